"""Runs steps on a device: inputs, forward, sampling, and the way back to the host.

With a depth of two, step N+1 is launched before the tokens of step N are read: a pending token
goes from the sampler to the next step through ``last_tokens`` on the device, at its request's row.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotstart.attention.base import AttentionBackend, BatchPlan
from hotstart.engine.request import Request
from hotstart.engine.sampler import Sampled, Sampler, TopLogprobs, top_logprobs
from hotstart.engine.scheduler import ScheduledRequest, Step
from hotstart.engine.step_memory import PROMPT_ROWS
from hotstart.messages import TokenLogprobs
from hotstart.models.base import Model


@dataclass
class StepResult:
    """A collected step, on the host."""

    step: Step
    tokens: dict[int, int]
    """Request id → sampled token."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Request id → positions of this step's chunk."""


@dataclass
class _InFlight:
    step: Step
    requests: list[Request]
    tokens: Tensor
    sampled: Sampled | None
    prompt: dict[int, list[TopLogprobs]]
    done: torch.cuda.Event | None


class ModelRunner:
    """An :class:`~hotstart.engine.executor.Executor` in this process."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        device: torch.device,
        *,
        rows: int,
        seed: int,
        lengths: bool = False,
    ) -> None:
        """``rows``: running requests at most. ``lengths``: the model wants each token's context length."""
        self.model = model
        self.attention = attention
        self.device = device
        self._wants_lengths = lengths
        self.sampler = Sampler(device, seed)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._flying: deque[_InFlight] = deque()

    @property
    def in_flight(self) -> int:
        """Steps submitted and not collected."""
        return len(self._flying)

    @torch.inference_mode()
    def submit(self, step: Step) -> None:
        """Launch a step. Returns before the device is done, where the device allows it."""
        if not self.attention.shares_prefix:
            # Single tokens of neighbouring slabs are attended in one call.
            step.entries.sort(key=lambda entry: (entry.length > 1, entry.request.table))
        entries = step.entries
        ids, positions, meta = self._inputs(step)
        hidden = self.model.forward(ids, positions, self.attention, meta, self._lengths(step))
        prompt = self._prompt_logprobs(hidden, entries)
        sampling, last = self._last_rows(entries)
        sampled = None
        tokens = torch.empty(0, dtype=torch.int64)
        if sampling:
            rows = hidden if len(last) == hidden.shape[0] else hidden[self._to_device(last)]
            sampled = self.sampler.sample(self.model.logits(rows), sampling)
            tokens = sampled.tokens
            where = self._to_device(array("q", [request.row for request in sampling]))
            self.last_tokens.index_copy_(0, where, tokens)
            tokens = tokens.to("cpu", non_blocking=True)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._flying.append(_InFlight(step, sampling, tokens, sampled, prompt, done))

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Wait for the oldest step in flight."""
        flight = self._flying.popleft()
        if flight.done is not None:
            flight.done.synchronize()
        result = StepResult(
            flight.step,
            {r.id: token for r, token in zip(flight.requests, flight.tokens.tolist(), strict=True)},
        )
        if flight.sampled is not None and flight.sampled.logprobs is not None:
            for index, (row, count) in enumerate(flight.sampled.wanted):
                result.logprobs[flight.requests[row].id] = flight.sampled.logprobs.message(index, count)
        for request_id, parts in flight.prompt.items():
            result.prompt_logprobs[request_id] = [
                part.message(position, part.ids.shape[1] - 1)
                for part in parts
                for position in range(len(part.ids))
            ]
        return result

    def forget(self, request: Request) -> None:
        """A request ended."""
        self.sampler.forget(request.id)

    def _inputs(self, step: Step) -> tuple[Tensor, Tensor, object]:
        ids, positions = array("q"), array("q")
        pending_at, pending_row = array("q"), array("q")
        for entry in step.entries:
            request, end = entry.request, entry.start + entry.length
            known = request.tokens[entry.start : end]
            positions.extend(range(entry.start, end))
            ids.extend(known)
            for _ in range(entry.length - len(known)):
                pending_at.append(len(ids))
                pending_row.append(request.row)
                ids.append(0)
        input_ids = self._to_device(ids)
        if pending_at:
            values = self.last_tokens[self._to_device(pending_row)]
            input_ids.index_copy_(0, self._to_device(pending_at), values)
        plan = BatchPlan(
            query_lens=[entry.length for entry in step.entries],
            context_lens=[entry.start for entry in step.entries],
            tables=[entry.request.table for entry in step.entries],
            copies=step.copies,
        )
        return input_ids, self._to_device(positions), self.attention.plan(plan)

    def _lengths(self, step: Step) -> Tensor | None:
        """Per token, the prompt's length or position + 1, whichever is more."""
        if not self._wants_lengths:
            return None
        lengths = array("q")
        for entry in step.entries:
            prompt = entry.request.num_prompt
            lengths.extend(max(prompt, at + 1) for at in range(entry.start, entry.start + entry.length))
        return self._to_device(lengths)

    def _last_rows(self, entries: list[ScheduledRequest]) -> tuple[list[Request], array[int]]:
        """Requests that sample, and the index of each one's last token in the batch."""
        sampling: list[Request] = []
        last = array("q")
        row = 0
        for entry in entries:
            row += entry.length
            if entry.samples:
                sampling.append(entry.request)
                last.append(row - 1)
        return sampling, last

    def _prompt_logprobs(
        self, hidden: Tensor, entries: list[ScheduledRequest]
    ) -> dict[int, list[TopLogprobs]]:
        found: dict[int, list[TopLogprobs]] = {}
        row = 0
        for entry in entries:
            request = entry.request
            count = request.params.prompt_logprobs
            # Position p predicts token p + 1; the last prompt position predicts the first output.
            end = min(entry.start + entry.length, request.num_prompt - 1)
            if count is not None and request.num_outputs <= 1 and entry.start < end:
                found[request.id] = self._positions(
                    hidden[row : row + end - entry.start], entry.start, request, count
                )
            row += entry.length
        return found

    def _positions(self, hidden: Tensor, start: int, request: Request, count: int) -> list[TopLogprobs]:
        following = array("q", request.tokens[start + 1 : start + 1 + len(hidden)])
        targets = torch.split(self._to_device(following), PROMPT_ROWS)
        return [
            top_logprobs(self.model.logits(rows).log_softmax(-1), tokens, count)
            for rows, tokens in zip(torch.split(hidden, PROMPT_ROWS), targets, strict=True)
        ]

    def _to_device(self, values: array[int]) -> Tensor:
        """int64 tensor of a host array; asynchronous on CUDA."""
        tensor = torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
