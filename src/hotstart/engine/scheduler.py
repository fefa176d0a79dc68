"""Which tokens the next step computes.

One rule, no phases: every request's ``num_computed`` catches up with its ``num_tokens``. Running
requests come first, single tokens before prefill chunks, then waiting requests in order of arrival,
all inside one token budget. A request that finds no memory preempts the youngest running one,
which starts over later (most of it from the prefix cache).

Without chunked prefill a prompt is computed whole. One that finds no room beside the running
requests goes before them in the next step, so that the head of the queue waits for one step at most,
and they for one in two.

Up to ``depth`` steps are in flight: a token sampled by an unfinished step is *pending*; it is
counted, its value stays on the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hotstart.engine.block_manager import BlockManager
from hotstart.engine.request import Request, Status


@dataclass
class ScheduledRequest:
    """A request's part of a step: tokens ``start`` to ``start + length``."""

    request: Request
    start: int
    length: int
    samples: bool
    """Whether these are its last tokens, so that the step samples the next one."""


@dataclass
class Step:
    """One forward pass. ``entries`` are in batch order."""

    entries: list[ScheduledRequest]
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    """Requests that entered the batch for the first time."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(entry.length for entry in self.entries)


class Scheduler:
    """Queues, budget and preemption; knows nothing of tensors.

    ``max_num_batched_tokens`` bounds the tokens of a step, ``max_num_seqs`` the running requests.
    Without ``chunked_prefill`` no request may be longer than a step.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._passed_over = False
        """The head of the queue did not fit whole beside the last step's running requests."""
        self._rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """End a request wherever it is, and free what it holds."""
        if request.status is Status.RUNNING:
            self._leave(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def schedule(self) -> Step | None:
        """The next step; None when nothing can be computed now.

        Advances ``num_computed`` and ``pending`` of what it schedules: the step is meant to be
        submitted at once.
        """
        step = Step([])
        budget = self.max_num_batched_tokens
        running = self.running.copy()
        first, self._passed_over = self._passed_over, False
        if first:
            budget -= self._admit(step, budget)
        budget -= self._schedule_running(running, step, budget, decodes=True)
        budget -= self._schedule_running(running, step, budget, decodes=False)
        while length := self._admit(step, budget):
            budget -= length
        if first:
            self._passed_over = False  # the next step is the running requests' again
        step.copies = self.blocks.take_copies()
        for entry in step.entries:
            entry.request.num_computed += entry.length
            entry.request.pending += entry.samples
        return step if step.entries else None

    def _schedule_running(self, running: list[Request], step: Step, budget: int, *, decodes: bool) -> int:
        used = 0
        chosen = [r for r in running if (r.remaining == 1) is decodes and self._may_run(r)]
        for request in chosen:
            length = self._chunk(request.remaining, budget - used)
            if length == 0 or request.status is not Status.RUNNING:
                continue
            if not self._extend(request, request.num_computed + length, step):
                continue
            used += length
            self._put(step, request, length)
        return used

    def _admit(self, step: Step, budget: int) -> int:
        """Let the head of the queue run; returns its tokens in this step, 0 when it must wait."""
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return 0
        request = self.waiting[0]
        if request.pending:
            # Preempted while a step was in flight: its last token is not known yet.
            return 0
        limit = self._first_chunk(request, budget)
        if limit == 0:
            return 0
        hit = self.blocks.admit(request, limit)
        if hit is None:
            return 0
        self.waiting.popleft()
        request.status = Status.RUNNING
        request.row = self._rows.pop()
        request.num_computed = hit
        self.running.append(request)
        if not request.scheduled_once:
            request.scheduled_once = True
            request.cached_tokens = hit
            step.admitted.append(request)
        length = min(limit, request.remaining)
        self._put(step, request, length)
        return length

    def _put(self, step: Step, request: Request, length: int) -> None:
        samples = request.num_computed + length == request.num_tokens
        step.entries.append(ScheduledRequest(request, request.num_computed, length, samples))

    def _may_run(self, request: Request) -> bool:
        """Whether anything is left to compute, given what is already in flight."""
        if request.remaining == 0 or request.num_outputs >= request.max_tokens:
            return False
        return request.pending == 0 or not request.needs_host_state

    def _first_chunk(self, request: Request, budget: int) -> int:
        """Tokens beyond its cached prefix that a waiting request may compute; 0: it must wait."""
        length = len(request.tokens)
        if self.chunked_prefill:
            return self._chunk(length, budget)
        if length > budget and length - self.blocks.cached(request) > budget:
            self._passed_over = True
            return 0
        return length

    def _chunk(self, remaining: int, budget: int) -> int:
        length = min(remaining, budget)
        if self.long_prefill_token_threshold:
            length = min(length, self.long_prefill_token_threshold)
        return length

    def _extend(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Make room, preempting from the youngest; False when the request preempted itself."""
        while not self.blocks.extend(request, num_tokens):
            scheduled = {id(entry.request) for entry in step.entries}
            victim = next((r for r in reversed(self.running) if id(r) not in scheduled), request)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        request.preemptions += 1
        self._leave(request)
        request.status = Status.WAITING
        request.num_computed = 0
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
        self._rows.append(request.row)
        request.row = -1
