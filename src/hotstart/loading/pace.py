"""How much one read asks for: whole steps of a fast storage, little of a slow one.

Progress is known only between reads, and without it a slow storage looks like a dead one. Short reads
cost a concurrent import little: a load has a handful of them at its beginning, and on a slow storage,
which is waited for without the interpreter lock, there are few in a second.
"""

from __future__ import annotations

_FIRST, _SHORTEST = 1 << 20, 256 << 10
_FAST_SECONDS, _SLOW_SECONDS = 0.05, 1.0


class Pace:
    """Shared by the readers of one load. ``longest`` in bytes; lengths are powers of two below it.

    ``distant``: each read is a request that takes a way; it begins with the longest.
    """

    def __init__(self, longest: int, *, distant: bool = False) -> None:
        self.length = longest if distant else min(_FIRST, longest)
        self._longest = longest

    def took(self, seconds: float) -> None:
        """Learn from how long a read took."""
        if seconds < _FAST_SECONDS:
            self.length = min(2 * self.length, self._longest)
        elif seconds > _SLOW_SECONDS:
            self.length = max(self.length // 2, min(_SHORTEST, self._longest))
