"""A request inside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from hotstart.messages import FinishReason, NewRequest, SamplingParams, TokenLogprobs, unpack_ids


class Status(Enum):
    """Where a request is; preemption sends it back to WAITING."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Request:
    """Token ids, what of them is computed, and what is in flight.

    ``num_computed`` counts tokens whose K and V are written by the steps submitted so far.
    ``pending`` counts tokens sampled by submitted steps whose value the host does not know yet.
    The scheduler's one rule is that ``num_computed`` catches up with ``num_tokens``.
    """

    __slots__ = (
        "cached_tokens",
        "digests",
        "eos_ids",
        "id",
        "noted",
        "num_computed",
        "num_prompt",
        "params",
        "pending",
        "preemptions",
        "prompt_logprobs",
        "row",
        "scheduled_once",
        "status",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(self, new: NewRequest, eos_ids: Sequence[int]) -> None:
        self.id = new.id
        self.tokens = unpack_ids(new.prompt)
        self.num_prompt = len(self.tokens)
        self.params: SamplingParams = new.params
        self.eos_ids = frozenset() if new.params.ignore_eos else frozenset(eos_ids)
        self.stop_ids = frozenset(new.params.stop_token_ids)
        self.status = Status.WAITING
        self.num_computed = 0
        self.pending = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.scheduled_once = False
        self.table: list[int] = []
        """Physical block ids, or one slab number; owned by the block manager."""
        self.digests: list[bytes] = []
        """Chained hashes of the leading token blocks; the block manager extends it."""
        self.noted = 0
        """Leading blocks of the table that need not be noted as computed again; the block manager's."""
        self.row = -1
        """Fixed place in the runner's per-request tensors while running."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if new.params.prompt_logprobs is not None else None
        )

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.tokens) + self.pending

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far, pending ones included."""
        return self.num_tokens - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def max_tokens(self) -> int:
        """Bounded by the context before the request came here."""
        return self.params.max_tokens if self.params.max_tokens is not None else 1 << 30

    @property
    def needs_host_state(self) -> bool:
        """Whether sampling depends on tokens that must be known first, so that none may be pending."""
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    def append(self, token: int) -> FinishReason:
        """Take in a sampled token; returns whether and why the request ends with it."""
        self.tokens.append(token)
        outputs = len(self.tokens) - self.num_prompt
        if outputs > self.params.min_tokens and (token in self.eos_ids or token in self.stop_ids):
            return FinishReason.STOP
        if outputs >= self.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.RUNNING
