"""Tokens a second after the first token, under a small load: a start that put its work off shows it here.

A few streams, each asking again as soon as its answer is complete, with prompts that no cache has
seen.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from hotstart.bench.client import Answer, RefusedError, Target, fresh_prompt, request_body, stream

SECONDS = 60.0
STREAMS = 4
_TOKENS = 64
"""Of each answer."""
_PAUSE = 0.1
"""Seconds after a request that failed."""


@dataclass
class FirstMinute:
    """One minute, counted from the first token."""

    tokens: list[float] = field(default_factory=list)
    """That arrived in each second, those of the first request included."""
    failed: int = 0
    """Requests that were refused or broke off."""


def watch(target: Target, first: Answer, seconds: float) -> FirstMinute:
    """Load the server until ``seconds`` after its first token, and count what arrives."""
    end = first.first + seconds
    arrived: list[tuple[float, float]] = [(at, first.tokens / len(first.chunks)) for at in first.chunks]
    failures: list[float] = []
    threads = [
        threading.Thread(target=_one_stream, args=(target, end, arrived, failures), daemon=True)
        for _ in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        # A stream that hangs ends with its server, which is stopped next.
        thread.join(max(0.0, end + 1 - time.monotonic()))
    buckets = [0.0] * max(1, round(seconds))
    for at, tokens in tuple(arrived):
        second = int(at - first.first)
        if 0 <= second < len(buckets):
            buckets[second] += tokens
    return FirstMinute(buckets, len(failures))


def _one_stream(
    target: Target, end: float, arrived: list[tuple[float, float]], failures: list[float]
) -> None:
    """Ask again and again; note when tokens came, and how many."""
    while time.monotonic() < end:
        times: list[float] = []
        tokens = 0
        try:
            for chunk in stream(target, request_body(target, fresh_prompt(), max_tokens=_TOKENS)):
                if chunk.text:
                    times.append(chunk.at)
                tokens = chunk.tokens or tokens
                if chunk.at >= end:
                    break
        except (RefusedError, OSError, ValueError):
            if time.monotonic() < end:
                failures.append(time.monotonic())
                time.sleep(_PAUSE)
        # A chunk may hold several tokens: the server's own count is spread over those of its answer.
        each = tokens / len(times) if tokens and times else 1.0
        arrived.extend([(at, each) for at in times])
