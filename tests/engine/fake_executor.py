"""An executor without a model: KV memory holds what was computed there, and every read is checked.

The "model" folds each token into a state, so the state at a position is right only if all tokens
before it were computed, copied or shared rightly. The next token is a function of the last state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hotstart.engine.block_manager import PagedBlockManager, SlabManager
from hotstart.engine.core import Engine
from hotstart.engine.model_runner import StepResult
from hotstart.engine.request import Request
from hotstart.engine.scheduler import Scheduler, Step
from hotstart.messages import FinishReason, NewRequest, SamplingParams, StepOutput, TokenLogprobs, pack_ids

VOCAB = 7
EOS = 0


def fold(state: int, token: int) -> int:
    """The state after one more token."""
    return hash((state, token))


def sample(state: int) -> int:
    """The token that follows a state."""
    return state % VOCAB


def answer(prompt: list[int], params: SamplingParams) -> list[int]:
    """What a request generates, whatever else happens."""
    state = 0
    for token in prompt:
        state = fold(state, token)
    tokens: list[int] = []
    while len(tokens) < (params.max_tokens or 0):
        tokens.append(sample(state))
        if not params.ignore_eos and tokens[-1] == EOS and len(tokens) > params.min_tokens:
            break
        state = fold(state, tokens[-1])
    return tokens


class FakeExecutor:
    """Steps are computed when they are submitted, as a device would, and their tokens told at collect."""

    def __init__(self, *, block_size: int | None, rows: int) -> None:
        """``block_size`` None: tables are slab numbers."""
        self.block_size = block_size
        self.memory: dict[tuple[int, int], int] = {}
        self.last_tokens: list[int | None] = [None] * rows
        self.steps: list[Step] = []
        self._flying: deque[StepResult] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def submit(self, step: Step) -> None:
        assert step.entries
        self.steps.append(step)
        for source, target, tokens in step.copies:
            assert source != target
            for at in range(tokens):
                self.memory[target, at] = self.memory[source, at]
        states = [
            self._context(entry.request, entry.start, entry.start + entry.length) for entry in step.entries
        ]
        result = StepResult(step, {})
        for entry, state in zip(step.entries, states, strict=True):
            request = entry.request
            for at, token in enumerate(self._inputs(request, entry.start, entry.length), entry.start):
                state = fold(state, token)
                self.memory[self._place(request, at)] = state
            if entry.samples:
                self._check_host_state(request)
                token = result.tokens[request.id] = self.last_tokens[request.row] = sample(state)
                if request.params.logprobs is not None:
                    result.logprobs[request.id] = TokenLogprobs([token], [0.0], [1])
            if request.params.prompt_logprobs is not None:
                end = min(entry.start + entry.length, request.num_prompt - 1)
                result.prompt_logprobs[request.id] = [
                    TokenLogprobs([request.tokens[at + 1]], [0.0], [1]) for at in range(entry.start, end)
                ]
        self._flying.append(result)

    def collect(self) -> StepResult:
        return self._flying.popleft()

    def forget(self, request: Request) -> None:
        pass

    def free_pages(self, slab: int) -> None:
        for place in [p for p in self.memory if p[0] == slab]:
            del self.memory[place]

    def _context(self, request: Request, start: int, end: int) -> int:
        """The state before ``start``, after checking that the memory really holds every one before."""
        assert end <= request.num_tokens
        state = 0
        for at, token in enumerate(request.tokens[:start]):
            state = fold(state, token)
            assert self.memory[self._place(request, at)] == state, f"position {at} is wrong"
        # Tokens that are still pending are known to the device only.
        return self.memory[self._place(request, start - 1)] if start else 0

    def _inputs(self, request: Request, start: int, length: int) -> list[int]:
        known = request.tokens[start : start + length]
        if len(known) < length:
            last = self.last_tokens[request.row]
            assert last is not None
            known = [*known, last]
        assert len(known) == length
        return known

    def _place(self, request: Request, at: int) -> tuple[int, int]:
        if self.block_size is None:
            return request.table[0], at
        return request.table[at // self.block_size], at % self.block_size

    def _check_host_state(self, request: Request) -> None:
        if request.needs_host_state:
            assert request.pending == 1, "an earlier token is not known, but penalties need it"


class Fixture:
    """An engine over the fake executor, and what it has said so far."""

    def __init__(
        self,
        *,
        block_size: int | None = None,
        capacity: int = 512,
        depth: int = 1,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        num_slabs: int | None = None,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.capacity = capacity
        self.executor = FakeExecutor(block_size=block_size, rows=max_num_seqs)
        self.blocks: PagedBlockManager | SlabManager
        if block_size is None:
            self.blocks = SlabManager(
                num_slabs or max_num_seqs + 3,
                capacity,
                prefix_caching=prefix_caching,
                free_pages=self.executor.free_pages,
            )
        else:
            self.blocks = PagedBlockManager(
                capacity // block_size + 1, block_size, prefix_caching=prefix_caching
            )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunked_prefill=chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        self.engine = Engine(
            self.scheduler, self.executor, eos_ids=[EOS], depth=depth, clock=lambda: float(len(self.steps))
        )
        self.prompts: dict[int, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}
        self.outputs: list[StepOutput] = []

    @property
    def steps(self) -> list[Step]:
        """Every step submitted."""
        return self.executor.steps

    def add(self, prompt: Iterable[int], max_tokens: int = 4, **params: object) -> int:
        """Queue a request; returns its id."""
        number = len(self.prompts)
        sampling = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})  # type: ignore[arg-type]
        self.prompts[number] = (list(prompt), sampling)
        self.tokens[number] = []
        self.engine.add(NewRequest(number, pack_ids(self.prompts[number][0]), sampling))
        return number

    def step(self) -> StepOutput:
        """One step, which must produce something."""
        output = self.engine.step()
        assert output is not None, "work to do, and nothing is done"
        self.outputs.append(output)
        for request, token, finish in output.unpack():
            assert request not in self.finish, "a token after the end"
            self.tokens[request].append(token)
            if finish:
                self.finish[request] = finish
        for event in output.scheduled:
            self.cached[event.id] = event.cached_tokens
        return output

    def run(self) -> None:
        """Step until nothing is left."""
        for _ in range(10_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def request(self, number: int) -> Request:
        """A live request."""
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        return next(request for request in alive if request.id == number)

    def request_was_preempted(self, number: int) -> bool:
        """Whether its first token was computed more than once."""
        return sum(entry[:2] == (number, 0) for step in self.plan() for entry in step) > 1

    def plan(self) -> list[list[tuple[int, int, int]]]:
        """Each step as (request, start, length)."""
        return [[(e.request.id, e.start, e.length) for e in step.entries] for step in self.steps]

    def check_answers(self) -> None:
        """Every finished request said what it says alone."""
        for number in self.finish:
            assert self.tokens[number] == answer(*self.prompts[number]), number
