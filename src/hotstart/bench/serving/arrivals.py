"""When requests are to be sent: at a rate, evenly, by chance or in bursts, or at a growing rate."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from msgspec import Struct

LINEAR, EXPONENTIAL = "linear", "exponential"


class Arrivals(Struct, frozen=True):
    """A plan; rates are requests a second."""

    rate: float = math.inf
    """Infinite: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between requests: 1 is Poisson's process, less comes
    in bursts, more is more even; infinite: the times are equal."""
    ramp_up: str | None = None
    ramp_up_start: int = 0
    ramp_up_end: int = 0


def schedule(number: int, arrivals: Arrivals, dice: random.Random) -> list[float]:
    """Seconds after the beginning of each of ``number`` requests.

    As vLLM's: the last one is at ``number / rate`` exactly, so that chance does not change the load. In a
    ramp the times are left as they are drawn.
    """
    gaps = [_gap(rate, arrivals.burstiness, dice) for rate in rates(number, arrivals)]
    offsets: list[float] = []
    at = 0.0
    for gap in gaps:
        at += gap
        offsets.append(at)
    if arrivals.ramp_up is None and at:
        stretch = number / arrivals.rate / at
        offsets = [offset * stretch for offset in offsets]
    return offsets


def rates(number: int, arrivals: Arrivals) -> Sequence[float]:
    """The rate at which each request comes."""
    begin, end = arrivals.ramp_up_start, arrivals.ramp_up_end
    shares = [index / max(number - 1, 1) for index in range(number)]
    if arrivals.ramp_up == LINEAR:
        return [begin + (end - begin) * share for share in shares]
    if arrivals.ramp_up == EXPONENTIAL:
        return [begin * (end / begin) ** share for share in shares]
    return [arrivals.rate] * number


def _gap(rate: float, burstiness: float, dice: random.Random) -> float:
    if math.isinf(rate):
        return 0.0
    if math.isinf(burstiness):
        return 1 / rate
    return dice.gammavariate(burstiness, 1 / (rate * burstiness))
