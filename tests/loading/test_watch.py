"""Reads that do not come back: taken over once on a new descriptor, then given up by name."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from checkpoint_files import write_model
from hotstart.checkpoint.base import ShardFile
from hotstart.checkpoint.folder import LocalFolder
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.errors import StorageError
from hotstart.loading.image import Image
from hotstart.storage.source import Cancel, FileSource, Source

PATIENCE = 0.2


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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def image(model: Path, descriptors: int) -> tuple[Image, StuckFolder]:
    folder = StuckFolder(str(model), descriptors)
    checkpoint = open_checkpoint(folder)
    return Image(checkpoint, strategy="buffered", patience=PATIENCE), folder


def test_a_read_that_hangs_is_made_again_on_a_new_descriptor(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    loading, folder = image(model, descriptors=1)
    loading.start()
    loading.wait()
    for number, file in enumerate(loading.checkpoint.files):
        assert loading.memory(number)[: file.size] == Path(file.path).read_bytes()
    assert "gives no byte at offset 0" in caplog.text
    assert loading.checkpoint.files[0].path in caplog.text
    folder.go.set()


def test_one_that_hangs_again_ends_the_load_with_file_offset_and_age(model: Path) -> None:
    loading, folder = image(model, descriptors=10)
    loading.start()
    with pytest.raises(StorageError, match=r"gave no byte at offset 0 for .* --storage-timeout"):
        loading.wait()
    folder.go.set()


def test_a_read_that_comes_back_late_is_not_counted_twice(model: Path) -> None:
    told: list[int] = []
    folder = StuckFolder(str(model), 1)
    loading = Image(open_checkpoint(folder), strategy="buffered", patience=PATIENCE, progress=told.append)
    loading.start()
    loading.wait()
    folder.go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("weights"):
            thread.join(10)
    assert told[-1] == loading.total
    assert max(told) == loading.total
