"""The seam between what schedules a step and what computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hotstart.engine.model_runner import StepResult
    from hotstart.engine.request import Request
    from hotstart.engine.scheduler import Step


class Executor(Protocol):
    """Runs steps in order; at most ``depth`` may be in flight."""

    @property
    def in_flight(self) -> int:
        """Steps submitted and not collected."""
        ...

    def submit(self, step: Step) -> None:
        """Launch a step."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest one."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that ended."""
        ...
