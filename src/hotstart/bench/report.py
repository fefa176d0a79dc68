"""The measurements of ``bench startup`` as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from hotstart.bench.first_minute import STREAMS
from hotstart.checkpoint.wording import count
from hotstart.units import format_rate, format_size

if TYPE_CHECKING:
    from hotstart.bench.first_minute import FirstMinute
    from hotstart.bench.launch import Start
    from hotstart.bench.startup import Plan, Runs

_COLD = 0.05
"""Share in the page cache up to which a file counts as evicted."""
_STRETCH = 5
"""Seconds of the first minute that are one figure."""

_STEPS: tuple[tuple[str, Callable[[Start], float]], ...] = (
    ("port answers", lambda start: start.answers),
    ("ready", lambda start: start.ready),
    ("first token", lambda start: start.first_token),
)


def table(runs: Runs, model: str) -> str:
    """One state of the page cache: seconds as median [least - most], and ratios between medians."""
    head = f"{'seconds [min - max]':<24}{'x import torch':>16}" + (f"{'x floor':>10}" if runs.floors else "")
    rows = [("", head), *_floor_rows(runs), *_server_rows(runs)]
    width = max(len(label) for label, figures in rows if figures) + 2
    lines = [f"{label:<{width}}{figures}".rstrip() for label, figures in rows]
    return "\n".join(["", _title(runs, model), *lines, "", *_notes(runs)]).rstrip()


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
        yield "", ""
        yield name, ""
        for label, moment in _STEPS:
            yield _row(f"  {label}", [moment(start) for start in starts], runs)
        for label, seconds in phases(starts).items():
            yield _row(f"    {label}", seconds)
        yield from _bytes_rows(runs, name, starts)
    for name in runs.failed:
        if name not in runs.starts:
            yield "", ""
            yield name, f"failed: {_reason(runs, name)}"


def _bytes_rows(runs: Runs, name: str, starts: Sequence[Start]) -> Iterator[tuple[str, str]]:
    told = [start.read_bytes for start in starts if start.read_bytes is not None]
    by_processes = (
        f"{format_size(round(median(told)))} by its processes" if told else "not told of its processes"
    )
    disks = ", ".join(f"{disk} {format_size(read)}" for disk, read in device_bytes(starts).items())
    yield "  read from storage", by_processes + (f"; by all of the machine: {disks}" if disks else "")
    peak = format_size(round(median(start.peak_rss for start in starts)))
    yield "  peak memory", f"{peak} (resident in each process until the first answer, added up)"
    if name in runs.details:
        detail = runs.details[name]
        yield (
            "  peak memory, PSS",
            f"{format_size(detail.peak_pss)} (what processes share counts once; ten idle seconds included)",
        )
        yield "  idle", f"{detail.idle_cpu * 1e3:.0f} ms of CPU in 10 s"
    if name in runs.minutes:
        yield (
            f"  tokens/s, by {_STRETCH} s",
            " ".join(f"{rate:.0f}" for rate in stretches(runs.minutes[name])),
        )


def device_bytes(starts: Sequence[Start]) -> dict[str, int]:
    """By disk, the median of what it read during a start."""
    disks = dict.fromkeys(disk for start in starts for disk in start.device_bytes)
    middle = {disk: round(median(start.device_bytes.get(disk, 0) for start in starts)) for disk in disks}
    return {disk: read for disk, read in middle.items() if read}


def stretches(minute: FirstMinute) -> list[float]:
    """Tokens a second, of each stretch of the first minute."""
    parts = [minute.tokens[at : at + _STRETCH] for at in range(0, len(minute.tokens), _STRETCH)]
    return [sum(part) / len(part) for part in parts]


def _notes(runs: Runs) -> Iterator[str]:
    if runs.reads and runs.floors:
        size = runs.floors[0].bytes
        yield f"best plain parallel read: {format_rate(size, median(runs.reads))}"
    yield from _cache_notes(runs)
    for name, starts in runs.starts.items():
        held = sum(start.held for start in starts)
        if held:
            yield f"{name}: first request held until ready in {held} of {len(starts)} starts"
        else:
            ratio = median(start.first_ttft / start.second_ttft for start in starts)
            yield f"{name}: first request took {ratio:.2f} x the second (time to first token)"
        if name in runs.failed:
            yield f"{name}: failed after these: {_reason(runs, name)}"
        if (minute := runs.minutes.get(name)) and minute.failed:
            yield f"{name}: {count(minute.failed, 'request')} of the first minute failed"
    if runs.minutes:
        yield f"tokens/s: after the first token, with {STREAMS} requests at once"
    yield from _comparison(runs)


def _reason(runs: Runs, name: str) -> str:
    """What ended the measurement, without the server's last lines."""
    return runs.failed[name].split("; its last lines:", 1)[0].removeprefix(f"{name} ")


def _cache_notes(runs: Runs) -> Iterator[str]:
    """A cold figure that was not cold is told, and by which files."""
    known = [share for share in runs.resident if share is not None]
    if not known or runs.state == "warm":
        return
    yield f"weights in the page cache just before a start: {median(known):.0%}"
    for path, share in runs.kept.items():
        if share > _COLD:
            yield f"not cold: the page cache held up to {share:.0%} of {os.path.basename(path)}"


def _comparison(runs: Runs) -> Iterator[str]:
    """Each further server against the first one."""
    middles = {name: median(start.first_token for start in starts) for name, starts in runs.starts.items()}
    first, *others = middles or [""]
    for name in others:
        yield f"first token of {name}: {middles[name] / middles[first]:.2f} x that of {first}"


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
        figures += f"{middle / median(runs.imports):>16.2f}"
    if runs is not None and runs.floors:
        figures += f"{middle / median([floor.total for floor in runs.floors]):>10.2f}"
    return label, figures


def as_json(results: Sequence[Runs], plan: Plan) -> str:
    """Every number of every round, what is needed to read them, and the medians of the table."""
    document = {
        "model": plan.model,
        "command": shlex.join(sys.argv),
        "servers": {server.name: shlex.join(server.argv) for server in plan.servers},
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "units": "seconds since just before the process was made; bytes",
        "summary": {runs.state: _summary(runs) for runs in results},
        "states": [dataclasses.asdict(runs) for runs in results],
    }
    return json.dumps(document, indent=1) + "\n"


def _summary(runs: Runs) -> dict[str, object]:
    """Medians by server."""
    imports = median(runs.imports)
    floor = median(floor.total for floor in runs.floors) if runs.floors else None
    found: dict[str, object] = {"import_torch": imports, "floor": floor}
    for name, starts in runs.starts.items():
        token = median(start.first_token for start in starts)
        found[name] = {
            **{label.replace(" ", "_"): median(map(moment, starts)) for label, moment in _STEPS},
            "x_import_torch": token / imports,
            "x_floor": token / floor if floor else None,
        }
    return found
