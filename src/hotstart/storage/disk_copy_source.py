"""An object of which a part lies on the disk: those chunks from there, the rest from the store."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from hotstart.storage.disk_copy import Entry
from hotstart.storage.disk_copy_index import chunks_touching
from hotstart.storage.source import Cancel, Source


class CopiedSource:
    """See :class:`hotstart.storage.source.Source`. ``inner``: the object in its store.

    Chunks whose bytes are not what their checksum says are asked of the store.
    """

    align = 1

    def __init__(self, inner: Source, entry: Entry) -> None:
        self.name = inner.name
        self.size = inner.size
        self.identity = inner.identity
        self.entry = entry
        self._inner = inner
        self._lock = threading.Lock()
        self._table = entry.table()
        self._fd = -1
        for path in (entry.partial, entry.data):
            with suppress(OSError):
                # Nothing that lies there is the reason that a start fails or hangs, a FIFO neither.
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                break

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        """See :class:`hotstart.storage.source.Source`."""
        end = offset + len(buffer)
        begin = offset  # of what only the store has, so far
        for index in chunks_touching(offset, end):
            first, last = self._table.bounds(index)
            low, high = max(first, offset), min(last, end)
            if not self._copy(index, buffer[low - offset : high - offset], low):
                continue
            if begin < low:
                self._inner.read_into(buffer[begin - offset : low - offset], begin, cancel)
            begin = high
        if begin < end:
            self._inner.read_into(buffer[begin - offset :], begin, cancel)

    def verify(self) -> None:
        """See :class:`hotstart.storage.source.Source`."""
        self._inner.verify()

    def close(self) -> None:
        """See :class:`hotstart.storage.source.Source`."""
        self._inner.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _copy(self, index: int, part: memoryview, offset: int) -> bool:
        """Fill ``part`` of a chunk from the disk; False when the chunk is not there or not right."""
        if self._fd < 0 or index not in self._table.crcs:
            return False
        begin, end = self._table.bounds(index)
        whole = len(part) == end - begin
        chunk = part if whole else memoryview(bytearray(end - begin))
        try:
            right = os.preadv(self._fd, [chunk], begin) == len(chunk) and self._table.holds(index, chunk)
        except OSError:
            right = False
        with self._lock:
            if not right:
                self._table.forget(index)
                return False
        if not whole:
            part[:] = chunk[offset - begin : offset - begin + len(part)]
        return True
