"""A web server that serves files by range and misbehaves by script: cuts, stalls, lies, refuses.

``with FaultServer({"model/a.bin": data}, Fault(nth=2, cut=1000)) as server`` cuts the second answer
after a thousand bytes of its body. Faults are looked at in their order; each counts the requests that
it is about. Also a proxy: requests in absolute form are served, CONNECT is tunnelled.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import unquote, urlsplit

MODIFIED = "Mon, 02 Jun 2025 10:00:00 GMT"


@dataclass
class Fault:
    """Which requests (all three must hold), and what happens to them."""

    path: str = ""
    """Part of the path."""
    nth: int = 0
    """The n-th request about which the fault is, from 1; 0: each."""
    times: int | None = None
    """At most so often."""
    if_range: Callable[[int, int], bool] = lambda begin, end: True

    status: int | None = None
    headers: dict[str, str | None] = field(default_factory=dict)
    """Added to or put in place of the answer's own; None: left out."""
    body: bytes | None = None
    cut: int | None = None
    """End the connection after so many bytes of the body."""
    reset: bool = False
    """End it by RST, not in order."""
    delay: float = 0.0
    """Seconds before the answer."""
    stall: int | None = None
    """Say nothing more, after so many bytes of the body; -1: nothing at all."""
    ignore_range: bool = False
    chunked: int = 0
    """Bytes of a chunk."""
    corrupt: int | None = None
    """Offset in the file of a byte that is flipped."""
    close_after: bool = False
    """Close the connection, once it is idle, without having said so."""
    bandwidth: float = 0.0
    """Bytes per second."""
    do: Callable[[FaultServer], None] | None = None
    """Called before the answer: replace a file, for example."""

    seen: int = 0

    def applies(self, request: Request) -> bool:
        """Count the request, and say whether the fault happens to it."""
        if self.path not in request.path or not self.if_range(*request.range):
            return False
        self.seen += 1
        if self.nth:
            return self.seen == self.nth
        return self.times is None or self.seen <= self.times


@dataclass(frozen=True)
class Request:
    """What a client asked for. ``range``: first byte and one after the last."""

    method: str
    target: str
    path: str
    headers: dict[str, str]
    range: tuple[int, int]
    connection: int


class FaultServer:
    """See the module. ``etag``: ``strong``, ``weak`` or ``none``. Counts what it saw."""

    def __init__(
        self,
        files: dict[str, bytes],
        *faults: Fault,
        etag: str = "strong",
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.files = dict(files)
        self.faults = list(faults)
        self.requests: list[Request] = []
        self.connects: list[str] = []
        self.connections = 0
        self.sent = 0
        self._etag, self._tls = etag, tls
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.port = self._listener.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if tls else 'http'}://{name}:{self.port}"

    def __enter__(self) -> FaultServer:
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    @property
    def gets(self) -> list[str]:
        """Paths of the requests in order."""
        return [request.path for request in self.requests]

    @property
    def open_connections(self) -> int:
        """That neither side has closed."""
        with self._lock:
            return len(self._open)

    def etag(self, path: str) -> str:
        """Of the file as it is now."""
        text = f'"{hashlib.md5(self.files[path], usedforsecurity=False).hexdigest()}"'
        return {"strong": text, "weak": "W/" + text, "none": ""}[self._etag]

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._spawn(self._serve, sock, self.connections)

    def _serve(self, sock: socket.socket, number: int) -> None:
        with self._lock:
            self._open.add(sock)
        plain = sock
        try:
            if self._tls:
                sock = self._tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open = (self._open - {plain}) | {sock}
            stream = sock.makefile("rb")
            with stream:
                while not self._stop.is_set() and self._one(sock, stream, number):
                    pass
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _one(self, sock: socket.socket, stream: object, number: int) -> bool:
        """Serve a request; False: the connection is at its end."""
        request = _read(stream, number)
        if request is None:
            return False
        if request.method == "CONNECT":
            self.connects.append(request.target)
            self._tunnel(sock, request.target)
            return False
        with self._lock:
            self.requests.append(request)
            fault = next((fault for fault in self.faults if fault.applies(request)), Fault())
        if fault.do:
            fault.do(self)
        if self._stop.wait(fault.delay):
            return False
        if fault.stall == -1:
            self._stop.wait()
        head, body = self._answer(request, fault)
        sock.sendall(head)
        if request.method == "HEAD" or fault.status in (204, 304):
            return True
        return self._send(sock, body, fault)

    def _answer(self, request: Request, fault: Fault) -> tuple[bytes, bytes]:
        begin, end = request.range
        name = request.path.lstrip("/")
        data = self.files.get(name)
        status, headers = 200, {}
        if data is None:
            status, body = 404, b"<Code>NoSuchKey</Code>"
        else:
            if etag := self.etag(name):
                headers["ETag"] = etag
            headers["Last-Modified"] = MODIFIED
            status, body = self._content(request, fault, data, begin, min(end, len(data)), headers)
        if fault.status is not None:
            status, body = fault.status, fault.body if fault.body is not None else b"<Code>Scripted</Code>"
            headers.pop("Content-Range", None)
        elif fault.body is not None:
            body = fault.body
        if fault.chunked:
            headers["Transfer-Encoding"] = "chunked"
        elif status not in (204, 304):
            headers["Content-Length"] = str(len(body))
        for key, value in fault.headers.items():
            headers.pop(key, None)
            if value is not None:
                headers[key] = value
        lines = [f"HTTP/1.1 {status} Scripted"] + [f"{key}: {value}" for key, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode(), body

    def _content(
        self, request: Request, fault: Fault, data: bytes, begin: int, end: int, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        wanted = request.headers
        etag = headers.get("ETag", "")
        if "if-match" in wanted and wanted["if-match"] != etag:
            return 412, b"<Code>PreconditionFailed</Code>"
        if etag and wanted.get("if-none-match") == etag:
            return 304, b""
        if fault.corrupt is not None:
            data = data[: fault.corrupt] + bytes([data[fault.corrupt] ^ 1]) + data[fault.corrupt + 1 :]
        if "range" not in wanted or fault.ignore_range:
            return 200, data
        if begin >= len(data):
            return 416, b"<Code>InvalidRange</Code>"
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        return 206, data[begin:end]

    def _send(self, sock: socket.socket, body: bytes, fault: Fault) -> bool:
        ends = [point for point in (fault.cut, fault.stall) if point is not None]
        part = body[: min(ends)] if ends else body
        step = max(1, int(fault.bandwidth / 20)) if fault.bandwidth else 1 << 20
        size = fault.chunked or step
        for at in range(0, len(part), size):
            piece = part[at : at + size]
            sock.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if fault.chunked else piece)
            self.sent += len(piece)
            if fault.bandwidth and self._stop.wait(len(piece) / fault.bandwidth):
                return False
        if fault.stall is not None:
            self._stop.wait()
        if ends:
            if fault.reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if fault.chunked:
            sock.sendall(b"0\r\n\r\n")
        return not fault.close_after

    def _tunnel(self, sock: socket.socket, target: str) -> None:
        host, _, port = target.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as other:
            other.settimeout(None)
            with self._lock:
                self._open.add(other)
            sock.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            back = threading.Thread(target=_pump, args=(other, sock), daemon=True)
            back.start()
            _pump(sock, other)
            back.join(10)
            with self._lock:
                self._open.discard(other)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for sock in (source, sink):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _read(stream: object, number: int) -> Request | None:
    line = stream.readline().decode("latin-1")  # type: ignore[attr-defined]
    if not line.strip():
        return None
    method, target, _ = line.split()
    headers: dict[str, str] = {}
    while text := stream.readline().decode("latin-1").strip():  # type: ignore[attr-defined]
        name, _, value = text.partition(":")
        headers[name.lower()] = value.strip()
    begin, end = 0, 1 << 62
    if headers.get("range", "").startswith("bytes="):
        first, _, last = headers["range"][6:].partition("-")
        begin, end = int(first), int(last) + 1
    path = target if method == "CONNECT" else unquote(urlsplit(target).path)
    return Request(method, target, path, headers, (begin, end), number)
