"""The engine proper: requests in, step outputs out. No process, no socket, no clock of its own."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from hotstart.engine.block_manager import BlockManager
from hotstart.engine.executor import Executor
from hotstart.engine.model_runner import StepResult
from hotstart.engine.request import Request, Status
from hotstart.engine.scheduler import Scheduler
from hotstart.messages import (
    EngineStats,
    FinishReason,
    NewRequest,
    PromptLogprobs,
    Scheduled,
    StepOutput,
    TokenLogprobs,
)


class Engine:
    """Schedules, keeps up to ``depth`` steps in flight, and turns results into outputs."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        eos_ids: Sequence[int],
        depth: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self._eos_ids = tuple(eos_ids)
        self._clock = clock
        self._requests: dict[int, Request] = {}

    @property
    def blocks(self) -> BlockManager:
        """The KV cache's bookkeeping."""
        return self.scheduler.blocks

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return bool(self._requests) or self.executor.in_flight > 0

    def add(self, new: NewRequest) -> None:
        """Queue a request. Its prompt is not empty and fits the context; the frontend saw to that."""
        request = Request(new, self._eos_ids)
        self._requests[request.id] = request
        self.scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Free a request; nothing more is said about it. Unknown ids just finished."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request)
            self.executor.forget(request)

    def status(self) -> StepOutput:
        """No tokens, only the gauges: for when requests ended without a step."""
        return StepOutput(ids=b"", tokens=b"", finish=b"", stats=self._stats(0))

    def step(self) -> StepOutput | None:
        """Fill the pipeline, then collect its oldest step; None when nothing was in flight."""
        at = self._clock()
        admitted: list[Request] = []
        while self.executor.in_flight < self.depth:
            step = self.scheduler.schedule()
            if step is None:
                break
            admitted += step.admitted
            self.executor.submit(step)
        if self.executor.in_flight == 0:
            return None
        output = self._output(self.executor.collect())
        output.scheduled = [Scheduled(r.id, at, r.cached_tokens) for r in admitted]
        return output

    def _output(self, result: StepResult) -> StepOutput:
        ids, tokens, finish = array("q"), array("i"), bytearray()
        stop_ids: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs = self._prompt_logprobs(result)
        for entry in result.step.entries:
            request = entry.request
            if request.status is Status.FINISHED:
                continue  # it stopped while this step was in flight: the surplus is dropped
            reason = FinishReason.RUNNING
            if entry.samples:
                request.pending -= 1
                token = result.tokens[request.id]
                reason = request.append(token)
                ids.append(request.id)
                tokens.append(token)
                finish.append(reason)
                if request.id in result.logprobs:
                    logprobs[request.id] = result.logprobs[request.id]
                if reason is FinishReason.STOP and token not in request.eos_ids:
                    stop_ids[request.id] = token
            if request.status is Status.RUNNING:
                self.blocks.computed(request)
            if reason is not FinishReason.RUNNING:
                self.scheduler.finish(request)
                self.executor.forget(request)
                del self._requests[request.id]
        return StepOutput(
            ids=ids.tobytes(),
            tokens=tokens.tobytes(),
            finish=bytes(finish),
            stop_ids=stop_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stats=self._stats(result.step.num_tokens),
        )

    def _prompt_logprobs(self, result: StepResult) -> list[PromptLogprobs]:
        """Whole prompts whose last position was computed in this step."""
        done = []
        for entry in result.step.entries:
            request = entry.request
            if request.prompt_logprobs is None or request.status is Status.FINISHED:
                continue
            # What a preempted request had of them is computed again.
            del request.prompt_logprobs[entry.start + 1 :]
            request.prompt_logprobs += result.prompt_logprobs.get(request.id, [])
            if len(request.prompt_logprobs) >= request.num_prompt:
                done.append(PromptLogprobs(request.id, request.prompt_logprobs))
                request.prompt_logprobs = None
        return done

    def _stats(self, step_tokens: int) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=scheduler.blocks.usage,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.blocks.queries,
            prefix_hits=scheduler.blocks.hits,
            step_tokens=step_tokens,
        )
