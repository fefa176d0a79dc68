"""Prometheus metrics: vLLM's names where the meaning is the same, ``hotstart:`` for our own.

Gauges and counters that the engine keeps are read from its last step when somebody scrapes;
histograms are observed as requests advance. docs/metrics.md lists all of them; a test compares.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import prometheus_client

from hotstart.frontend.snapshot import Snapshot
from hotstart.messages import EngineStats, FinishReason, LoadStats, Ready
from hotstart.timeline import Timeline

if TYPE_CHECKING:
    from hotstart.frontend.generation import Choice

_LABELS = ("model_name", "engine")
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = tuple(float(2**power) for power in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)


class Metrics:
    """One registry. ``observe`` calls cost about a microsecond each."""

    def __init__(self, model_name: str, timeline: Timeline) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prometheus_client.CollectorRegistry()
        self.labels = (model_name, "0")
        """The model's served name, and vLLM's number of the engine."""
        self.timeline = timeline
        self.stats = EngineStats()
        self.ready: Ready | None = None
        self.load: LoadStats | None = None
        self.ready_at: float | None = None
        """When it became ready, by ``time.monotonic()``."""
        self.first_token_at: float | None = None
        """Of the first request of all."""
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self._success: dict[FinishReason, int] = dict.fromkeys(list(FinishReason)[1:], 0)

        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens.", _PER_TOKEN)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", _PER_TOKEN
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Whole requests.", _LATENCY)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Waiting for a step.", _LATENCY)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "Running.", _LATENCY)
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Until the first token.", _LATENCY
        )
        self._decode = self._histogram("vllm:request_decode_time_seconds", "After the first token.", _LATENCY)
        self._request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._request_generation = self._histogram(
            "vllm:request_generation_tokens", "Output tokens.", _TOKENS
        )
        self._request_max = self._histogram(
            "vllm:request_params_max_tokens", "The max_tokens of requests.", _TOKENS
        )
        self._request_computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found in the prefix cache.", _TOKENS
        )
        self._request_longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Output tokens of a prompt's longest answer.", _TOKENS
        )
        self._request_n = self._histogram("vllm:request_params_n", "The n of requests.", _COUNTS)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens per step.", _STEP_TOKENS)
        self._registry.register(Snapshot(self))
        prometheus_client.ProcessCollector(registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
        histogram = prometheus_client.Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(*self.labels)

    def admitted(self, *, n: int, max_tokens: int) -> None:
        """A request passed validation."""
        self._request_n.observe(n)
        self._request_max.observe(max_tokens)

    def token(self, choice: Choice, now: float) -> None:
        """A token of ``choice`` arrived; keeps the choice's clock."""
        if choice.first_token is None:
            choice.first_token = now
            if self.first_token_at is None:
                self.first_token_at = now
            self._ttft.observe(now - choice.arrival)
            self.prompt_tokens += len(choice.prompt)
            self.cached_tokens += choice.cached_tokens
        else:
            self._itl.observe(now - choice.last_token)
        choice.last_token = now
        self.generation_tokens += 1

    def finished(self, choice: Choice, finish: FinishReason) -> None:
        """``choice`` ended."""
        self._success[finish] += 1
        if choice.first_token is None or choice.scheduled is None:
            return
        last, first = choice.last_token, choice.first_token
        self._e2e.observe(last - choice.arrival)
        self._queue.observe(max(0.0, choice.scheduled - choice.arrival))
        self._inference.observe(max(0.0, last - choice.scheduled))
        self._prefill.observe(max(0.0, first - choice.scheduled))
        self._decode.observe(last - first)
        self._request_prompt.observe(len(choice.prompt))
        self._request_generation.observe(choice.generated)
        self._request_computed.observe(len(choice.prompt) - choice.cached_tokens)
        siblings = (
            [c for c in choice.generation.choices if c.prompt is choice.prompt] if choice.generation else []
        )
        if finish is not FinishReason.ABORT and all(sibling.finish for sibling in siblings):
            self._request_longest.observe(max(sibling.generated for sibling in siblings))
        if choice.generated > 1:
            self._tpot.observe((last - first) / (choice.generated - 1))

    def step(self, stats: EngineStats) -> None:
        """A step ended."""
        self.stats = stats
        if stats.step_tokens:
            self._step_tokens.observe(stats.step_tokens)

    def set_engine(self, ready: Ready) -> None:
        """What the engine said of itself."""
        self.ready, self.ready_at = ready, time.monotonic()

    def success(self) -> dict[FinishReason, int]:
        """Ended choices by reason."""
        return self._success

    def exposition(self) -> bytes:
        """The text format that scrapers read."""
        return prometheus_client.generate_latest(self._registry)
