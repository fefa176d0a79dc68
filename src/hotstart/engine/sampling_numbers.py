"""The numbers that a step's sampling needs, from host state to the device in one copy.

A tensor made from a list, a boolean mask or ``unique`` on a GPU waits for everything queued there;
with two steps in flight that would be the whole step before. So everything is counted here, on the
host, and what the device gets are indices and factors.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotstart.engine.request import Request

GREEDY_BELOW = 1e-5
"""A temperature below this means the likeliest token."""


@dataclass(frozen=True)
class Column:
    """A place in :class:`Numbers`."""

    integers: bool
    begin: int
    end: int


class Numbers:
    """Columns that are filled on the host, sent together, and then read as tensors."""

    def __init__(self) -> None:
        self._integers = array("q")
        self._floats = array("f")
        self._sent: tuple[Tensor, Tensor] | None = None

    def integers(self, values: Iterable[int]) -> Column:
        """Add int64 values."""
        begin = len(self._integers)
        self._integers.extend(values)
        return Column(True, begin, len(self._integers))

    def floats(self, values: Iterable[float]) -> Column:
        """Add float32 values."""
        begin = len(self._floats)
        self._floats.extend(values)
        return Column(False, begin, len(self._floats))

    def send(self, device: torch.device) -> None:
        """One copy for all columns, asynchronous on CUDA."""
        data = bytearray(self._integers)
        cut = len(data)
        data += self._floats
        if not data:
            return
        block = torch.frombuffer(data, dtype=torch.uint8)
        if device.type == "cuda":
            block = block.pin_memory().to(device, non_blocking=True)
        self._sent = block[:cut].view(torch.int64), block[cut:].view(torch.float32)

    def __getitem__(self, column: Column) -> Tensor:
        """A column as a tensor [values] on the device, once sent."""
        assert self._sent is not None
        return self._sent[not column.integers][column.begin : column.end]


class _Places:
    """Places in the flattened logits, and a number for each."""

    def __init__(self) -> None:
        self.places = array("q")
        self.values = array("f")

    def add(self, line: int, tokens: Collection[int], values: Iterable[float]) -> None:
        self.places.extend(map(line.__add__, tokens))
        self.values.extend(values)

    def columns(self, numbers: Numbers) -> tuple[Column, Column] | None:
        """None: no places."""
        return (numbers.integers(self.places), numbers.floats(self.values)) if self.places else None


class Edits:
    """Bias, minimum length and penalties as places in the flattened logits [rows x vocab]."""

    def __init__(self, numbers: Numbers, requests: list[Request], vocab: int) -> None:
        self._numbers = numbers
        bias, repetition, penalty = _Places(), _Places(), _Places()
        banned: list[int] = []
        for row, request in enumerate(requests):
            params, line = request.params, row * vocab
            if params.logit_bias:
                bias.add(line, params.logit_bias, params.logit_bias.values())
            if request.num_outputs <= params.min_tokens:  # the token to be sampled is counted
                # A stop id that the model does not have can never be sampled.
                banned += [line + token for token in request.eos_ids | request.stop_ids if token < vocab]
            if params.repetition_penalty != 1.0:
                seen = set(request.tokens)
                repetition.add(line, seen, [params.repetition_penalty] * len(seen))
            if params.presence_penalty or params.frequency_penalty:
                counts = Counter(request.tokens[request.num_prompt :])
                once, each = params.presence_penalty, params.frequency_penalty
                penalty.add(line, counts, [-once - each * count for count in counts.values()])
        self._bias = bias.columns(numbers)
        self._banned = numbers.integers(banned) if banned else None
        self._repetition = repetition.columns(numbers)
        self._penalty = penalty.columns(numbers)

    def apply(self, logits: Tensor) -> None:
        """Edit logits [rows, vocab], contiguous, in place."""
        flat, numbers = logits.view(-1), self._numbers
        if self._bias:
            flat.index_add_(0, numbers[self._bias[0]], numbers[self._bias[1]])
        if self._banned:
            flat.index_fill_(0, numbers[self._banned], -math.inf)
        if self._repetition:
            places, factor = numbers[self._repetition[0]], numbers[self._repetition[1]]
            value = flat.index_select(0, places)
            flat.index_copy_(0, places, torch.where(value > 0, value / factor, value * factor))
        if self._penalty:
            flat.index_add_(0, numbers[self._penalty[0]], numbers[self._penalty[1]])


class Draw:
    """The rows with a temperature, and the rules by which each of them draws."""

    def __init__(self, numbers: Numbers, requests: list[Request], vocab: int) -> None:
        rows = [row for row, r in enumerate(requests) if r.params.temperature >= GREEDY_BELOW]
        self.requests = [requests[row] for row in rows]
        params = [request.params for request in self.requests]
        self.rows = numbers.integers(rows) if 0 < len(rows) < len(requests) else None
        """None: all of them, or none."""
        self.temperature = numbers.floats(p.temperature for p in params)
        self.log_min_p: Column | None = None
        if any(p.min_p > 0 for p in params):
            self.log_min_p = numbers.floats(math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params)
        cut = [row for row, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
        self.any_cut = bool(cut)
        self.cut = numbers.integers(cut) if 0 < len(cut) < len(params) else None
        """Drawing rows with a top_k or top_p; None: all of them, or none."""
        self.top_k = [params[row].top_k if 0 < params[row].top_k < vocab else vocab for row in cut]
        self.limit = numbers.integers(self.top_k)
        # Rounding must not end a nucleus that is everything.
        self.top_p = numbers.floats(params[row].top_p if params[row].top_p < 1.0 else math.inf for row in cut)
