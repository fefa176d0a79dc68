"""A file of a checkpoint, open for reading as was chosen for it, and the other way. Torch-free."""

from __future__ import annotations

from msgspec import structs

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.folder import Folder
from hotstart.errors import StorageError
from hotstart.loading.choice import COLD, RESIDENT, Choice
from hotstart.loading.trial import Trial
from hotstart.storage.residency import resident_fraction
from hotstart.storage.source import DIRECT_ALIGN, FileSource, Source


class Opened:
    """``choice`` changes when the file system refuses it, or when the other way proves faster.

    A ``way`` is ``direct``, ``buffered`` or ``ranges``.
    """

    def __init__(self, folder: Folder, file: ShardFile, choice: Choice) -> None:
        """Raises StorageError and ModelError for what cannot be opened, or not as it was ordered."""
        self.choice = choice
        self.size = file.size
        self._folder, self._file = folder, file
        self._direct: Source | None = None
        if choice.strategy == "direct":
            try:
                self._direct = folder.source(file, direct=True)
            except StorageError:
                if choice.ordered:
                    raise
                self.choice = choice.buffered("has no direct reads (O_DIRECT)")
        only_directly = self._direct is not None and choice.ordered
        self._cached = self._direct if only_directly and self._direct is not None else folder.source(file)
        self.name = self._cached.name
        self.tried = self.choice.is_cold
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
        self.choice = self.choice.buffered("refuses direct reads into this memory")
        self.tried = False
        return True

    def heed(self, trial: Trial) -> None:
        """Take the verdict as this file's choice, if it is one of those that were tried."""
        if self.tried:
            reason = f"{self.choice.resident:.0%} resident in the page cache; {trial}"
            self.choice = structs.replace(self.choice, strategy=trial.verdict, reason=reason)

    def drop_behind(self) -> None:
        """Keep nothing in the page cache of what is read, unless it was there before."""
        if self.choice.resident < COLD:
            for source in self._sources():
                if isinstance(source, FileSource):
                    source.drops_behind = True

    def again(self) -> Opened:
        """The same file through new descriptors, for those of this one hang."""
        return Opened(self._folder, self._file, self.choice)

    def verify(self) -> None:
        """Raise StorageError when the content is not the pinned one any more."""
        self._cached.verify()

    def close(self) -> None:
        """Close the descriptors."""
        for source in self._sources():
            source.close()

    def _sources(self) -> set[Source]:
        return {source for source in (self._direct, self._cached) if source is not None}
