"""The figures of a run, from when things happened. Nothing here looks at a clock.

Definitions are in docs/benchmarks.md; where vLLM prints a figure of the same name, it is the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import fmean, pstdev

from msgspec import Struct

from hotstart.bench.latency import percentile
from hotstart.bench.serving.answer import Answer

TTFT, TPOT, ITL, E2EL = "ttft", "tpot", "itl", "e2el"
QUEUE, E2EL_WITH_QUEUE = "client_queue_time", "e2el_including_client_queue"
NAMES = (TTFT, TPOT, ITL, E2EL, QUEUE, E2EL_WITH_QUEUE)
LIMITS = (TTFT, TPOT, E2EL)
"""What ``--goodput`` may name."""


class Distribution(Struct, frozen=True):
    """Of values in seconds, in milliseconds; all 0 where there is no value."""

    mean: float
    median: float
    std: float
    percentiles: dict[str, float]
    """By ``99`` or ``99.9``, in the order asked for."""


class Metrics(Struct, frozen=True):
    """What a run amounts to; rates are by the second."""

    duration: float
    completed: int
    failed: int
    total_input: int
    total_output: int
    request_throughput: float
    request_goodput: float
    output_throughput: float
    total_token_throughput: float
    peak_output: float
    """Tokens in the fullest second."""
    peak_requests: int
    """Requests of the fullest second, as vLLM counts: all that were there in any part of it."""
    in_flight: int
    """Requests that were there at the same moment, at most."""
    distributions: dict[str, Distribution]
    """By the names above."""


def summarize(
    answers: Sequence[Answer],
    duration: float,
    percentiles: Sequence[float] = (99,),
    limits: Mapping[str, float] | None = None,
) -> Metrics:
    """The figures of a run of ``duration`` seconds; ``limits`` in milliseconds, by name."""
    good = [answer for answer in answers if not answer.error]
    total_input = sum(answer.prompt_tokens for answer in good)
    total_output = sum(answer.output_tokens for answer in good)
    met = sum(_meets(answer, limits) for answer in good) if limits else 0
    values = _values(good)
    return Metrics(
        duration=duration,
        completed=len(good),
        failed=len(answers) - len(good),
        total_input=total_input,
        total_output=total_output,
        request_throughput=len(good) / duration,
        request_goodput=met / duration,
        output_throughput=total_output / duration,
        total_token_throughput=(total_input + total_output) / duration,
        peak_output=max(tokens_by_second(good), default=0.0),
        peak_requests=max(requests_by_second(good), default=0),
        in_flight=most_in_flight(good),
        distributions={name: distribution(found, percentiles) for name, found in values.items()},
    )


def tpot(answer: Answer) -> float:
    """Seconds for each token but the first; 0 where there is no other."""
    if answer.output_tokens <= 1:
        return 0.0
    return (answer.latency - answer.ttft) / (answer.output_tokens - 1)


def distribution(values: Iterable[float], percentiles: Sequence[float]) -> Distribution:
    """Of values in seconds."""
    ordered = sorted(values) or [0.0]
    return Distribution(
        fmean(ordered) * 1000,
        percentile(ordered, 50) * 1000,
        pstdev(ordered) * 1000,
        {percent_word(percent): percentile(ordered, percent) * 1000 for percent in percentiles},
    )


def percent_word(percent: float) -> str:
    """``99`` or ``99.9``, as keys and lines have it."""
    return str(int(percent)) if int(percent) == percent else str(percent)


def tokens_by_second(answers: Sequence[Answer]) -> list[float]:
    """Tokens in each second from the first start on; those of an answer are spread over its chunks."""
    begin, seconds = _span(answers)
    found = [0.0] * seconds
    for answer in answers:
        share = answer.output_tokens / len(answer.chunks) if answer.chunks else 0.0
        for at in answer.chunks:
            found[int(at - begin)] += share
    return found


def requests_by_second(answers: Sequence[Answer]) -> list[int]:
    """Requests that were there in some part of each second from the first start on."""
    begin, seconds = _span(answers)
    found = [0] * seconds
    for answer in answers:
        for second in range(int(answer.start - begin), int(answer.end - begin) + 1):
            found[second] += 1
    return found


def most_in_flight(answers: Sequence[Answer]) -> int:
    """Requests that were there at the same moment, at most."""
    # An end comes before a start at the same moment.
    turns = sorted([(a.start, 1) for a in answers] + [(a.end, -1) for a in answers])
    now = most = 0
    for _, step in turns:
        now += step
        most = max(most, now)
    return most


def _span(answers: Sequence[Answer]) -> tuple[float, int]:
    """The first start, and how many seconds have a part of the run."""
    if not answers:
        return 0.0, 0
    begin = min(answer.start for answer in answers)
    return begin, ceil(max(answer.end for answer in answers) - begin) + 1


def _values(good: Sequence[Answer]) -> dict[str, list[float]]:
    queues = [answer.start - answer.arrived for answer in good]
    return {
        TTFT: [answer.ttft for answer in good],
        TPOT: [tpot(answer) for answer in good if answer.output_tokens > 1],
        ITL: [gap for answer in good for gap in answer.itl],
        E2EL: [answer.latency for answer in good],
        QUEUE: queues,
        E2EL_WITH_QUEUE: [a.latency + queue for a, queue in zip(good, queues, strict=True)],
    }


def _meets(answer: Answer, limits: Mapping[str, float]) -> bool:
    reached = {TTFT: answer.ttft, TPOT: tpot(answer), E2EL: answer.latency}
    return all(reached[name] * 1000 <= limit for name, limit in limits.items())
