"""What each medium brought at best in earlier starts, so that the next one can be told what to expect.

One small file below the cache root, written aside and renamed. It is never the reason a start fails:
a file that cannot be read or written is a medium that nobody has measured. A stale rate costs a wrong
expectation and nothing else; a medium and a strategy have one, whatever the model.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

_FILE = "read-rates.json"
_FROM = 64 << 20
"""Bytes; less says little about a rate."""
_KEPT = 64
"""Media; the oldest give way."""


class Rate(Struct, frozen=True):
    """The best of the starts so far."""

    rate: Annotated[float, Meta(gt=0)]
    """Bytes per second."""
    at: float
    """Seconds since the epoch."""

    @property
    def origin(self) -> str:
        """For messages: where the figure comes from."""
        return f"in the best of earlier starts ({time.strftime('%Y-%m-%d', time.gmtime(self.at))})"


def recall(cache_root: str, medium: str, strategy: str) -> Rate | None:
    """The best rate of a medium; None: nobody has measured it."""
    return _load(cache_root).get(_key(medium, strategy)) if cache_root else None


def record(cache_root: str, medium: str, strategy: str, nbytes: int, seconds: float) -> None:
    """Keep the rate of a load that ended, if it is the best so far."""
    if not cache_root or nbytes < _FROM or seconds <= 0:
        return
    rates, key = _load(cache_root), _key(medium, strategy)
    best = rates.pop(key, None)
    rate = nbytes / seconds
    rates[key] = Rate(rate, time.time()) if best is None or rate > best.rate else best
    kept = dict(list(rates.items())[-_KEPT:])
    path = os.path.join(cache_root, _FILE)
    aside = f"{path}.{os.getpid()}"
    with suppress(OSError):
        with open(aside, "wb") as file:
            file.write(msgspec.json.encode(kept))
        os.replace(aside, path)


def _load(cache_root: str) -> dict[str, Rate]:
    try:
        with open(os.path.join(cache_root, _FILE), "rb") as file:
            return msgspec.json.decode(file.read(1 << 20), type=dict[str, Rate])
    except (OSError, msgspec.MsgspecError):
        return {}


def _key(medium: str, strategy: str) -> str:
    """A description may hold names of accounts: only its digest is kept."""
    return hashlib.sha256(f"{medium}\0{strategy}".encode()).hexdigest()[:16]
