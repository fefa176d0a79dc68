"""What a medium brings, from a few reads of the files themselves: small, so that nobody waits for it.

The reads are those of the plan, as many at once, spread over the files, and of ranges that are not in
the page cache where the plan means to go past it. They say what the medium gives in the first moment:
a disk that has to wake up, or a store that is far away, gives more later.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, ShardFile
from hotstart.errors import StorageError
from hotstart.storage.access import read_error
from hotstart.storage.residency import resident_fraction
from hotstart.storage.source import Source
from hotstart.units import format_size

_MADV_POPULATE_READ = 22
_READ = 4 << 20
_EACH = 2
"""Reads of each reader."""
_MOST = 8
"""Readers: more would make it no longer a few megabytes."""
_CACHED = 0.5


class Probe(Struct, frozen=True):
    """Bytes per second of one medium, and how they were found."""

    rate: float
    origin: str


def probe(checkpoint: Checkpoint, files: Sequence[ShardFile], kind: str, readers: int) -> Probe:
    """Read a few megabytes of these files as the plan has it. Raises StorageError and ModelError.

    ``kind``: see :attr:`~hotstart.loading.choice.Choice.kind`.
    """
    readers = min(readers, _MOST)
    maps = kind.startswith("map")
    ranges = list(_ranges(files, readers * _EACH, past_cache=kind != "map"))
    sources: dict[str, Source] = {}
    try:
        for file, _, _ in ranges:
            if file.path not in sources:
                sources[file.path] = _open(checkpoint, file, direct=kind == "direct")
        stop = threading.Event()

        def read(item: tuple[ShardFile, int, int]) -> int:
            file, offset, length = item
            source = sources[file.path]
            # Not closed: after an error, the frames of its traceback hold views of this memory.
            memory = mmap.mmap(-1, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE)
            blocks = -(-length // source.align) * source.align
            source.read_into(memoryview(memory)[:blocks], offset, stop)
            return length

        began = time.monotonic()
        with ThreadPoolExecutor(readers) as pool:
            done = sum(pool.map(_enter if maps else read, ranges))
        seconds = max(time.monotonic() - began, 1e-6)
    finally:
        for source in sources.values():
            source.close()
    return Probe(max(done, 1) / seconds, f"by a probe of {format_size(done)}")


def _ranges(
    files: Sequence[ShardFile], wanted: int, *, past_cache: bool
) -> Iterator[tuple[ShardFile, int, int]]:
    """As many ranges, spread over the files; those that are in the page cache only where nothing else is."""
    steps = [
        (file, offset, min(_READ, file.size - offset))
        for file in files
        for offset in range(0, file.size, _READ)
    ]
    spread = [steps[number * len(steps) // wanted] for number in range(min(wanted, len(steps)))]
    spread = spread if len(steps) > wanted else steps
    cold = [step for step in spread if not (past_cache and _cached(*step))]
    yield from cold or spread


def _cached(file: ShardFile, offset: int, length: int) -> bool:
    if not os.path.isabs(file.path):
        return False
    fd = _descriptor(file.path)
    try:
        return (resident_fraction(fd, offset, length) or 0.0) >= _CACHED
    finally:
        os.close(fd)


def _open(checkpoint: Checkpoint, file: ShardFile, *, direct: bool) -> Source:
    assert checkpoint.folder is not None
    if direct:
        try:
            return checkpoint.folder.source(file, direct=True)
        except StorageError:
            pass  # the load falls back as well, and says so
    return checkpoint.folder.source(file)


def _enter(item: tuple[ShardFile, int, int]) -> int:
    """Map a range and have its pages entered into the page table, and read where they are not there."""
    file, offset, length = item
    fd = _descriptor(file.path)
    try:
        with mmap.mmap(fd, length, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=offset) as memory:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
            with suppress(OSError):  # older than Linux 5.14
                memory.madvise(_MADV_POPULATE_READ)
            bytes(memory[:: mmap.PAGESIZE])
    finally:
        os.close(fd)
    return length


def _descriptor(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise read_error(path, error, doing="open") from None
