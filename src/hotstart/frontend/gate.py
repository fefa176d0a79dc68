"""Who may enter, and when.

Completion requests that come before the model is there are held, not refused: they are encoded as
soon as the tokenizer is loaded and wait in the engine for its first step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hotstart.config.settings import HttpConfig
from hotstart.frontend.errors import ApiError
from hotstart.frontend.liveness import Liveness
from hotstart.frontend.startup import Checked, Startup, State


class Gate:
    """Opens when the checks passed and the context length is known; closes when the server drains."""

    def __init__(self, startup: Startup, liveness: Liveness, http: HttpConfig) -> None:
        self.active = 0
        """Requests inside."""
        self._startup = startup
        self._liveness = liveness
        self._http = http
        self._held = 0
        self._moved = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[Checked]:
        """Wait for the model if need be, and count as active until the block ends.

        Raises :class:`ApiError` 503 when the request cannot be held, or the start fails meanwhile.
        """
        held = self._startup.state is State.LOADING
        if held:
            self._admit_early()
            self._held += 1
        self.active += 1
        self._idle.clear()
        try:
            yield await self._opened()
        finally:
            self._held -= held
            self.active -= 1
            if self.active == 0:
                self._idle.set()

    def require_ready(self) -> Checked:
        """What the checks found, for requests that are not held. Raises 503 until ready."""
        state, checked = self._startup.state, self._startup.checked
        if state is not State.READY or checked is None:
            raise self.closed()
        return checked

    def update(self) -> None:
        """Look at the state again; called on the event loop after every change."""
        if self._may_pass() or self._startup.state is not State.LOADING:
            self._moved.set()

    async def idle(self) -> None:
        """Wait until nobody is inside."""
        await self._idle.wait()

    def closed(self) -> ApiError:
        """The 503 for the present state."""
        state = self._startup.state
        if state is State.DRAINING or state is State.STOPPED:
            return ApiError(503, "The server is shutting down.", retry_after=1)
        if state is State.FAILED:
            problems = "; ".join(str(problem).rstrip(".") for problem in self._startup.failed)
            return ApiError(503, f"The server failed: {problems}.")
        report = self._liveness.report()
        progress = "" if report.percent is None else f", {report.percent:g} %"
        message = f"The model is loading ({report.phase}{progress})."
        return ApiError(503, message, retry_after=self._liveness.retry_after())

    def _admit_early(self) -> None:
        if not self._http.hold_requests or self._held >= self._http.max_held_requests:
            raise self.closed()

    def _may_pass(self) -> bool:
        startup = self._startup
        return startup.checked is not None and startup.max_model_len is not None

    async def _opened(self) -> Checked:
        if not self._may_pass() and self._startup.state is State.LOADING:
            await self._moved.wait()
        state, checked = self._startup.state, self._startup.checked
        if checked is None or state not in (State.LOADING, State.READY):
            raise self.closed()
        return checked
