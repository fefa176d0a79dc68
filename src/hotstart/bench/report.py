"""The measurements of ``bench startup`` as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from hotstart.units import format_rate, format_size

if TYPE_CHECKING:
    from hotstart.bench.launch import Start
    from hotstart.bench.startup import Runs

_STEPS: tuple[tuple[str, Callable[[Start], float]], ...] = (
    ("port answers", lambda start: start.answers),
    ("ready", lambda start: start.ready),
    ("first token", lambda start: start.first_token),
)


def table(runs: Runs, model: str) -> str:
    """One state of the page cache: seconds as median [least - most], and ratios between medians."""
    rows = [
        ("", f"{'seconds':<24}{'x import torch':>14}{'x floor':>9}"),
        *_floor_rows(runs),
        *_server_rows(runs),
    ]
    width = max(len(label) for label, figures in rows if figures) + 2
    lines = [f"{label:<{width}}{figures}".rstrip() for label, figures in rows]
    return "\n".join(["", _title(runs, model), *lines, *_notes(runs)])


def _title(runs: Runs, model: str) -> str:
    rounds = len(runs.imports)
    weights = f", {format_size(runs.floors[0].bytes)}" if runs.floors else ""
    name = os.path.basename(model.rstrip("/")) or "start"
    return f"{name}{weights}, page cache {runs.state}, rounds: {rounds}, cores: {os.cpu_count()}"


def _floor_rows(runs: Runs) -> Iterator[tuple[str, str]]:
    """Label and figures of each row."""
    yield _row("import torch", runs.imports)
    if runs.reads:
        yield _row("plain read of the bytes", runs.reads)
    if not runs.floors:
        return
    yield _row("floor", [floor.total for floor in runs.floors], runs)
    yield _row("  python, import torch", [floor.imported for floor in runs.floors])
    yield _row("  rest of the bytes", [floor.arrived - floor.imported for floor in runs.floors])
    yield _row("  one eager forward", [floor.forward for floor in runs.floors])


def _server_rows(runs: Runs) -> Iterator[tuple[str, str]]:
    for name, starts in runs.starts.items():
        yield name, ""
        for label, moment in _STEPS:
            yield _row(f"  {label}", [moment(start) for start in starts], runs)
        for label, seconds in phases(starts).items():
            yield _row(f"    {label}", seconds)


def _notes(runs: Runs) -> Iterator[str]:
    if runs.reads and runs.floors:
        size = runs.floors[0].bytes
        yield f"best plain parallel read: {format_rate(size, median(runs.reads))}"
    known = [share for share in runs.resident if share is not None]
    if known and runs.state != "warm":
        yield f"weights in the page cache just before a start: {median(known):.0%}"
    for name, starts in runs.starts.items():
        held = sum(start.held for start in starts)
        if held:
            yield f"{name}: first request held until ready in {held} of {len(starts)} starts"
        else:
            ratio = median(start.first_ttft / start.second_ttft for start in starts)
            yield f"{name}: first request took {ratio:.2f} x the second (time to first token)"
    for name, start in runs.details.items():
        yield (
            f"{name}: peak memory {format_size(start.peak_pss)} (PSS of all processes), "
            f"idle {start.idle_cpu * 1e3:.0f} ms of CPU in 10 s"
        )


def phases(starts: Sequence[Start]) -> dict[str, list[float]]:
    """Lengths of the phases that a server told of, in order of their beginning."""
    found: dict[str, list[float]] = {}
    for start in starts:
        for phase in sorted(start.phases, key=lambda phase: float(str(phase["start"]))):
            if phase.get("end") is not None:
                label = f"{phase['process']}: {phase['name']}"
                found.setdefault(label, []).append(float(str(phase["end"])) - float(str(phase["start"])))
    return found


def median_start(starts: Sequence[Start]) -> Start:
    """The start whose first token came at the (lower) median time."""
    return sorted(starts, key=lambda start: start.first_token)[(len(starts) - 1) // 2]


def _row(label: str, seconds: Sequence[float], runs: Runs | None = None) -> tuple[str, str]:
    middle = median(seconds)
    text = f"{middle:.3f}"
    if len(seconds) > 1:
        text += f" [{min(seconds):.3f} - {max(seconds):.3f}]"
    figures = f"{text:<24}"
    if runs is not None:
        figures += f"{middle / median(runs.imports):>14.2f}"
    if runs is not None and runs.floors:
        figures += f"{middle / median([floor.total for floor in runs.floors]):>9.2f}"
    return label, figures


def as_json(results: Sequence[Runs], model: str) -> str:
    """Every number of every round, with what is needed to read them."""
    document = {
        "model": model,
        "command": " ".join(sys.argv),
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "units": "seconds since just before the process was made; bytes",
        "states": [dataclasses.asdict(runs) for runs in results],
    }
    return json.dumps(document, indent=1) + "\n"
