"""The metrics that are read at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotstart import __version__
from hotstart.messages import LoadStats, Ready

if TYPE_CHECKING:
    from hotstart.frontend.metrics import Metrics

_LABELS = ("model_name", "engine")
Rows = Iterable[tuple[tuple[str, ...], float]]
"""Values of the further labels, and the value."""


class Snapshot(Collector):
    """Reads :class:`~hotstart.frontend.metrics.Metrics`, the timeline, and what the engine said of itself."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        yield from self._traffic()
        yield from self._start()
        if self._metrics.load is not None:
            yield from self._load(self._metrics.load)
        if self._metrics.ready is not None:
            yield from self._engine(self._metrics.ready)

    def _traffic(self) -> Iterator[Metric]:
        metrics, stats = self._metrics, self._metrics.stats
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a step.", stats.waiting)
        yield self._gauges(
            "vllm:num_requests_waiting_by_reason",
            "The same by reason.",
            ("reason",),
            ((("capacity",), stats.waiting), (("deferred",), 0)),
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", stats.kv_usage)
        cached, prompt = metrics.cached_tokens, metrics.prompt_tokens
        for name, text, value in (
            ("vllm:num_preemptions", "Requests put back to make room.", stats.preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("vllm:prompt_tokens", "Prompt tokens of requests that got a token.", prompt),
            ("vllm:prompt_tokens_cached", "Those found in the prefix cache.", cached),
            ("vllm:generation_tokens", "Tokens generated.", metrics.generation_tokens),
        ):
            yield self._counters(name, text, (), (((), value),))
        yield self._counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens computed, and found in the prefix cache.",
            ("source",),
            (
                (("local_compute",), prompt - cached),
                (("local_cache_hit",), cached),
                (("external_kv_transfer",), 0),
            ),
        )
        success = metrics.success().items()
        yield self._counters(
            "vllm:request_success",
            "Ended requests.",
            ("finished_reason",),
            [((str(reason.text),), count) for reason, count in success],
        )

    def _start(self) -> Iterator[Metric]:
        metrics, timeline = self._metrics, self._metrics.timeline
        phases, labels = timeline.phases(), ("phase", "process")
        yield self._gauges(
            "hotstart:startup_phase_seconds",
            "Length of a phase of the start, so far.",
            labels,
            [((phase.name, phase.process), phase.seconds()) for phase in phases],
        )
        counted = [phase for phase in phases if phase.total]
        yield self._gauges(
            "hotstart:startup_phase_bytes",
            "Bytes that a phase of the start has got, so far.",
            labels,
            [((phase.name, phase.process), phase.bytes) for phase in counted],
        )
        yield self._gauges(
            "hotstart:startup_phase_expected_bytes",
            "Bytes that it needs.",
            labels,
            [((phase.name, phase.process), phase.total) for phase in counted],
        )
        yield self._gauge("hotstart:ready", "1 once the model answers, else 0.", metrics.ready is not None)
        for name, text, moment in (
            ("ready", "From the start of the process until the model could answer.", metrics.ready_at),
            ("first_token", "Until the first token of the first request.", metrics.first_token_at),
        ):
            if moment is not None:
                yield self._gauge(f"hotstart:startup_{name}_seconds", text, timeline.since_origin(moment))
        yield self._gauges("hotstart:build_info", "The version.", ("version",), (((__version__,), 1),))

    def _load(self, load: LoadStats) -> Iterator[Metric]:
        yield self._counters(
            "hotstart:load_bytes",
            "Bytes of weights by where they lay and how they were read.",
            ("source", "strategy"),
            [((read.source, read.strategy), read.bytes) for read in load.read],
        )
        for name, text, value in (
            ("retries", "Ranges asked for again after a failure.", load.retried),
            ("replaced", "Ranges and reads given up for being slow, and made anew.", load.replaced),
        ):
            yield self._counters(f"hotstart:load_{name}", text, (), (((), value),))
        yield self._gauge(
            "hotstart:load_longest_stall_seconds", "The longest single read.", load.longest_stall
        )
        if load.resident is not None:
            yield self._gauge(
                "hotstart:load_page_cache_ratio",
                "Share of the files that the page cache had, 0 to 1.",
                load.resident,
            )
        yield self._counters(
            "hotstart:disk_copy_written_bytes",
            "Bytes that this server has written to the disk copy.",
            (),
            (((), load.copied),),
        )

    def _engine(self, ready: Ready) -> Iterator[Metric]:
        values = {
            "block_size": str(ready.block_size),
            "kv_cache_memory_bytes": str(ready.kv_cache_bytes),
            "num_gpu_blocks": str(ready.kv_cache_tokens // max(1, ready.block_size)),
            "engine": self._metrics.labels[1],
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=tuple(values))
        info.add_metric(tuple(values.values()), 1)
        yield info
        yield self._gauge("hotstart:weights_bytes", "Bytes of weights in use.", ready.weights_bytes)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, (), (((), value),))

    def _gauges(self, name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*_LABELS, *labels))
        for values, value in rows:
            family.add_metric((*self._metrics.labels, *values), value)
        return family

    def _counters(self, name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, *labels))
        for values, value in rows:
            family.add_metric((*self._metrics.labels, *values), value)
        return family
