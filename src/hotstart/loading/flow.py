"""How many reads are in flight: more, as long as more of them bring more bytes.

One reader of an object store gets some tens of megabytes a second and the network gives a hundred
times that; on one's own machine two readers use all there is, and thirty get in each other's way.
Nothing tells the two apart but trying. What a number of readers brings follows from how long their
reads take: n readers that are never idle bring n times what one of them gets (Little's law), so one
read of each is a measurement.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WINDOW = 0.2
"""Seconds of a measurement, at least, where the answer is not plain."""
_WORTH_IT = 1.08
"""More readers must bring this much more, or the smaller number is kept."""
_PLAINLY = 1.5
"""A gain for which the first reads are proof enough, although they include connecting."""
_DISTANT = 0.1
"""Seconds of a read from which on the storage is far or slow: there a few readers too many do no harm."""
_FIRST_REST, _LONGEST_REST = 2.0, 30.0
"""Seconds before a number that was found is doubted: what else ran, such as imports, may have ended."""


class Flow:
    """Admits readers. Thread-safe. Doubles their number until that no longer pays."""

    def __init__(self, first: int, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = min(first, most)
        """Reads that may be in flight now."""
        self._most = most
        self._clock = clock
        self._free = threading.Condition()
        self._inside = 0
        self._level = 0
        """Of the measurement: what began before it says nothing about it."""
        self._best = 0.0
        """Bytes per second with half as many; 0: not known."""
        self._doubted = 0.0
        """Bytes per second with twice as many, while half of them are measured again; 0: no doubt."""
        self._rest, self._rests_until = _FIRST_REST, 0.0
        self._begin(0.0, warm=False)

    @classmethod
    def of_files(cls) -> Flow:
        """Of no limit: the number of readers is known to be right, and one of them may hang for ever."""
        return cls(sys.maxsize, sys.maxsize)

    @contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        """Wait for a turn; the block reads ``nbytes``."""
        with self._free:
            while self._inside >= self.limit:
                self._free.wait()
            self._inside += 1
            level, number, began = self._level, self._begun, self._clock()
            self._begun += began >= self._rests_until
        try:
            yield
        finally:
            with self._free:
                self._inside -= 1
                now = self._clock()
                if level == self._level and self.limit < self._most and began >= self._rests_until:
                    self._count(number, nbytes, now - began, now)
                self._free.notify()

    def _count(self, number: int, nbytes: int, seconds: float, now: float) -> None:
        # Whose reads count is known when they begin: those that end first would promise too much.
        enough = self.limit if self._warm else self.limit // 2 + 1
        if not self._warm and number >= enough:
            return
        self._awaited += number < enough
        self._reads += 1
        self._bytes += nbytes
        self._seconds += seconds
        if self._awaited < enough:
            return
        rate = self.limit * self._bytes / max(self._seconds, 1e-9)
        if not self._warm:
            # The first reads include connecting, and whatever else happens once.
            far = self._seconds / self._reads >= _DISTANT
            if far and self._best and rate > self._best * _PLAINLY:
                self._grow(rate, now)
            else:
                self._begin(now, warm=True)
        elif now - self._since >= _WINDOW:
            self._judge(rate, now)

    def _judge(self, rate: float, now: float) -> None:
        """Decide by a measurement whether more readers are tried, these kept, or half of them."""
        if self._doubted:
            rate, self._doubted, half = self._doubted, 0.0, rate
            if rate >= half * _WORTH_IT:
                self.limit *= 2
                self._grow(rate, now)
            else:
                self._stay(now)
        elif rate >= self._best * _PLAINLY:
            self._grow(rate, now)
        elif rate >= self._best * _WORTH_IT:
            # What else went on may have ended, and half as many would bring as much now.
            self._doubted = rate
            self.limit //= 2
            self._begin(now, warm=True)
        else:
            self.limit = max(1, self.limit // 2)
            self._stay(now)

    def _begin(self, now: float, *, warm: bool) -> None:
        """Measure from now on; ``warm``: with connections that are there."""
        self._since, self._warm = now, warm
        self._level += 1
        self._begun = self._awaited = self._reads = self._bytes = 0
        self._seconds = 0.0

    def _grow(self, rate: float, now: float) -> None:
        self._best = rate
        self.limit = min(2 * self.limit, self._most)
        self._begin(now, warm=False)
        self._free.notify_all()

    def _stay(self, now: float) -> None:
        """Keep this number, and ask again after a rest how it does."""
        self._best = 0.0
        self._rests_until = now + self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)
        self._begin(self._rests_until, warm=True)
