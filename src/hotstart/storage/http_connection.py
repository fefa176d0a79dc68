"""HTTP/1.1 as a weight reader needs it: a response's body received where it is to lie.

The usual clients read a body into buffers of their own and copy it, several times; against one
local server they stay at 0.4 to 0.8 GB/s where receiving into the destination gives 1.0 and more
with two thirds of the CPU (``benchmarks/http_readers.py``). The kernel fills whole pieces
(``MSG_WAITALL``) while the interpreter's lock is free.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Mapping

from msgspec import Struct

from hotstart.storage.source import Cancel, ReadCancelled

PIECE = 1 << 20
"""Bytes of one receive: between two of them a reader looks at clock and cancellation."""
_TICK = 1.0
"""Seconds after which a receive that got nothing looks up."""
_MAX_HEAD = 64 << 10


class Head(Struct, frozen=True):
    """Status line and headers; names in lower case, the last of repeated ones."""

    status: int
    reason: str
    headers: dict[str, str]

    @property
    def length(self) -> int | None:
        """Bytes of the body, where the head says so."""
        value = self.headers.get("content-length", "")
        return int(value) if value.isdigit() and len(value) < 20 else None

    @property
    def keeps(self) -> bool:
        """Whether the connection may be used again after the body."""
        return self.headers.get("connection", "").lower() != "close" and self.length is not None


class StalledError(ConnectionError):
    """Nothing arrived for as long as the reader was willing to wait."""


class HttpConnection:
    """One connection, one request at a time. Not thread-safe. Raises ``OSError`` for whatever fails."""

    def __init__(
        self, scheme: str, host: str, port: int, *, patience: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """Connect. ``patience``: seconds without a byte after which it is given up."""
        self._patience = patience
        self.place = scheme, host, port
        self._host = host if port in (80, 443) else f"{host}:{port}"
        sock = socket.create_connection((host.strip("[]"), port), timeout=min(patience, 20.0))
        self._waits_in_kernel = scheme == "http"
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if scheme == "https":
                sock = (tls or ssl.create_default_context()).wrap_socket(sock, server_hostname=host)
                sock.settimeout(_TICK)
            else:
                # A timeout of Python's makes the socket non-blocking, and MSG_WAITALL then does not wait.
                sock.settimeout(None)
                seconds, micros = int(_TICK), int(_TICK % 1 * 1e6)
                timeval = seconds.to_bytes(8, "little") + micros.to_bytes(8, "little")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self._rest = b""
        """Of the body, what came together with the head."""

    def ask(self, target: str, headers: Mapping[str, str], cancel: Cancel, method: str = "GET") -> Head:
        """Send a request without a body and read the answer's head."""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._host}", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        data = bytearray()
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > _MAX_HEAD:
                raise ConnectionError("the answer's head is longer than 64 KiB")
            part = bytearray(4096)
            data += part[: self._receive(memoryview(part), cancel, whole=False)]
        self._rest = bytes(data[end + 4 :])
        return _parse(bytes(data[: end + 4]))

    def receive_into(self, view: memoryview, cancel: Cancel) -> int:
        """At least one byte of the body into ``view``, up to all of it; raises when the peer closed."""
        if self._rest:
            got = min(len(self._rest), len(view))
            view[:got] = self._rest[:got]
            self._rest = self._rest[got:]
            return got
        return self._receive(view[:PIECE], cancel, whole=True)

    def body(self, head: Head, limit: int, cancel: Cancel) -> bytes:
        """A small body, whole, or its first ``limit`` bytes: then the connection is of no more use."""
        if head.status in (204, 304):
            return b""
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunked(limit, cancel)
        data = bytearray(limit if head.length is None else min(limit, head.length))
        got = 0
        try:
            while got < len(data):
                got += self.receive_into(memoryview(data)[got:], cancel)
        except ConnectionResetError:
            if head.length is not None:
                raise  # a body without a length ends with its connection, another is cut
        return bytes(data[:got])

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()

    def _receive(self, view: memoryview, cancel: Cancel, *, whole: bool) -> int:
        deadline = time.monotonic() + self._patience
        while True:
            if cancel.is_set():
                raise ReadCancelled(self._host)
            try:
                if self._waits_in_kernel:
                    got = self._socket.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
                else:
                    got = self._socket.recv_into(view)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                if time.monotonic() > deadline:
                    raise StalledError(f"nothing arrived for {self._patience:g} s") from None
                continue
            if got == 0:
                raise ConnectionResetError("the server closed the connection before the end")
            return got

    def _chunked(self, limit: int, cancel: Cancel) -> bytes:
        """Only error pages and small files come this way; the connection is not used again."""
        reader = io.BufferedReader(_Raw(self, cancel))
        data = b""
        while len(data) < limit:
            size = int(reader.readline(64).split(b";")[0].strip() or b"0", 16)
            if size == 0:
                break
            data += reader.read(min(size, limit))
            reader.readline(8)
        return data[:limit]


class _Raw(io.RawIOBase):
    def __init__(self, connection: HttpConnection, cancel: Cancel) -> None:
        self._connection = connection
        self._cancel = cancel

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        if self._connection._rest:
            return self._connection.receive_into(view, self._cancel)
        return self._connection._receive(view, self._cancel, whole=False)


def _parse(data: bytes) -> Head:
    stream = io.BytesIO(data)
    line = stream.readline().decode("latin-1").strip()
    version, _, rest = line.partition(" ")
    code, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/1.") or not (code.isdigit() and len(code) == 3):
        raise ConnectionError(f"not an HTTP answer: {line[:60]!a}")
    headers = {name.lower(): value.strip() for name, value in http.client.parse_headers(stream).items()}
    return Head(int(code), reason.strip(), headers)
