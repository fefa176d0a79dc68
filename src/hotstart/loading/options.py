"""``--model-loader-extra-config`` of our own loader: what may stand in it, and what it means here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from hotstart.config.load_formats import key_problems
from hotstart.errors import ConfigError, raise_all

_SMALLEST_BUFFER = 1 << 20


class Ring(Struct, frozen=True):
    """Threads, buffers of each, and bytes of each buffer."""

    threads: int
    buffers: int
    buffer_bytes: int
    limit: int | None = None
    """Bytes that it had to keep to; None: nothing."""

    @property
    def nbytes(self) -> int:
        """Staging memory in all."""
        return self.threads * self.buffers * self.buffer_bytes


class LoaderOptions(Struct, frozen=True):
    """The parsed object; None: the loader decides."""

    concurrency: int | None = None
    memory_limit: int | None = None
    """Bytes; -1: no bound."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> LoaderOptions:
        """Raises ConfigError that lists what is right."""
        # The pattern says which files, not how they are read; a format without it has refused it before.
        problems = key_problems("auto", {key: given[key] for key in given if key != "pattern"})
        threads = given.get("concurrency", given.get("num_threads"))
        if "concurrency" in given and given.get("num_threads", threads) != threads:
            problems.append(
                ConfigError(
                    "--model-loader-extra-config has concurrency and num_threads, which differ",
                    expected="one of them",
                )
            )
        raise_all(problems)
        return cls(threads, given.get("memory_limit"))

    def ring(self, default: Ring, *, need: int, free: int) -> Ring:
        """The ring of staging buffers inside the limit: fewer threads first, then smaller buffers.

        ``need``: bytes that will go through it; it has no more buffers than they fill. ``free``: bytes
        of memory that can be used now, by the container's limit where there is one; a quarter of them is
        the limit where the user has set none.
        """
        limit = free // 4 if self.memory_limit is None else self.memory_limit
        ring = structs.replace(default, threads=self.concurrency or default.threads)
        ring = _needed(ring, need)
        return ring if limit == -1 else structs.replace(_within(ring, limit), limit=limit)


def _needed(ring: Ring, need: int) -> Ring:
    """A ring without buffers that would stay empty."""
    filled = max(1, -(-need // ring.buffer_bytes))
    threads = min(ring.threads, filled)
    size = min(ring.buffer_bytes, -(-max(need, 1) // _SMALLEST_BUFFER) * _SMALLEST_BUFFER)
    return Ring(threads, min(ring.buffers, -(-filled // threads)), size)


def _within(ring: Ring, limit: int) -> Ring:
    """A ring of at most ``limit`` bytes, or the least that works."""
    threads, buffers, size = ring.threads, ring.buffers, ring.buffer_bytes
    threads = max(1, min(threads, limit // (buffers * size)))
    if threads * buffers * size > limit:
        buffers = 1
        size = min(size, max(_SMALLEST_BUFFER, limit // _SMALLEST_BUFFER * _SMALLEST_BUFFER))
    return structs.replace(ring, threads=threads, buffers=buffers, buffer_bytes=size)
