"""Put a benchmark's files into the page cache, or take them out, and say how far that worked.

Eviction asks politely: pages that are dirty or mapped by a running process stay. What is still
resident afterwards is measured, so that a "cold" figure that was not cold can be told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hotstart.storage.residency import evict, resident_fraction

_DROP_CACHES = "/proc/sys/vm/drop_caches"
_STEP = 16 << 20


def model_files(directory: str) -> list[str]:
    """The weight files of a model directory, and its small files."""
    return sorted(str(path) for path in Path(directory).iterdir() if path.is_file())


def library_files() -> list[str]:
    """Interpreter, standard library and everything installed beside it."""
    roots = {sys.prefix, sys.base_prefix}
    found = (Path(folder) / name for root in roots for folder, _, names in os.walk(root) for name in names)
    return [str(path) for path in found if path.is_file()]


def warm(paths: Iterable[str]) -> None:
    """Read every byte once."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(_STEP):
                pass


def evict_all(paths: Iterable[str]) -> None:
    """Drop the pages of these files; unreadable ones are passed over."""
    for path in paths:
        with suppress(OSError):
            evict(path)


def drop_everything() -> bool:
    """Drop the page cache of the whole machine; False where that is not allowed."""
    os.sync()
    try:
        with open(_DROP_CACHES, "w") as file:
            file.write("3\n")
    except OSError:
        return False
    return True


def resident_share(paths: Iterable[str]) -> float | None:
    """Share of the bytes of these files that the page cache holds, 0 to 1; None: cannot be known."""
    sizes = {path: os.path.getsize(path) for path in paths}
    shares = resident_shares(sizes)
    total = sum(sizes.values())
    if not total or len(shares) < len(sizes):
        return None
    return sum(shares[path] * size for path, size in sizes.items()) / total


def resident_shares(paths: Iterable[str]) -> dict[str, float]:
    """By file, the share of its bytes that the page cache holds; without those where it cannot be known."""
    found = {path: resident_fraction(path) for path in paths}
    return {path: share for path, share in found.items() if share is not None}
