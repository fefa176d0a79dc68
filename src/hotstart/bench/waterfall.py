"""The phases of a start as a picture: one bar each, by time; and the minute after it as a curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hotstart.bench.report import median_start
from hotstart.errors import ConfigError
from hotstart.units import format_seconds

if TYPE_CHECKING:
    from hotstart.bench.first_minute import FirstMinute
    from hotstart.bench.startup import Runs

_WIDTH, _RIGHT, _ROW, _BAR, _CURVE = 1200, 110, 24, 16, 140
_MARGIN = 12
_INK, _FAINT, _GRID = "#1f2328", "#656d76", "#d8dee4"
_COLOURS = {"floor": "#8c959f", "server": "#0969da", "phase": "#54aeff", "token": "#1a7f37"}
_CURVES = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e")
_LEGEND = (
    ("floor", "floor of this machine"),
    ("server", "until it answers, is ready"),
    ("phase", "phase, as the server tells it"),
    ("token", "until the first token"),
)
_GAP = 8
"""Above each server."""


class Bar(NamedTuple):
    """From ``start`` to ``end``, in seconds."""

    label: str
    start: float
    end: float
    kind: str


def require_pillow(flag: str = "--png") -> None:
    """Raise ``ConfigError`` when the extra that ``flag`` needs is missing, before anything is measured."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{flag} needs Pillow, which is not installed", advice="Install it: pip install 'hotstart[plot]'"
        ) from None


def draw(results: Sequence[Runs], model: str = "") -> bytes:
    """The picture of the median start of each server, in each state, as PNG."""
    from io import BytesIO

    from PIL import Image, ImageDraw

    prefix = f"{model}, " if model else ""
    groups = [(f"{prefix}page cache {runs.state}: median start", bars(runs)) for runs in results]
    curves = [
        (f"{prefix}page cache {runs.state}: tokens/s after the first token", runs.minutes)
        for runs in results
        if runs.minutes
    ]
    longest = max(bar.end for _, group in groups for bar in group)
    height = sum(_height(group) + 4 * _ROW for _, group in groups) + 2 * _ROW
    height += sum(_curve_height(minutes) + 4 * _ROW for _, minutes in curves)
    image = Image.new("RGB", (_WIDTH, height), "white")
    canvas = ImageDraw.Draw(image)
    left = (
        max(canvas.textlength(bar.label, font=_font()) for _, group in groups for bar in group) + 3 * _MARGIN
    )
    top = _ROW // 2
    for title, group in groups:
        top = _draw_group(canvas, title, group, top, left, longest)
    for title, minutes in curves:
        top = _draw_curve(canvas, title, minutes, top, left)
    _draw_legend(canvas, top)
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


def _font(size: int = 14) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _draw_group(canvas: Any, title: str, group: Sequence[Bar], top: int, left: float, longest: float) -> int:
    scale = (_WIDTH - left - _RIGHT) / longest
    canvas.text((_MARGIN, top), title, font=_font(17), fill=_INK)
    top += _ROW + 4
    bottom = top + _height(group)
    _draw_times(canvas, top, bottom, left, scale, longest)
    floor = max((bar.end for bar in group if bar.kind == "floor"), default=None)
    if floor is not None:
        x = left + floor * scale
        canvas.line((x, top, x, bottom), fill=_COLOURS["floor"], width=2)
    for place, bar in enumerate(group):
        top += _GAP if _begins_server(group, place) else 0
        begin, end = left + bar.start * scale, left + bar.end * scale
        middle = top + _ROW / 2
        box = (begin, middle - _BAR / 2, max(end, begin + 1.5), middle + _BAR / 2)
        canvas.text((_MARGIN, middle), bar.label, font=_font(), fill=_INK, anchor="lm")
        canvas.rectangle(box, fill=_COLOURS[bar.kind])
        text = format_seconds(bar.end - bar.start)
        # A halo, since the line of the floor may run through it.
        halo = {"stroke_width": 3, "stroke_fill": "white"}
        canvas.text((end + 7, middle), text, font=_font(), fill=_FAINT, anchor="lm", **halo)
        top += _ROW
    return bottom + 2 * _ROW


def _begins_server(group: Sequence[Bar], place: int) -> bool:
    return place > 0 and group[place].kind == "server" and group[place - 1].kind in ("floor", "token")


def _height(group: Sequence[Bar]) -> int:
    return len(group) * _ROW + sum(_GAP for place in range(len(group)) if _begins_server(group, place))


def _curve_height(minutes: dict[str, FirstMinute]) -> int:
    """Room for the names beside it."""
    return max(_CURVE, len(minutes) * _ROW)


def _draw_curve(canvas: Any, title: str, minutes: dict[str, FirstMinute], top: int, left: float) -> int:
    """A line for each server; its name stands beside it, in its colour."""
    canvas.text((_MARGIN, top), title, font=_font(17), fill=_INK)
    top += _ROW + 4
    high = _curve_height(minutes)
    bottom = top + high
    seconds = max(len(minute.tokens) for minute in minutes.values())
    most = max(1.0, *(rate for minute in minutes.values() for rate in minute.tokens))
    scale = (_WIDTH - left - _RIGHT) / seconds
    _draw_times(canvas, top, bottom, left, scale, seconds)
    step = _tick(most)
    for number in range(int(most / step) + 1):
        y = bottom - number * step / most * high
        canvas.line((left, y, left + seconds * scale, y), fill=_GRID)
        if number % 2 == 0:
            canvas.text((left - 6, y), f"{number * step:g}", font=_font(), fill=_FAINT, anchor="rm")
    for place, (name, minute) in enumerate(minutes.items()):
        colour = _CURVES[place % len(_CURVES)]
        points = [
            (left + (second + 0.5) * scale, bottom - rate / most * high)
            for second, rate in enumerate(minute.tokens)
        ]
        canvas.line(points, fill=colour, width=2, joint="curve")
        canvas.text((_MARGIN, top + place * _ROW), name, font=_font(), fill=colour)
    return bottom + 2 * _ROW


def _draw_times(canvas: Any, top: int, bottom: int, left: float, scale: float, longest: float) -> None:
    step = _tick(longest)
    for number in range(int(longest / step) + 1):
        x = left + number * step * scale
        canvas.line((x, top, x, bottom), fill=_GRID)
        canvas.text((x, bottom + 3), f"{number * step:g} s", font=_font(), fill=_FAINT, anchor="ma")


def _draw_legend(canvas: Any, top: int) -> None:
    x = float(_MARGIN)
    for kind, text in _LEGEND:
        canvas.rectangle((x, top + 3, x + 14, top + 15), fill=_COLOURS[kind])
        canvas.text((x + 20, top), text, font=_font(), fill=_FAINT)
        x += 20 + canvas.textlength(text, font=_font()) + 28


def _tick(longest: float) -> float:
    """The step of an axis: at most ten of them."""
    units = (unit * 10.0**power for power in range(-3, 7) for unit in (1, 2, 5))
    return next(unit for unit in units if longest / unit <= 10)
