"""The frontend's end of the socket pair to the engine.

A protocol rather than streams: a step's frame is decoded and handed to the requests inside the
read callback, with no task in between.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable

from hotstart.errors import ConfigError, DeviceError, EngineError, HotstartError, ModelError, StorageError
from hotstart.frontend.engine_writer import EngineWriter
from hotstart.frontend.errors import ApiError
from hotstart.frontend.generation import Choice, Generation
from hotstart.frontend.metrics import Metrics
from hotstart.frontend.startup import Startup
from hotstart.frontend.stats_log import StatsLog
from hotstart.messages import (
    AbortRequests,
    AddRequests,
    Control,
    ControlDone,
    Failed,
    FinishReason,
    Frames,
    LoadStats,
    LogEvent,
    NewRequest,
    PhaseEvent,
    Ready,
    StepOutput,
    ToEngine,
    decode_from_engine,
    frame,
    pack_ids,
)
from hotstart.timeline import Timeline

_GONE = "The engine is gone; the server is stopping."
_ERRORS: dict[int, type[HotstartError]] = {
    error.exit_code: error for error in (ConfigError, ModelError, StorageError, DeviceError, EngineError)
}


class EngineClient(asyncio.Protocol):
    """Sends requests, and routes what comes back to their :class:`Choice`.

    ``lost`` is set, and ``on_lost`` called, when the engine's end of the pair closes.
    """

    def __init__(
        self, startup: Startup, timeline: Timeline, metrics: Metrics, stats_log: StatsLog | None = None
    ) -> None:
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None
        self._startup = startup
        self._timeline = timeline
        self._metrics = metrics
        self._stats_log = stats_log
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._ids = itertools.count(1)
        self._live: dict[int, Choice] = {}
        self._waiting = 0
        """Choices that no step has taken up yet."""
        self._engine_running = self._engine_waiting = 0
        """As of the last step."""
        self._controls: deque[asyncio.Future[bool]] = deque()

    @property
    def waiting(self) -> int:
        """Choices sent to the engine that the next step will not take up, as far as can be known here.

        What came since the last step is no queue as long as the engine has places for it.
        """
        ready = self._startup.ready
        places = 0
        if ready is not None and self._engine_waiting == 0:
            places = max(0, ready.max_num_seqs - self._engine_running)
        return max(0, self._waiting - places)

    async def connect(self, engine: EngineWriter) -> None:
        """Take over the socket."""
        await engine.hand_over(self._adopt)

    async def _adopt(self, engine: socket.socket) -> Callable[[bytes], object]:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self, sock=engine)
        return lambda data: loop.call_soon_threadsafe(self._write, data)

    def submit(self, generation: Generation) -> None:
        """Send every choice. Raises :class:`ApiError` when the engine is gone."""
        if self.lost:
            raise ApiError(500, _GONE)
        requests = []
        packed: dict[int, bytes] = {}
        for choice in generation.choices:
            choice.id = next(self._ids)
            self._live[choice.id] = choice
            key = id(choice.prompt)
            if key not in packed:
                packed[key] = pack_ids(choice.prompt)
            requests.append(NewRequest(choice.id, packed[key], choice.params))
        self._waiting += len(requests)
        self._send(AddRequests(requests))

    def abort(self, generation: Generation) -> None:
        """Free what of ``generation`` still runs; nothing is shown of it any more."""
        running = [choice for choice in generation.choices if self._live.pop(choice.id, None)]
        for choice in running:
            self._leave_queue(choice)
            self._metrics.finished(choice, FinishReason.ABORT)
        if running:
            self._send(AbortRequests([choice.id for choice in running]))

    async def control(self, op: str) -> bool:
        """Ask the engine for an operation between two steps; whether it could be done.

        Raises :class:`ApiError` when the engine ends first.
        """
        if self.lost:
            raise ApiError(500, _GONE)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._controls.append(done)
        self._send(Control(op))
        return await done

    def fail_all(self, error: ApiError) -> None:
        """Answer everything that runs with ``error``."""
        for generation in {id(c.generation): c.generation for c in self._live.values()}.values():
            if generation is not None:
                generation.fail(error)
                self.abort(generation)

    def close(self) -> None:
        """Close our end, which ends the engine."""
        if self._transport is not None:
            self._transport.close()

    def _send(self, message: ToEngine) -> None:
        self._write(frame(message))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self.lost:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Handle every complete frame."""
        for body in self._frames.feed(data):
            self._handle(body)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine closed its end, or died."""
        self.lost = True
        for done in self._controls:
            if not done.done():
                done.set_exception(ApiError(500, _GONE))
        self.on_lost()

    def _handle(self, body: bytes) -> None:
        message = decode_from_engine(body)
        if isinstance(message, StepOutput):
            self._step(message)
        elif isinstance(message, PhaseEvent):
            self._timeline.merge(message.phase)
        elif isinstance(message, LogEvent):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, LoadStats):
            self._metrics.load = message
        elif isinstance(message, Ready):
            self._metrics.set_engine(message)
            self._startup.become_ready(message)
        elif isinstance(message, Failed):
            self._startup.fail(
                [
                    _ERRORS.get(code, EngineError)(found, expected=expected, advice=advice)
                    for code, found, expected, advice in message.problems
                ]
            )
        elif isinstance(message, ControlDone) and not (done := self._controls.popleft()).done():
            done.set_result(message.ok)

    def _step(self, step: StepOutput) -> None:
        now = time.monotonic()
        live, metrics = self._live, self._metrics
        for scheduled in step.scheduled:
            choice = live.get(scheduled.id)
            if choice is not None:
                self._leave_queue(choice)
                choice.scheduled, choice.cached_tokens = scheduled.at, scheduled.cached_tokens
        for prompt in step.prompt_logprobs:
            choice = live.get(prompt.id)
            if choice is not None:
                choice.prompt_logprobs = prompt.positions
        aborts: list[int] = []
        logprobs, stop_ids = step.logprobs, step.stop_ids
        for request_id, token, finish in step.unpack():
            choice = live.get(request_id)
            if choice is None or choice.generation is None:
                continue
            if token >= 0:
                metrics.token(choice, now)
            if not choice.accept(token, finish, logprobs.get(request_id), stop_ids.get(request_id)):
                continue
            if choice.finish:
                del live[request_id]
                self._leave_queue(choice)
                metrics.finished(choice, choice.finish)
                if not finish:
                    aborts.append(request_id)
            choice.generation.offer(choice)
        if aborts:
            self._send(AbortRequests(aborts))
        metrics.step(step.stats)
        self._engine_running, self._engine_waiting = step.stats.running, step.stats.waiting
        if self._stats_log is not None:
            self._stats_log.note(now)

    def _leave_queue(self, choice: Choice) -> None:
        if choice.scheduled is None:
            choice.scheduled = time.monotonic()
            self._waiting -= 1
