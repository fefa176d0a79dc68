"""Whatever the network does, what lies in memory is what lies in the store, bit by bit."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import file_of
from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.remote import ObjectFolder
from hotstart.loading import image
from hotstart.loading.image import Image
from hotstart.storage.location import parse_location
from hotstart.storage.object_store import ObjectStore

SEEDS = st.integers(0, 2**32)
PAGES = st.integers(1, 5).map(lambda pages: pages * 4096)


def faults(draw: st.DrawFn) -> Fault:
    """One that passes, somewhere in the load."""
    kinds: list[dict[str, Any]] = [
        {"cut": draw(st.integers(0, 9000))},
        {"cut": draw(st.integers(0, 9000)), "reset": True},
        {"status": draw(st.sampled_from([429, 500, 503]))},
        {"chunked": draw(st.integers(1, 5000))},
        {"close_after": True},
        {"delay": draw(st.floats(0.0, 0.03))},
        {"headers": {"Content-Length": None}, "cut": draw(st.integers(0, 9000))},
        {"headers": {"Content-Range": "bytes 0-1/*"}},
        {"headers": {"Connection": "close"}},
        {"bandwidth": 300_000.0},
    ]
    kind = draw(st.sampled_from(kinds))
    return Fault(path=".safetensors", nth=draw(st.integers(1, 30)), **kind)


@st.composite
def scripts(draw: st.DrawFn) -> list[Fault]:
    return [faults(draw) for _ in range(draw(st.integers(0, 8)))]


def checkpoint_of(files: dict[str, bytes], folder: ObjectFolder) -> Checkpoint:
    headers = [folder.header(name.removeprefix("m/"), number) for number, name in enumerate(files)]
    return Checkpoint(
        path=folder.path, folder=folder, files=tuple(header.file for header in headers if header), tensors={}
    )


def store_files(seed: int, sizes: list[int]) -> dict[str, bytes]:
    """Safetensors files of one tensor each."""
    made: dict[str, bytes] = {}
    for number, size in enumerate(sizes):
        header = {"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        made[f"m/{number}.safetensors"] = file_of(header, random.Random(seed + number).randbytes(size))
    return made


@settings(deadline=None, max_examples=100)
@given(
    seed=SEEDS,
    sizes=st.lists(st.integers(0, 60_000), min_size=1, max_size=4),
    step=PAGES,
    readers=st.integers(1, 6),
    script=scripts(),
    etag=st.sampled_from(["strong", "weak", "none"]),
)
def test_any_checkpoint_chunking_and_faults_give_the_same_bytes(
    seed: int, sizes: list[int], step: int, readers: int, script: list[Fault], etag: str
) -> None:
    files = store_files(seed, sizes)
    with FaultServer(files, *script, etag=etag) as server, patch.object(image, "STEP", step):
        store = ObjectStore(parse_location(f"{server.url}/m"), environ={}, patience=20.0)
        load = Image(checkpoint_of(files, ObjectFolder(store, "")), readers=readers)
        load.start()
        try:
            report = load.wait()
            found = [bytes(load.memory(number))[: len(data)] for number, data in enumerate(files.values())]
        finally:
            load.close()
    assert found == list(files.values())
    assert report.bytes == sum(map(len, files.values()))
