"""What a step holds: decodes first, prefill in chunks, order of arrival, preemption, steps ahead."""

from __future__ import annotations

import pytest
from fake_executor import EOS, Fixture, answer

from hotstart.messages import FinishReason, SamplingParams

KINDS = pytest.mark.parametrize("block_size", [None, 4], ids=["slabs", "paged"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def test_prompt_is_computed_in_chunks_that_fill_the_budget() -> None:
    fixture = Fixture(max_num_batched_tokens=10)
    fixture.add(range(1, 26), max_tokens=2)
    fixture.run()
    assert fixture.plan() == [[(0, 0, 10)], [(0, 10, 10)], [(0, 20, 5)], [(0, 25, 1)]]
    fixture.check_answers()


def test_decodes_come_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    fixture = Fixture(max_num_batched_tokens=10)
    fixture.add([1, 2], max_tokens=5)
    fixture.add([3, 4], max_tokens=5)
    fixture.step()
    fixture.add(range(1, 20), max_tokens=1)
    fixture.run()
    assert fixture.plan()[1:4] == [
        [(0, 2, 1), (1, 2, 1), (2, 0, 8)],
        [(0, 3, 1), (1, 3, 1), (2, 8, 8)],
        [(0, 4, 1), (1, 4, 1), (2, 16, 3)],
    ]
    fixture.check_answers()


def test_single_tokens_are_batched_before_chunks_even_of_older_requests() -> None:
    fixture = Fixture(max_num_batched_tokens=6)
    fixture.add(range(1, 12), max_tokens=2)
    fixture.add([1, 2], max_tokens=4)
    fixture.step()
    fixture.step()
    assert fixture.plan() == [[(0, 0, 6)], [(0, 6, 5), (1, 0, 1)]]
    fixture.run()
    fixture.check_answers()


def test_at_most_max_num_seqs_run_and_others_follow_in_order_of_arrival() -> None:
    fixture = Fixture(max_num_seqs=2)
    for number in range(5):
        fixture.add([number + 1, 2, 3], max_tokens=2)
    fixture.run()
    assert max(len(step.entries) for step in fixture.steps) == 2
    assert [r.id for step in fixture.steps for r in step.admitted] == [0, 1, 2, 3, 4]
    fixture.check_answers()


def test_large_request_at_the_head_is_not_overtaken_forever() -> None:
    fixture = Fixture(capacity=64, max_num_seqs=4)
    fixture.add([1] * 16, max_tokens=16)
    large = fixture.add([2] * 48, max_tokens=4)
    small = [fixture.add([3] * 4, max_tokens=2) for _ in range(6)]
    fixture.run()
    admitted = [r.id for step in fixture.steps for r in step.admitted]
    assert admitted.index(large) < min(admitted.index(number) for number in small)
    fixture.check_answers()


def test_long_prefill_threshold_lets_short_prompts_pass() -> None:
    fixture = Fixture(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    fixture.add(range(1, 20))
    fixture.add([1, 2, 3])
    fixture.step()
    assert fixture.plan() == [[(0, 0, 6), (1, 0, 3)]]


def test_without_chunks_a_prompt_waits_until_it_fits_the_step_whole() -> None:
    fixture = Fixture(max_num_batched_tokens=16, chunked_prefill=False)
    fixture.add(range(1, 11), max_tokens=1)
    fixture.add(range(1, 13), max_tokens=1)
    fixture.run()
    assert fixture.plan() == [[(0, 0, 10)], [(1, 0, 12)]]


@DEPTHS
def test_without_chunks_a_passed_over_prompt_goes_first_in_the_next_step(depth: int) -> None:
    fixture = Fixture(max_num_batched_tokens=16, chunked_prefill=False, depth=depth)
    fixture.add([1, 2], max_tokens=60)
    fixture.step()
    long = fixture.add(range(1, 17), max_tokens=1)
    short = fixture.add([1, 2, 3], max_tokens=1)
    before = len(fixture.steps)
    fixture.run()
    later = fixture.plan()[before:]
    assert next(index for index, step in enumerate(later) if (long, 0, 16) in step) == 1
    assert next(index for index, step in enumerate(later) if (short, 0, 3) in step) == 2
    fixture.check_answers()


def test_without_chunks_a_stream_of_long_prompts_leaves_every_second_step_to_the_running() -> None:
    fixture = Fixture(max_num_batched_tokens=16, chunked_prefill=False, prefix_caching=False)
    fixture.add([1, 2], max_tokens=12)
    fixture.step()
    for number in range(8):
        fixture.add([1 + number % 6] * 16, max_tokens=1)
    fixture.run()
    decodes = [any(entry[0] == 0 for entry in step) for step in fixture.plan()]
    assert decodes[1:9] == [True, False] * 4
    fixture.check_answers()


@KINDS
def test_without_chunks_only_what_is_not_cached_must_fit_the_step(block_size: int | None) -> None:
    fixture = Fixture(max_num_batched_tokens=48, chunked_prefill=False, block_size=block_size)
    prompt = [1 + n % 6 for n in range(48)]
    fixture.add(prompt, max_tokens=1)
    fixture.run()
    fixture.add([1, 2], max_tokens=30)
    fixture.step()
    fixture.add(prompt, max_tokens=1)
    fixture.step()
    assert [(number, start > 0) for number, start, _ in fixture.plan()[-1]] == [(1, True), (2, True)]
    fixture.run()
    fixture.check_answers()


@KINDS
@DEPTHS
def test_preempted_requests_start_over_and_say_the_same(block_size: int | None, depth: int) -> None:
    fixture = Fixture(block_size=block_size, depth=depth, capacity=64, max_num_seqs=3)
    for number in range(3):
        fixture.add([number + 1] * 12, max_tokens=30)
    fixture.run()
    assert fixture.outputs[-1].stats.preemptions > 0
    assert len(fixture.finish) == 3
    fixture.check_answers()
    assert fixture.blocks.usage == 0


@KINDS
def test_oldest_request_is_never_preempted_and_the_youngest_is(block_size: int | None) -> None:
    fixture = Fixture(block_size=block_size, capacity=64, max_num_seqs=3)
    for number in range(3):
        fixture.add([number + 1] * 12, max_tokens=40)
    preempted: list[int] = []
    while 0 not in fixture.finish:
        fixture.step()
        alive = set(fixture.prompts) - set(fixture.finish)
        preempted += [number for number in alive if fixture.request(number).preemptions]
    assert preempted[0] == 2
    assert 0 not in preempted


@KINDS
def test_request_preempted_while_its_token_is_pending_waits_for_it(block_size: int | None) -> None:
    fixture = Fixture(block_size=block_size, depth=2, capacity=32, max_num_seqs=2)
    fixture.add([1] * 12, max_tokens=16)
    fixture.add([2] * 12, max_tokens=16)
    fixture.run()
    assert fixture.outputs[-1].stats.preemptions > 0
    fixture.check_answers()


def test_two_steps_are_in_flight_and_the_second_uses_a_token_the_host_does_not_know() -> None:
    fixture = Fixture(depth=2)
    fixture.add([1, 2, 3], max_tokens=3)
    fixture.step()
    assert fixture.plan() == [[(0, 0, 3)], [(0, 3, 1)]]
    assert fixture.executor.in_flight == 1
    assert len(fixture.tokens[0]) == 1
    fixture.run()
    fixture.check_answers()


def test_surplus_of_a_step_ahead_is_dropped_after_a_stop() -> None:
    prompt = next(
        [1, a, b]
        for a in range(1, 7)
        for b in range(1, 7)
        if 3 <= len(answer([1, a, b], SamplingParams(max_tokens=20))) <= 10
    )
    fixture = Fixture(depth=2)
    fixture.add(prompt, max_tokens=20, ignore_eos=False)
    fixture.run()
    assert fixture.finish == {0: FinishReason.STOP}
    assert fixture.tokens[0][-1] == EOS
    computed = sum(length for step in fixture.plan() for _, _, length in step)
    assert computed == len(prompt) + len(fixture.tokens[0]), "one token was computed too much"
    fixture.check_answers()
    assert fixture.blocks.usage == 0


def test_no_token_beyond_max_tokens_is_ever_computed() -> None:
    fixture = Fixture(depth=2)
    fixture.add([1, 2, 3], max_tokens=5)
    fixture.run()
    assert sum(length for step in fixture.plan() for _, _, length in step) == 3 + 5 - 1
    assert fixture.finish == {0: FinishReason.LENGTH}


def test_penalties_wait_for_the_token_before_while_others_step_ahead() -> None:
    fixture = Fixture(depth=2)
    fixture.add([1, 2, 3], max_tokens=4, repetition_penalty=1.3)
    fixture.add([4, 5, 6], max_tokens=4)
    fixture.step()
    assert fixture.plan() == [[(0, 0, 3), (1, 0, 3)], [(1, 3, 1)]]
    fixture.run()
    fixture.check_answers()


@KINDS
@DEPTHS
def test_aborted_requests_leave_nothing_behind_and_say_nothing(block_size: int | None, depth: int) -> None:
    fixture = Fixture(block_size=block_size, depth=depth, max_num_seqs=2, max_num_batched_tokens=12)
    for number in range(3):
        fixture.add([number + 1] * 9, max_tokens=20, prompt_logprobs=0, logprobs=0)
    fixture.step()
    assert len(fixture.tokens[0]) == 1
    for number in range(3):
        fixture.engine.abort(number)
    told = {number: list(tokens) for number, tokens in fixture.tokens.items()}
    while fixture.engine.has_work:
        output = fixture.step()
        assert output.prompt_logprobs == []
        assert output.logprobs == {}
    assert fixture.tokens == told
    assert fixture.blocks.usage == 0
    assert fixture.blocks.reset()


def test_abort_of_an_unknown_request_is_ignored() -> None:
    fixture = Fixture()
    fixture.engine.abort(99)
    assert not fixture.engine.has_work


@KINDS
def test_cached_tokens_are_reported_once_with_the_time_of_scheduling(block_size: int | None) -> None:
    fixture = Fixture(block_size=block_size, capacity=128)
    fixture.add([*range(1, 7)] * 6, max_tokens=2)
    fixture.run()
    fixture.add([*range(1, 7)] * 6, max_tokens=2)
    fixture.run()
    assert fixture.cached == {0: 0, 1: 32}
    stats = fixture.outputs[-1].stats
    assert (stats.prefix_queries, stats.prefix_hits) == (72, 32)
    assert [event.at for output in fixture.outputs for event in output.scheduled] == [0.0, 2.0]


@KINDS
def test_prompt_logprobs_come_once_whole_and_in_order_even_after_preemption(block_size: int | None) -> None:
    fixture = Fixture(block_size=block_size, capacity=64, max_num_batched_tokens=8, max_num_seqs=2)
    fixture.add([1] * 20, max_tokens=40)
    prompt = [1 + n % 6 for n in range(40)]
    asked = fixture.add(prompt, max_tokens=2, prompt_logprobs=0)
    fixture.run()
    assert fixture.request_was_preempted(asked)
    found = [p for output in fixture.outputs for p in output.prompt_logprobs]
    assert [p.id for p in found] == [asked]
    assert found[0].positions[0] is None
    assert [p.ids[0] for p in found[0].positions if p is not None] == prompt[1:]


def test_prompt_logprobs_never_use_the_cache_since_every_position_is_needed() -> None:
    fixture = Fixture()
    fixture.add([1] * 40, max_tokens=1)
    fixture.run()
    fixture.add([1] * 40, max_tokens=1, prompt_logprobs=0)
    fixture.run()
    assert fixture.cached[1] == 0
