"""The way of a generation request, from its bytes to the last byte of the answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from hotstart.checkpoint.wording import count
from hotstart.frontend.context import Frontend
from hotstart.frontend.errors import ApiError
from hotstart.frontend.generation import Delta, Generation
from hotstart.frontend.parsing import ClientGoneError, parse, read_body
from hotstart.frontend.protocol.requests import GenerationRequest
from hotstart.frontend.startup import Checked

R = TypeVar("R", bound=GenerationRequest)

log = logging.getLogger("hotstart.frontend")

_JSON_HEADERS = [(b"content-type", b"application/json")]
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """A request's generation, and how its results are written."""

    generation: Generation

    def whole(self, deltas: list[Delta]) -> bytes:
        """The JSON body of an answer that is not streamed; one delta per choice."""
        ...

    def events(self, deltas: list[Delta]) -> bytes:
        """The events for what is new, including a choice's opening one before its first."""
        ...

    def closing(self) -> bytes:
        """Events after the last token, before ``[DONE]``."""
        ...


class Kind(Protocol[R]):
    """One of the two kinds of generation request."""

    request_type: type[R]

    def check(self, request: R) -> None:
        """Refuse what is contradictory in itself, before anything is held."""
        ...

    async def prepare(
        self, frontend: Frontend, checked: Checked, request: R, *, request_id: str, arrival: float
    ) -> Answer:
        """Encode and validate against the model. Raises :class:`ApiError`."""
        ...


class GenerationEndpoint(Generic[R]):
    """ASGI application for ``/v1/completions`` or ``/v1/chat/completions``."""

    def __init__(self, frontend: Frontend, kind: Kind[R]) -> None:
        self._frontend = frontend
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises :class:`ApiError` as long as nothing has been sent."""
        arrival = time.monotonic()
        body = await read_body(scope, receive, self._frontend.config.http.max_body_bytes)
        request = parse(body, self._kind.request_type)
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
        self._kind.check(request)
        request_id: str = scope["state"]["request_id"]
        await until_disconnect(receive, self._answer(request, request_id, arrival, send))

    async def _answer(self, request: R, request_id: str, arrival: float, send: Send) -> None:
        frontend = self._frontend
        async with frontend.gate.enter() as checked:
            answer = await self._kind.prepare(
                frontend, checked, request, request_id=request_id, arrival=arrival
            )
            generation = answer.generation
            frontend.check_queue(len(generation.choices))
            frontend.metrics.admitted(
                n=request.n or 1, max_tokens=generation.choices[0].params.max_tokens or 0
            )
            self._log(generation, request_id)
            frontend.client.submit(generation)
            try:
                if request.stream:
                    await _stream(send, answer)
                else:
                    await send_json(send, answer.whole(await generation.take()))
            finally:
                frontend.client.abort(generation)

    def _log(self, generation: Generation, request_id: str) -> None:
        config = self._frontend.config.log
        if not config.enable_log_requests:
            return
        first = generation.choices[0]
        shown = first.prompt[: config.max_log_len]
        text = first.tokenizer.decode(shown, skip_special_tokens=False)[: config.max_log_len]
        log.info(
            "received: %s, prompt %r, ids %s, %s",
            count(len(generation.choices), "choice"),
            text,
            shown,
            first.params,
            extra={"request_id": request_id},
        )


async def _stream(send: Send, answer: Answer) -> None:
    """Server-sent events. Headers wait for the first token, so that an early failure has its status."""
    generation = answer.generation
    deltas = await generation.take()
    await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
    try:
        while True:
            events = answer.events(deltas)
            if generation.finished:
                break
            await send({"type": "http.response.body", "body": events, "more_body": True})
            deltas = await generation.take()
        events += answer.closing()
    except ApiError as error:
        events = event(msgspec.Raw(error.body()))
    await send({"type": "http.response.body", "body": events + DONE, "more_body": False})


async def send_json(send: Send, body: bytes, *, status: int = 200) -> None:
    """A JSON answer in one piece."""
    headers = [*_JSON_HEADERS, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def event(message: msgspec.Struct | msgspec.Raw) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``, and cancel it the moment the client closes the connection."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            raise ClientGoneError
        working.result()
    finally:
        watching.cancel()
        working.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
