"""The start, as a list of phases. Log lines, JSON, metrics and pages are views of it.

All times are seconds of ``time.monotonic()``, which all processes of one machine share, so
phases of the engine and of the frontend merge without translation. ``origin`` is the moment the
kernel started the ``hotstart`` process, before the interpreter was up.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec


class Phase(msgspec.Struct, kw_only=True):
    """One stretch of a start. ``bytes`` and ``total`` are 0 where bytes mean nothing."""

    name: str
    process: str
    start: float
    end: float | None = None
    bytes: int = 0
    total: int = 0
    detail: str = ""

    def seconds(self, now: float | None = None) -> float:
        """Length so far, in seconds."""
        end = self.end if self.end is not None else (time.monotonic() if now is None else now)
        return max(0.0, end - self.start)

    @property
    def moves(self) -> bool:
        """Whether bytes of it are still to come."""
        return self.end is None and self.bytes < self.total


Listener = Callable[[Phase], None]


class Timeline:
    """Collects phases of one process, and those that other processes report.

    Thread-safe. Listeners are called at the beginning of a phase, at its end and at every
    :meth:`progress`, on the thread that caused it.
    """

    def __init__(self, process: str, *, origin: float | None = None) -> None:
        self.process = process
        self.origin = process_start() if origin is None else origin
        self._phases: dict[tuple[str, str], Phase] = {}
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with every change from now on."""
        self._listeners.append(listener)

    def begin(self, name: str, *, total: int = 0, start: float | None = None) -> Phase:
        """Open a phase; close it with :meth:`end`."""
        phase = Phase(
            name=name, process=self.process, start=time.monotonic() if start is None else start, total=total
        )
        self.merge(phase)
        return phase

    def end(self, phase: Phase, *, detail: str = "", at: float | None = None) -> None:
        """Close a phase. Closing it twice keeps the first end."""
        if phase.end is None:
            phase.end = max(phase.start, time.monotonic() if at is None else at)
        if detail:
            phase.detail = detail
        self.merge(phase)

    def progress(self, phase: Phase, done: int) -> None:
        """Set the bytes done so far. Reports of several threads may come late: the furthest counts."""
        if done > phase.bytes:
            phase.bytes = done
            self.merge(phase)

    @contextmanager
    def phase(self, name: str, *, total: int = 0) -> Iterator[Phase]:
        """``with timeline.phase("import torch"): …``; closed on errors as well."""
        phase = self.begin(name, total=total)
        try:
            yield phase
        finally:
            self.end(phase)

    def merge(self, phase: Phase) -> None:
        """Take in a phase, by (process, name), from here or from another process."""
        with self._lock:
            self._phases[(phase.process, phase.name)] = phase
        for listener in self._listeners:
            listener(phase)

    def phases(self) -> list[Phase]:
        """All phases, by start."""
        with self._lock:
            return sorted(self._phases.values(), key=lambda p: p.start)

    def since_origin(self, moment: float) -> float:
        """Seconds; 0 for what was before it, where no /proc tells when processes began."""
        return max(0.0, moment - self.origin)

    def as_dict(self) -> dict[str, object]:
        """The JSON form: seconds since the origin, rounded to 0.1 ms."""
        return {
            "origin": "process start",
            "phases": [
                {
                    "name": p.name,
                    "process": p.process,
                    "start": round(self.since_origin(p.start), 4),
                    "end": None if p.end is None else round(self.since_origin(p.end), 4),
                    "bytes": p.bytes,
                    "total": p.total,
                    "detail": p.detail,
                }
                for p in self.phases()
            ],
        }


def awaited(phases: Sequence[Phase]) -> list[Phase]:
    """The open ones of ``phases``: what moves bytes, what counts none, what has all of its bytes.

    The last kind only waits for others, so it is never what a start stands still for.
    """
    running = [phase for phase in phases if phase.end is None]
    return sorted(running, key=lambda phase: 0 if phase.moves else 2 if phase.total else 1)


def process_start(pid: int | None = None) -> float:
    """When the kernel started a process, in ``time.monotonic()`` seconds (10 ms resolution).

    Source: field 22 of ``/proc/PID/stat``, see proc(5). Falls back to now where /proc is absent.
    """
    try:
        with open(f"/proc/{pid or 'self'}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.monotonic()
    return time.monotonic() - max(0.0, age)
