"""Sizes, counts and times as people write and read them."""

from __future__ import annotations

import re

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)\s*$")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*$", re.IGNORECASE)


def parse_count(text: str) -> int:
    """``"4096"``, ``"4k"`` (4 000), ``"4K"`` (4 096), ``"1.5k"``; vLLM's convention.

    Raises ``ValueError`` when the text is no whole number of the given unit.
    """
    match = _COUNT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a whole number (4096, 4k = 4000, 4K = 4096)")
    number, suffix = match.groups()
    unit = _BINARY[suffix.lower()] if suffix.isupper() else 1000 ** " kmgt".index(suffix or " ")
    value = float(number) * unit
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value) if "." in number else int(number) * unit


def parse_size(text: str) -> int:
    """Bytes from ``"5368709120"``, ``"5GiB"``, ``"5g"`` (binary) or ``"5GB"`` (decimal)."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size (5368709120, 5GiB, 5.4GB)")
    number, suffix, binary, byte = match.groups()
    power = " kmgt".index(suffix.lower() or " ")
    base = 1000 if byte and not binary else 1024
    return int(float(number) * base**power) if "." in number else int(number) * base**power


def format_size(size: float) -> str:
    """Decimal units with three significant figures: ``269 MB``, ``14.8 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{_three(size)} {unit}"
        size /= 1000
    return f"{_three(size)} TB"


def format_rate(size: float, seconds: float) -> str:
    """``1.62 GB/s``; ``-`` when no time has passed."""
    return f"{format_size(size / seconds)}/s" if seconds > 0 else "-"


def format_seconds(seconds: float) -> str:
    """``840 ms`` below a second, ``1.62 s`` below ten, ``75 s`` below two minutes, then ``2 min 5 s``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{_three(seconds)} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s"


def _three(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
