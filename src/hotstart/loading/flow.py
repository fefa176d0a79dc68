"""How many reads are in flight: more, as long as more of them bring more bytes.

One reader of an object store gets some tens of megabytes a second and the network gives a hundred
times that; on one's own machine two readers use all there is, and thirty get in each other's way.
Nothing tells the two apart but trying.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WINDOW = 0.2
"""Seconds of a measurement, at least; and each reader is to finish at least twice in it."""
_WORTH_IT = 1.08
"""More readers must bring this much more, or the smaller number is kept."""


class Flow:
    """Admits readers. Thread-safe. Doubles their number until that no longer pays."""

    def __init__(self, first: int, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = min(first, most)
        """Reads that may be in flight now."""
        self._most = most
        self._clock = clock
        self._free = threading.Condition()
        self._inside = 0
        self._settled = self.limit == most
        self._best = 0.0
        """Bytes per second with half as many."""
        self._bytes = self._reads = 0
        self._since: float | None = None

    @contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        """Wait for a turn; the block reads ``nbytes``."""
        with self._free:
            while self._inside >= self.limit:
                self._free.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._free:
                self._inside -= 1
                self._count(nbytes)
                self._free.notify()

    def _count(self, nbytes: int) -> None:
        now = self._clock()
        if self._settled:
            return
        if self._since is None:
            # The first reads include connecting, and whatever else happens once.
            self._reads += 1
            if self._reads >= self.limit:
                self._since, self._bytes, self._reads = now, 0, 0
            return
        self._bytes += nbytes
        self._reads += 1
        seconds = now - self._since
        if seconds < _WINDOW or self._reads < 2 * self.limit:
            return
        rate = self._bytes / seconds
        if rate < self._best * _WORTH_IT:
            self.limit = max(1, self.limit // 2)
            self._settled = True
            return
        self._best = rate
        if self.limit == self._most:
            self._settled = True
            return
        self.limit = min(2 * self.limit, self._most)
        self._since, self._bytes, self._reads = None, 0, 0
        self._free.notify_all()
