"""An object of a store as the open file that a library wants: read by ranges, with patience and no program.

A library reads a file from front to back, in pieces of all sizes. Small ones come from bytes that were read
ahead, while the next ones are on their way; large ones go straight to where they are wanted, in several
ranges at once. The source keeps connections, tries again and pins the object, as for hotstart's own readers.
"""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from hotstart.storage.source import Source

AHEAD = 4 << 20
"""Bytes that are read ahead unless told otherwise."""
_RANGE = 16 << 20
"""Bytes of one request, where what is wanted is longer."""


class Ranges:
    """Reads of one source, at most ``most`` at once. Owns the source. Thread-safe."""

    def __init__(self, source: Source, most: int) -> None:
        self.size = source.size
        self._source = source
        self._cancel = threading.Event()
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="ranges")

    def read(self, view: memoryview, offset: int) -> list[Future[None]]:
        """Begin to fill ``view`` from ``offset`` on; the results raise StorageError and ReadCancelled."""
        return [
            self._pool.submit(self._source.read_into, view[at : at + _RANGE], offset + at, self._cancel)
            for at in range(0, len(view), _RANGE)
        ]

    def close(self) -> None:
        """Reads that are under way end with an error."""
        self._cancel.set()
        self._pool.shutdown(cancel_futures=True)
        self._source.close()


class _Ahead(NamedTuple):
    """Bytes from ``at`` on, that may still be on their way."""

    at: int
    data: memoryview
    coming: list[Future[None]]

    @property
    def end(self) -> int:
        return self.at + len(self.data)


class StoredFile(io.BufferedIOBase):
    """Readable and seekable, for one thread; many may share ``ranges``, which closing leaves open."""

    def __init__(self, ranges: Ranges, *, ahead: int = AHEAD, at: int = 0, end: int | None = None) -> None:
        """Nothing behind ``end`` is read ahead."""
        self._ranges = ranges
        self._ahead = ahead
        self._at = at
        self._end = ranges.size if end is None else min(end, ranges.size)
        self._kept: list[_Ahead] = []
        """What is read from, and what comes after it."""

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes from the beginning."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Asks nobody."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._ranges.size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """So many bytes, or what there is before the end. Raises StorageError and ReadCancelled."""
        left = max(0, self._ranges.size - self._at)
        data = bytearray(left if size is None or size < 0 else min(size, left))
        self.readinto(data)
        return bytes(data)

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer, or what of it there is before the end. Raises StorageError and ReadCancelled."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._ranges.size - self._at)]
        wanted = len(view)
        while len(view):
            got = self._from_kept(view) or self._straight(view) or self._keep(len(view))
            view = view[got:]
            self._at += got
        return wanted

    def close(self) -> None:
        """Forget what was read ahead."""
        self._kept = []
        super().close()

    def _from_kept(self, view: memoryview) -> int:
        """Bytes that were there, or on their way."""
        self._kept = [each for each in self._kept if self._at < each.end]
        if not self._kept or self._at < self._kept[0].at:
            return 0
        first = self._kept[0]
        if len(self._kept) == 1:
            self._more(first.end)
        for each in first.coming:
            each.result()
        found = first.data[self._at - first.at :][: len(view)]
        view[: len(found)] = found
        return len(found)

    def _straight(self, view: memoryview) -> int:
        """All bytes, where they are many, and behind them the next ones to keep."""
        if len(view) < self._ahead:
            return 0
        self._kept = []
        coming = self._ranges.read(view, self._at)
        self._more(self._at + len(view))
        for each in coming:
            each.result()
        return len(view)

    def _keep(self, needed: int) -> int:
        """Begin to read ahead from here."""
        self._kept = []
        self._more(self._at, needed)
        return 0

    def _more(self, at: int, needed: int = 0) -> None:
        length = max(needed, min(self._ahead, self._end - at))
        if length > 0:
            data = memoryview(bytearray(length))
            self._kept.append(_Ahead(at, data, self._ranges.read(data, at)))
