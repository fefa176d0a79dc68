"""Any checkpoint, read in chunks of any size that come in any order, some of them twice: the same bits.

In images (CPU) and in arenas that a ring fills (GPU), from files and from ranges of objects.
"""

from __future__ import annotations

import tempfile
import threading
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from any_checkpoint import Stored, Turns, checkpoints, passing_faults, same_bits
from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.base import Checkpoint, ShardFile, TensorRef
from hotstart.checkpoint.folder import Folder, LocalFolder
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder, open_store
from hotstart.device.fake import FakeDevice
from hotstart.loading import image
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.image import Image
from hotstart.loading.image_store import ImageStore
from hotstart.loading.ring import Loading
from hotstart.storage.source import Cancel, FileSource, Source

KINDS = ["image", "ring"]
PAGE = 4096
Slots = dict[str, Tensor | tuple[Tensor, ...]]


class Shaken(FileSource):
    """Reads end in the order of ``turns``; some never do before the load is over."""

    def __init__(self, path: str, direct: bool, pinned: str, folder: ShakenFolder) -> None:
        super().__init__(path, direct=direct, pinned=pinned)
        self._folder = folder

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        if self._folder.hangs(self.name, offset):
            self._folder.over.wait(60)
        super().read_into(buffer, offset, cancel)
        if self._folder.turns is not None:
            self._folder.turns.take()


class ShakenFolder(LocalFolder):
    """A directory whose files are :class:`Shaken`."""

    def __init__(self, path: str, turns: Turns | None = None, hanging: int = 0) -> None:
        super().__init__(path)
        self.turns = turns
        self.over = threading.Event()
        self.hung: set[tuple[str, int]] = set()
        self._hanging = hanging
        self._lock = threading.Lock()

    def hangs(self, name: str, offset: int) -> bool:
        """The first reads of so many places, each once."""
        with self._lock:
            if len(self.hung) >= self._hanging or (name, offset) in self.hung:
                return False
            self.hung.add((name, offset))
            return True

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        return Shaken(file.path, direct, file.identity, self)


def in_image(
    stored: Stored, checkpoint: Checkpoint, step: int, readers: int, strategy: str, patience: float
) -> Slots:
    with patch.object(image, "STEP", step):
        load = Image(checkpoint, strategy=strategy, readers=readers, patience=patience)
        with closing(load):
            load.start()
            store = ImageStore(load, stored.items(checkpoint), {}, getattr(torch, stored.dtype))
            found = {slot: store.tensor(slot) for slot in stored.slots}  # before their bytes are there
            report = load.wait()
    assert report.bytes == sum(map(len, stored.files.values()))
    return found


def in_arena(
    stored: Stored, checkpoint: Checkpoint, step: int, readers: int, buffers: int, patience: float
) -> Slots:
    layout = Layout.of(stored.items(checkpoint), dtype=stored.dtype)
    device = FakeDevice()
    with closing(Arena(layout, device)) as arena:
        loading = Loading(
            checkpoint, arena, threads=readers, buffers=buffers, buffer_bytes=step, patience=patience
        )
        with closing(loading):
            report = loading.wait()
            arena.finish()
        assert report.bytes == loading.total
        return {slot: arena.tensor(slot).clone() for slot in stored.slots}


def assert_same(found: Slots, stored: Stored) -> None:
    for slot, expected in stored.slots.items():
        assert same_bits(found[slot], expected), slot


def opened(folder: Folder) -> Checkpoint:
    return open_checkpoint(folder, ignore_index=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(
    stored=checkpoints(),
    pages=st.integers(1, 5),
    readers=st.integers(1, 6),
    buffers=st.integers(1, 3),
    strategy=st.sampled_from(["map", "buffered", "direct"]),
    seed=st.integers(0, 2**32),
)
def test_of_files_whatever_the_order_of_reads(
    kind: str, stored: Stored, pages: int, readers: int, buffers: int, strategy: str, seed: int
) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".images-") as directory:
        for name, data in stored.files.items():
            Path(directory, name).write_bytes(data)
        with closing(Turns(seed, readers)) as turns:
            checkpoint = opened(ShakenFolder(directory, turns))
            if kind == "image":
                found = in_image(stored, checkpoint, pages * PAGE, readers, strategy, 60.0)
            else:
                found = in_arena(stored, checkpoint, pages * PAGE, readers, buffers, 60.0)
        assert_same(found, stored)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=4)
@given(stored=checkpoints(), pages=st.integers(1, 2), readers=st.integers(2, 4))
def test_of_files_whose_reads_hang_and_come_back_late(
    kind: str, stored: Stored, pages: int, readers: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, data in stored.files.items():
            Path(directory, name).write_bytes(data)
        folder = ShakenFolder(directory, hanging=3)
        try:
            checkpoint = opened(folder)
            if kind == "image":
                found = in_image(stored, checkpoint, pages * PAGE, readers, "buffered", 0.3)
            else:
                found = in_arena(stored, checkpoint, pages * PAGE, readers, 2, 0.3)
        finally:
            folder.over.set()
        for thread in threading.enumerate():
            if thread.name.startswith(("weights-", "reader-")):
                thread.join(20)
        assert_same(found, stored)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(
    stored=checkpoints(),
    pages=st.integers(1, 5),
    readers=st.integers(1, 6),
    script=passing_faults(),
    etag=st.sampled_from(["strong", "weak", "none"]),
)
def test_of_objects_whatever_the_network_does(
    kind: str, stored: Stored, pages: int, readers: int, script: list[Fault], etag: str
) -> None:
    files = {f"m/{name}": data for name, data in stored.files.items()}
    with FaultServer(files, *script, etag=etag) as server:
        store = open_store(f"{server.url}/m", environ={}, patience=20.0)
        folder = ObjectFolder(store, "")
        headers = [folder.header(name, number) for number, name in enumerate(stored.files)]
        tensors: dict[str, TensorRef] = {}
        for header in headers:
            assert header is not None
            tensors |= {ref.name: ref for ref in header.tensors}
        shards = tuple(header.file for header in headers if header is not None)
        checkpoint = Checkpoint(folder.path, shards, tensors, folder=folder)
        if kind == "image":
            found = in_image(stored, checkpoint, pages * PAGE, readers, "auto", 60.0)
        else:
            found = in_arena(stored, checkpoint, pages * PAGE, readers, 1, 60.0)
        store.close()
    assert_same(found, stored)
