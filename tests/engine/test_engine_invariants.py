"""Whatever is added, aborted and stepped in whatever order: memory is accounted for, answers are right."""

from __future__ import annotations

import pytest
from fake_executor import Fixture
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hotstart.engine.request import Status

LONGEST = 64
"""Of prompt and answer together; every capacity holds at least this."""

# Three tokens, so that prompts share prefixes more often than not.
prompts = st.one_of(
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 56)).map(
        lambda t: [t[0]] * (t[2] // 2) + [t[1]] * (t[2] - t[2] // 2)
    ),
)


class EngineMachine(RuleBasedStateMachine):
    """The fake executor checks every position that is read."""

    kinds = st.sampled_from([None, 1, 4, 16])

    @initialize(
        kind=st.deferred(lambda: EngineMachine.kinds),
        depth=st.integers(1, 3),
        spare=st.sampled_from([0, 16, 48, 208]),
        seqs=st.integers(1, 4),
        slabs=st.integers(0, 2),
        budget=st.sampled_from([1, 5, 16, 100]),
        chunked=st.booleans(),
        threshold=st.sampled_from([0, 0, 7]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        kind: int | None,
        depth: int,
        spare: int,
        seqs: int,
        slabs: int,
        budget: int,
        chunked: bool,
        threshold: int,
        caching: bool,
    ) -> None:
        self.fixture = Fixture(
            block_size=kind,
            capacity=LONGEST + spare,
            depth=depth,
            max_num_seqs=seqs,
            num_slabs=seqs + slabs,
            # A start without chunks is refused where a request may be longer than a step.
            max_num_batched_tokens=budget if chunked else max(budget, LONGEST),
            chunked_prefill=chunked,
            long_prefill_token_threshold=threshold,
            prefix_caching=caching,
        )
        self.aborted: set[int] = set()

    @rule(
        prompt=prompts,
        wanted=st.integers(1, 40),
        eos=st.booleans(),
        penalty=st.sampled_from([1.0, 1.0, 1.2]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self, prompt: list[int], wanted: int, eos: bool, penalty: float, prompt_logprobs: int | None
    ) -> None:
        self.fixture.add(
            prompt,
            max_tokens=min(wanted, LONGEST - len(prompt)),
            ignore_eos=not eos,
            repetition_penalty=penalty,
            prompt_logprobs=prompt_logprobs,
        )

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.alive))
        self.fixture.engine.abort(number)
        self.aborted.add(number)

    @precondition(lambda self: self.fixture.engine.has_work)
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.fixture.engine.has_work:
                self.fixture.step()

    @precondition(lambda self: len(self.fixture.prompts) % 4 == 3)
    @rule()
    def forget_prefixes(self) -> None:
        running = bool(self.fixture.scheduler.running)
        assert self.fixture.blocks.reset() is not running

    @property
    def alive(self) -> list[int]:
        return [n for n in self.fixture.prompts if n not in self.fixture.finish and n not in self.aborted]

    @invariant()
    def memory_and_rows_have_one_owner(self) -> None:
        fixture = self.fixture
        running = fixture.scheduler.running
        assert len({r.row for r in running}) == len(running)
        assert all(0 <= r.row < fixture.scheduler.max_num_seqs for r in running)
        for request in fixture.scheduler.waiting:
            assert (request.status, request.table, request.row) == (Status.WAITING, [], -1)
        held = [place for r in running for place in r.table]
        if fixture.executor.block_size is None:
            assert len(set(held)) == len(held)
            computed = sum(-(-r.num_computed // 16) * 16 for r in running)
            assert computed <= round(fixture.blocks.usage * fixture.capacity) <= fixture.capacity
        else:
            size = fixture.executor.block_size
            assert all(len(set(r.table)) == len(r.table) for r in running)
            assert 0 not in held, "block 0 is for padding"
            assert len(set(held)) == round(fixture.blocks.usage * (fixture.capacity // size))

    @invariant()
    def nobody_reads_what_another_writes(self) -> None:
        size = self.fixture.executor.block_size
        if size is None:
            return
        running = self.fixture.scheduler.running
        for request in running:
            being_written = set(request.table[request.num_computed // size :])
            for other in running:
                assert other is request or not being_written & set(other.table)

    def teardown(self) -> None:
        if not hasattr(self, "fixture"):
            return
        fixture = self.fixture
        fixture.run()
        assert set(fixture.finish) == set(fixture.prompts) - self.aborted
        fixture.check_answers()
        assert fixture.blocks.usage == 0
        assert fixture.blocks.reset()
        # All memory is back: one request of the greatest length runs without preemption.
        before = fixture.scheduler.preemptions
        fixture.add([1], max_tokens=fixture.capacity - 1)
        fixture.run()
        fixture.check_answers()
        assert fixture.scheduler.preemptions == before


@pytest.mark.parametrize(
    ("name", "kinds"), [("slabs", st.none()), ("paged", st.sampled_from([1, 4, 16]))], ids=lambda v: str(v)
)
def test_engine(name: str, kinds: st.SearchStrategy[int | None]) -> None:
    EngineMachine.kinds = kinds
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
