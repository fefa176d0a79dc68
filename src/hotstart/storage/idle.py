"""Work that must not be felt: a thread that gets the processor and the disk when nobody else wants them."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS = 1
_IDLE_CLASS = 3 << 13


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
