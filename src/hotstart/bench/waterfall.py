"""The phases of a start as a picture: one bar each, by time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hotstart.bench.report import median_start
from hotstart.errors import ConfigError

if TYPE_CHECKING:
    from hotstart.bench.startup import Runs

_WIDTH, _LABELS, _RIGHT, _ROW, _BAR = 1200, 330, 90, 24, 16
_INK, _FAINT, _GRID = "#1f2328", "#656d76", "#d8dee4"
_COLOURS = {"floor": "#8c959f", "server": "#0969da", "phase": "#54aeff", "token": "#1a7f37"}


class Bar(NamedTuple):
    """From ``start`` to ``end``, in seconds."""

    label: str
    start: float
    end: float
    kind: str


def require_pillow() -> None:
    """Raise ``ConfigError`` when the extra is missing, before anything is measured."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--png needs Pillow, which is not installed", advice="Install it: pip install 'hotstart[plot]'"
        ) from None


def draw(results: Sequence[Runs]) -> bytes:
    """The picture of the median start of each server, in each state, as PNG."""
    from io import BytesIO

    from PIL import Image, ImageDraw

    groups = [(f"page cache {runs.state}", bars(runs)) for runs in results]
    longest = max(bar.end for _, group in groups for bar in group)
    rows = sum(len(group) + 2 for _, group in groups)
    image = Image.new("RGB", (_WIDTH, rows * _ROW + 3 * _ROW), "white")
    canvas = ImageDraw.Draw(image)
    top = _ROW
    for title, group in groups:
        top = _draw_group(canvas, title, group, top, longest)
    picture = BytesIO()
    image.save(picture, format="PNG")
    return picture.getvalue()


def bars(runs: Runs) -> list[Bar]:
    """The floor's parts, then each server's moments and phases."""
    found: list[Bar] = []
    if runs.floors:
        floor = sorted(runs.floors, key=lambda floor: floor.total)[(len(runs.floors) - 1) // 2]
        found.append(Bar("floor: python, import torch", 0.0, floor.imported, "floor"))
        found.append(Bar("floor: rest of the bytes", floor.imported, floor.arrived, "floor"))
        found.append(Bar("floor: one eager forward", floor.arrived, floor.total, "floor"))
    for name, starts in runs.starts.items():
        start = median_start(starts)
        found.append(Bar(f"{name}: until the port answers", 0.0, start.answers, "server"))
        found += _phase_bars(start.phases)
        found.append(Bar(f"{name}: until ready", 0.0, start.ready, "server"))
        found.append(Bar(f"{name}: until the first token", 0.0, start.first_token, "token"))
    return found


def _phase_bars(phases: Sequence[dict[str, object]]) -> list[Bar]:
    times = [(float(str(p["start"])), p.get("end"), f"   {p['process']}: {p['name']}") for p in phases]
    return [
        Bar(label, start, float(str(end)), "phase") for start, end, label in sorted(times) if end is not None
    ]


def _draw_group(canvas: Any, title: str, group: Sequence[Bar], top: int, longest: float) -> int:
    from PIL import ImageFont

    font, bold = ImageFont.load_default(14), ImageFont.load_default(17)
    scale = (_WIDTH - _LABELS - _RIGHT) / longest
    canvas.text((12, top), title, font=bold, fill=_INK)
    top += _ROW + 4
    bottom = top + len(group) * _ROW
    step = _tick(longest)
    for number in range(int(longest / step) + 1):
        x = _LABELS + number * step * scale
        canvas.line((x, top, x, bottom), fill=_GRID)
        canvas.text((x, bottom), f"{number * step:g} s", font=font, fill=_FAINT, anchor="ma")
    for bar in group:
        left, right = _LABELS + bar.start * scale, _LABELS + bar.end * scale
        middle = top + _ROW / 2
        box = (left, middle - _BAR / 2, max(right, left + 1.5), middle + _BAR / 2)
        canvas.text((12, middle), bar.label, font=font, fill=_INK, anchor="lm")
        canvas.rectangle(box, fill=_COLOURS[bar.kind])
        canvas.text((right + 6, middle), f"{bar.end - bar.start:.3f} s", font=font, fill=_FAINT, anchor="lm")
        top += _ROW
    return bottom + 2 * _ROW


def _tick(longest: float) -> float:
    """The step of the time axis: at most ten of them."""
    units = (unit * 10.0**power for power in range(-3, 6) for unit in (1, 2, 5))
    return next(unit for unit in units if longest / unit <= 10)
