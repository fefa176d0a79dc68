"""The rates of ``bench load`` as a picture: one bar a loader, and the ceiling as a line."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotstart.bench.load import ceiling
from hotstart.bench.load_local import OURS
from hotstart.bench.load_report import Row, heading, rows
from hotstart.units import format_rate

if TYPE_CHECKING:
    from hotstart.bench.load import Runs, Subject

_WIDTH, _LABELS, _RIGHT, _ROW, _BAR = 1000, 200, 220, 28, 18
_INK, _FAINT, _LINE = "#1f2328", "#656d76", "#cf222e"
_OURS, _OTHERS = "#0969da", "#8c959f"


def draw(results: Sequence[Runs], subject: Subject) -> bytes:
    """The picture, as PNG; bars are medians, thin lines reach from the slowest round to the fastest."""
    from PIL import Image, ImageDraw, ImageFont

    groups = [(runs, rows(runs, subject)) for runs in results]
    height = sum(len(found) + 2 for _, found in groups) * _ROW + 3 * _ROW // 2
    image = Image.new("RGB", (_WIDTH, height), "white")
    canvas = ImageDraw.Draw(image)
    top = _ROW // 2
    for runs, found in groups:
        top = _draw_group(canvas, runs, found, subject, top)
    legend = "bar: median; thin line: slowest to fastest round; red: ceiling, what plain readers get"
    canvas.text((12, top), legend, font=ImageFont.load_default(14), fill=_FAINT)
    png = io.BytesIO()
    image.save(png, format="PNG")
    return png.getvalue()


def _draw_group(canvas: Any, runs: Runs, found: Sequence[Row], subject: Subject, top: int) -> int:
    from PIL import ImageFont

    font, bold = ImageFont.load_default(14), ImageFont.load_default(17)
    best = ceiling(runs)
    limit = subject.nbytes / best[1] if best is not None else 0.0
    fastest = max([limit, *(subject.nbytes / min(row.seconds) for row in found)])
    scale = (_WIDTH - _LABELS - _RIGHT) / fastest if fastest else 0.0
    title = heading(runs, subject)
    if best is not None:
        title += f", ceiling {format_rate(limit, 1)} ({best[0]})"
    canvas.text((12, top), title, font=bold, fill=_INK)
    top += _ROW
    if best is not None:
        x = _LABELS + limit * scale
        canvas.line((x, top, x, top + len(found) * _ROW), fill=_LINE, width=2)
    for row in found:
        middle = top + _ROW / 2
        right = _LABELS + max(row.rate * scale, 1.5)
        low, high = (_LABELS + subject.nbytes / s * scale for s in (max(row.seconds), min(row.seconds)))
        canvas.text((12, middle), row.name, font=font, fill=_INK, anchor="lm")
        fill = _OURS if row.name.startswith(OURS) else _OTHERS
        canvas.rectangle((_LABELS, middle - _BAR / 2, right, middle + _BAR / 2), fill=fill)
        canvas.line((low, middle, high, middle), fill=_INK, width=2)
        share = f", {row.share:.2f} x ceiling" if row.share else ""
        text = f"{format_rate(row.rate, 1)}{share}"
        # In a column of its own: beside its bar, the line of a far ceiling would run through it.
        canvas.text((_WIDTH - _RIGHT + 8, middle), text, font=font, fill=_FAINT, anchor="lm")
        top += _ROW
    return top + _ROW
