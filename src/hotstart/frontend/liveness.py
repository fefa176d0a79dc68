"""How far the start has come: what ``/livez`` says, and when "loading" has become "stalled"."""

from __future__ import annotations

import time
from collections.abc import Callable

from hotstart.frontend.protocol.service import LivezResponse
from hotstart.frontend.startup import Startup, State
from hotstart.timeline import Phase, Timeline, awaited

_WORK_SECONDS = 0.03
"""CPU time between two looks that counts as work; waiting threads take far less."""


class Liveness:
    """Watches a timeline. ``stall``: seconds without any change that count as no progress.

    However long a start takes, it is no stall while something moves: a phase begins, ends or counts
    bytes, or, while none counts bytes, the engine computes. ``cpu_seconds`` is its CPU time so far:
    an import from a slow disk or the first step of a large model has no other sign of life.
    """

    def __init__(
        self,
        startup: Startup,
        timeline: Timeline,
        *,
        stall: float = 60.0,
        cpu_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._startup = startup
        self._timeline = timeline
        self._stall = stall
        self._cpu_seconds = cpu_seconds
        self._worked = 0.0
        self._clock = clock
        self._changed = clock()
        timeline.listen(self._note)

    def _note(self, phase: Phase) -> None:
        self._changed = self._clock()

    def _idle(self, now: float, phase: Phase | None) -> float:
        """Seconds since the last sign of life."""
        counts_bytes = phase is not None and phase.moves
        worked = self._cpu_seconds()
        if worked - self._worked >= _WORK_SECONDS:
            self._worked = worked
            if not counts_bytes:
                self._changed = now
        return now - self._changed

    def report(self) -> LivezResponse:
        """The state now. Alive means ``status`` is loading, ready or draining."""
        now = self._clock()
        state = self._startup.state
        status, message = state.value, None
        phase = self._current()
        idle = self._idle(now, phase)
        if state is State.FAILED:
            message = "; ".join(str(problem).rstrip(".") for problem in self._startup.failed) + "."
        elif state is State.LOADING and idle > self._stall:
            status = "stalled"
            message = f"No progress for {idle:.0f} s in the phase {phase.name if phase else 'start'}."
        moved, total = (phase.bytes, phase.total) if phase else (0, 0)
        if self._startup.ready is not None:
            moved = total = self._startup.ready.weights_bytes
        return LivezResponse(
            status=status,
            phase=phase.name if phase and state is State.LOADING else status,
            bytes=moved,
            total=total,
            percent=round(100 * moved / total, 1) if total else None,
            seconds_left=self._seconds_left(phase, now) if state is State.LOADING else None,
            elapsed=round(now - self._timeline.origin, 3),
            message=message,
        )

    def retry_after(self) -> int:
        """Whole seconds after which a client may try again, 1 to 60."""
        left = self._seconds_left(self._current(), self._clock())
        return 1 if left is None else max(1, min(60, round(left + 0.5)))

    def _current(self) -> Phase | None:
        """The open phase that moves bytes, else the newest open one that counts none, else the newest."""
        phases = self._timeline.phases()
        running = awaited(phases)
        moving = [phase for phase in running if phase.moves]
        uncounted = [phase for phase in running if not phase.total]
        return next((group[-1] for group in (moving, uncounted, running, phases) if group), None)

    @staticmethod
    def _seconds_left(phase: Phase | None, now: float) -> float | None:
        if phase is None or not phase.bytes or not phase.total or phase.end is not None:
            return None
        return round((phase.total - phase.bytes) * phase.seconds(now) / phase.bytes, 1)
