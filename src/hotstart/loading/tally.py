"""What the readers of one load have done, counted in one place and told in order. Torch-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec import Struct

from hotstart.units import format_seconds


class LoadReport(Struct, frozen=True):
    """What a load did."""

    bytes: int
    """Of the files, read or mapped; small holes between tensors included."""
    seconds: float
    longest_stall: float
    """Longest single read in seconds: of the storage, or of an import that held the interpreter lock."""

    def __str__(self) -> str:
        """What the phase itself does not tell: bytes, seconds and rate are in its line already."""
        return f"longest stall {format_seconds(self.longest_stall)}"


class Tally:
    """Thread-safe. ``progress`` is called with the bytes done so far, on one reader's thread at a time.

    Its numbers only grow, and the last one is the total. A slow call holds up its own thread only;
    what others do meanwhile is told by the same thread afterwards.
    """

    def __init__(self, total: int, progress: Callable[[int], None]) -> None:
        self.total = total
        self.done = 0
        self.ways: dict[tuple[int, str], int] = {}
        """Bytes by file and way of reading, where the reader says."""
        self._progress = progress
        self._told = 0
        self._stall = 0.0
        self._began = self._latest = time.monotonic()
        self._counting = threading.Lock()
        self._telling = threading.Lock()

    def start(self) -> None:
        """The readers begin now."""
        self._began = self._latest = time.monotonic()

    def add(self, nbytes: int, seconds: float, file: int = -1, way: str = "") -> bool:
        """Count a read that has ended just now; True: this call has told that all is done."""
        with self._counting:
            self.done += nbytes
            if way:
                self.ways[file, way] = self.ways.get((file, way), 0) + nbytes
            self._stall = max(self._stall, seconds)
            self._latest = time.monotonic()
        told = 0
        # Whoever finds another thread telling leaves it to that one, which looks again at the end.
        while self._told < self.done and self._telling.acquire(blocking=False):
            try:
                if self._told < self.done:
                    self._told = told = self.done
                    self._progress(told)
            finally:
                self._telling.release()
        return told == self.total

    def report(self) -> LoadReport:
        """Of all so far."""
        return LoadReport(self.done, self._latest - self._began, self._stall)
