"""Direct or buffered reads: what a few samples decide."""

from __future__ import annotations

import pytest

from hotstart.loading.trial import Trial

MIB = 1 << 20


def answer(trial: Trial, direct: float, buffered: float) -> list[str]:
    """One round of samples that take this many seconds; returns how they were read."""
    ways = []
    for _ in range(8):
        way, sample = trial.next()
        assert sample
        ways.append(way)
        trial.took(way, MIB, direct if way == "direct" else buffered)
    return ways


def test_steps_are_read_both_ways_in_turn() -> None:
    assert answer(Trial(warm_up=0), 1.0, 1.0) == ["direct", "buffered"] * 4


def test_the_first_steps_are_no_samples() -> None:
    trial = Trial(warm_up=2)
    assert [trial.next() for _ in range(3)] == [("direct", False), ("direct", False), ("direct", True)]


def test_steps_between_the_samples_and_the_verdict_are_read_directly() -> None:
    trial = Trial(warm_up=0)
    for _ in range(8):
        trial.next()
    assert trial.next() == ("direct", False)


@pytest.mark.parametrize(("direct", "buffered"), [(1.0, 3.0), (1.0, 1.0), (1.0, 0.9)])
def test_one_round_confirms_direct_reads_unless_buffered_ones_are_clearly_faster(
    direct: float, buffered: float
) -> None:
    trial = Trial(warm_up=0)
    answer(trial, direct, buffered)
    assert trial.verdict == "direct"
    assert trial.next() == ("direct", False)


def test_buffered_reads_must_win_twice() -> None:
    trial = Trial(warm_up=0)
    answer(trial, 2.0, 1.0)
    assert trial.verdict == ""
    answer(trial, 2.0, 1.0)
    assert trial.verdict == "buffered"
    assert trial.next() == ("buffered", False)
    assert str(trial) == "direct 524 kB/s a reader against buffered 1.05 MB/s, measured on 16.8 MB"


def test_a_hiccup_in_one_round_changes_nothing() -> None:
    trial = Trial(warm_up=0)
    answer(trial, 5.0, 1.0)
    answer(trial, 1.0, 1.0)
    assert trial.verdict == "direct"
