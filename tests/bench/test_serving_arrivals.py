"""When requests are sent."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from hotstart.bench.serving.arrivals import Arrivals, schedule


def gaps(number: int, **of: object) -> list[float]:
    offsets = schedule(number, Arrivals(**of), random.Random(1))  # type: ignore[arg-type]
    return [after - before for before, after in pairwise([0.0, *offsets])]


def test_without_a_rate_all_go_at_once() -> None:
    assert schedule(3, Arrivals(), random.Random(1)) == [0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 8.0, math.inf])
def test_last_request_of_a_rate_is_on_time_whatever_the_dice(burstiness: float) -> None:
    assert sum(gaps(200, rate=4.0, burstiness=burstiness)) == pytest.approx(50)


def test_burstiness_is_the_shape_of_the_gamma_distribution() -> None:
    # Its deviation is the mean divided by the root of the shape.
    for shape in (0.25, 1.0, 4.0):
        found = gaps(20_000, rate=10.0, burstiness=shape)
        assert pstdev(found) / fmean(found) == pytest.approx(shape**-0.5, rel=0.05)


def test_infinite_burstiness_is_even() -> None:
    assert gaps(5, rate=2.0, burstiness=math.inf) == pytest.approx([0.5] * 5)


@pytest.mark.parametrize(
    ("strategy", "rates"), [("linear", [2, 5, 8, 11, 14]), ("exponential", [2, 3.2531, 5.2915, 8.6070, 14])]
)
def test_ramp_goes_from_one_rate_to_the_other(strategy: str, rates: list[float]) -> None:
    found = gaps(5, ramp_up=strategy, ramp_up_start=2, ramp_up_end=14, burstiness=math.inf)
    assert [1 / gap for gap in found] == pytest.approx(rates, rel=1e-4)
