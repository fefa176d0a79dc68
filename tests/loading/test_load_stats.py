"""What a load tells of itself: bytes by source and strategy, what the page cache had, what was retried."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from checkpoint_files import file_of
from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder
from hotstart.device.fake import FakeDevice
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.image import Image
from hotstart.loading.ring import Loading
from hotstart.messages import BytesRead
from hotstart.models.spec import WeightSpec
from hotstart.storage.location import parse_location
from hotstart.storage.mounts import mount_of
from hotstart.storage.object_store import ObjectStore

SIZE = 300_000
DATA = random.Random(5).randbytes(SIZE)
FILE = file_of({"t": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}, DATA)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(FILE)
    return tmp_path


@pytest.mark.parametrize("strategy", ["map", "buffered"])
def test_files_count_under_their_file_system_and_strategy(model: Path, strategy: str) -> None:
    mount = mount_of(str(model))
    assert mount is not None
    image = Image(open_checkpoint(str(model)), strategy=strategy)
    image.start()
    image.wait()
    stats = image.stats()
    assert stats.read == [BytesRead(mount.fs_type, strategy, len(FILE))]
    assert stats.resident == pytest.approx(1)  # it was written just now
    assert (stats.retried, stats.replaced) == (0, 0)


def test_a_load_into_device_memory_counts_what_it_has_read(model: Path) -> None:
    checkpoint = open_checkpoint(str(model))
    spec = WeightSpec(slot="t", stored=("t",), shape=(SIZE,))
    arena = Arena(Layout.of([(spec, checkpoint.tensors["t"])]), FakeDevice())
    loading = Loading(checkpoint, arena, threads=2, buffer_bytes=8192)
    loading.wait()
    assert [(each.strategy, each.bytes) for each in loading.stats().read] == [("buffered", SIZE)]
    loading.close()
    arena.close()


def test_objects_count_under_their_scheme_and_broken_ranges_as_retries(tmp_path: Path) -> None:
    cut = Fault(
        path="model", if_range=lambda begin, end: end > 1000, nth=2, cut=100
    )  # the first is the header's
    with FaultServer({"m/model.safetensors": FILE}, cut) as web:
        store = ObjectStore(parse_location(f"{web.url}/m"), environ={}, patience=30.0)
        image = Image(open_checkpoint(ObjectFolder(store, str(tmp_path))))
        image.start()
        image.wait()
        stats = image.stats()
        image.close()
    assert stats.read == [BytesRead("http", "ranges", len(FILE))]
    assert stats.resident is None
    assert (stats.retried, stats.replaced) == (1, 0)
