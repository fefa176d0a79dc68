"""One line of throughput every ten seconds, as long as there is traffic."""

from __future__ import annotations

import logging

from hotstart.frontend.metrics import Metrics

log = logging.getLogger("hotstart.frontend")

_INTERVAL = 10.0


class StatsLog:
    """Written from steps, so that an idle server sleeps."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._since: float | None = None
        self._prompt_tokens = self._generation_tokens = 0

    def note(self, now: float) -> None:
        """A step ended at ``now``, in seconds of ``time.monotonic()``."""
        metrics, since = self._metrics, self._since
        if since is not None and now - since < _INTERVAL:
            return
        prompt = metrics.prompt_tokens - self._prompt_tokens
        generated = metrics.generation_tokens - self._generation_tokens
        # After an idle stretch the interval says nothing about speed: start a new one.
        if since is not None and now - since < 2 * _INTERVAL:
            stats = metrics.stats
            hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
            log.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
                "KV cache %.1f %%, prefix cache hits %.1f %%",
                prompt / (now - since),
                generated / (now - since),
                stats.running,
                stats.waiting,
                100 * stats.kv_usage,
                100 * hits,
            )
        self._since = now
        self._prompt_tokens, self._generation_tokens = metrics.prompt_tokens, metrics.generation_tokens
