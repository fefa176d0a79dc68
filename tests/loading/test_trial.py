"""Which of two ways brings more: what a few samples decide."""

from __future__ import annotations

import pytest

from hotstart.loading.trial import Trial

MIB = 1 << 20


def answer(trial: Trial, steps: int, map: float, direct: float) -> list[str]:
    """Steps that take this many seconds, one after the other; returns how they were read."""
    ways = []
    for _ in range(steps):
        way, turn = trial.next()
        ways.append(way)
        if turn is not None:
            trial.took(turn, MIB, map if way == "map" else direct)
    return ways


def test_the_first_steps_are_no_samples() -> None:
    trial = Trial("map", "direct", readers=3)
    assert [trial.next() for _ in range(3)] == [("map", None)] * 3


def test_ways_take_turns_and_the_steps_beside_the_turn_before_do_not_count() -> None:
    trial = Trial("map", "direct", readers=2)
    steps = [trial.next() for _ in range(18)]
    assert steps[2:6] == [("map", None)] * 2 + [("map", 0)] * 2
    assert steps[6:10] == [("direct", None)] * 2 + [("direct", 1)] * 2
    assert [turn for _, turn in steps[10:]] == [None, None, 2, 2, None, None, 3, 3]


def test_steps_between_the_samples_and_the_verdict_are_read_in_the_usual_way() -> None:
    trial = Trial("map", "direct", readers=1)
    for _ in range(9):
        trial.next()
    assert trial.next() == ("map", None)


@pytest.mark.parametrize("direct", [3.0, 1.0, 0.9])
def test_one_round_confirms_the_usual_way_unless_its_rival_is_clearly_faster(direct: float) -> None:
    trial = Trial("map", "direct", readers=2)
    ways = answer(trial, 20, 1.0, direct)
    assert trial.verdict == "map"
    assert ways.count("direct") == 4
    assert trial.next() == ("map", None)


def test_the_rival_must_win_twice() -> None:
    trial = Trial("map", "direct", readers=2)
    answer(trial, 17, 2.0, 1.0)
    assert trial.verdict == ""
    answer(trial, 1, 2.0, 1.0)
    assert trial.verdict == "direct"
    assert trial.next() == ("direct", None)


def test_a_hiccup_in_one_round_changes_nothing() -> None:
    trial = Trial("map", "direct", readers=2)
    answer(trial, 10, 5.0, 1.0)
    answer(trial, 8, 1.0, 1.0)
    assert trial.verdict == "map"


def test_samples_that_come_late_change_no_verdict() -> None:
    trial = Trial("map", "direct", readers=1)
    answer(trial, 5, 1.0, 1.0)
    assert trial.verdict == "map"
    assert not trial.took(1, MIB, 0.001)
    assert trial.verdict == "map"


def test_what_was_measured_is_told() -> None:
    trial = Trial("map", "direct", readers=1)
    answer(trial, 9, 0.004, 0.002)
    assert str(trial) == "map 262 MB/s a reader, direct 524 MB/s, measured on 4.19 MB"


def test_how_later_steps_will_be_read_is_known_before_they_are_taken() -> None:
    trial = Trial("map", "direct", readers=2)
    expected = [trial.coming(later) for later in range(20)]
    assert [trial.next()[0] for _ in range(20)] == expected
