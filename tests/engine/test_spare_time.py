"""Tuning and chores: when they are done, and what they never delay."""

from __future__ import annotations

from collections.abc import Iterator

from hotstart.engine.spare_time import SpareTime


class Line:
    """A link on which a message arrives during the ``arrives``-th wait; none when 0."""

    def __init__(self, arrives: int = 0) -> None:
        self.waits: list[float] = []
        self._arrives = arrives

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return len(self.waits) == self._arrives


def pieces(done: list[str]) -> Iterator[None]:
    for number in range(3):
        done.append(f"piece {number}")
        yield


def test_without_requests_everything_is_done_in_order() -> None:
    done: list[str] = []
    spare = SpareTime(
        pieces(done), [lambda: done.append("first"), lambda: done.append("second")], Line().wait
    )

    spare.use(busy=False)
    spare.use(busy=False)

    assert done == ["piece 0", "piece 1", "piece 2", "first", "second"]


def test_a_request_right_after_ready_meets_an_engine_that_does_nothing_else() -> None:
    done: list[str] = []
    line = Line(arrives=1)
    spare = SpareTime(pieces(done), [lambda: done.append("chore")], line.wait)

    spare.use(busy=False)

    assert not done
    assert line.waits[0] > 0, "tuning must give a request a moment to come first"


def test_a_request_waits_for_one_piece_at_most() -> None:
    done: list[str] = []
    spare = SpareTime(pieces(done), [lambda: done.append("chore")], Line(arrives=2).wait)

    spare.use(busy=False)

    assert done == ["piece 0"]


def test_chores_give_way_to_a_request_and_are_done_later() -> None:
    done: list[str] = []
    line = Line(arrives=5)  # one pause before tuning, two looks between pieces, one pause before a chore
    spare = SpareTime(iter([1, 2]), [lambda: done.append("first"), lambda: done.append("second")], line.wait)

    spare.use(busy=False)
    assert done == ["first"]

    spare.use(busy=False)
    assert done == ["first", "second"]


def test_while_requests_run_tuning_waits_for_the_first_seconds_to_pass() -> None:
    now = [0.0]
    done: list[str] = []
    spare = SpareTime(pieces(done), [], Line().wait, clock=lambda: now[0])

    spare.use(busy=True)
    assert not done

    now[0] = 60.0
    spare.use(busy=True)
    assert done == ["piece 0"], "one piece a step"
    spare.use(busy=True)
    assert done == ["piece 0", "piece 1"]
