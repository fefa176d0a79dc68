"""Counts and lists of names, as messages write them."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def few(names: Sequence[str], limit: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
