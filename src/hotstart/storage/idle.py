"""Work that must not be felt: a thread that gets the processor and the disk when nobody else wants them."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS = 1
_IDLE_CLASS = 3 << 13


_MOSTLY = 0.5
"""Share of the processors."""


class SpareProcessors:
    """Whether most of the processors have nothing to do.

    The lowest priority alone is not enough: whoever is passed over while it holds the interpreter lock
    holds up every other thread. (Measured: on two busy cores, writing a copy at idle priority made the
    load it followed a fifth longer.)
    """

    def __init__(self, cores: int, *, root: str = "/") -> None:
        self._cores = cores
        self._path = os.path.join(root, "proc/stat")
        self.restart()

    def restart(self) -> None:
        """Look at the time from now on."""
        self._machine = self._times()
        self._own = _own_times()

    def now(self) -> bool:
        """Of the machine, and of those that this process may use, but for what the calling thread did."""
        used, wall = (after - before for after, before in zip(_own_times(), self._own, strict=True))
        idle, total = (after - before for after, before in zip(self._times(), self._machine, strict=True))
        return used < _MOSTLY * wall * self._cores and (idle > _MOSTLY * total or not total)

    def _times(self) -> tuple[int, int]:
        """Idle and all, in the kernel's ticks; zeros where the kernel does not tell."""
        try:
            with open(self._path) as file:
                ticks = [int(text) for text in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        return sum(ticks[3:5]), sum(ticks)


def _own_times() -> tuple[float, float]:
    return time.process_time() - time.thread_time(), time.monotonic()


def run_idle() -> None:
    """Give the calling thread the lowest priority there is, as far as the system allows it.

    Threads of Linux have priorities of their own; what this thread starts inherits them.
    """
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(ctypes.c_long(number), _WHO_PROCESS, 0, _IDLE_CLASS)
