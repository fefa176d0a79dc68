"""Reads that do not come back: taken over once on a new descriptor, then given up by name."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from checkpoint_files import write_model
from hotstart.checkpoint.base import Checkpoint, ShardFile, TensorRef
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.device.fake import FakeDevice
from hotstart.errors import StorageError
from hotstart.loading import image as image_module
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.image import STEP, Image
from hotstart.loading.ring import Loading
from hotstart.loading.watch import Watch
from hotstart.models.spec import WeightSpec
from hotstart.storage.source import Cancel, FileSource, identity
from image_files import write_large
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


def test_a_reader_that_took_over_may_hang_itself_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(tmp_path)
    first, second = threading.Event(), threading.Event()
    hangs = {0: first, STEP: second}
    read_into = FileSource.read_into

    def stuck(source: FileSource, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        if offset in hangs:
            hangs.pop(offset).wait(60)
        read_into(source, buffer, offset, cancel)

    monkeypatch.setattr(FileSource, "read_into", stuck)
    told: list[int] = []

    def progress(done: int) -> None:
        told.append(done)
        if done == 3 * STEP:  # of the third reader, which has another step to read
            second.set()
            for thread in set(threading.enumerate()) - {threading.current_thread()}:
                if thread.name == "weights-again":
                    thread.join(10)

    loading = Image(checkpoint, strategy="buffered", readers=1, patience=PATIENCE, progress=progress)
    loading.start()
    loading.wait()
    first.set()
    assert not hangs
    assert told[-1] == loading.total
    file = loading.checkpoint.files[0]
    assert loading.memory(0)[: file.size] == Path(file.path).read_bytes()


def test_what_was_taken_over_of_a_mapping_is_never_given_back_as_if_its_file_had_it(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    checkpoint = write_large(disk)
    populate = image_module._File._populate

    def stuck(file: image_module._File, offset: int, length: int) -> None:
        if offset == 0:
            go.wait(60)
        populate(file, offset, length)

    monkeypatch.setattr(image_module._File, "_populate", stuck)
    loading = Image(checkpoint, strategy="map", patience=PATIENCE)
    loading.start()
    loading.wait()
    go.set()
    file = checkpoint.files[0]
    assert not loading.is_mapped(0)
    assert loading.memory(0)[: file.size] == Path(file.path).read_bytes()


def test_a_read_that_comes_back_while_it_is_taken_over_does_not_move_where_the_other_begins() -> None:
    now = 0.0
    begins: dict[str, int] = {}

    def take_over(work: str, offset: int, attempt: int) -> None:
        begins[work] = offset
        for reading in readings:  # both come back just now
            assert not watch.moved(reading, 999)

    watch = Watch(1.0, take_over, pytest.fail, clock=lambda: now)
    readings = [watch.begin(work, "file", at) for work, at in (("one", 10), ("two", 20))]
    now = 2.0
    watch.look()
    assert begins == {"one": 10, "two": 20}


def test_where_no_reader_can_be_begun_to_take_over_the_load_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, folder = image(model, descriptors=1)
    loading.start()
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        loading.wait()
    folder.go.set()


def test_an_error_of_a_read_that_was_taken_over_does_not_end_the_load(model: Path) -> None:
    folder = StuckFolder(str(model), 1, then=StorageError("too late"))
    loading = Image(open_checkpoint(folder), strategy="buffered", readers=1, patience=PATIENCE)
    before = set(threading.enumerate())

    def come_back() -> None:
        folder.go.set()
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("weights-") and thread.name != "weights-watch":
                thread.join(10)

    with Then(come_back) as handler:
        loading.start()
        loading.wait()
    assert handler.called
    for number, file in enumerate(loading.checkpoint.files):
        assert loading.memory(number)[: file.size] == Path(file.path).read_bytes()


VALUES = bytes(range(256)) * 4096
BUFFER = 8192


class Then(logging.Handler):
    """Does something when a chunk is the next reader's, before that one starts: a warning tells of it."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__()
        self.called = False
        self._do = do
        self._logger = logging.getLogger("hotstart.storage")

    def emit(self, record: logging.LogRecord) -> None:
        self.called = True
        self._do()

    def __enter__(self) -> Then:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)


class Gpu:
    """A load of one tensor by one reader, a read of which hangs; and the progress it told."""

    def __init__(
        self, directory: Path, *, at: int = 0, then: Exception | None = None, **options: Any
    ) -> None:
        path = directory / "0.safetensors"
        path.write_bytes(VALUES)
        ref = TensorRef("w", 0, "U8", (len(VALUES),), 0, len(VALUES))
        shard = ShardFile(str(path), len(VALUES), 0, identity=identity(os.stat(path)))
        self.folder = StuckFolder(str(directory), 1, at=at, then=then)
        checkpoint = Checkpoint(str(directory), (shard,), {"w": ref}, folder=self.folder)
        layout = Layout.of([(WeightSpec(slot="w", stored=("w",), shape=ref.shape), ref)])
        self.device = FakeDevice()
        self.arena = Arena(layout, self.device)
        self.told: list[int] = []
        before = set(threading.enumerate())
        self.loading = Loading(
            checkpoint, self.arena, threads=1, patience=PATIENCE, progress=self.told.append, **options
        )
        self.readers = [t for t in threading.enumerate() if t not in before and t.name.startswith("reader-")]

    @property
    def weights(self) -> bytes:
        return bytes(self.arena.tensor("w").tolist())

    def come_back(self) -> None:
        """The read that hung ends."""
        self.folder.go.set()
        for thread in self.readers:
            thread.join(0.5)  # it may wait for the next one

    def close(self) -> None:
        self.folder.go.set()
        self.loading.close()
        self.arena.close()


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Gpu]:
    with closing(Gpu(tmp_path)) as gpu:
        yield gpu


def test_a_gpu_load_reads_the_chunk_again_into_another_buffer(gpu: Gpu) -> None:
    gpu.loading.wait()
    assert gpu.weights == VALUES
    assert gpu.told[-1] == max(gpu.told) == gpu.loading.total


def test_a_gpu_load_waits_for_the_copies_of_a_reader_that_never_comes_back(tmp_path: Path) -> None:
    options: dict[str, Any] = {"at": 2 * BUFFER, "buffer_bytes": BUFFER, "buffers": 3}
    with closing(Gpu(tmp_path, **options)) as gpu:
        gpu.loading.wait()
        assert gpu.weights == VALUES


def test_a_reader_that_comes_back_after_its_load_touches_the_device_no_more(gpu: Gpu) -> None:
    gpu.loading.wait()
    gpu.loading.close()
    before = len(gpu.device.calls)
    gpu.come_back()
    assert gpu.device.calls[before:] == []


def test_an_error_that_comes_back_after_the_chunk_was_taken_over_does_not_count(tmp_path: Path) -> None:
    late = StorageError("too late")
    with closing(Gpu(tmp_path, then=late, buffer_bytes=BUFFER)) as gpu:
        handler = Then(gpu.come_back)  # between the take-over and the next reader's first byte
        with handler:
            gpu.loading.wait()
        assert handler.called
        assert gpu.weights == VALUES


def test_a_gpu_load_waits_for_the_next_reader_although_the_first_comes_back_before_it_begins(
    gpu: Gpu,
) -> None:
    with Then(gpu.come_back):
        gpu.loading.wait()
    assert gpu.weights == VALUES
