"""Endpoints about the server, its models and its tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hotstart import __version__
from hotstart.frontend.context import Frontend, encode, vocab_size
from hotstart.frontend.conversation import render_prompt
from hotstart.frontend.errors import ApiError
from hotstart.frontend.parsing import parse, read_body
from hotstart.frontend.protocol import service as p
from hotstart.frontend.startup import Checked, State

if TYPE_CHECKING:
    from hotstart.frontend.startup_page import EventStream, StartPage

Handler = Callable[[Request], Awaitable[Response]]


class Service:
    """Handlers of everything but generation."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._page: StartPage | None = None

    async def livez(self, request: Request) -> Response:
        """200 while the server starts, serves or drains; 503 once it failed or makes no progress."""
        report = self._frontend.liveness.report()
        alive = report.status in ("loading", "ready", "draining")
        return _json(report, 200 if alive else 503)

    async def health(self, request: Request) -> Response:
        """200 when requests are served at once, else 503."""
        if self._frontend.startup.state is not State.READY:
            raise self._frontend.gate.closed()
        return Response(status_code=200)

    async def startup_json(self, request: Request) -> Response:
        """The timeline so far, and what the engine said of itself once it is ready."""
        startup = self._frontend.startup
        return _json(
            {"state": startup.state.value, **self._frontend.timeline.as_dict(), "engine": startup.ready}
        )

    async def startup_page(self, request: Request) -> Response:
        """The start as a page, live."""
        return self._start_page().html()

    async def startup_events(self, request: Request) -> EventStream:
        """What brings the page to life."""
        return self._start_page().events()

    def _start_page(self) -> StartPage:
        if self._page is None:
            # Imported when somebody looks: a start that nobody looks at does not pay for it.
            from hotstart.frontend.startup_page import StartPage

            self._page = StartPage(self._frontend)
        return self._page

    async def version(self, request: Request) -> Response:
        """The version of hotstart."""
        return _json(p.VersionResponse(__version__))

    async def load(self, request: Request) -> Response:
        """Generation requests being answered."""
        return _json(p.LoadResponse(self._frontend.gate.active))

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        text = self._frontend.metrics.exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        from hotstart.frontend.openapi import document

        return _json(document())

    async def models(self, request: Request) -> Response:
        """All served names."""
        checked = self._frontend.gate.require_ready()
        return _json(p.ModelList(data=[self._card(name, checked) for name in checked.served_names]))

    async def model(self, request: Request) -> Response:
        """One served name."""
        checked = self._frontend.gate.require_ready()
        return _json(self._card(self._frontend.check_model(request.path_params["model"], checked), checked))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        asked = await self._parse(request, p.TokenizeRequest)
        checked = self._checked()
        self._frontend.check_model(asked.model, checked)
        tokenizer = checked.text.tokenizer
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "Give either prompt or messages.", param="prompt")
        text, special = asked.prompt or "", asked.add_special_tokens is not False
        if asked.messages is not None:
            text = render_prompt(
                checked.text,
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt is not False,
                continue_final_message=bool(asked.continue_final_message),
                template_kwargs={
                    **self._frontend.config.model.default_chat_template_kwargs,
                    **(asked.chat_template_kwargs or {}),
                },
            )
            special = bool(asked.add_special_tokens)
        param = "prompt" if asked.messages is None else "messages"
        ids = await encode(tokenizer, text, add_special_tokens=special, param=param)
        strings = [tokenizer.piece(token) for token in ids] if asked.return_token_strs else None
        length = self._frontend.context_length()
        return _json(p.TokenizeResponse(count=len(ids), max_model_len=length, tokens=ids, token_strs=strings))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones included."""
        asked = await self._parse(request, p.DetokenizeRequest)
        checked = self._checked()
        self._frontend.check_model(asked.model, checked)
        size = vocab_size(checked)
        largest = max(asked.tokens, default=0)
        if largest >= size:
            raise ApiError(
                400, f"tokens has {largest}, but the vocabulary has {size} tokens.", param="tokens"
            )
        return _json(
            p.DetokenizeResponse(checked.text.tokenizer.decode(asked.tokens, skip_special_tokens=False))
        )

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget the prefixes of earlier requests, as after an update of the weights; 409 while any runs."""
        for name in ("reset_running_requests", "reset_external"):
            if request.query_params.get(name, "false").lower() not in ("false", "0"):
                raise ApiError(400, f"{name} is not supported; leave it out.", param=name)
        self._frontend.gate.require_ready()
        if not await self._frontend.client.control("reset_prefix_cache"):
            raise ApiError(409, "Requests are running; reset the prefix cache when they have ended.")
        return Response(status_code=200)

    def _checked(self) -> Checked:
        startup = self._frontend.startup
        if startup.checked is None or startup.max_model_len is None:
            raise self._frontend.gate.closed()
        return startup.checked

    async def _parse(self, request: Request, kind: type[p.T]) -> p.T:
        limit = self._frontend.config.http.max_body_bytes
        return parse(await read_body(request.scope, request.receive, limit), kind)

    def _card(self, name: str, checked: Checked) -> p.ModelCard:
        created = self._frontend.created
        return p.ModelCard(
            id=name,
            created=created,
            root=checked.files.path,
            max_model_len=self._frontend.context_length(),
            permission=[p.ModelPermission(id=f"modelperm-{name}", created=created)],
        )


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
