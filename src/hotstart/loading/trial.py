"""Which of two ways brings more bytes from a device, found out by reading what is read anyway.

Past the page cache or through it: nothing tells but trying. How much a kernel reads ahead of a mapping,
how far away the device is, what caches lie below: all of that matters. The first steps of a load are
read in one way, the next in the other, twice. In turn, not side by side: on a device that is busy the
way with the larger requests would take the other's share.
"""

from __future__ import annotations

import threading

from hotstart.units import format_rate, format_size

TRIAL_FROM = 512 << 20
"""Bytes; less is read before a comparison is worth anything."""
_CLEARLY = 1.25
"""The rival must be this much faster, in two rounds one after the other: a hiccup is no reason."""
_ROUNDS = 2


class Trial:
    """Thread-safe. Until there is a verdict, steps are read as :meth:`next` says."""

    def __init__(self, usual: str, rival: str, *, readers: int) -> None:
        """``readers``: steps in flight. Reads begin small: as many steps are no samples at all."""
        self.ways = usual, rival
        self.verdict = ""
        """One of the ways; empty until it is known."""
        self._readers = readers
        self._lock = threading.Lock()
        self._asked = 0
        self._turns = [_Turn() for _ in range(2 * _ROUNDS)]

    def next(self) -> tuple[str, int | None]:
        """How to read the next step, and the turn of which it is a sample: then :meth:`took` must follow."""
        with self._lock:
            way, turn, place = self._at(self._asked)
            self._asked += 1
            # The first steps of a turn are read beside the last ones of the turn before.
            return way, None if turn is None or place < self._readers else turn

    def coming(self, later: int) -> str:
        """How the step will be read, as far as is known, that so many others come before."""
        with self._lock:
            return self._at(self._asked + later)[0]

    def _at(self, number: int) -> tuple[str, int | None, int]:
        """The way of a step, and its place in a turn, if it has one."""
        turn, place = divmod(number - self._readers, 2 * self._readers)
        if self.verdict or not 0 <= turn < len(self._turns):
            return self.verdict or self.ways[0], None, 0
        return self.ways[turn % 2], turn, place

    def took(self, turn: int, nbytes: int, seconds: float) -> bool:
        """Learn from a sample; True for the one that brings the verdict."""
        with self._lock:
            self._turns[turn].count(nbytes, seconds)
            if not self.verdict:
                self.verdict = self._judge()
                return bool(self.verdict)
            return False

    def __str__(self) -> str:
        """``map 390 MB/s a reader, direct 180 MB/s, measured on 67.1 MB``."""
        usual, rival = (
            f"{way} {format_rate(sum(t.nbytes for t in turns), sum(t.seconds for t in turns))}"
            for way, turns in ((self.ways[number], self._turns[number::2]) for number in range(2))
        )
        size = format_size(sum(turn.nbytes for turn in self._turns))
        return f"{usual} a reader, {rival}, measured on {size}"

    def _judge(self) -> str:
        for usual, rival in zip(self._turns[::2], self._turns[1::2], strict=True):
            if min(usual.samples, rival.samples) < self._readers:
                return ""
            if rival.rate < usual.rate * _CLEARLY:
                return self.ways[0]
        return self.ways[1]


class _Turn:
    """Samples of one way, one after the other."""

    def __init__(self) -> None:
        self.samples = self.nbytes = 0
        self.seconds = 0.0

    def count(self, nbytes: int, seconds: float) -> None:
        self.samples += 1
        self.nbytes += nbytes
        self.seconds += seconds

    @property
    def rate(self) -> float:
        """Bytes per second of a reader."""
        return self.nbytes / max(self.seconds, 1e-9)
