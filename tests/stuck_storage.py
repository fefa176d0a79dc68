"""Files whose first reads do not come back, as on a file server that is gone."""

from __future__ import annotations

import threading

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.folder import LocalFolder
from hotstart.storage.source import Cancel, FileSource, Source


class Stuck(FileSource):
    """A descriptor whose read of one offset hangs until it is let go, and fails if ``then`` says so."""

    def __init__(self, path: str, go: threading.Event, at: int, then: Exception | None) -> None:
        super().__init__(path)
        self._go = go
        self._at = at
        self._then = then

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        if offset == self._at:
            self._go.wait(60)
            if self._then is not None:
                raise self._then
        super().read_into(buffer, offset, cancel)


class StuckFolder(LocalFolder):
    """The first ``descriptors`` of a file hang, at its beginning or where ``at`` says."""

    def __init__(self, path: str, descriptors: int, *, at: int = 0, then: Exception | None = None) -> None:
        super().__init__(path)
        self.left = descriptors
        self.at = at
        self.then = then
        self.go = threading.Event()

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        self.left -= 1
        if self.left < 0:
            return FileSource(file.path)
        return Stuck(file.path, self.go, self.at, self.then)
