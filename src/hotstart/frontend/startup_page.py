"""The page of a start: its phases while they last, and its waterfall once it is done.

Imported when somebody asks for it, so that a start nobody looks at pays nothing. However many look, a
change is found and encoded once: one task, which runs only while somebody looks, compares at most ten
times a second what there is with what there was. Who cannot keep up gets the newest state next, not
every one between, and who takes nothing for a while is cut off.

The page is for strangers too, since ``--api-key`` does not guard it: it names the model as clients do,
and says no path of the machine. Why a start failed is told only where no key is needed anyway.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotstart.frontend.answering import SSE_HEADERS, until_disconnect
from hotstart.timeline import Phase
from hotstart.units import format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from hotstart.frontend.context import Frontend

_PAGE = os.path.join(os.path.dirname(__file__), "pages", "startup.html")
_LEAST_PAUSE, _MOST_PAUSE = 0.1, 2.0
"""Seconds between two events."""
_EVENTS_A_SECOND = 400
"""To all viewers together: with many of them each gets fewer, and the start keeps its processor."""
_SIGN_OF_LIFE = 5.0
"""Seconds without a change after which an event says that there was none."""
_HANGS = 3.0
"""Seconds after which a viewer that takes nothing is cut off."""
_REFRESH = '<meta http-equiv="refresh" content="2">'
"""For browsers without JavaScript, as long as anything changes."""
_POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PhaseView(msgspec.Struct, frozen=True):
    """A phase as the page shows it; seconds since the process began."""

    name: str
    process: str
    start: float
    end: float | None
    bytes: int
    total: int
    note: str

    @classmethod
    def of(cls, phase: Phase, origin: float) -> PhaseView:
        """``note`` is the choice without its reason, which may name a mount."""
        note = re.split(r" \(|; |, ", phase.detail, maxsplit=1)[0]
        return cls(
            name=phase.name,
            process=phase.process,
            start=round(max(0.0, phase.start - origin), 4),
            end=None if phase.end is None else round(max(0.0, phase.end - origin), 4),
            bytes=phase.bytes,
            total=phase.total,
            note="" if "/" in note else note,
        )


class News(msgspec.Struct, frozen=True, kw_only=True):
    """One event: how the server stands, and the phases that a viewer does not have yet."""

    state: str
    """As in ``/livez``."""
    model: str
    now: float
    ready: float | None
    """When it became ready; None: not yet."""
    failed: tuple[str, ...]
    facts: dict[str, str]
    whole: bool
    """Whether ``phases`` are all there are."""
    phases: tuple[PhaseView, ...]


class StartPage:
    """The page, and the events that bring it to life."""

    def __init__(self, frontend: Frontend) -> None:
        self._feed = Feed(frontend)
        with open(_PAGE, encoding="utf-8") as file:
            self._page = file.read()
        self._headers = {
            "content-security-policy": _POLICY.format(
                script=self._digest("script"), style=self._digest("style")
            ),
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    def html(self) -> Response:
        """The page as it stands, readable without JavaScript as well."""
        news = self._feed.news(whole=True)
        filled = {
            "model": news.model,
            "text": "\n".join(_lines(news)),
            "refresh": "" if news.state == "ready" else _REFRESH,
        }
        page = self._page
        for name, value in filled.items():
            page = page.replace(f"{{{{{name}}}}}", value if name == "refresh" else html.escape(value))
        return Response(page, media_type="text/html", headers=self._headers)

    def events(self) -> EventStream:
        """The answer that goes on until the start is over."""
        return EventStream(self._feed)

    def _digest(self, tag: str) -> str:
        """What a policy calls the only script or style that may run."""
        found = re.search(rf"<{tag}>(.*?)</{tag}>", self._page, re.S)
        assert found is not None
        digest = hashlib.sha256(found.group(1).encode()).digest()
        return f"sha256-{base64.b64encode(digest).decode()}"


class Feed:
    """What there is to show, in versions: a viewer gets what changed since the one it has seen."""

    def __init__(self, frontend: Frontend, clock: Callable[[], float] = time.monotonic) -> None:
        self.ended = False
        """Nothing changes any more."""
        self._frontend = frontend
        self._clock = clock
        self._version = 0
        self._phases: dict[tuple[str, str], tuple[PhaseView, int]] = {}
        """Each as it is, and the version that brought it."""
        self._state = ""
        self._encoded: dict[int, bytes] = {}
        """The event of this version for those that have seen an earlier one."""
        self._viewers = 0
        self._looking: asyncio.Task[None] | None = None
        self._newer = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        frontend.startup.listen(self._changed_somewhere)

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Somebody looks."""
        self._viewers += 1
        self._look()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._keep_looking())
        try:
            yield
        finally:
            self._viewers -= 1

    async def after(self, seen: int) -> tuple[bytes, int, bool]:
        """The event for one who has seen a version (0: none), which one it brings, and if it is the last."""
        if seen == self._version and not self.ended:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._newer.wait(), _SIGN_OF_LIFE)
        if seen == self._version:
            return self._encode(seen), seen, self.ended
        event = self._encoded.get(seen) or self._encode(seen)
        self._encoded[seen] = event
        return event, self._version, self.ended

    def news(self, *, whole: bool, newer_than: int = 0) -> News:
        """What there is now, the phases of versions after ``newer_than``."""
        if whole:
            self._look()
        frontend = self._frontend
        timeline, startup = frontend.timeline, frontend.startup
        ready = startup.ready_at
        return News(
            state=self._state,
            model=_served_name(frontend),
            now=round(timeline.since_origin(self._clock()), 4),
            ready=None if ready is None else round(timeline.since_origin(ready), 4),
            failed=self._problems(),
            facts=self._facts() if whole or self.ended else {},
            whole=whole,
            phases=tuple(view for view, version in self._phases.values() if version > newer_than),
        )

    def _encode(self, seen: int) -> bytes:
        body = msgspec.json.encode(self.news(whole=seen == 0, newer_than=seen))
        return (b"event: end\n" if self.ended else b"") + b"data: " + body + b"\n\n"

    def _look(self) -> None:
        """Take in what has changed; a new version where anything has."""
        origin, version = self._frontend.timeline.origin, self._version + 1
        changed = False
        self._encoded.clear()  # each event says what time it is
        for phase in self._frontend.timeline.phases():
            key, view = (phase.process, phase.name), PhaseView.of(phase, origin)
            known = self._phases.get(key)
            if known is None or known[0] != view:
                self._phases[key] = view, version
                changed = True
        state = self._frontend.liveness.report().status
        if not changed and state == self._state:
            return
        self._state, self._version = state, version
        self.ended = state not in ("loading", "stalled")
        self._newer.set()
        self._newer = asyncio.Event()

    async def _keep_looking(self) -> None:
        while self._viewers and not self.ended:
            await asyncio.sleep(min(_MOST_PAUSE, max(_LEAST_PAUSE, self._viewers / _EVENTS_A_SECOND)))
            self._look()

    def _changed_somewhere(self) -> None:
        with suppress(RuntimeError):  # the loop may be closed when the engine's end is told
            self._loop.call_soon_threadsafe(self._look)

    def _problems(self) -> tuple[str, ...]:
        failed = self._frontend.startup.failed
        if self._frontend.config.http.api_key:
            return tuple(f"A {problem.kind}: the server's log says which." for problem in failed)
        return tuple(str(problem) for problem in failed)

    def _facts(self) -> dict[str, str]:
        ready = self._frontend.startup.ready
        if ready is None:
            return {}
        return {
            "weights": format_size(ready.weights_bytes),
            "device": f"{ready.device}, {ready.dtype}",
            "context": f"{ready.max_model_len} tokens",
            "KV cache": f"{format_size(ready.kv_cache_bytes)}, {ready.kv_cache_tokens} tokens",
            "first step": ready.first_step,
        }


class EventStream:
    """One viewer: an ASGI application, as a response is."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the start is over or the viewer leaves."""
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        abort = scope["extensions"]["hotstart.abort"]["connection"]
        await until_disconnect(receive, self._stream(send, abort))

    async def _stream(self, send: Send, abort: Callable[[], Any]) -> None:
        seen, last = 0, False
        with self._feed.viewer():
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            while not last:
                event, seen, last = await self._feed.after(seen)
                message = {"type": "http.response.body", "body": event, "more_body": not last}
                try:
                    await asyncio.wait_for(send(message), _HANGS)
                except asyncio.TimeoutError:
                    abort()
                    await asyncio.Event().wait()  # until the connection's end is noticed


def _served_name(frontend: Frontend) -> str:
    model = frontend.config.model
    return model.served_model_name[0] if model.served_model_name else model.model


def _lines(news: News) -> Iterator[str]:
    """The page's content as text."""
    took = format_seconds(news.now if news.ready is None else news.ready)
    yield f"ready after {took}" if news.ready is not None else f"{news.state} for {took}"
    yield from news.failed
    width = max((len(phase.name) for phase in news.phases), default=0)
    for phase in sorted(news.phases, key=lambda phase: phase.start):
        seconds = max(0.0, (news.now if phase.end is None else phase.end) - phase.start)
        parts = [format_seconds(seconds) if phase.end is not None else f"for {format_seconds(seconds)}"]
        if phase.total and phase.end is None:
            parts.append(f"{format_size(phase.bytes)} of {format_size(phase.total)}")
        elif phase.bytes:
            parts.append(format_size(phase.bytes))
        if phase.bytes:
            parts.append(format_rate(phase.bytes, seconds))
        yield f"{phase.name:<{width}}  {', '.join(parts)}"
