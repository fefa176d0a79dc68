"""The bytes of one object, written to its copy on the disk as they lie in memory, or read once more.

Bytes that arrived stay in the image, so a copy costs the readers a note of what arrived and nothing
else. What was not written while the model loaded is written afterwards; what memory has no more, or
never had (a GPU's staging buffers are used again), is asked of the store again.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from hotstart.errors import StorageError
from hotstart.storage.disk_copy import DiskCopies, Entry
from hotstart.storage.disk_copy_index import CHUNK, ChunkTable, chunks_inside, chunks_touching, runs
from hotstart.storage.source import Cancel, Source

_AT_ONCE = 16
"""Chunks of one write."""
_SYNC_EVERY = 64 << 20
"""Bytes after which what was written is brought to the disk, and counts."""


class Ranges:
    """Ranges in any order, each as long as its neighbours make it. Overlaps are fine."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> tuple[int, int]:
        """Add a range; returns the whole one that it is a part of now."""
        low, high = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if low < high:
            begin, end = min(begin, self._begins[low]), max(end, self._ends[high - 1])
        self._begins[low:high], self._ends[low:high] = [begin], [end]
        return begin, end


class CopyJob:
    """One object's copy under way. All but :meth:`arrived` and :meth:`needs` run on one thread."""

    def __init__(
        self,
        copies: DiskCopies,
        name: str,
        identity: str,
        size: int,
        open_source: Callable[[], Source],
        memory: memoryview | None = None,
    ) -> None:
        """``memory``: where the object's bytes arrive. ``open_source``: the object in its store."""
        self.name = name
        self.size = size
        self.problem = ""
        """Why there will be no copy in this run."""
        self.done = False
        """Nothing more is done about it."""
        self.synced: Callable[[], None] = lambda: None
        """Called when more of it is on the disk; may call :meth:`lose`."""
        self.published = False
        """It is complete, by this run."""
        self.written = 0
        """Bytes, in this run."""
        self._copies = copies
        self._identity = identity
        self._open_source = open_source
        self._memory = memory
        self._news: deque[tuple[int, int]] = deque()
        self._arrived = Ranges()
        self._waiting: set[int] = set()
        """Chunks in memory that are not written."""
        self._lost: set[int] = set()
        """Chunks that memory has no more."""
        self._entry: Entry | None = None
        self._table: ChunkTable | None = None
        self._fds: list[int] = []
        self._unsynced: list[tuple[int, int]] = []

    def arrived(self, begin: int, end: int) -> None:
        """These bytes are in memory."""
        self._news.append((begin, end))

    def found(self) -> Entry | None:
        """The copy as it is before this run, if there is one."""
        return self._copies.entry(self.name, self._identity, self.size)

    def needs(self, begin: int, end: int) -> bool:
        """Whether any of these bytes are still to be written from memory."""
        if self.done or self._memory is None:
            return False
        return any(not self._has(index) for index in chunks_touching(begin, end) if index not in self._lost)

    def lose(self, begin: int, end: int) -> None:
        """Memory has these bytes no more."""
        lost = chunks_touching(begin, end)
        self._lost.update(lost)
        self._waiting.difference_update(lost)

    def write_arrived(self, stop: Cancel | None = None) -> None:
        """Write the chunks that are whole in memory, until ``stop``."""
        self._guarded(lambda: self._write_arrived(stop))

    def complete(self, cancel: Cancel) -> None:
        """Write all that is missing, from memory or the store, and publish the copy."""
        self._guarded(lambda: self._complete(cancel))
        self.close()

    def discard(self) -> None:
        """What arrived is not what it should be: nothing of it is to be found by another start."""
        self.done = True
        entry = self._entry or self._copies.entry(self.name, self._identity, self.size)
        if entry is not None:
            entry.discard()

    def close(self) -> None:
        """Let go of the files; the copy stays as it is."""
        self.done = True
        while self._fds:
            os.close(self._fds.pop())

    def _guarded(self, work: Callable[[], None]) -> None:
        """No copy is ever the reason that anything ends."""
        if self.done:
            return
        try:
            work()
        except OSError as error:
            words = error.found if isinstance(error, StorageError) else error.strerror or str(error)
            self.problem = words
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and self._entry is not None:
                self._entry.discard()  # a full disk is worse for everybody than no copy
            self.close()

    def _has(self, index: int) -> bool:
        return self._table is not None and index in self._table.crcs

    def _open(self) -> bool:
        """Open the copy for writing; False when that is not for us to do."""
        if self._fds:
            return True
        entry = self._copies.create(self.name, self._identity, self.size)
        lock = None if entry.complete else entry.lock_for_writing()
        if lock is None:
            self.done = True
            return False
        self._fds.append(lock)
        self._entry = entry
        if entry.complete:  # by a process that had the lock until now
            self.close()
            return False
        with suppress(FileNotFoundError):
            os.unlink(entry.data)  # of a wrong length
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fds += [os.open(path, flags, 0o600) for path in (entry.partial, entry.chunks)]
        os.ftruncate(self._fds[1], self.size)
        table = entry.table()
        self._check_earlier(table)
        self._table = table  # from now on what it has may go from memory
        return True

    def _check_earlier(self, table: ChunkTable) -> None:
        """What an earlier process wrote, and perhaps a power cut took back."""
        buffer = memoryview(bytearray(CHUNK))
        for index in sorted(table.crcs):
            begin, end = table.bounds(index)
            part = buffer[: end - begin]
            if os.preadv(self._fds[1], [part], begin) != len(part) or not table.holds(index, part):
                table.forget(index)

    def _write_arrived(self, stop: Cancel | None) -> None:
        while self._news:
            begin, end = self._arrived.add(*self._news.popleft())
            self._waiting.update(chunks_inside(begin, end, self.size))
        if self._memory is None or not self._waiting or not self._open():
            return
        wanted = {index for index in self._waiting if not self._has(index) and index not in self._lost}
        self._waiting = set()
        for run in runs(wanted, _AT_ONCE):
            if not self._lost.isdisjoint(run):
                continue  # the store has them
            if stop is not None and stop.is_set():
                self._waiting.update(index for index in wanted if not self._has(index))
                break
            begin, end = run.start * CHUNK, min(run.stop * CHUNK, self.size)
            self._write(run, self._memory[begin:end])
        self._sync()

    def _write(self, run: Iterable[int], data: memoryview) -> None:
        """Write neighbouring chunks."""
        assert self._table is not None
        first = None
        for index in run:
            begin, end = self._table.bounds(index)
            first = begin if first is None else first
            self._unsynced.append((index, zlib.crc32(data[begin - first : end - first])))
        assert first is not None
        at = 0
        while at < len(data):
            at += os.pwrite(self._fds[1], data[at:], first + at)
        self.written += len(data)
        if len(self._unsynced) * CHUNK >= _SYNC_EVERY:
            self._sync()

    def _sync(self) -> None:
        if self._unsynced and self._table is not None and not self.done:  # not after a discard
            os.fdatasync(self._fds[1])
            self._table.record(self._fds[2], self._unsynced)
            self._unsynced = []
            self.synced()

    def _complete(self, cancel: Cancel) -> None:
        self._write_arrived(cancel)
        if self.done or cancel.is_set() or not self._open():
            return
        assert self._entry is not None
        assert self._table is not None
        missing = self._table.missing()
        if missing:
            self._fetch(missing, cancel)
        if self._table.complete:
            for fd in self._fds[1:]:
                os.fsync(fd)
            self._entry.publish()
            self.published = True

    def _fetch(self, missing: list[int], cancel: Cancel) -> None:
        """Ask the store for what was neither written nor is in memory."""
        source = self._open_source()
        try:
            buffer = memoryview(bytearray(min(_AT_ONCE * CHUNK, self.size)))
            for run in runs(missing, _AT_ONCE):
                if cancel.is_set():
                    break
                begin, end = run.start * CHUNK, min(run.stop * CHUNK, self.size)
                part = buffer[: end - begin]
                source.read_into(part, begin, cancel)
                self._write(run, part)
            self._sync()
        finally:
            source.close()


def compare(entry: Entry, cancel: threading.Event, breathe: Callable[[], None] = lambda: None) -> str:
    """Compare a complete copy with its checksums; returns what is wrong, empty if nothing is.

    A copy that is wrong, or cannot be read, is removed. ``breathe`` is called now and then.
    """
    table = entry.table()
    wrong = "" if table.complete else "its checksums are not complete"
    buffer = memoryview(bytearray(_AT_ONCE * CHUNK))
    try:
        fd = os.open(entry.data, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or str(error)
    try:
        for run in runs(range(table.count), _AT_ONCE):
            if wrong or cancel.is_set():
                break
            first, end = run.start * CHUNK, min(run.stop * CHUNK, table.size)
            whole = os.preadv(fd, [buffer[: end - first]], first) == end - first
            for index in run:
                begin, end = table.bounds(index)
                if not whole or not table.holds(index, buffer[begin - first : end - first]):
                    wrong = f"bytes {begin} to {end} are not what was written"
                    break
            breathe()
    except OSError as error:
        wrong = error.strerror or str(error)
    finally:
        os.close(fd)
    if wrong:
        entry.discard()
    return wrong
