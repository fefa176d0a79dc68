"""How late the client itself is: whether what is measured is the server, or the one who measures.

A timer of the kernel comes due every few milliseconds and is read by the same event loop, through the
same poll, as chunks are. How late it is read is how late a chunk that came then was seen.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from hotstart.bench.latency import percentile
from hotstart.bench.serving.answer import Answer
from hotstart.bench.serving.metrics import tpot

INTERVAL = 0.01
"""Seconds between looks."""
SHARE = 0.03
"""Of what is measured, from which on the client's own delay is warned about."""
_CLOEXEC, _NONBLOCK = 0o2000000, 0o4000


class Delay(Struct, frozen=True):
    """Seconds that the client was late."""

    mean: float
    p99: float
    longest: float


class Delays(Struct, frozen=True):
    """Both kinds."""

    sending: Delay
    """From when a request was planned to when it was its turn."""
    seeing: Delay
    """From when a chunk could be read to when it was."""


class LoopDelay:
    """``async with LoopDelay() as late``: seconds that the event loop was late, one for each look."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._fd = -1
        self._begin = 0.0
        self._seen = 0
        self.late: list[float] = []

    def __enter__(self) -> LoopDelay:
        self._fd = _timer(self._interval)
        self._begin = time.monotonic()
        asyncio.get_running_loop().add_reader(self._fd, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def _look(self) -> None:
        try:
            (times,) = struct.unpack("Q", os.read(self._fd, 8))
        except BlockingIOError:
            return
        since = time.monotonic() - self._begin
        for _ in range(times):
            self._seen += 1
            self.late.append(max(0.0, since - self._seen * self._interval))


def _timer(interval: float) -> int:
    """A descriptor that can be read each time the interval has passed (timerfd_create(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, _CLOEXEC | _NONBLOCK)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    seconds = int(interval)
    nanoseconds = int((interval - seconds) * 1e9)
    spec = (ctypes.c_long * 4)(seconds, nanoseconds, seconds, nanoseconds)
    if libc.timerfd_settime(fd, 0, spec, None) < 0:
        number = ctypes.get_errno()
        os.close(fd)
        raise OSError(number, "timerfd_settime")
    return fd


def delays(answers: Sequence[Answer], late: Sequence[float]) -> Delays:
    """What a run was late, by its answers and by the looks of :class:`LoopDelay`."""
    return Delays(_delay([answer.arrived - answer.planned for answer in answers]), _delay(late))


def _delay(values: Sequence[float]) -> Delay:
    ordered = sorted(values) or [0.0]
    return Delay(fmean(ordered), percentile(ordered, 99), ordered[-1])


def too_late(found: Delays, answers: Sequence[Answer]) -> list[str]:
    """What of the client's own delay is too large a part of what was measured; empty: nothing."""
    good = [answer for answer in answers if not answer.error]
    times = [
        (found.sending.mean, "requests went out", "of TTFT", [answer.ttft for answer in good]),
        (found.seeing.mean, "chunks were seen", "of TTFT", [answer.ttft for answer in good]),
        (found.seeing.mean, "chunks were seen", "of TPOT", [s for answer in good if (s := tpot(answer))]),
    ]
    warnings = []
    for late, what, of, values in times:
        middle = percentile(values, 50) if values else 0.0
        if middle and late > SHARE * middle:
            warnings.append(f"{what} {late * 1000:.2f} ms late on average, {late / middle:.0%} {of}")
    return warnings
