"""Whether files come faster past the page cache or through it, found out by reading what is read anyway.

A direct read saves a copy and lets the device see whole requests; on most disks it wins clearly. It
loses where a layer below has a cache or reads ahead of its own. The first steps of a load are read
one way and the other in turn, by readers that run side by side: both ways see the same device, the
same competition and the same import beside them, and no reader waits for another.
"""

from __future__ import annotations

import threading

from hotstart.units import format_rate, format_size

WAYS = ("direct", "buffered")
TRIAL_FROM = 256 << 20
"""Bytes; less is read before a comparison is worth anything."""
_SAMPLES = 8
"""Steps of a round, half of them each way."""
_CLEARLY = 1.25
"""Buffered reads must be this much faster, in two rounds one after the other: a hiccup is no reason."""


class Trial:
    """Thread-safe. Steps that are no samples are read directly until the verdict is known.

    The first ``warm_up`` steps are no samples: reads begin small, and grow when they are fast.
    """

    def __init__(self, warm_up: int) -> None:
        self.verdict = ""
        """``direct`` or ``buffered``; empty until it is known."""
        self._lock = threading.Lock()
        self._to_warm_up = warm_up
        self._to_ask = _SAMPLES
        self._answers = 0
        self._rounds = 0
        self._bytes = dict.fromkeys(WAYS, 0)
        self._seconds = dict.fromkeys(WAYS, 0.0)
        self._total = dict.fromkeys(WAYS, (0, 0.0))

    def next(self) -> tuple[str, bool]:
        """How to read the next step, and whether it is a sample: then :meth:`took` must follow."""
        with self._lock:
            if self._to_warm_up:
                self._to_warm_up -= 1
                return "direct", False
            if not self._to_ask:
                return self.verdict or "direct", False
            self._to_ask -= 1
            return WAYS[self._to_ask % 2 == 0], True

    def took(self, way: str, nbytes: int, seconds: float) -> bool:
        """Learn from a sample; True for the one that brings the verdict."""
        with self._lock:
            self._bytes[way] += nbytes
            self._seconds[way] += seconds
            self._answers += 1
            if self._answers < _SAMPLES:
                return False
            return self._judge()

    def __str__(self) -> str:
        """``direct 390 MB/s a reader against buffered 180 MB/s, measured on 67.1 MB``."""
        direct, buffered = (format_rate(*self._total[way]) for way in WAYS)
        size = format_size(sum(nbytes for nbytes, _ in self._total.values()))
        return f"direct {direct} a reader against buffered {buffered}, measured on {size}"

    def _judge(self) -> bool:
        rates = [self._bytes[way] / max(self._seconds[way], 1e-9) for way in WAYS]
        for way in WAYS:
            nbytes, seconds = self._total[way]
            self._total[way] = nbytes + self._bytes[way], seconds + self._seconds[way]
        self._rounds += 1
        if rates[1] < rates[0] * _CLEARLY:
            self.verdict = "direct"
        elif self._rounds == 2:
            self.verdict = "buffered"
        else:
            self._to_ask, self._answers = _SAMPLES, 0
            self._bytes, self._seconds = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0.0)
        return bool(self.verdict)
