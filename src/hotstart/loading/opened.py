"""A file of a checkpoint, open for reading as was chosen for it, and the other way. Torch-free."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

from msgspec import structs

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.folder import Folder
from hotstart.errors import StorageError
from hotstart.loading.choice import COLD, RESIDENT, Choice
from hotstart.loading.trial import TRIAL_FROM, Trial
from hotstart.storage.residency import resident_fraction
from hotstart.storage.source import DIRECT_ALIGN, FileSource, Source

_FIRST_READ = 256 << 10
"""Bytes; the kernel's first window is four times as large as what was asked for, the next ones double."""


class Opened:
    """``choice`` changes when the file system refuses it, or when the other way proves faster.

    A ``way`` is ``map``, ``direct``, ``buffered`` or ``ranges``.
    """

    def __init__(self, folder: Folder, file: ShardFile, choice: Choice) -> None:
        """Raises StorageError and ModelError for what cannot be opened, or not as it was ordered."""
        self.choice = choice
        self.size = file.size
        self._folder, self._file = folder, file
        self._drops_behind = False
        self._direct: Source | None = None
        if "direct" in (choice.strategy, choice.rival):
            try:
                self._direct = folder.source(file, direct=True)
            except StorageError:
                if choice.ordered:
                    raise
                if choice.strategy == "direct":
                    self.choice = choice.buffered("has no direct reads (O_DIRECT)")
        only_directly = self._direct is not None and choice.ordered
        self._cached = self._direct if only_directly and self._direct is not None else folder.source(file)
        self.name = self._cached.name
        self.tried = self._direct is not None and bool(self.choice.rival)
        """Whether a trial of both ways concerns it."""
        for source in self._sources():
            if isinstance(source, FileSource):
                source.descriptor_for_each_reader = choice.network

    def way(self, offset: int, length: int) -> str:
        """How to read a range: as chosen, but what lies in the page cache is read from there."""
        if self.choice.strategy == "direct" and not self.choice.ordered and self.choice.resident >= COLD:
            assert isinstance(self._cached, FileSource)
            begin = offset // DIRECT_ALIGN * DIRECT_ALIGN
            share = resident_fraction(self._cached.fileno(), begin, offset + length - begin)
            if (share or 0.0) >= RESIDENT:
                return "buffered"
        return self.choice.strategy

    def source(self, way: str) -> Source:
        """Where the bytes are read that way."""
        return self._direct if way == "direct" and self._direct is not None else self._cached

    def refuse(self) -> bool:
        """A direct read has failed: whether the file may be read through the page cache instead."""
        if self._cached is self._direct:
            return False
        if self.choice.strategy == "direct":
            self.choice = self.choice.buffered("refuses direct reads into this memory")
        self.tried = False
        return True

    def map(self) -> mmap.mmap:
        """The file's bytes as memory, private to this process. Raises OSError."""
        # Writable: torch warns about memory that it must not write.
        assert isinstance(self._cached, FileSource)
        return mmap.mmap(self._cached.fileno(), self.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)

    def refuse_map(self, error: OSError) -> None:
        """It cannot be mapped: read it through the page cache instead. Raises StorageError for an order."""
        if self.choice.ordered:
            raise StorageError(
                f"{self.name} cannot be mapped: {error.strerror}", advice="Use --read-strategy buffered"
            )
        self.choice = self.choice.buffered(f"cannot be mapped: {error.strerror}")
        self.tried = False

    def read_ahead(self, offset: int, length: int) -> None:
        """Let the kernel begin to bring a range into the page cache."""
        assert isinstance(self._cached, FileSource)
        fd, end = self._cached.fileno(), offset + length
        mount = self.choice.mount
        piece = length if mount is None else mount.read_ahead
        with suppress(OSError):  # a file system that does not read ahead reads when it must
            for begin in range(offset, end, piece):
                os.posix_fadvise(fd, begin, min(piece, end - begin), os.POSIX_FADV_WILLNEED)

    def stream(self, offset: int) -> int:
        """A descriptor that the kernel takes for one that is read in order from ``offset`` on.

        What it knows of a reader belongs to the open file, so each reader needs one. Raises OSError.
        """
        assert isinstance(self._cached, FileSource)
        # By this name it is the same file even if another took its place.
        fd = os.open(f"/proc/self/fd/{self._cached.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        if offset:  # who begins elsewhere shows by two reads, one after the other, that he goes on
            try:
                os.pread(fd, mmap.PAGESIZE, offset)
                os.pread(fd, _FIRST_READ, offset + mmap.PAGESIZE)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def heed(self, trial: Trial) -> None:
        """Take the verdict as this file's choice, if it is one of those that were tried."""
        if self.tried:
            reason = f"{self.choice.resident:.0%} resident in the page cache; {trial}"
            self.choice = structs.replace(self.choice, strategy=trial.verdict, reason=reason)

    def drop_behind(self) -> None:
        """Keep nothing in the page cache of what is read, unless it was there before."""
        self._drops_behind = True
        if self.choice.resident < COLD:
            for source in self._sources():
                if isinstance(source, FileSource):
                    source.drops_behind = True

    def again(self) -> Opened:
        """The same file through new descriptors, for those of this one hang."""
        other = Opened(self._folder, self._file, self.choice)
        other.tried = other.tried and self.tried
        if self._drops_behind:
            other.drop_behind()
        return other

    def verify(self) -> None:
        """Raise StorageError when the content is not the pinned one any more."""
        self._cached.verify()

    def close(self) -> None:
        """Close the descriptors."""
        for source in self._sources():
            source.close()

    def _sources(self) -> set[Source]:
        return {source for source in (self._direct, self._cached) if source is not None}


def begin_trial(files: Sequence[Opened], readers: int) -> Trial | None:
    """Of the two ways of most bytes, if they are worth it; the other files keep theirs."""
    sizes: dict[tuple[str, str], int] = {}
    for file in files:
        if file.tried:
            ways = file.choice.strategy, file.choice.rival
            sizes[ways] = sizes.get(ways, 0) + file.size
    most = max(sizes, key=lambda ways: sizes[ways], default=("", ""))
    for file in files:
        file.tried = file.tried and (file.choice.strategy, file.choice.rival) == most
    return Trial(*most, readers=readers) if sizes.get(most, 0) >= TRIAL_FROM else None
