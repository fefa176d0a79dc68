"""HTTP/1.1 as a weight reader needs it: a response's body received where it is to lie.

The usual clients read a body into buffers of their own and copy it, several times
(``benchmarks/http_readers.py`` measures them). Here the kernel fills whole pieces of the destination
(``MSG_WAITALL``) while the interpreter's lock is free.
"""

from __future__ import annotations

import base64
import errno
import http.client
import io
import math
import os
import random
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from msgspec import Struct

from hotstart.storage.source import Cancel, ReadCancelled

PIECE = 1 << 20
"""Bytes of one receive: between two of them a reader looks at clock and cancellation."""
_TICK = 0.1
"""Seconds after which whoever waits for the peer looks up."""
_MAX_HEAD = 64 << 10
_CONNECT, _CONNECT_NEXT = 20.0, 2.0
"""Seconds for an address that is the last or only one, and for one after which there are others."""
_PORTS = {"http": 80, "https": 443}
_LISTS = ("x-goog-hash", "repr-digest", "digest")
"""Headers that servers repeat, one for each item of a list."""
Until = Callable[[], float]
"""When to give up waiting, of ``time.monotonic``; it may come to be known while one waits."""
Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""What ``socket.getaddrinfo`` answers with."""


def never() -> float:
    """Not to give up."""
    return math.inf


def at(moment: float) -> Until:
    """To give up at a moment that is known."""
    return lambda: moment


class Head(Struct, frozen=True):
    """Status line and headers; names in lower case, the last of repeated ones unless they are a list."""

    status: int
    reason: str
    headers: dict[str, str]
    version: str = "HTTP/1.1"

    @property
    def length(self) -> int | None:
        """Bytes of the body, where the head says so."""
        value = self.headers.get("content-length", "")
        return int(value) if value.isdecimal() and len(value) < 20 and not self.chunked else None

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks, its length unknown."""
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def keeps(self) -> bool:
        """Whether the server will take another request on this connection."""
        options = {option.strip().lower() for option in self.headers.get("connection", "").split(",")}
        return "close" not in options and (self.version != "HTTP/1.0" or "keep-alive" in options)


class StalledError(ConnectionError):
    """Nothing arrived for as long as the reader was willing to wait."""


class Proxy(Struct, frozen=True):
    """An HTTP proxy. ``credentials``: ``user:password``, a secret."""

    host: str
    port: int
    credentials: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What a request to it carries."""
        if not self.credentials:
            return {}
        return {"Proxy-Authorization": "Basic " + base64.b64encode(self.credentials.encode()).decode()}


class HttpConnection:
    """One connection, one request at a time. Not thread-safe. Raises ``OSError`` for whatever fails."""

    def __init__(
        self,
        place: tuple[str, str, int],
        cancel: Cancel,
        *,
        patience: float,
        tls: ssl.SSLContext | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        """Connect to ``place``: scheme, host and port. ``tls`` is needed for https.

        ``patience``: seconds without a byte after which it is given up.
        """
        scheme, host, port = self.place = place
        self._patience = patience
        name = f"[{host}]" if ":" in host else host
        self._host = name if port == _PORTS[scheme] else f"{name}:{port}"
        self._prefix, self._headers = "", {"Host": self._host, "User-Agent": "hotstart"}
        self._rest = b""
        """What was received and not yet asked for."""
        self._left: int | None = 0
        """Bytes of the body, or of the chunk, still to come; None: up to the end of the connection."""
        self._chunked = self._in_chunk = False
        self._keeps = True
        dialled = (proxy.host, proxy.port) if proxy else (host, port)
        self._socket = _dial(*dialled, patience, cancel)
        self._blocking = False
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._wait_in_kernel()
            if proxy and scheme == "https":
                self._tunnel(proxy, f"{name}:{port}", cancel)
            elif proxy:
                self._prefix = f"http://{self._host}"
                self._headers |= proxy.headers
            if scheme == "https":
                self._encrypt(tls or ssl.create_default_context(), host, cancel)
        except BaseException:
            self._socket.close()
            raise

    def ask(
        self,
        target: str,
        headers: Mapping[str, str],
        cancel: Cancel,
        *,
        method: str = "GET",
        until: Until = never,
    ) -> Head:
        """Send a request without a body and read the answer's head.

        ``until``: when a server that stays silent is given up (StalledError).
        """
        lines = [f"{method} {self._prefix}{target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (self._headers | dict(headers)).items()]
        self._keeps = False  # until the whole answer is known to have come
        self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        patient = time.monotonic() + self._patience

        def both() -> float:
            return min(until(), patient)

        head = self._head(cancel, both)
        while 100 <= head.status < 200:
            head = self._head(cancel, both)
        bodiless = method == "HEAD" or head.status in (204, 304)
        self._chunked, self._in_chunk = head.chunked and not bodiless, False
        self._left = 0 if bodiless or head.chunked else head.length
        self._keeps = head.keeps
        return head

    def receive_into(self, view: memoryview, cancel: Cancel, *, until: Until = never) -> int:
        """At least one byte of the body into ``view``, up to all of it; 0: the body has ended.

        Raises ConnectionResetError when the connection ended before the body did.
        """
        if self._left == 0 and not self._next_chunk(cancel, until):
            return 0
        bounded = self._left is not None
        if self._left is not None:
            view = view[: self._left]
        got = self._receive(view[:PIECE], cancel, until, whole=True)
        if self._left is not None:
            self._left -= got
        if got == 0 and bounded:
            raise _cut()
        return got

    def body(
        self,
        head: Head,
        limit: int,
        cancel: Cancel,
        *,
        progressed: Callable[[int], None] = lambda got: None,
        silence: float = math.inf,
    ) -> bytes:
        """A small body, whole, or its first ``limit`` bytes: then the connection is of no more use.

        ``progressed`` is told how many have come. ``silence``: seconds without a byte after which it
        is given up (StalledError).
        """
        data = bytearray(min(limit, 64 << 10 if head.length is None else head.length))
        got = 0
        while got < limit and (part := self._part(data, got, limit, cancel, at(time.monotonic() + silence))):
            got += part
            progressed(got)
        return bytes(memoryview(data)[:got])

    @property
    def reusable(self) -> bool:
        """Whether the answer has been read to its end and the server takes another request."""
        return self._keeps and self._left == 0 and not self._chunked and not self._rest

    @property
    def stale(self) -> bool:
        """Whether an idle connection was closed by the server, or says what nobody asked for."""
        return self.readable

    @property
    def readable(self) -> bool:
        """Whether something has arrived that was not asked for yet."""
        if self._rest or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()

    def _part(self, data: bytearray, at: int, limit: int, cancel: Cancel, until: Until) -> int:
        if at == len(data):
            if self._left == 0 and not self._next_chunk(cancel, until):
                return 0
            data.extend(bytes(min(max(at, 4096), limit - at)))
        with memoryview(data) as view:
            return self.receive_into(view[at:], cancel, until=until)

    def _head(self, cancel: Cancel, until: Until) -> Head:
        data = bytearray(self._rest)
        part = bytearray(4096)
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > _MAX_HEAD:
                raise ConnectionError("the answer's head is longer than 64 KiB")
            self._rest = b""
            got = self._receive(memoryview(part), cancel, until, whole=False)
            if got == 0:
                raise _cut()
            data += part[:got]
        self._rest = bytes(data[end + 4 :])
        return _parse(bytes(data[: end + 4]))

    def _next_chunk(self, cancel: Cancel, until: Until) -> bool:
        """Read up to the next chunk's first byte; False at the end of the body."""
        if not self._chunked:
            return False
        if self._in_chunk and self._line(cancel, until):
            raise ConnectionError("a chunk is longer than it says")
        text = self._line(cancel, until).partition(b";")[0].strip()
        try:
            self._left = int(text, 16)
        except ValueError:
            raise ConnectionError(f"no length of a chunk: {text[:20]!a}") from None
        if self._left < 0:
            raise ConnectionError(f"no length of a chunk: {text[:20]!a}")
        self._in_chunk = self._left > 0
        if not self._in_chunk:
            while self._line(cancel, until):
                pass
            self._chunked = False
        return self._in_chunk

    def _line(self, cancel: Cancel, until: Until) -> bytes:
        data, self._rest = bytearray(self._rest), b""
        part = bytearray(4096)
        while (end := data.find(b"\r\n")) < 0:
            if len(data) > _MAX_HEAD:
                raise ConnectionError("a chunk without a length")
            got = self._receive(memoryview(part), cancel, until, whole=False)
            if got == 0:
                raise _cut()
            data += part[:got]
        self._rest = bytes(data[end + 2 :])
        return bytes(data[:end])

    def _receive(self, view: memoryview, cancel: Cancel, until: Until, *, whole: bool) -> int:
        """Bytes received, at least one; 0 when the peer has closed."""
        if self._rest:
            got = min(len(self._rest), len(view))
            view[:got] = self._rest[:got]
            self._rest = self._rest[got:]
            return got
        began = time.monotonic()
        while True:
            if cancel.is_set():
                raise ReadCancelled(self._host)
            try:
                if self._blocking:
                    return self._socket.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
                return self._records(view) if whole else self._socket.recv_into(view)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() > min(until(), began + self._patience):
                    raise StalledError(f"nothing arrived for {time.monotonic() - began:.1f} s") from None

    def _records(self, view: memoryview) -> int:
        """TLS gives 16 KiB at a time: as many as come within a tick."""
        receive = self._socket.recv_into
        got = receive(view)
        look_up = time.monotonic() + _TICK
        while 0 < got < len(view):
            try:
                more = receive(view[got:])
            except TimeoutError:
                break
            if more == 0:
                break  # the next call will find it again
            got += more
            if time.monotonic() > look_up:
                break
        return got

    def _wait_in_kernel(self) -> None:
        # A timeout of Python's makes the socket non-blocking, and MSG_WAITALL then does not wait.
        self._socket.settimeout(None)
        timeval = struct.pack("ll", int(_TICK), int(_TICK % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(self._patience) + 1, 0)
        )
        self._blocking = True

    def _tunnel(self, proxy: Proxy, authority: str, cancel: Cancel) -> None:
        lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}"]
        lines += [f"{name}: {value}" for name, value in proxy.headers.items()]
        self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        head = self._head(cancel, at(time.monotonic() + self._patience))
        if head.status != 200 or self._rest:
            raise ConnectionError(f"the proxy {proxy.host}:{proxy.port} answers {head.status} {head.reason}")

    def _encrypt(self, tls: ssl.SSLContext, host: str, cancel: Cancel) -> None:
        until = time.monotonic() + min(self._patience, _CONNECT)
        self._socket.settimeout(_TICK)
        self._blocking = False
        secure = tls.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
        self._socket = secure
        while not self._shook_hands(secure):
            if cancel.is_set():
                raise ReadCancelled(self._host)
            if time.monotonic() > until:
                raise StalledError("no answer to the TLS handshake")

    def _shook_hands(self, secure: ssl.SSLSocket) -> bool:
        try:
            secure.do_handshake()
        except TimeoutError:
            return False
        return True


def _dial(host: str, port: int, patience: float, cancel: Cancel) -> socket.socket:
    """``socket.create_connection`` that can be cancelled and does not wait 20 s for a dead IPv6 route."""
    last: OSError = OSError(f"{host} has no address")
    addresses = in_turns(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    for number, (family, kind, protocol, _, address) in enumerate(addresses, 1):
        seconds = min(patience, _CONNECT if number == len(addresses) else _CONNECT_NEXT)
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(address)
            if code == errno.EINPROGRESS:
                _until_writable(sock, time.monotonic() + seconds, cancel)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            return sock
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
    raise last


def in_turns(addresses: Sequence[Address]) -> list[Address]:
    """The order in which to try a resolver's answer: families in turns, the preferred one first.

    A store has many addresses and the resolver's order is always the same: connections spread over
    them. And where one family leads nowhere, the other is not behind all of its addresses.
    """
    families = list(dict.fromkeys(address[0] for address in addresses))
    of_family = [[address for address in addresses if address[0] == family] for family in families]
    for each in of_family:
        random.shuffle(each)
    return [address for turn in zip_longest(*of_family) for address in turn if address is not None]


def _until_writable(sock: socket.socket, until: float, cancel: Cancel) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while not poll.poll(_TICK * 1000):
        if cancel.is_set():
            raise ReadCancelled("connecting")
        if time.monotonic() > until:
            raise StalledError("no answer to a connection request")


def _cut() -> ConnectionResetError:
    return ConnectionResetError("the server closed the connection before the end")


def _parse(data: bytes) -> Head:
    stream = io.BytesIO(data)
    line = stream.readline().decode("latin-1").strip()
    version, _, rest = line.partition(" ")
    code, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/1.") or not (code.isdecimal() and len(code) == 3):
        raise ConnectionError(f"not an HTTP answer: {line[:60]!a}")
    try:
        parsed = http.client.parse_headers(stream)
    except http.client.HTTPException as error:
        raise ConnectionError(f"not an HTTP answer: {error}") from None
    if len(set(parsed.get_all("content-length", ()))) > 1:
        raise ConnectionError("an answer with two lengths")
    headers = {name.lower(): value.strip() for name, value in parsed.items()}
    headers |= {name: ", ".join(parsed.get_all(name, ())) for name in _LISTS if name in headers}
    return Head(int(code), reason.strip(), headers, version)
