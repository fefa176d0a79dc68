"""The measurements of ``bench load`` as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hotstart.bench.load_formats import LOAD_FORMATS
from hotstart.bench.load_loader import Measurement
from hotstart.checkpoint.wording import count
from hotstart.units import format_rate, format_size

if TYPE_CHECKING:
    from hotstart.bench.load import Runs, Subject


_COLD = 0.05
"""Share in the page cache up to which a file counts as cold."""


class Row(NamedTuple):
    """A loader's rounds in figures."""

    name: str
    seconds: list[float]
    rate: float
    """Bytes of the files per second, of the median."""
    share: float
    """Of the ceiling's rate; 0 where none is known."""
    measured: list[Measurement]


def rows(runs: Runs, subject: Subject) -> list[Row]:
    """Each loader without an error, in the order of the table."""
    from hotstart.bench.load import ceiling

    best = ceiling(runs)
    found = []
    for name, measured in runs.loaders.items():
        if any(each.error for each in measured):
            continue
        seconds = [each.seconds for each in measured]
        middle = median(seconds)
        share = best[1] / middle if best is not None else 0.0
        found.append(Row(name, seconds, subject.nbytes / middle, share, measured))
    return found


def table(runs: Runs, subject: Subject) -> str:
    """One state: seconds as median [least - most], rate, share of the ceiling, memory."""
    head = f"{'seconds [min - max]':<24}{'rate':>11}{'x ceiling':>11}{'peak RSS':>11}{'anonymous':>11}"
    on_gpu = subject.kind != "cpu"
    if on_gpu:
        head += f"{'peak GPU':>11}"
    lines = [("", head), *((row.name, _figures(row, on_gpu)) for row in rows(runs, subject))]
    failed = [(name, f"failed: {error}") for name, error in errors(runs).items()]
    width = max(len(label) for label, _ in [*lines, *failed]) + 2
    text = [f"{label:<{width}}{figures}".rstrip() for label, figures in [*lines, *failed]]
    return "\n".join(
        [
            "",
            f"{heading(runs, subject)}, cores: {os.cpu_count()}",
            subject.medium,
            *([f"into {subject.device.info}"] if subject.device is not None else []),
            *text,
            *_notes(runs, subject),
        ]
    )


def errors(runs: Runs) -> dict[str, str]:
    """The first error of each loader that has one."""
    return {
        name: next(each.error for each in measured if each.error)
        for name, measured in runs.loaders.items()
        if any(each.error for each in measured)
    }


def left_out(reasons: Mapping[str, str]) -> Iterator[str]:
    """A line for each loader that was not measured."""
    for name, reason in reasons.items():
        yield f"not measured: {name}: {reason}"


def heading(runs: Runs, subject: Subject) -> str:
    """What was read, from where, and how often."""
    rounds = max((len(measured) for measured in runs.loaders.values()), default=0)
    name = os.path.basename(subject.location.rstrip("/"))
    state = runs.state if subject.small_files else f"page cache {runs.state}"
    if subject.location.startswith(("http://", "https://")):
        state = "web server"
    files = count(len(subject.files), "file")
    found = f" ({subject.found})" if subject.found else ""
    return f"{name}, {format_size(subject.nbytes)} in {files}{found}, {state}, rounds: {rounds}"


def _figures(row: Row, on_gpu: bool) -> str:
    text = f"{median(row.seconds):.3f}"
    if len(row.seconds) > 1:
        text += f" [{min(row.seconds):.3f} - {max(row.seconds):.3f}]"
    share = f"{row.share:.2f}" if row.share else "-"
    peak, anonymous = (
        format_size(max(getattr(each, field) for each in row.measured)) for field in ("peak", "anonymous")
    )
    figures = f"{text:<24}{format_rate(row.rate, 1):>11}{share:>11}{peak:>11}{anonymous:>11}"
    if on_gpu:
        figures += f"{format_size(max(each.device_peak for each in row.measured)):>11}"
    return figures


def _notes(runs: Runs, subject: Subject) -> Iterator[str]:
    from hotstart.bench.load import ceiling

    best = ceiling(runs)
    if best is None:
        into_memory = " (--loader http.client)" if subject.kind == "cpu" else ""
        yield f"ceiling: unknown, for no plain reader was measured{into_memory}"
    else:
        yield f"ceiling: {best[0]}: {best[1]:.3f} s, {format_rate(subject.nbytes, best[1])}"
    for name, measured in runs.loaders.items():
        note = next((each.note for each in measured if each.note), "")
        if load_format := LOAD_FORMATS.get((subject.format, name)) if subject.found else None:
            note = f"as --load-format {load_format}" + (f": {note}" if note else "")
        if note:
            yield f"{name}: {note}"
    everything = {**runs.plain, **runs.loaders}
    shares = [each.resident for rows in everything.values() for each in rows if each.resident is not None]
    if shares:
        yield f"files in the page cache just before: {min(shares):.0%} to {max(shares):.0%}"
    for name, measured in everything.items():
        held = max((each.resident or 0.0 for each in measured), default=0.0)
        if runs.state == "cold" and held > _COLD:
            yield f"not cold: {name}, of whose files the page cache held {held:.0%}"


def as_json(results: Sequence[Runs], subject: Subject, reasons: Mapping[str, str]) -> str:
    """Every number of every round, with what is needed to read them."""
    from hotstart.bench.load import ceiling

    document = {
        "model": subject.location,
        "medium": subject.medium,
        "bytes": subject.nbytes,
        "files": len(subject.files),
        "format": subject.format,
        "device": "cpu" if subject.device is None else str(subject.device.info),
        "command": " ".join(sys.argv),
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "units": "seconds without imports; bytes",
        "states": [
            {
                **msgspec.to_builtins(runs),
                "ceiling": dict(zip(("reader", "seconds"), ceiling(runs) or (), strict=False)),
            }
            for runs in results
        ],
        "not_measured": dict(reasons),
    }
    return json.dumps(document, indent=1) + "\n"
