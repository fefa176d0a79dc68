"""Prometheus metrics: vLLM's names where the meaning is the same, ``hotstart:`` for our own.

Gauges and counters that the engine keeps are read from its last step when somebody scrapes;
histograms are observed as requests advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotstart.messages import EngineStats, FinishReason, Ready
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
        self._labels = (model_name, "0")
        self.stats = EngineStats()
        self.ready: Ready | None = None
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
        self._request_n = self._histogram("vllm:request_params_n", "The n of requests.", _COUNTS)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens per step.", _STEP_TOKENS)
        self._registry.register(_Snapshot(self, self._labels, timeline))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
        histogram = prometheus_client.Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(*self._labels)

    def admitted(self, *, n: int, max_tokens: int) -> None:
        """A request passed validation."""
        self._request_n.observe(n)
        self._request_max.observe(max_tokens)

    def token(self, choice: Choice, now: float) -> None:
        """A token of ``choice`` arrived; keeps the choice's clock."""
        if choice.first_token is None:
            choice.first_token = now
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
        if choice.generated > 1:
            self._tpot.observe((last - first) / (choice.generated - 1))

    def step(self, stats: EngineStats) -> None:
        """A step ended."""
        self.stats = stats
        if stats.step_tokens:
            self._step_tokens.observe(stats.step_tokens)

    def set_engine(self, ready: Ready) -> None:
        """What the engine said of itself."""
        self.ready = ready

    def success(self) -> dict[FinishReason, int]:
        """Ended choices by reason."""
        return self._success

    def exposition(self) -> bytes:
        """The text format that scrapers read."""
        return prometheus_client.generate_latest(self._registry)


class _Snapshot(Collector):
    """Everything that is read at the moment of a scrape."""

    def __init__(self, metrics: Metrics, labels: tuple[str, str], timeline: Timeline) -> None:
        self._metrics = metrics
        self._labels = labels
        self._timeline = timeline

    def collect(self) -> Iterator[Metric]:
        metrics, stats = self._metrics, self._metrics.stats
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", stats.running),
            ("vllm:num_requests_waiting", "Requests waiting for a step.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", stats.kv_usage),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("vllm:num_preemptions", "Requests put back to make room.", stats.preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("vllm:prompt_tokens", "Prompt tokens of requests that got a token.", metrics.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Those found in the prefix cache.", metrics.cached_tokens),
            ("vllm:generation_tokens", "Tokens generated.", metrics.generation_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Ended requests.", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in metrics.success().items():
            success.add_metric((*self._labels, str(reason.text)), count)
        yield success
        if metrics.ready is not None:
            yield self._cache_config(metrics.ready)
        yield self._phases()

    def _cache_config(self, ready: Ready) -> Metric:
        values = {
            "block_size": str(ready.block_size),
            "kv_cache_memory_bytes": str(ready.kv_cache_bytes),
            "num_gpu_blocks": str(ready.kv_cache_tokens // max(1, ready.block_size)),
            "engine": "0",
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=tuple(values))
        info.add_metric(tuple(values.values()), 1)
        return info

    def _phases(self) -> Metric:
        gauge = GaugeMetricFamily(
            "hotstart:startup_phase_seconds", "Length of a phase of the start.", labels=("phase", "process")
        )
        for phase in self._timeline.phases():
            gauge.add_metric((phase.name, phase.process), phase.seconds())
        return gauge
