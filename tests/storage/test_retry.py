"""When to ask again: the bound is progress, not the number of attempts."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotstart.storage.retry import Persistence, TransientError, retry_after
from hotstart.storage.source import ReadCancelled

NEVER = threading.Event()


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def persistence(patience: float = 60.0) -> tuple[Persistence, Time]:
    time = Time()
    return Persistence(patience, clock=time, sleep=time.sleep), time


def pause(persistence: Persistence, time: Time, error: OSError) -> float:
    began = time.now
    persistence.failed(error, NEVER)
    return time.now - began


def test_pauses_grow_to_a_bound() -> None:
    read, time = persistence(1000.0)
    pauses = [pause(read, time, OSError()) for _ in range(12)]
    assert 0.02 <= pauses[0] <= 0.05
    assert 2.5 <= pauses[-1] <= 5.0


def test_progress_makes_pauses_short_again() -> None:
    read, time = persistence()
    for _ in range(6):
        read.failed(OSError(), NEVER)
    read.progressed()
    assert pause(read, time, OSError()) <= 0.05


@given(st.floats(0.1, 100.0), st.floats(0.0, 3.0))
def test_without_progress_it_ends_when_patience_does(patience: float, attempt: float) -> None:
    read, time = persistence(patience)
    ended = False
    while not ended:
        time.sleep(attempt)
        try:
            read.failed(OSError("the cause"), NEVER)
        except OSError as error:
            ended = str(error) == "the cause"
    assert patience <= time.now <= patience + attempt + 1e-6


def test_what_moves_is_never_given_up() -> None:
    read, time = persistence(1.0)
    for _ in range(1000):
        time.sleep(0.9)
        read.progressed()
        read.failed(OSError(), NEVER)
    assert read.failures == 1000


def test_what_the_server_asks_for_is_waited_for_and_not_less() -> None:
    read, time = persistence()
    assert 7.0 <= pause(read, time, TransientError("503", 7.0)) <= 7.05


def test_a_server_that_asks_for_more_than_there_is_patience_gets_one_more_attempt() -> None:
    read, time = persistence(10.0)
    assert pause(read, time, TransientError("503", 3600.0)) == pytest.approx(10.0)
    with pytest.raises(TransientError):
        read.failed(TransientError("503", 3600.0), NEVER)


def test_waiting_can_be_cancelled() -> None:
    read, time = persistence(1000.0)
    cancel = threading.Event()

    def sleep(seconds: float) -> None:
        time.now += seconds
        cancel.set()

    read._sleep = sleep
    with pytest.raises(ReadCancelled):
        read.failed(TransientError("503", 500.0), cancel)
    assert time.now < 1.0


def test_a_silent_attempt_leaves_time_for_others_and_the_last_has_the_rest() -> None:
    read, time = persistence(60.0)
    silences = []
    for _ in range(3):
        silences.append(read.silence)
        time.sleep(read.silence)
        read._in_vain += 1
    assert silences == [15.0, 30.0, 15.0]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        ("Mon, 02 Jun 2025 10:00:30 GMT", 30.0),
        ("Mon, 02 Jun 2025 09:00:00 GMT", 0.0),
        ("soon", None),
        ("-1", None),
        ("", None),
        ("99999999999999999999", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}, clock=lambda: 1748858400.0) == seconds
