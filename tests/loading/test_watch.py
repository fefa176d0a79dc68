"""Reads that do not come back: taken over once on a new descriptor, then given up by name."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_files import write_model
from hotstart.checkpoint.base import Checkpoint, ShardFile, TensorRef
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.device.fake import FakeDevice
from hotstart.errors import StorageError
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.image import Image
from hotstart.loading.ring import Loading
from hotstart.models.spec import WeightSpec
from hotstart.storage.source import identity
from stuck_storage import StuckFolder

PATIENCE = 0.2


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


VALUES = bytes(range(256)) * 4096


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[tuple[StuckFolder, Arena, Loading, list[int]]]:
    """A load of one tensor by one reader, whose first read hangs; and the progress it told."""
    path = tmp_path / "0.safetensors"
    path.write_bytes(VALUES)
    ref = TensorRef("w", 0, "U8", (len(VALUES),), 0, len(VALUES))
    shard = ShardFile(str(path), len(VALUES), 0, identity=identity(os.stat(path)))
    folder = StuckFolder(str(tmp_path), 1)
    checkpoint = Checkpoint(str(tmp_path), (shard,), {"w": ref}, folder=folder)
    arena = Arena(Layout.of([(WeightSpec(slot="w", stored=("w",), shape=ref.shape), ref)]), FakeDevice())
    told: list[int] = []
    loading = Loading(checkpoint, arena, threads=1, patience=PATIENCE, progress=told.append)
    yield folder, arena, loading, told
    folder.go.set()
    loading.close()
    arena.close()


def test_a_gpu_load_reads_the_chunk_again_into_another_buffer(
    gpu: tuple[StuckFolder, Arena, Loading, list[int]],
) -> None:
    _, arena, loading, told = gpu
    loading.wait()
    assert bytes(arena.tensor("w").tolist()) == VALUES
    assert told[-1] == max(told) == loading.total


def test_a_gpu_load_waits_for_the_next_reader_although_the_first_comes_back_before_it_begins(
    gpu: tuple[StuckFolder, Arena, Loading, list[int]],
) -> None:
    folder, arena, loading, _ = gpu
    first = [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]

    class BetweenTheTwo(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            """The warning is written when the chunk is the next reader's, and before that one starts."""
            folder.go.set()
            for thread in first:
                thread.join(0.5)

    handler, logger = BetweenTheTwo(), logging.getLogger("hotstart.storage")
    logger.addHandler(handler)
    try:
        loading.wait()
    finally:
        logger.removeHandler(handler)
    assert bytes(arena.tensor("w").tolist()) == VALUES
