"""How much of the prompts the server had already, by its own metrics.

Prompts that a server has seen cost it nothing, so that a second run of the same ones is no measurement
of anything but its memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from hotstart.bench.serving.answer import Answer
from hotstart.bench.serving.client import Client

QUERIES, HITS = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"
WORTH_A_WARNING = 0.01
"""Share of the prompts' tokens."""
_SAMPLE = re.compile(r"^(vllm:prefix_cache_\w+?)(?:_total)?(?:\{(.*)\})? ([-+.\deE]+)")
_MODEL = re.compile(r'model_name="((?:[^"\\]|\\.)*)"')


class Counters(Struct, frozen=True):
    """Tokens of prompts since the server started."""

    queries: float
    hits: float


class Reuse(Struct, frozen=True):
    """Tokens of prompts in one run."""

    queries: int
    hits: int
    source: str
    """Who says so."""

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.hits / self.queries if self.queries else 0.0


async def counters(client: Client, model: str) -> Counters | None:
    """As they are now; None where the server does not tell."""
    try:
        response = await client.get("/metrics")
    except (OSError, ValueError):
        return None
    return parse(response.body.decode("utf-8", "replace"), model) if response.status == 200 else None


def parse(text: str, model: str) -> Counters | None:
    """From Prometheus' text: the sum over engines, of this model where names are told."""
    found: dict[str, list[tuple[str | None, float]]] = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            name, labels, value = match.groups()
            named = _MODEL.search(labels or "")
            found.setdefault(name, []).append((named[1] if named else None, float(value)))
    if QUERIES not in found or HITS not in found:
        return None
    return Counters(_total(found[QUERIES], model), _total(found[HITS], model))


def _total(samples: Sequence[tuple[str | None, float]], model: str) -> float:
    ours = [value for name, value in samples if name == model]
    return sum(ours or [value for _, value in samples])


def reuse(before: Counters | None, after: Counters | None, answers: Sequence[Answer]) -> Reuse | None:
    """What was there already: by the metrics, else by the usage in answers; None: nobody tells."""
    if before is not None and after is not None and after.queries >= before.queries:
        return Reuse(
            round(after.queries - before.queries), round(after.hits - before.hits), "the server's metrics"
        )
    told = [answer for answer in answers if not answer.error and answer.cached_tokens is not None]
    if not told:
        return None
    hits = sum(answer.cached_tokens or 0 for answer in told)
    return Reuse(sum(answer.prompt_tokens for answer in told), hits, "the usage in its answers")
