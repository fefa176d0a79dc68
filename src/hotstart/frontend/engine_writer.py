"""The one way into the engine's socket, before and after an event loop owns it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable


class EngineWriter:
    """Writes whole frames, in order, whichever thread sends them.

    Straight into the socket at first, since the engine must not wait for an event loop; once
    :meth:`hand_over` is through, into what the loop writes with. What a dead engine can no longer
    take is dropped: its death is noticed, and explained, where its end of file is read.
    """

    def __init__(self, engine: socket.socket) -> None:
        self._socket = engine
        self._lock = threading.Lock()
        self._write: Callable[[bytes], object] = engine.sendall

    def send(self, frame: bytes) -> None:
        """Write ``frame`` or queue it. For threads; the loop has its transport."""
        # RuntimeError: the loop is closed already, and with it the server.
        with self._lock, contextlib.suppress(OSError, RuntimeError):
            self._write(frame)

    async def hand_over(self, adopt: Callable[[socket.socket], Awaitable[Callable[[bytes], object]]]) -> None:
        """Give the socket to the running loop; ``adopt`` returns what to write with, from any thread."""
        # Held across the await: a frame comes whole before the socket is made non-blocking, or after.
        with self._lock:
            self._socket.setblocking(False)
            self._write = await adopt(self._socket)
