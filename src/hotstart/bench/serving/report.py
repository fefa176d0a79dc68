"""The printed block and the JSON, line by line and key by key as ``vllm bench serve`` writes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hotstart.bench.serving import metrics
from hotstart.bench.serving.answer import Answer
from hotstart.bench.serving.delay import Delay, Delays, too_late
from hotstart.bench.serving.metrics import Metrics
from hotstart.bench.serving.prefix_cache import WORTH_A_WARNING, Reuse
from hotstart.checkpoint.wording import count

_WIDTH = 50
_TITLES = {
    metrics.TTFT: ("TTFT", "Time to First Token"),
    metrics.TPOT: ("TPOT", "Time per Output Token (excl. 1st token)"),
    metrics.ITL: ("ITL", "Inter-token Latency"),
    metrics.E2EL: ("E2EL", "End-to-end Latency"),
    metrics.QUEUE: ("Client Queue Time", "Client-side Queueing"),
    metrics.E2EL_WITH_QUEUE: ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
DETAILED = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Keys that only ``--save-detailed`` keeps."""
_MOST_FAILURES = 10


def block(found: Metrics, values: Mapping[str, Any]) -> str:
    """What is printed; ``values`` are those of the flags."""
    cap, rate = values.get("max_concurrency"), values["request_rate"]
    lines = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        _line("Successful requests:", found.completed),
        _line("Failed requests:", found.failed),
    ]
    if cap is not None:
        lines.append(_line("Maximum request concurrency:", cap))
    if not math.isinf(rate):
        lines.append(_line("Request rate configured (RPS):", float(rate)))
    lines += [
        _line("Benchmark duration (s):", found.duration),
        _line("Total input tokens:", found.total_input),
        _line("Total generated tokens:", found.total_output),
        _line("Request throughput (req/s):", found.request_throughput),
    ]
    if values["goodput"]:
        lines.append(_line("Request goodput (req/s):", found.request_goodput))
    lines += [
        _line("Output token throughput (tok/s):", found.output_throughput),
        _line("Peak output token throughput (tok/s):", found.peak_output),
        _line("Peak concurrent requests:", float(found.peak_requests)),
        _line("Total token throughput (tok/s):", found.total_token_throughput),
    ]
    for name in _selected(values):
        short, title = _TITLES[name]
        values_of = found.distributions[name]
        lines.append(f"{title:-^{_WIDTH}}")
        lines.append(_line(f"Mean {short} (ms):", values_of.mean))
        lines.append(_line(f"Median {short} (ms):", values_of.median))
        lines += [_line(f"P{word} {short} (ms):", value) for word, value in values_of.percentiles.items()]
    return "\n".join([*lines, "=" * _WIDTH])


def figures(found: Metrics, answers: Sequence[Answer], values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON's part about what was measured, with every request."""
    result: dict[str, Any] = {
        "duration": found.duration,
        "completed": found.completed,
        "failed": found.failed,
        "total_input_tokens": found.total_input,
        "total_output_tokens": found.total_output,
        "request_throughput": found.request_throughput,
        "request_goodput": found.request_goodput if values["goodput"] else None,
        "output_throughput": found.output_throughput,
        "total_token_throughput": found.total_token_throughput,
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [0 if answer.error else answer.output_tokens for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itl for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.start for answer in answers],
        "queue_times": [answer.start - answer.arrived for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
        "max_output_tokens_per_s": found.peak_output,
        "max_concurrent_requests": found.peak_requests,
        "rtfx": 0.0,
    }
    for name in _selected(values):
        values_of = found.distributions[name]
        result[f"mean_{name}_ms"] = values_of.mean
        result[f"median_{name}_ms"] = values_of.median
        result[f"std_{name}_ms"] = values_of.std
        result |= {f"p{word}_{name}_ms": value for word, value in values_of.percentiles.items()}
    return result


def head(values: Mapping[str, Any], origin: str, date: str) -> dict[str, Any]:
    """The JSON's part about what was asked."""
    rate = values["request_rate"]
    result = {
        "date": date,
        "endpoint_type": values["backend"],
        "backend": values["backend"],
        "label": values.get("label"),
        "model_id": origin,
        "tokenizer_id": values.get("tokenizer") or origin,
        "num_prompts": values["num_prompts"],
        **dict(values["metadata"]),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": "inf" if math.isinf(values["burstiness"]) else values["burstiness"],
        "max_concurrency": values.get("max_concurrency"),
    }
    if values.get("ramp_up_strategy"):
        keys = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        result |= {key: values[key] for key in keys}
    return result


def ours(
    found: Metrics, answers: Sequence[Answer], late: Delays, reuse: Reuse | None, counted: str, seed: int
) -> dict[str, Any]:
    """The JSON's part that vLLM's has not."""
    return {
        "seed": seed,
        "tokens_counted_by": counted,
        "in_flight": found.in_flight,
        "prefix_cache": None
        if reuse is None
        else {"queries": reuse.queries, "hits": reuse.hits, "source": reuse.source},
        "client_delay_ms": {"sending": _in_ms(late.sending), "seeing": _in_ms(late.seeing)},
        "first_chunks": [a.first_chunk - a.start if a.first_chunk else 0.0 for a in answers],
    }


def notes(found: Metrics, late: Delays, reuse: Reuse | None, counted: str, seed: int) -> str:
    """The lines under the block."""
    cached = "unknown: the server does not tell"
    if reuse is not None:
        cached = f"{reuse.share:.1%} of {reuse.queries} prompt tokens, by {reuse.source}"
    return "\n".join(
        [
            f"Tokens counted by: {counted}",
            f"From the prefix cache: {cached}",
            f"In flight at once, at most: {found.in_flight}",
            f"Client delay (ms): sending {_shown(late.sending)}; seeing {_shown(late.seeing)}",
            f"Seed: {seed}",
        ]
    )


def warnings(
    answers: Sequence[Answer], late: Delays, reuse: Reuse | None, *, shared: float = 0.0
) -> list[str]:
    """What makes the figures other than they seem; ``shared``: tokens that are meant to be reused."""
    found = failures(answers)
    if reuse is not None and reuse.queries and (reuse.hits - shared) / reuse.queries >= WORTH_A_WARNING:
        found.append(
            f"{reuse.share:.1%} of the prompts came from the server's prefix cache, which knew them or their "
            "beginnings, so the figures are better than with new ones: leave --seed out, or empty the cache "
            "(POST /reset_prefix_cache)"
        )
    sent = sum(answer.prompt_tokens for answer in answers if not answer.error)
    if reuse is not None and sent and reuse.queries > 1.05 * sent and not any(a.error for a in answers):
        found.append(
            f"the server was asked about {reuse.queries} prompt tokens while these were {sent}: "
            "somebody else uses it"
        )
    found += [f"the client was slow: {what}" for what in too_late(late, answers)]
    return found


def failures(answers: Sequence[Answer]) -> list[str]:
    """What became of requests that failed, the most frequent first."""
    reasons = Counter(answer.error for answer in answers if answer.error)
    total = len(answers)
    lines = [
        f"{count(number, 'request')} of {total} failed and counted as such, none was sent again: {reason}"
        for reason, number in reasons.most_common(_MOST_FAILURES)
    ]
    if len(reasons) > _MOST_FAILURES:
        lines.append(f"and for {len(reasons) - _MOST_FAILURES} other reasons")
    return lines


def _selected(values: Mapping[str, Any]) -> list[str]:
    """In the order in which they are printed; queueing only where there is a queue."""
    names = [name for name in metrics.NAMES if name in values["percentile_metrics"]]
    capped = values.get("max_concurrency") is not None
    if not capped:
        names = [name for name in names if name not in (metrics.QUEUE, metrics.E2EL_WITH_QUEUE)]
    elif math.isinf(values["request_rate"]):
        names = [name for name in names if name != metrics.E2EL_WITH_QUEUE]
    return names


def _line(name: str, value: float) -> str:
    shown = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{name:<40} {shown}"


def _in_ms(delay: Delay) -> dict[str, float]:
    return {"mean": delay.mean * 1000, "p99": delay.p99 * 1000, "max": delay.longest * 1000}


def _shown(delay: Delay) -> str:
    return f"mean {delay.mean * 1000:.2f}, P99 {delay.p99 * 1000:.2f}, max {delay.longest * 1000:.2f}"
