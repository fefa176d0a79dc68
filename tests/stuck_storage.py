"""Files whose first reads do not come back, as on a file server that is gone."""

from __future__ import annotations

import threading

from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.folder import LocalFolder
from hotstart.storage.source import Cancel, FileSource, Source


class Stuck(FileSource):
    """A descriptor whose first read hangs until it is let go."""

    def __init__(self, path: str, go: threading.Event) -> None:
        super().__init__(path)
        self._go = go

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        if offset == 0:
            self._go.wait(60)
        super().read_into(buffer, offset, cancel)


class StuckFolder(LocalFolder):
    """The first ``descriptors`` of a file hang."""

    def __init__(self, path: str, descriptors: int) -> None:
        super().__init__(path)
        self.left = descriptors
        self.go = threading.Event()

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        self.left -= 1
        return Stuck(file.path, self.go) if self.left >= 0 else FileSource(file.path)
