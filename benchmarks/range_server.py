"""A web server for measurements: files by range with ``sendfile``, from several processes, with faults.

``with served(folder, cut=0.01, slow=0.01) as address`` cuts one answer of a hundred by a reset after a
part of its body and lets one of a hundred go on at 64 KiB/s. Nothing here is fit for another purpose.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

_TRICKLE = 64 << 10
"""Bytes per second of a slow answer."""
_LARGE = 1 << 20
"""Bytes from which on an answer may be at fault: headers and small files come as they are."""


@contextmanager
def served(
    folder: Path, *, cut: float = 0.0, slow: float = 0.0, rate: float = 0.0, processes: int = 2
) -> Iterator[str]:
    """The folder's address.

    ``cut``, ``slow``: shares of the answers. ``rate``: bytes per second of all together; 0: any.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(
            target=_work, args=(listener, folder, cut, slow, rate / processes, number), daemon=True
        )
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        listener.close()


def _work(listener: socket.socket, folder: Path, cut: float, slow: float, rate: float, seed: int) -> None:
    chance, line = random.Random(seed), _Line(rate)
    while True:
        connection, _ = listener.accept()
        args = connection, folder, cut, slow, chance, line
        threading.Thread(target=_serve, args=args, daemon=True).start()


class _Line:
    """Bandwidth that all answers of a process share."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pass_through(self, nbytes: int) -> None:
        if not self._rate:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))


def _serve(
    connection: socket.socket, folder: Path, cut: float, slow: float, chance: random.Random, line: _Line
) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, connection.makefile("rb") as requests, suppress(OSError):
        while first := requests.readline():
            headers = {}
            while text := requests.readline().decode().strip():
                name, _, value = text.partition(":")
                headers[name.lower()] = value.strip()
            method, target, _ = first.decode().split()
            path = folder / unquote(target.partition("?")[0]).lstrip("/")
            if not path.is_file():
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            size = path.stat().st_size
            begin, end = _range(headers.get("range", ""), size)
            status = "206 Partial Content" if "range" in headers else "200 OK"
            connection.sendall(
                f"HTTP/1.1 {status}\r\nContent-Length: {end - begin}\r\nAccept-Ranges: bytes\r\n"
                f'Content-Range: bytes {begin}-{end - 1}/{size}\r\nETag: "{size:x}"\r\n\r\n'.encode()
            )
            if method == "HEAD":
                continue
            fate = chance.random() if end - begin >= _LARGE else 1.0
            with open(path, "rb") as file:
                if fate >= cut + slow:
                    _send(connection, file.fileno(), begin, end, line)
                    continue
                middle = chance.randrange(begin, end)
                _send(connection, file.fileno(), begin, middle, line)
                if fate < cut:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                while middle < end:
                    time.sleep(0.25)
                    middle += os.sendfile(
                        connection.fileno(), file.fileno(), middle, min(_TRICKLE // 4, end - middle)
                    )


def _range(text: str, size: int) -> tuple[int, int]:
    if not text:
        return 0, size
    first, _, last = text.removeprefix("bytes=").partition("-")
    return int(first), min(size, int(last) + 1) if last else size


def _send(connection: socket.socket, fd: int, begin: int, end: int, line: _Line) -> None:
    while begin < end:
        sent = os.sendfile(connection.fileno(), fd, begin, min(1 << 20, end - begin))
        line.pass_through(sent)
        begin += sent
