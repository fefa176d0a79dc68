"""What makes later steps faster or the process leaner, and what no request should wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

_IDLE_BEFORE_TUNING = 0.05
"""Seconds without a request before tuning begins: it would slow a request that comes at once."""
_IDLE_BEFORE_CHORES = 0.5
_BUSY_BEFORE_TUNING = 2.0
"""Seconds after which tuning no longer waits for a pause: the first requests are not to pay for it."""
_DONE = object()


class SpareTime:
    """First tuning, in pieces of milliseconds, then the chores, each of them once."""

    def __init__(
        self,
        tuning: Iterator[object],
        chores: Iterable[Callable[[], object]],
        wait: Callable[[float], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wait``: whether a message arrives within that many seconds."""
        self._tuning: Iterator[object] | None = tuning
        self._chores = list(chores)
        self._wait = wait
        self._clock = clock
        self._tune_anyway = clock() + _BUSY_BEFORE_TUNING

    def use(self, *, busy: bool) -> None:
        """Called before each step. Without work: until all is done or a message arrives.

        ``busy``: requests are running; then one piece of tuning, and only once the first seconds are over.
        """
        if busy:
            if self._clock() > self._tune_anyway:
                self._tune()
            return
        if self._tuning is not None and not self._wait(_IDLE_BEFORE_TUNING):
            self._tune()
            while self._tuning is not None and not self._wait(0):
                self._tune()
        while self._tuning is None and self._chores and not self._wait(_IDLE_BEFORE_CHORES):
            self._chores.pop(0)()

    def _tune(self) -> None:
        if self._tuning is not None and next(self._tuning, _DONE) is _DONE:
            self._tuning = None
