"""The OpenAPI document, generated from the protocol's structs."""

from __future__ import annotations

from typing import Any

import msgspec

from hotstart import __version__
from hotstart.frontend.middleware import OPEN_PATHS
from hotstart.frontend.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from hotstart.frontend.protocol.completions import CompletionChunk, CompletionRequest, CompletionResponse
from hotstart.frontend.protocol.requests import ErrorResponse
from hotstart.frontend.protocol.service import (
    DetokenizeRequest,
    DetokenizeResponse,
    LivezResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)

_STREAMED = {CompletionResponse: CompletionChunk, ChatResponse: ChatChunk}
_OPERATIONS: tuple[tuple[str, str, str, type | None, type | None, tuple[int, ...]], ...] = (
    ("post", "/v1/completions", "Complete prompts", CompletionRequest, CompletionResponse, (404, 429)),
    ("post", "/v1/chat/completions", "Continue a conversation", ChatRequest, ChatResponse, (404, 429)),
    ("get", "/v1/models", "List the served names", None, ModelList, ()),
    ("get", "/v1/models/{model}", "Show one served name", None, ModelCard, (404,)),
    ("post", "/tokenize", "Encode a prompt or a conversation", TokenizeRequest, TokenizeResponse, (404,)),
    ("post", "/detokenize", "Decode token ids", DetokenizeRequest, DetokenizeResponse, (404,)),
    ("post", "/reset_prefix_cache", "Forget the prefixes of earlier requests", None, None, (400, 409)),
    ("get", "/livez", "How far the server is", None, LivezResponse, ()),
    ("get", "/health", "Whether requests are served", None, None, ()),
    ("get", "/readyz", "Whether requests are served", None, None, ()),
    ("get", "/ping", "Whether requests are served", None, None, ()),
    ("post", "/ping", "Whether requests are served", None, None, ()),
    ("get", "/version", "The version of hotstart", None, VersionResponse, ()),
    ("get", "/load", "Requests being answered", None, LoadResponse, ()),
)
_TEXT_OPERATIONS = (
    ("/metrics", "Prometheus metrics", "text/plain"),
    ("/startup", "The start as a page", "text/html"),
    ("/startup/events", "The start as server-sent events", "text/event-stream"),
    ("/startup.json", "The timeline of the start", "application/json"),
)


def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    types = {t for _, _, _, request, response, _ in _OPERATIONS for t in (request, response) if t is not None}
    types |= {ErrorResponse, *_STREAMED.values()}
    ordered = sorted(types, key=lambda t: t.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, request, response, statuses in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(by_type, path, summary, request, response, statuses)
    for path, summary, media in _TEXT_OPERATIONS:
        answer = {"description": "OK", "content": {media: {}}}
        paths[path] = {"get": {"summary": summary, "responses": {"200": answer}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hotstart", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    by_type: dict[type, dict[str, Any]],
    path: str,
    summary: str,
    request: type | None,
    response: type | None,
    statuses: tuple[int, ...],
) -> dict[str, Any]:
    ok: dict[str, Any] = {"description": "OK"}
    if response is not None:
        ok["content"] = {"application/json": {"schema": by_type[response]}}
        if response in _STREAMED:
            ok["content"]["text/event-stream"] = {"schema": _event(by_type[_STREAMED[response]])}
    error = {"application/json": {"schema": by_type[ErrorResponse]}}
    errors = [
        *statuses,
        503,
        *((400, 413, 415) if request else ()),
        *((401,) if path not in OPEN_PATHS else ()),
    ]
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": ok,
            **{str(s): {"description": "Error", "content": error} for s in sorted(errors)},
        },
    }
    if path == "/livez":
        operation["responses"]["503"]["content"] = ok["content"]
    if request is not None:
        body = {"application/json": {"schema": by_type[request]}}
        operation["requestBody"] = {"required": True, "content": body}
    if "{model}" in path:
        model = {"type": "string", "minLength": 1, "maxLength": 4096}
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": model}]
    if path not in OPEN_PATHS:
        operation["security"] = [{"key": []}, {}]
    return operation


def _event(schema: dict[str, Any]) -> dict[str, Any]:
    """A server-sent event whose data is JSON, in the words of OpenAPI 3.2; the last one is ``[DONE]``."""
    chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    data = {"anyOf": [{"const": "[DONE]"}, chunk]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}
