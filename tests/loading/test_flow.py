"""The number of reads in flight, found by trying; stores are simulated, with a clock of their own."""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotstart.loading.flow import Flow

MB = 1_000_000
READ = 8 * MB
Store = Callable[[int, float], float]
"""Seconds of a read, given how many are in flight and the time."""


class Simulation:
    """A flow whose readers are events: no thread, no waiting."""

    def __init__(self, store: Store, first: int = 8, most: int = 64) -> None:
        self.now = 0.0
        self.flow = Flow(first, most, clock=lambda: self.now)
        self.reads = 0
        self.history: list[tuple[float, int]] = []
        self._store = store
        self._waiting: list[tuple[float, int, ExitStack]] = []

    def run(self, seconds: float) -> Simulation:
        until = self.now + seconds
        while self.now < until:
            while len(self._waiting) < self.flow.limit:
                self.reads += 1
                turn = ExitStack()
                turn.enter_context(self.flow.reading(READ))
                took = self._store(len(self._waiting) + 1, self.now)
                heapq.heappush(self._waiting, (self.now + took, self.reads, turn))
            self.now, _, turn = heapq.heappop(self._waiting)
            turn.close()
            self.history.append((self.now, self.flow.limit))
        return self

    def first_at(self, limit: int) -> float:
        """When the limit was reached."""
        return next(when for when, found in self.history if found >= limit)


def store(latency: float, each: float, total: float) -> Store:
    """Seconds before the first byte; bytes per second of a connection, and of all of them."""
    return lambda inside, now: latency + READ / min(each, total / inside)


def test_a_distant_store_gets_all_readers_within_a_few_rounds() -> None:
    simulation = Simulation(store(0.05, 90 * MB, 12_000 * MB)).run(2.0)
    assert simulation.flow.limit == 64
    assert simulation.first_at(64) < 0.75


@pytest.mark.parametrize(
    ("latency", "each", "total"),
    [(0.05, 90, 500), (0.05, 90, 800), (0.02, 90, 1250), (0.0002, 1500, 1500), (0.03, 125, 125)],
)
def test_whatever_the_network_has_is_used(latency: float, each: float, total: float) -> None:
    simulation = Simulation(store(latency, each * MB, total * MB)).run(12.0)
    assert simulation.reads * READ / 12.0 > 0.9 * total * MB


def test_a_store_that_a_few_readers_use_up_keeps_a_few() -> None:
    simulation = Simulation(store(0.0002, 1500 * MB, 1500 * MB)).run(10.0)
    more = sum(1 for _, limit in simulation.history if limit > 8)
    assert simulation.flow.limit == 8
    assert more < 0.15 * len(simulation.history)


def test_readers_that_get_in_each_others_way_are_sent_back_soon() -> None:
    def crowded(inside: int, now: float) -> float:
        return 0.0002 + READ / (1500 * MB / inside / (1 + 0.02 * inside))

    simulation = Simulation(crowded).run(2.0)
    assert simulation.flow.limit == 8
    assert max(limit for _, limit in simulation.history) == 16


def test_a_number_found_in_bad_times_is_doubted_later() -> None:
    def busy_at_first(inside: int, now: float) -> float:
        return store(0.005, 90 * MB, 300 * MB if now < 3.0 else 12_000 * MB)(inside, now)

    simulation = Simulation(busy_at_first).run(3.0)
    assert simulation.flow.limit < 64
    simulation.run(12.0)
    assert simulation.flow.limit == 64


def test_a_store_that_is_slow_at_first_is_no_reason_for_more_readers() -> None:
    def waking(inside: int, now: float) -> float:
        return store(0.0002, 1500 * MB, (1500 if now > 0.5 else 900) * MB)(inside, now)

    simulation = Simulation(waking).run(2.0)
    assert simulation.flow.limit == 8
    assert max(limit for _, limit in simulation.history) == 16


def test_a_few_quick_reads_among_slow_ones_promise_nothing() -> None:
    chance = random.Random(4)

    def uneven(inside: int, now: float) -> float:
        return READ / (600 * MB / inside) * chance.choice([0.2, 1.0, 1.8])

    simulation = Simulation(uneven).run(1.5)
    assert max(limit for _, limit in simulation.history) <= 16


def test_a_slow_line_is_not_crowded() -> None:
    simulation = Simulation(store(0.03, 125 * MB, 125 * MB)).run(60.0)
    assert simulation.flow.limit == 8


@settings(deadline=None, max_examples=50)
@given(
    st.floats(0.0, 0.3),
    st.floats(1.0, 2000.0),
    st.floats(1.0, 2000.0),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_the_number_stays_between_the_first_and_the_most(
    latency: float, each: float, total: float, first: int, most: int
) -> None:
    simulation = Simulation(store(latency, each * MB, total * MB), first, most).run(3.0)
    limits = {limit for _, limit in simulation.history}
    assert min(first, most) <= min(limits)
    assert max(limits) <= most


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_than_the_limit_read_at_once(limit: int) -> None:
    flow = Flow(limit, limit)
    inside, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with flow.reading(1):
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= limit


def test_a_read_that_fails_leaves_its_place_to_another() -> None:
    flow = Flow(1, 1)
    with pytest.raises(OSError, match="lost"), flow.reading(1):
        raise OSError("lost")
    with flow.reading(1):
        pass
