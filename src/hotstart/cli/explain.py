"""The read plan for people: ``hotstart check MODEL --explain``, and shorter in the log of a start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hotstart.checkpoint.folder import LocalFolder
from hotstart.config.load_formats import is_stream
from hotstart.errors import HotstartError
from hotstart.loading.explain import Plan, lines, plan_of, short
from hotstart.loading.options import LoaderOptions
from hotstart.loading.rates import Rate, recall, record
from hotstart.units import format_rate, format_seconds, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotstart.checkpoint.base import Checkpoint
    from hotstart.cli.check import Report
    from hotstart.config.settings import Config
    from hotstart.loading.probe import Probe
    from hotstart.timeline import Timeline


def explained(config: Config, report: Report) -> Iterator[str]:
    """The lines of ``--explain``; probes each medium with a few megabytes."""
    yield "read plan"
    checkpoint = report.checkpoint
    if checkpoint is None or not checkpoint.files:
        yield "  none: there are no weights to read"
        return
    from hotstart.config import cache_root

    if is_stream(config.load.load_format):
        name = config.load.load_format
        yield f"  none: {name} reads by itself, and does not say how; hotstart bench load measures it"
        return
    root = cache_root.resolve(config.cache_root or None, os.environ)
    try:
        plan = plan_for(config, report, checkpoint)
        rates = [
            recall(root.path, medium, strategy) or _probe(checkpoint, plan, medium, strategy)
            for medium, strategy in plan.groups
        ]
    except HotstartError as error:
        yield f"  none: {error}"
        return
    found = list(lines(plan, rates))
    width = max(len(topic) for topic, _ in found)
    previous = ""
    for topic, text in found:
        yield f"  {'' if topic == previous else topic:<{width}}  {text}"
        previous = topic


def plan_for(config: Config, report: Report, checkpoint: Checkpoint) -> Plan:
    """The plan by the settings of a start. Raises HotstartError."""
    from hotstart.device.choose import choose

    options = LoaderOptions.parse(config.load.model_loader_extra_config)
    staging = None
    if choose(config.device.device).kind == "cuda":
        from hotstart.loading.staging import staging_for

        staging = staging_for(checkpoint, options)
    return plan_of(
        checkpoint,
        strategy=config.load.read_strategy,
        readers=options.concurrency,
        ring=staging.ring if staging else None,
        first=staging.first if staging else None,
        store=_store(report),
    )


def _store(report: Report) -> str:
    if report.folder is None or isinstance(report.folder, LocalFolder):
        return ""
    from hotstart.checkpoint.remote import ObjectFolder

    assert isinstance(report.folder, ObjectFolder)
    return report.folder.store.settings.described


def _probe(checkpoint: Checkpoint, plan: Plan, medium: str, strategy: str) -> Probe:
    from hotstart.loading.probe import probe

    files = [each.file for each in plan.groups[medium, strategy]]
    return probe(checkpoint, files, strategy, plan.first)


class Expectation:
    """What a start expects of its medium, and what came of it."""

    def __init__(self, plan: Plan, cache_root: str) -> None:
        self._plan = plan
        self._cache_root = cache_root
        self._rates = [recall(cache_root, medium, strategy) for medium, strategy in plan.groups]

    def __str__(self) -> str:
        return short(self._plan, self._rates)

    def outcome(self, timeline: Timeline) -> str:
        """The achieved rate against the best of earlier starts, which is kept; empty: nothing was read."""
        phase = next((p for p in timeline.phases() if p.name == "read weights" and p.end is not None), None)
        if phase is None or not phase.bytes:
            return ""
        seconds = phase.seconds()
        text = f"{format_size(phase.bytes)} in {format_seconds(seconds)}, {format_rate(phase.bytes, seconds)}"
        if not self._plan.is_pure:
            return text  # of several media, the page cache among them: says nothing of any of them
        ((medium, strategy),) = self._plan.groups
        best = self._rates[0]
        record(self._cache_root, medium, strategy, phase.bytes, seconds)
        return f"{text}, {_compared(phase.bytes / seconds, best)}" if seconds else text


def _compared(rate: float, best: Rate | None) -> str:
    if best is None:
        return "the first start from here: later ones are compared with it"
    return f"{rate / best.rate:.2f} of the {format_rate(best.rate, 1)} {best.origin}"
