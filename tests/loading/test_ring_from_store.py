"""A GPU's weights from an object store: ranges into pinned buffers, whatever the network does meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

from checkpoint_files import file_of
from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder
from hotstart.device.fake import FakeDevice
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.ring import Loading
from hotstart.models.spec import WeightSpec
from hotstart.storage.location import parse_location
from hotstart.storage.object_store import ObjectStore

SIZE = 200_000


def test_device_memory_holds_what_the_store_holds_although_answers_are_cut_and_late(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(SIZE)
    header = {"t": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}
    # Longer than a hanging read of a file would be given: a store's own patience counts.
    faults = Fault(path="model", nth=4, delay=0.6), Fault(path="model", nth=6, cut=100)
    with FaultServer({"m/model.safetensors": file_of(header, data)}, *faults) as web:
        store = ObjectStore(parse_location(f"{web.url}/m"), environ={}, patience=30.0)
        checkpoint = open_checkpoint(ObjectFolder(store, str(tmp_path)))
        spec = WeightSpec(slot="t", stored=("t",), shape=(SIZE,))
        arena = Arena(Layout.of([(spec, checkpoint.tensors["t"])]), FakeDevice())
        loading = Loading(checkpoint, arena, threads=4, first=2, buffer_bytes=8192, patience=0.2)
        loading.wait()
        loading.close()
    assert bytes(arena.tensor("t").tolist()) == data
    assert len(web.requests) > SIZE // 8192
    arena.close()
