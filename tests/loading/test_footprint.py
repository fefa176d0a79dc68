"""What weights occupy: counted from headers alone, and true of the stores."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from hotstart.checkpoint.base import Checkpoint, ShardFile, TensorRef
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.loading import footprint
from hotstart.loading.arena import Layout
from hotstart.loading.image import Image
from hotstart.loading.image_store import ImageStore
from hotstart.loading.match import Matched, match
from hotstart.models.spec import WeightSpec

MB = 1 << 20


def matched(dtype: str, *, stored: str = "BF16", shift: int = 0) -> tuple[Checkpoint, Matched]:
    """Two slots of one tensor and one of three, 1 Mi elements each; nothing is written."""
    size = {"BF16": 2, "F32": 4}[stored]
    slots = {"a": ["a"], "qkv": ["q", "k", "v"], "b": ["b"]}
    tensors, specs, offset = {}, [], 8 + shift
    for slot, names in slots.items():
        for at, name in enumerate(names):
            tensors[name] = TensorRef(name, 0, stored, (1024, 1024), offset, MB * size)
            specs.append(WeightSpec(slot=slot, stored=(name,), shape=(1024, 1024), at=at * 1024))
            offset += MB * size
    checkpoint = Checkpoint("", (ShardFile("model.safetensors", offset, 8),), tensors)
    return checkpoint, match(specs, checkpoint, dtype)


def test_weights_used_as_stored_occupy_their_files() -> None:
    checkpoint, found = matched("bfloat16")
    assert footprint.of_images(checkpoint, found) == footprint.Footprint(10 * MB + 8, 10 * MB + 8)


def test_wider_copies_replace_what_is_stored_slot_by_slot() -> None:
    checkpoint, found = matched("float32")
    held, peak = 20 * MB + 8, 20 * MB + 8 + (6 + 12) * MB
    assert footprint.of_images(checkpoint, found) == footprint.Footprint(held, peak)


def test_narrower_copies_leave_half() -> None:
    checkpoint, found = matched("bfloat16", stored="F32")
    assert footprint.of_images(checkpoint, found) == footprint.Footprint(10 * MB + 8, 20 * MB + 8 + 18 * MB)


def test_misaligned_weights_move_without_growing() -> None:
    checkpoint, found = matched("bfloat16", shift=1)
    size = 10 * MB + 9
    assert footprint.of_images(checkpoint, found) == footprint.Footprint(size, size + 12 * MB)


def test_arena_holds_slots_and_meanwhile_what_is_cast_into_them() -> None:
    _, found = matched("float32")
    layout = Layout.of(found.loads, dtype=found.dtype)
    assert footprint.of_arena(layout) == footprint.Footprint(20 * MB, 30 * MB)


@pytest.mark.parametrize("strategy", ["buffered", "map"])
def test_stored_bytes_of_a_converted_slot_are_given_back_at_once(strategy: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stored = {name: torch.randn(1024, 1024).bfloat16() for name in ("embed", "q", "k")}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    specs = [
        WeightSpec(slot="embed", stored=("embed",), shape=(1024, 1024)),
        WeightSpec(slot="head", stored=("head",), shape=(1024, 1024), alias_of="embed"),
        WeightSpec(slot="qk", stored=("q",), shape=(1024, 1024)),
        WeightSpec(slot="qk", stored=("k",), shape=(1024, 1024), at=1024),
    ]
    found = match(specs, checkpoint, "float32")
    image = Image(checkpoint, strategy=strategy)
    store = ImageStore(image, list(found.loads), {"head": "embed"}, torch.float32)
    image.start()
    image.wait()
    assert resident(image.memory(0)) >= 6 * MB
    embed, qk = store.tensor("embed"), store.tensor("qk")
    assert resident(image.memory(0)) < MB, "headers and the edges of tensors"
    assert torch.equal(embed, stored["embed"].float())  # type: ignore[arg-type]
    assert torch.equal(qk, torch.cat([stored["q"], stored["k"]]).float())  # type: ignore[arg-type]
    assert store.tensor("head") is embed, "a tied head must not read what was given back"
    assert not store.may_release("head"), "the embedding is still read"
    kept = weakref.ref(qk)
    del qk
    assert kept() is None, "a copy that the model replaces is freed"


def resident(memory: mmap.mmap) -> int:
    """Bytes of a mapping in this process's memory: bit 63 of each entry of /proc/self/pagemap."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory)) // mmap.PAGESIZE
    count = -(-len(memory) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(first * 8)
        entries = file.read(count * 8)
    return sum(entries[at] >> 7 for at in range(7, len(entries), 8)) * mmap.PAGESIZE
