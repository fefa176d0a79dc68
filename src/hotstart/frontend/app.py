"""Routes and middleware: the table of what this server answers."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from hotstart.frontend.answering import GenerationEndpoint
from hotstart.frontend.chat import Chat
from hotstart.frontend.completions import Completions
from hotstart.frontend.context import Frontend
from hotstart.frontend.errors import ApiError, answer_api_error, answer_defect, answer_http_exception
from hotstart.frontend.middleware import Doorway
from hotstart.frontend.service import Service


def create_app(frontend: Frontend) -> ASGIApp:
    """The ASGI application."""
    service = Service(frontend)
    routes = [
        Route("/v1/completions", GenerationEndpoint(frontend, Completions()), methods=["POST"]),
        Route("/v1/chat/completions", GenerationEndpoint(frontend, Chat()), methods=["POST"]),
        Route("/v1/models", service.models, methods=["GET"]),
        Route("/v1/models/{model:path}", service.model, methods=["GET"]),
        Route("/livez", service.livez, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/readyz", service.health, methods=["GET"]),
        Route("/ping", service.health, methods=["GET", "POST"]),
        Route("/startup", service.startup_page, methods=["GET"]),
        Route("/startup/events", service.startup_events, methods=["GET"]),
        Route("/startup.json", service.startup_json, methods=["GET"]),
        Route("/version", service.version, methods=["GET"]),
        Route("/metrics", service.metrics, methods=["GET"]),
        Route("/load", service.load, methods=["GET"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
        Route("/reset_prefix_cache", service.reset_prefix_cache, methods=["POST"]),
    ]
    http = frontend.config.http
    if not http.disable_fastapi_docs:
        routes.append(Route("/openapi.json", service.openapi, methods=["GET"]))
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(http.allowed_origins),
        allow_methods=list(http.allowed_methods),
        allow_headers=list(http.allowed_headers),
        allow_credentials=http.allow_credentials,
    )
    app = Starlette(
        routes=routes,
        middleware=[cors, Middleware(Doorway, http)],
        exception_handlers={
            ApiError: answer_api_error,
            HTTPException: answer_http_exception,
            Exception: answer_defect,
        },
    )
    app.router.redirect_slashes = False
    return app
