"""``--model-loader-extra-config`` of our own loader: what may stand in it, and what it means here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from hotstart.errors import ConfigError, HotstartError, raise_all

_KEYS: dict[str, tuple[type, int, str]] = {
    "concurrency": (int, 1, "reads in flight, 1 or more"),
    "memory_limit": (int, -1, "bytes of staging memory at most; -1: no bound, 0: the least that works"),
    "num_threads": (int, 1, "the same as concurrency"),
    "enable_multithread_load": (bool, 0, "true or false; reads are parallel either way"),
}
_SMALLEST_BUFFER = 1 << 20


class Ring(Struct, frozen=True):
    """Threads, buffers of each, and bytes of each buffer."""

    threads: int
    buffers: int
    buffer_bytes: int

    @property
    def nbytes(self) -> int:
        """Staging memory in all."""
        return self.threads * self.buffers * self.buffer_bytes


class LoaderOptions(Struct, frozen=True):
    """The parsed object; None: the loader decides."""

    concurrency: int | None = None
    memory_limit: int | None = None
    """Bytes; None: no bound."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> LoaderOptions:
        """Raises ConfigError that lists what is right."""
        problems: list[HotstartError] = [
            problem for key, value in given.items() if (problem := _problem(key, value)) is not None
        ]
        threads = given.get("concurrency", given.get("num_threads"))
        if "concurrency" in given and given.get("num_threads", threads) != threads:
            problems.append(
                ConfigError(
                    "--model-loader-extra-config has concurrency and num_threads, which differ",
                    expected="one of them",
                )
            )
        raise_all(problems)
        limit = given.get("memory_limit", -1)
        return cls(threads, None if limit == -1 else limit)

    def ring(self, default: Ring) -> Ring:
        """The ring of staging buffers inside the limit: fewer threads first, then smaller buffers."""
        threads, buffers, size = self.concurrency or default.threads, default.buffers, default.buffer_bytes
        if self.memory_limit is None:
            return Ring(threads, buffers, size)
        threads = max(1, min(threads, self.memory_limit // (buffers * size)))
        if threads * buffers * size > self.memory_limit:
            buffers = 1
            size = max(_SMALLEST_BUFFER, self.memory_limit // _SMALLEST_BUFFER * _SMALLEST_BUFFER)
        return Ring(threads, buffers, min(size, default.buffer_bytes))


def _problem(key: str, value: Any) -> ConfigError | None:
    if key not in _KEYS:
        known = "; ".join(f"{name} ({text})" for name, (_, _, text) in _KEYS.items())
        return ConfigError(f"--model-loader-extra-config has no key {key!r}", expected=known)
    kind, least, text = _KEYS[key]
    if isinstance(value, bool):
        right = kind is bool
    else:
        right = isinstance(value, int) and kind is int and value >= least
    if right:
        return None
    return ConfigError(f"--model-loader-extra-config: {key} is {value!r}", expected=text)
