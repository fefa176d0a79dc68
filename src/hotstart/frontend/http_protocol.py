"""uvicorn's HTTP protocol: bounded where a client could make it grow, open to clients that half-close."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable

import uvicorn.server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hotstart.frontend.descriptors import Descriptors
from hotstart.frontend.errors import ApiError
from hotstart.frontend.hangups import Hangups, Watch

log = logging.getLogger("hotstart.http")

MAX_HEADER_BYTES = 64 << 10
MAX_PIPELINED = 64
"""Requests of one connection that may wait for the answer to an earlier one."""
_OFFER = re.compile(rb"(?im)^upgrade(?=[ \t]*:[ \t]*h2c)")

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Clients must expect any number of these before an answer (RFC 9110, section 15.2)."""
_COMMENT = b"3\r\n:\n\n\r\n"
"""A chunk with a server-sent event's comment; all that is sent in chunks here is event streams."""
_PROBE_SECONDS = 1.0
"""Between the first two probes; the time doubles from then on."""

_LINGER_SECONDS = 1.0
_MOST_LINGERING = 8
"""Connections that are turned away at the same time and may still send; more are closed at once."""


class ServerState(uvicorn.server.ServerState):
    """What the connections of a server share."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.descriptors = Descriptors()
        self.hangups = Hangups(loop)
        self.lingering: deque[HttpProtocol] = deque()


class HttpProtocol(HttpToolsProtocol):
    """A connection is closed when its headers grow past a limit, or too many requests queue on it.

    A client may close its sending half after a request and still be answered. Its end of file looks
    like that of a client that is gone for good, so the server says something harmless into the
    connection: a peer that is gone answers with a reset, which the kernel reports at once. It does so
    again and again, ever more rarely, since the client may leave later, and a relay on the way learns
    of it only when it has something to pass on.

    Requests that arrive before an earlier one is answered queue. Who leaves then, or closes the
    sending half, gives all of them up.
    """

    server_state: ServerState
    _in_headers = True
    _header_bytes = 0
    _running: RequestResponseCycle | None = None
    """The request that is being answered; uvicorn's ``cycle`` is the newest, which may only queue."""
    _hangup: Watch | None = None
    _next_probe: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; it is turned away when descriptors are about to run out."""
        super().connection_made(transport)
        if self.client is not None:
            # An IPv4 address on a socket for both families; trusted proxies are listed in their own form.
            self.client = self.client[0].removeprefix("::ffff:"), self.client[1]
        if self.server_state.descriptors.refuse(transport.get_extra_info("socket").fileno()):
            self._turn_away()

    def _turn_away(self) -> None:
        error = ApiError(503, "Too many connections are open.", retry_after=1).response()
        fields = b"".join(b"%s: %s\r\n" % header for header in error.raw_headers)
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\n%sconnection: close\r\n\r\n%s" % (fields, error.body)
        )
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing on bytes that are not read resets the connection, and the answer may be lost.
        self.transport.write_eof()
        self._linger_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        lingering = self.server_state.lingering
        lingering.append(self)
        # They hold descriptors of the reserve, of which others must find some.
        while len(lingering) > max(1, min(_MOST_LINGERING, self.server_state.descriptors.reserve // 2)):
            lingering.popleft().transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whichever side."""
        if self._next_probe is not None:
            self._next_probe.cancel()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            if self in self.server_state.lingering:
                self.server_state.lingering.remove(self)
        self._stop_watching()
        self.pipeline.clear()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        if self._in_headers:
            # The parser takes the body of a request with an Upgrade header for the other protocol's
            # bytes. Clients that offer HTTP/2 this way expect the offer to be ignored.
            head, end, rest = data.partition(b"\r\n\r\n")
            if end and _OFFER.search(head):
                data = _OFFER.sub(b"x-upgrade", head) + end + rest
        self._header_bytes += len(data)
        super().data_received(data)
        too_long = self._in_headers and self._header_bytes > MAX_HEADER_BYTES
        if too_long or len(self.pipeline) > MAX_PIPELINED:
            log.warning("closed a connection: %s", "headers too long" if too_long else "flooded")
            self.pipeline.clear()
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether the connection stays open for the answer.

        Not over TLS, whose transports cannot be half-closed, not for HTTP/1.0, whose clients know no
        interim answers, and not while requests queue on the connection.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.pipeline:
            return False
        if self.scheme == "https" or cycle.scope["http_version"] != "1.1":
            return False
        if not self._watch(self.transport.abort, half=False):
            return False
        cycle.keep_alive = False
        self._probe(_PROBE_SECONDS)
        return True

    def _watch(self, react: Callable[[], None], *, half: bool) -> bool:
        """Have ``react`` called when the client is gone, or with ``half`` sends no more; if possible."""
        self._stop_watching()
        number = self.transport.get_extra_info("socket").fileno()
        try:
            self._hangup = self.server_state.hangups.watch(number, react, half=half)
        except (OSError, ValueError):
            return False
        return True

    def _stop_watching(self) -> None:
        if self._hangup is not None:
            self._hangup.stop()
            self._hangup = None

    def _client_sends_no_more(self) -> None:
        if self.pipeline:
            self.transport.abort()
        else:
            self._stop_watching()  # nothing queues any more: the end of file is read as usual

    def _probe(self, wait: float) -> None:
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        if not cycle.response_started:
            self.transport.write(_INTERIM)
        elif cycle.chunked_encoding:
            self.transport.write(_COMMENT)
        self._next_probe = self.loop.call_later(wait, self._probe, 2 * wait)

    def _unsupported_upgrade_warning(self) -> None:
        # uvicorn's own words advise to install what would not help.
        log.warning("ignored an offer to upgrade the connection: only HTTP is spoken here")

    def on_headers_complete(self) -> None:
        """The parser's callback."""
        self._in_headers = False
        # For answers without end to clients that take nothing.
        self.scope["extensions"] = {"hotstart.abort": {"connection": self.transport.abort}}
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        elif self._hangup is None:
            # uvicorn reads nothing while requests queue, and so would not see the client leave.
            self._watch(self._client_sends_no_more, half=True)

    def on_response_complete(self) -> None:
        """The answer of the running request is written; the next one starts."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """The parser's callback."""
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_complete()
