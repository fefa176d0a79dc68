"""An HTTP/1.1 client that does little between the socket and the clock.

One process is to follow thousands of chunks a second, so a chunk's way is short: the event loop, the
parser that servers use (httptools), the answer's own list of times. Connections are kept and taken
again, and there is no limit to their number but the system's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from httptools import HttpParserError, HttpResponseParser
from msgspec import Struct

from hotstart.bench.serving.answer import Answer, EventReader
from hotstart.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Coroutine

_LONGEST = 6 * 60 * 60.0
"""Seconds that one request may take; as vLLM's client."""
_SHOWN = 500
"""Characters of what a server says about a failure."""


class Server(Struct, frozen=True):
    """Where to ask."""

    scheme: str
    host: str
    port: int
    prefix: str = ""
    """In front of every path."""
    headers: dict[str, str] = {}
    insecure: bool = False
    """Take any certificate."""

    @property
    def url(self) -> str:
        """As people write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"

    def tls(self) -> ssl.SSLContext | None:
        """How to check the server; None without TLS."""
        if self.scheme != "https":
            return None
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def parse_server(url: str, headers: Mapping[str, str], *, insecure: bool = False) -> Server:
    """From ``http://host:port/prefix``. Raises ``ConfigError``."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (KeyError, ValueError):
        port = 0
    if not port or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"the address {url} is none of a server", expected="http://HOST:PORT or https://HOST"
        )
    return Server(parts.scheme, parts.hostname, port, parts.path.rstrip("/"), dict(headers), insecure)


class Response(Struct):
    """A whole response."""

    status: int
    body: bytes


class Client:
    """Requests to one server, within one running event loop."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._tls = server.tls()
        self._address: str | None = None
        default = {"http": 80, "https": 443}[server.scheme]
        host = f"[{server.host}]" if ":" in server.host else server.host
        fields = {
            "Host": host if server.port == default else f"{host}:{server.port}",
            "User-Agent": "hotstart-bench",
            "Accept": "*/*",
            **server.headers,
        }
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("latin-1")

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)

    async def get(self, path: str) -> Response:
        """Raises ``OSError`` where no whole response comes."""
        return await self._whole(self._request("GET", path))

    async def post(self, path: str, body: bytes) -> Response:
        """Raises as :meth:`get`."""
        return await self._whole(self._request("POST", path, body))

    async def stream(self, path: str, body: bytes, answer: Answer, request_id: str = "") -> None:
        """Ask, and fill in what comes of it: ``answer.error`` where that is no answer."""
        answer.start = time.perf_counter()
        exchange = _Streamed(answer)
        try:
            request = self._request("POST", path, body, request_id)
            await self._exchange(request, exchange)
            answer.error = exchange.error
        except (OSError, ValueError) as error:
            answer.error = str(error) or type(error).__name__

    def _request(self, method: str, path: str, body: bytes = b"", request_id: str = "") -> bytes:
        head = f"{method} {self.server.prefix}{path} HTTP/1.1\r\n".encode("latin-1") + self._head
        if request_id:
            head += f"X-Request-Id: {request_id}\r\n".encode("latin-1")
        if method == "POST":
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        return head + b"\r\n" + body

    async def _whole(self, request: bytes) -> Response:
        exchange = _Whole()
        await self._exchange(request, exchange)
        return Response(exchange.status, b"".join(exchange.parts))

    async def _exchange(self, request: bytes, exchange: _Exchange) -> None:
        connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                await connection.exchange(request, exchange)
                return
            except ConnectionError:
                # A server closes what has been idle for a while, and may do so just now.
                if exchange.status:
                    raise
        connection = await self._connect()
        await connection.exchange(request, exchange)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        server = self.server
        _, connection = await loop.create_connection(
            lambda: _Connection(self._keep, self._open),
            self._address or server.host,
            server.port,
            ssl=self._tls,
            server_hostname=server.host if self._tls else None,
        )
        # A name is looked up once, not for each of many connections at once.
        if self._address is None and (peer := connection.peer()):
            self._address = peer
        return connection

    def _keep(self, connection: _Connection, usable: bool) -> None:
        if usable:
            self._idle.append(connection)
        elif connection in self._idle:
            self._idle.remove(connection)


class _Exchange:
    """What becomes of a response; the parts of it as they come."""

    status = 0

    def body(self, data: bytes, now: float) -> None:
        raise NotImplementedError

    def complete(self, now: float) -> None:
        """Raises ``ValueError`` where the content is no whole one."""


class _Whole(_Exchange):
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def body(self, data: bytes, now: float) -> None:
        self.parts.append(data)


class _Streamed(_Exchange):
    def __init__(self, answer: Answer) -> None:
        self.error = ""
        self.headers: dict[str, str] = {}
        self._reader = EventReader(answer)
        self._refusal = b""

    def body(self, data: bytes, now: float) -> None:
        if self.status == 200:
            self._reader.feed(data, now)
        elif len(self._refusal) < _SHOWN * 4:
            self._refusal += data

    def complete(self, now: float) -> None:
        if self.status == 200:
            self._reader.close(now)
            return
        self.error = f"HTTP {self.status}"
        if later := self.headers.get("retry-after"):
            self.error += f" (Retry-After: {later})"
        if said := " ".join(self._refusal.decode("utf-8", "replace").split()):
            self.error += f": {said[:_SHOWN]}"


class _Connection(asyncio.Protocol):
    """One connection; at most one exchange at a time."""

    def __init__(self, keep: Callable[[_Connection, bool], None], opened: set[_Connection]) -> None:
        self._keep = keep
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._exchange: _Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self._until_close = False
        """The body ends where the connection does."""
        self._now = 0.0

    def peer(self) -> str:
        """The address that was reached."""
        assert self._transport is not None
        found = self._transport.get_extra_info("peername")
        return str(found[0]) if isinstance(found, tuple) else ""

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, exchange: _Exchange) -> None:
        """Send, and wait until the response is whole. Raises ``OSError``, ``ValueError``."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._parser = HttpResponseParser(self)
        self._exchange, self._until_close = exchange, True
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        limit = loop.call_later(_LONGEST, self._end, TimeoutError(f"no end within {_LONGEST:.0f} s"))
        self._transport.write(request)
        try:
            await self._ended
        except BaseException:
            self._exchange = None
            self.close()
            raise
        finally:
            limit.cancel()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._exchange is None:  # nobody asked for it
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            # What a callback raises is wrapped by the parser.
            cause = error.__context__ or error
            self._end(cause if isinstance(cause, ValueError) else ValueError(f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._opened.discard(self)
        self._keep(self, False)
        self._transport = None
        exchange = self._exchange
        if exchange is None:
            return
        self._now = time.perf_counter()
        if error is None and exchange.status and self._until_close:
            self._finish(exchange, usable=False)
        else:
            self._end(ConnectionResetError("the server closed the connection before the answer was whole"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key in (b"content-length", b"transfer-encoding"):
            self._until_close = False
        elif key == b"retry-after" and isinstance(self._exchange, _Streamed):
            self._exchange.headers["retry-after"] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.body(data, self._now)

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status >= 200:
            self._finish(self._exchange, usable=self._parser.should_keep_alive())

    def _finish(self, exchange: _Exchange, *, usable: bool) -> None:
        try:
            exchange.complete(self._now)
        except ValueError as error:
            self._end(error)
            return
        ended, self._exchange = self._ended, None
        if usable:
            self._keep(self, True)
        else:
            self.close()
        if ended is not None and not ended.done():
            ended.set_result(None)

    def _end(self, error: Exception) -> None:
        """No whole response: whatever else comes belongs to nobody."""
        ended, self._exchange = self._ended, None
        self.close()
        if ended is not None and not ended.done():
            ended.set_exception(error)


def run_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, on uvloop where it is installed."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run(work)
    return asyncio.run(work)
