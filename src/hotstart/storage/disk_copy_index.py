"""Which chunks of a copy are on the disk, each with its checksum.

A file of one 8-byte record a chunk: the CRC-32 of its bytes, and a seal that only a record written
for this chunk carries, so a hole in the file reads as absent. A record is written once the bytes it
speaks of are on the disk; whoever reads the copy compares all the same.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress

CHUNK = 1 << 20
"""Bytes that share a checksum."""

_RECORD = struct.Struct("<II")


class ChunkTable:
    """Of a file of ``size`` bytes; ``crcs`` holds the checksum of each chunk that is there."""

    def __init__(self, path: str, size: int) -> None:
        """Read what is there; what cannot be read counts as absent."""
        self.path = path
        self.size = size
        self.count = -(-size // CHUNK)
        self.crcs: dict[int, int] = {}
        with suppress(OSError), open(path, "rb") as file:
            data = file.read(self.count * _RECORD.size)
            whole = len(data) // _RECORD.size * _RECORD.size
            for index, (crc, seal) in enumerate(_RECORD.iter_unpack(data[:whole])):
                if seal == _seal(index, crc):
                    self.crcs[index] = crc

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return len(self.crcs) == self.count

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that are there."""
        return sum(end - begin for begin, end in map(self.bounds, self.crcs))

    def bounds(self, index: int) -> tuple[int, int]:
        """Where a chunk begins and ends."""
        return index * CHUNK, min((index + 1) * CHUNK, self.size)

    def missing(self) -> list[int]:
        """The chunks that are not there, in order."""
        return [index for index in range(self.count) if index not in self.crcs]

    def holds(self, index: int, data: memoryview | bytes) -> bool:
        """Whether these are the bytes of a chunk that is there."""
        return self.crcs.get(index) == zlib.crc32(data)

    def forget(self, index: int) -> None:
        """The chunk is not what its record says."""
        self.crcs.pop(index, None)

    def record(self, fd: int, found: Iterable[tuple[int, int]]) -> None:
        """Write the checksums of chunks, whose bytes are on the disk, to ``fd``. Raises OSError."""
        for index, crc in found:
            os.pwrite(fd, _RECORD.pack(crc, _seal(index, crc)), index * _RECORD.size)
            self.crcs[index] = crc


def chunks_inside(begin: int, end: int, size: int) -> range:
    """The chunks that lie wholly inside a range of a file of ``size`` bytes."""
    last = -(-size // CHUNK) if end >= size else end // CHUNK
    return range(-(-begin // CHUNK), last)


def chunks_touching(begin: int, end: int) -> range:
    """The chunks that a range has a part in."""
    return range(begin // CHUNK, -(-end // CHUNK)) if end > begin else range(0)


def runs(indices: Iterable[int], longest: int) -> Iterator[range]:
    """Neighbours together, in ascending order, at most ``longest`` of them."""
    run: range | None = None
    for index in sorted(indices):
        if run is not None and index == run.stop and len(run) < longest:
            run = range(run.start, index + 1)
            continue
        if run is not None:
            yield run
        run = range(index, index + 1)
    if run is not None:
        yield run


def _seal(index: int, crc: int) -> int:
    return zlib.crc32(struct.pack("<QI", index, crc), 0x686F7473)
