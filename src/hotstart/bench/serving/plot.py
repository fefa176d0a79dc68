"""A run of ``bench serve`` as a picture: how TTFT and ITL are spread, and tokens a second over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, floor, log, log10
from typing import Any, NamedTuple

from hotstart.bench.latency import percentile

_WIDTH, _MARGIN, _LEFT, _ROW = 1200, 16, 56, 24
_HIGH = 220
"""Of each diagram, without titles and axes."""
_GAP = 3 * _ROW
_INK, _FAINT, _GRID = "#1f2328", "#656d76", "#d8dee4"
_BAR, _LINE, _FAR = "#54aeff", "#0969da", "#cf222e"
_BINS = 60
_AROUND = 4.0
"""The axis of times reaches at least to P50 divided and multiplied by it."""
_LEAST = 100.0
"""It begins at P50 divided by this at the latest: gaps of chunks that came together are next to nothing."""
_MOST_BUCKETS = 120


class Spread(NamedTuple):
    """A histogram of seconds in bins that are equally wide on a logarithmic axis."""

    counts: list[int]
    begin: float
    end: float
    p50: float
    p99: float

    def place(self, value: float) -> float:
        """From 0 at ``begin`` to 1 at ``end``; what is less than ``begin`` counts as that."""
        return log(max(value, self.begin) / self.begin) / log(self.end / self.begin)


class Rate(NamedTuple):
    """Tokens a second, from the first request's start, in buckets of the same width."""

    tokens: list[float]
    width: float
    """Seconds of a bucket."""


def draw(result: Mapping[str, Any]) -> bytes:
    """The picture, as PNG.

    ``result`` has vLLM's keys of ``--save-detailed``, lists by request, times in seconds: ``ttfts``,
    ``itls`` (a list for each request), ``start_times``, ``output_lens``, and ``errors``, where a text
    that is not empty means that the request does not count. ``title`` is written above, where given.
    """
    from io import BytesIO

    from PIL import Image, ImageDraw

    good = successful(result)
    title = str(result.get("title", ""))
    top = _MARGIN + (_ROW if title else 0)
    image = Image.new("RGB", (_WIDTH, top + 2 * (_HIGH + _GAP) + _MARGIN), "white")
    canvas = ImageDraw.Draw(image)
    if title:
        canvas.text((_MARGIN, _MARGIN // 2), title, font=_font(17), fill=_INK)
    half = (_WIDTH - 2 * _MARGIN) / 2
    gaps = [gap for each in good for gap in each.itls]
    _draw_spread(canvas, "Time to first token (TTFT)", "requests", [each.ttft for each in good], _MARGIN, top)
    _draw_spread(canvas, "Between chunks of an answer (ITL)", "gaps", gaps, _MARGIN + half, top)
    _draw_rate(canvas, rate(good), top + _HIGH + _GAP)
    picture = BytesIO()
    image.save(picture, format="PNG")
    return picture.getvalue()


class Streamed(NamedTuple):
    """A request that was answered; times in seconds."""

    start: float
    ttft: float
    itls: list[float]
    tokens: int


def successful(result: Mapping[str, Any]) -> list[Streamed]:
    """The requests of a detailed result that count."""
    columns = ("start_times", "ttfts", "itls", "output_lens", "errors")
    rows = zip(*(result[name] for name in columns), strict=True)
    return [Streamed(start, ttft, itls, tokens) for start, ttft, itls, tokens, error in rows if not error]


def spread(values: Sequence[float]) -> Spread:
    """The histogram of values in seconds, of which there is at least one; all are in it."""
    p50 = max(percentile(values, 50), 1e-6)
    begin = max(min(*values, p50 / _AROUND), p50 / _LEAST)
    found = Spread([0] * _BINS, begin, max(*values, p50 * _AROUND), p50, percentile(values, 99))
    for value in values:
        found.counts[min(int(found.place(value) * _BINS), _BINS - 1)] += 1
    return found


def rate(requests: Sequence[Streamed]) -> Rate:
    """Tokens a second over time; those of an answer are spread evenly over its chunks."""
    begin = min((each.start for each in requests), default=0.0)
    arrivals = [
        (at - begin, each.tokens / (len(each.itls) + 1))
        for each in requests
        for at in accumulate(each.itls, initial=each.start + each.ttft)
    ]
    longest = max((at for at, _ in arrivals), default=0.0)
    width = next(
        unit * 10.0**power for power in range(-2, 6) for unit in (1, 2, 5)
        if longest < unit * 10.0**power * _MOST_BUCKETS
    )  # fmt: skip
    tokens = [0.0] * (int(longest / width) + 1)
    for at, amount in arrivals:
        tokens[int(at / width)] += amount / width
    return Rate(tokens, width)


def _font(size: int = 14) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _draw_spread(canvas: Any, title: str, noun: str, values: Sequence[float], left: float, top: int) -> None:
    canvas.text((left, top), f"{title}: {noun}, axis logarithmic", font=_font(17), fill=_INK)
    top += _ROW + 4
    left, right, bottom = left + _LEFT, left + (_WIDTH - 2 * _MARGIN) / 2 - _MARGIN, top + _HIGH
    if not values:
        canvas.text(
            ((left + right) / 2, top + _HIGH / 2), f"no {noun}", font=_font(), fill=_FAINT, anchor="mm"
        )
        return
    found = spread(values)
    # Room above the bars for the two marks.
    high = (_HIGH - 2 * _ROW) / max(found.counts)
    _draw_times(canvas, found, (left, right), (top, bottom))
    _draw_amounts(canvas, max(found.counts), (left, right), bottom, high)
    width = (right - left) / _BINS
    for place, count in enumerate(found.counts):
        if count:
            x, y = left + place * width, min(bottom - count * high, bottom - 1)
            canvas.rectangle((x, y, x + width - 1, bottom), fill=_BAR)
    for row, (name, value, colour) in enumerate((("P50", found.p50, _LINE), ("P99", found.p99, _FAR))):
        x, y = left + found.place(value) * (right - left), top + row * _ROW
        canvas.line((x, y, x, bottom), fill=colour, width=2)
        fits = x + 110 < right
        text = f"{name} {_shown(value)}"
        at = (x + (6 if fits else -6), y)
        canvas.text(at, text, font=_font(), fill=colour, anchor="la" if fits else "ra")


def _draw_times(canvas: Any, found: Spread, columns: tuple[float, float], rows: tuple[int, int]) -> None:
    """Lines at 1, 2 and 5; at 1 alone where they would be too many."""
    powers = range(floor(log10(found.begin)), ceil(log10(found.end)) + 1)
    units = (1, 2, 5) if log10(found.end / found.begin) < 3 else (1,)
    for value in (unit * 10.0**power for power in powers for unit in units):
        if found.begin <= value <= found.end:
            x = columns[0] + found.place(value) * (columns[1] - columns[0])
            canvas.line((x, rows[0], x, rows[1]), fill=_GRID)
            canvas.text((x, rows[1] + 3), _shown(value), font=_font(), fill=_FAINT, anchor="ma")


def _shown(seconds: float) -> str:
    """Three digits: percentiles of two runs are compared. Pillow's own font has no µ."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _draw_rate(canvas: Any, found: Rate, top: int) -> None:
    width = "second" if found.width == 1 else _shown(found.width)
    title = f"Output tokens/s over time, each {width}"
    canvas.text((_MARGIN, top), title, font=_font(17), fill=_INK)
    top += _ROW + 4
    left, right, bottom = _MARGIN + _LEFT, _WIDTH - 2 * _MARGIN, top + _HIGH
    longest, most = len(found.tokens) * found.width, max(found.tokens)
    if not most:
        canvas.text(
            ((left + right) / 2, top + _HIGH / 2), "no tokens", font=_font(), fill=_FAINT, anchor="mm"
        )
        return
    scale, high = (right - left) / longest, _HIGH / most
    _draw_seconds(canvas, longest, left, scale, (top, bottom))
    _draw_amounts(canvas, most, (left, right), bottom, high)
    points: list[tuple[float, float]] = [(left, bottom)]
    for place, tokens in enumerate(found.tokens):
        y = bottom - tokens * high
        points += [(left + place * found.width * scale, y), (left + (place + 1) * found.width * scale, y)]
    canvas.polygon([*points, (right, bottom)], fill=_BAR)
    canvas.line([*points, (right, bottom)], fill=_LINE, width=2)


def _draw_seconds(canvas: Any, longest: float, left: float, scale: float, rows: tuple[int, int]) -> None:
    unit, name = (1.0, "s") if longest >= 2 else (1e-3, "ms")
    step = _tick(longest / unit, 8)
    for number in range(int(longest / unit / step) + 1):
        x = left + number * step * unit * scale
        canvas.line((x, rows[0], x, rows[1]), fill=_GRID)
        text = f"{number * step:g} {name}" if number else "0"
        canvas.text((x, rows[1] + 3), text, font=_font(), fill=_FAINT, anchor="ma")


def _draw_amounts(canvas: Any, most: float, columns: tuple[float, float], bottom: int, high: float) -> None:
    step = max(_tick(most, 5), 1.0 if most >= 1 else 0.0)
    for number in range(int(most / step) + 1):
        y = bottom - number * step * high
        canvas.line((columns[0], y, columns[1], y), fill=_GRID)
        canvas.text((columns[0] - 6, y), f"{number * step:g}", font=_font(), fill=_FAINT, anchor="rm")


def _tick(longest: float, most: int) -> float:
    """The step of an axis: at most ``most`` of them."""
    units = (unit * 10.0**power for power in range(-6, 10) for unit in (1, 2, 5))
    return next(unit for unit in units if longest / unit <= most)
