"""Weights from files into an arena: layout, the ring of buffers, and what can go wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotstart.checkpoint.base import Checkpoint, ShardFile, TensorRef
from hotstart.checkpoint.folder import LocalFolder
from hotstart.device.cpu import CpuDevice
from hotstart.device.fake import FakeDevice
from hotstart.errors import DeviceError, EngineError, ModelError, StorageError
from hotstart.loading.arena import ALIGNMENT, Arena, Layout
from hotstart.loading.ring import Loading, plan_chunks
from hotstart.loading.tally import LoadReport
from hotstart.models.spec import DTYPES, WeightSpec
from hotstart.storage.source import identity

Item = tuple[WeightSpec, TensorRef]


class Files:
    """Shards of random bytes, written as tensors are added; ``start`` misaligns every tensor."""

    def __init__(self, folder: Path, start: int = 11) -> None:
        self.folder = folder
        self.start = start
        self.contents: list[bytearray] = []
        self.refs: dict[str, TensorRef] = {}
        self.random = random.Random(7)

    def add(
        self, name: str, shape: tuple[int, ...], dtype: str = "BF16", *, file: int = 0, hole: int = 0
    ) -> TensorRef:
        while len(self.contents) <= file:
            self.contents.append(bytearray(self.random.randbytes(self.start)))
        data = self.contents[file]
        data += self.random.randbytes(hole)
        size = DTYPES[dtype][1]
        for extent in shape:
            size *= extent
        ref = TensorRef(name, file, dtype, shape, len(data), size)
        # Ordinary numbers: a random exponent may be a NaN, which equals nothing.
        values = torch.randint(-100, 100, shape).to(getattr(torch, DTYPES[dtype][0]))
        data += bytes(values.reshape(-1).view(torch.uint8).tolist())
        self.refs[name] = ref
        return ref

    def checkpoint(self) -> Checkpoint:
        shards = []
        for index, data in enumerate(self.contents):
            path = self.folder / f"{index}.safetensors"
            path.write_bytes(data)
            shards.append(ShardFile(str(path), len(data), self.start, identity=identity(os.stat(path))))
        return Checkpoint(str(self.folder), tuple(shards), self.refs, folder=LocalFolder(str(self.folder)))

    def value(self, name: str) -> torch.Tensor:
        ref = self.refs[name]
        data = self.contents[ref.file][ref.offset : ref.offset + ref.nbytes]
        return torch.frombuffer(data, dtype=getattr(torch, DTYPES[ref.dtype][0])).view(ref.shape)

    def item(self, name: str, slot: str | None = None, at: int = 0, finish: str | None = None) -> Item:
        ref = self.refs[name]
        return WeightSpec(slot=slot or name, stored=(name,), shape=ref.shape, at=at, finish=finish), ref


def load(checkpoint: Checkpoint, arena: Arena, **options: Any) -> LoadReport:
    with closing(Loading(checkpoint, arena, **options)) as loading:
        return loading.wait()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_q_k_and_v_are_one_tensor_whatever_their_order_in_the_files(files: Files) -> None:
    files.add("v", (2, 8), file=1)
    files.add("k", (2, 8))
    files.add("gap", (3, 5))
    files.add("q", (4, 8))
    items = [files.item("k", "qkv", 4), files.item("v", "qkv", 6), files.item("q", "qkv", 0)]
    arena = Arena(Layout.of(items), FakeDevice())
    load(files.checkpoint(), arena)
    assert torch.equal(arena.tensor("qkv"), torch.cat([files.value("q"), files.value("k"), files.value("v")]))


def test_slots_are_aligned_whatever_the_file_does(files: Files) -> None:
    for n in range(5):
        files.add(f"w{n}", (3, 7), hole=n)
    layout = Layout.of([files.item(f"w{n}") for n in range(5)])
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots.values())
    arena = Arena(layout, FakeDevice())
    load(files.checkpoint(), arena)
    for n in range(5):
        assert torch.equal(arena.tensor(f"w{n}"), files.value(f"w{n}"))


def test_a_tensor_can_be_taken_before_its_bytes_arrive(files: Files) -> None:
    files.add("w", (16, 16))
    arena = Arena(Layout.of([files.item("w")]), FakeDevice())
    early = arena.tensor("w")
    load(files.checkpoint(), arena)
    assert torch.equal(early, files.value("w"))


def test_tensors_longer_than_a_buffer_arrive_whole_and_each_byte_is_read_once(files: Files) -> None:
    files.add("long", (300, 101), "F32")
    files.add("short", (3,))
    files.add("long2", (200, 77), "F32", file=1)
    items = [files.item(name) for name in files.refs]
    arena = Arena(Layout.of(items), FakeDevice())
    report = load(files.checkpoint(), arena, threads=3, buffers=2, buffer_bytes=8192)
    for name in files.refs:
        assert torch.equal(arena.tensor(name), files.value(name))
    assert report.bytes == sum(ref.nbytes for ref in files.refs.values())


def test_a_buffer_is_reused_only_after_its_copies_have_run(files: Files) -> None:
    files.add("w", (64, 1024), "F32")
    arena = Arena(Layout.of([files.item("w")]), device := FakeDevice())
    load(files.checkpoint(), arena, threads=1, buffers=1, buffer_bytes=8192)
    assert torch.equal(arena.tensor("w"), files.value("w"))
    assert any(call[0] == "wait" for call in device.calls)


def test_tensors_that_nobody_asked_for_are_not_read(files: Files) -> None:
    files.add("a", (64,))
    files.add("unused", (1 << 18,))
    files.add("b", (64,))
    arena = Arena(Layout.of([files.item("a"), files.item("b")]), FakeDevice())
    report = load(files.checkpoint(), arena)
    assert report.bytes == 256


def test_a_small_hole_between_tensors_is_read_over(files: Files) -> None:
    files.add("a", (64,))
    files.add("b", (64,), hole=100)
    arena = Arena(Layout.of([files.item("a"), files.item("b")]), FakeDevice())
    assert len(plan_chunks((part.ref, arena.address(part)) for part in arena.layout.parts)) == 1
    assert load(files.checkpoint(), arena).bytes == 356
    assert torch.equal(arena.tensor("b"), files.value("b"))


def test_neighbours_that_stay_neighbours_are_one_copy(files: Files) -> None:
    files.add("gate", (4, 8))
    files.add("up", (4, 8))
    arena = Arena(Layout.of([files.item("gate", "gu", 0), files.item("up", "gu", 4)]), device := FakeDevice())
    load(files.checkpoint(), arena)
    assert [call[0] for call in device.calls].count("copy") == 1


def test_other_dtypes_are_cast_into_their_slots_and_their_staging_is_freed(files: Files) -> None:
    files.add("q", (4, 8), "F32")
    files.add("k", (2, 8), "BF16")
    files.add("scale", (3,), "F32")
    items = [
        files.item("q", "qk", 0, "cast"),
        files.item("k", "qk", 4, "cast"),
        files.item("scale"),
    ]
    arena = Arena(Layout.of(items, dtype="bfloat16"), device := FakeDevice())
    load(files.checkpoint(), arena)
    before = device.allocated
    arena.finish()
    assert device.allocated < before
    assert torch.equal(arena.tensor("qk"), torch.cat([files.value("q").bfloat16(), files.value("k")]))
    assert arena.tensor("scale").dtype == torch.float32


def test_every_stored_dtype_of_safetensors_has_a_view(files: Files) -> None:
    for dtype in DTYPES:
        files.add(dtype, (4, 2), dtype)
    arena = Arena(Layout.of([files.item(dtype) for dtype in DTYPES]), CpuDevice())
    load(files.checkpoint(), arena)
    for dtype, (name, _) in DTYPES.items():
        found = arena.tensor(dtype)
        assert found.dtype == getattr(torch, name)
        assert torch.equal(found.view(torch.uint8), files.value(dtype).view(torch.uint8))


def test_a_tied_weight_shares_the_bytes_of_the_other_even_when_it_is_stored(files: Files) -> None:
    files.add("embed", (8, 4))
    copy = files.add("head", (8, 4))
    tied = WeightSpec(slot="lm_head", stored=("head",), shape=(8, 4), alias_of="embed")
    for arena in (
        Arena(Layout.of([files.item("embed")], tied=[tied]), FakeDevice()),
        Arena(Layout.of([files.item("embed"), (tied, copy)]), FakeDevice()),
    ):
        report = load(files.checkpoint(), arena)
        assert report.bytes == files.refs["embed"].nbytes
        assert arena.tensor("lm_head").data_ptr() == arena.tensor("embed").data_ptr()


def test_scalars_and_empty_tensors_are_weights_too(files: Files) -> None:
    files.add("scalar", (), "F32")
    files.add("empty", (0, 4))
    arena = Arena(Layout.of([files.item("scalar"), files.item("empty")]), FakeDevice())
    load(files.checkpoint(), arena)
    assert torch.equal(arena.tensor("scalar"), files.value("scalar"))
    assert arena.tensor("empty").shape == (0, 4)


def test_a_hole_between_the_rows_of_a_slot_is_refused(files: Files) -> None:
    files.add("q", (4, 8))
    files.add("v", (2, 8))
    with pytest.raises(ModelError, match="v should begin at row 6 of qkv, whose rows so far end at 4"):
        Layout.of([files.item("q", "qkv", 0), files.item("v", "qkv", 6)])


def test_a_shape_other_than_the_specification_is_refused(files: Files) -> None:
    ref = files.add("w", (4, 8))
    spec = WeightSpec(slot="w", stored=("w",), shape=(4, 9))
    with pytest.raises(ModelError, match=r"w has shape \[4, 8\]; expected \[4, 9\]"):
        Layout.of([(spec, ref)])


def test_parts_of_different_dtypes_are_refused_when_they_are_not_cast(files: Files) -> None:
    files.add("q", (4, 8), "F32")
    files.add("k", (4, 8), "BF16")
    with pytest.raises(ModelError, match="q F32, k BF16"):
        Layout.of([files.item("q", "qk", 0), files.item("k", "qk", 4)])


def test_progress_grows_to_the_total(files: Files) -> None:
    files.add("w", (64, 1024), "F32")
    arena = Arena(Layout.of([files.item("w")]), FakeDevice())
    seen: list[int] = []
    loading = Loading(files.checkpoint(), arena, threads=4, buffer_bytes=8192, progress=seen.append)
    loading.wait()
    loading.close()
    assert seen == sorted(set(seen))
    assert seen[-1] == loading.total


def test_slow_progress_holds_up_no_other_reader_and_never_goes_back(files: Files) -> None:
    total = files.add("w", (64, 1024), "F32").nbytes
    finished = threading.Event()

    class Device(FakeDevice):
        def record(self, event: int, stream: int) -> None:
            super().record(event, stream)
            if sum(call[0] == "record" for call in self.calls) == 10:  # of more than thirty chunks
                finished.set()

    others_went_on: list[bool] = []
    seen: list[int] = []

    def progress(done: int) -> None:
        others_went_on.append(finished.wait(10))
        seen.append(done)

    arena = Arena(Layout.of([files.item("w")]), Device())
    load(files.checkpoint(), arena, threads=2, buffer_bytes=8192, progress=progress)
    assert all(others_went_on)
    assert seen == sorted(set(seen))
    assert seen[-1] == total


def test_buffers_are_given_back_on_close(files: Files) -> None:
    files.add("w", (64, 1024), "F32")
    arena = Arena(Layout.of([files.item("w")]), device := FakeDevice())
    loading = Loading(files.checkpoint(), arena, threads=2, buffer_bytes=8192)
    loading.wait()
    assert device.pinned_bytes > 0
    loading.close()
    assert device.pinned_bytes == 0


def test_a_file_cut_after_its_header_was_read_is_named(files: Files) -> None:
    ref = files.add("w", (64, 1024), "F32")
    arena = Arena(Layout.of([files.item("w")]), device := FakeDevice())
    checkpoint = files.checkpoint()
    os.truncate(checkpoint.files[0].path, ref.offset + 5000)
    with pytest.raises(StorageError, match=r"0\.safetensors was replaced or changed after its header"):
        load(checkpoint, arena, buffer_bytes=8192)
    assert device.pinned_bytes == 0


def test_a_file_replaced_by_one_of_the_same_size_is_named(files: Files) -> None:
    files.add("w", (64, 1024), "F32")
    arena = Arena(Layout.of([files.item("w")]), FakeDevice())
    checkpoint = files.checkpoint()
    path = Path(checkpoint.files[0].path)
    path.with_suffix(".new").write_bytes(bytes(checkpoint.files[0].size))
    os.replace(path.with_suffix(".new"), path)
    with pytest.raises(StorageError, match=r"0\.safetensors was replaced or changed after its header"):
        load(checkpoint, arena)


def test_a_file_written_to_after_its_bytes_were_read_is_an_error_too(files: Files) -> None:
    files.add("w", (64, 1024), "F32")
    arena = Arena(Layout.of([files.item("w")]), device := FakeDevice())
    checkpoint = files.checkpoint()

    def rewrite(done: int) -> None:
        if done == checkpoint.tensors["w"].nbytes:
            os.utime(checkpoint.files[0].path, ns=(1, 1))

    with pytest.raises(StorageError, match=r"0\.safetensors was changed while it was being read"):
        load(checkpoint, arena, progress=rewrite)
    assert device.pinned_bytes == 0


def test_a_file_that_cannot_be_opened_is_named(files: Files) -> None:
    files.add("w", (4,))
    files.add("x", (4,), file=1)
    arena = Arena(Layout.of([files.item("w"), files.item("x")]), FakeDevice())
    checkpoint = files.checkpoint()
    os.unlink(checkpoint.files[1].path)
    with pytest.raises(ModelError, match=r"1\.safetensors does not exist"):
        load(checkpoint, arena)


@pytest.mark.parametrize(
    ("method", "call"), [("pinned", 2), ("copy", 5), ("record", 5), ("wait", 3), ("synchronize", 1)]
)
def test_a_failing_device_ends_the_load_and_nothing_stays_pinned(
    files: Files, method: str, call: int
) -> None:
    files.add("w", (64, 1024), "F32")
    device = FakeDevice(fail={method: call})
    arena = Arena(Layout.of([files.item("w")]), device)
    with pytest.raises(DeviceError, match=f"call {call} of {method}"):
        load(files.checkpoint(), arena, threads=1, buffers=2, buffer_bytes=8192)
    assert device.pinned_bytes == 0


def test_a_cancelled_load_says_how_far_it_came(files: Files) -> None:
    files.add("w", (64, 1024), "F32")
    arena = Arena(Layout.of([files.item("w")]), FakeDevice())
    cancelled = threading.Event()

    def first_chunk(done: int) -> None:
        cancelled.wait()

    loading = Loading(files.checkpoint(), arena, threads=1, buffer_bytes=8192, progress=first_chunk)
    loading.cancel()
    cancelled.set()
    with pytest.raises(EngineError, match="cancelled after"):
        loading.wait()
    loading.close()


def test_an_arena_larger_than_the_device_is_an_error_before_anything_is_read(files: Files) -> None:
    files.add("w", (64, 1024), "F32")
    with pytest.raises(DeviceError, match="out of memory"):
        Arena(Layout.of([files.item("w")]), FakeDevice(total=1000))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 9_000)), min_size=1, max_size=12),
    chunk=st.integers(8192, 40_000),
    gap=st.integers(0, 5_000),
)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_a_plan_copies_each_byte_to_its_place_and_reads_none_twice(
    sizes: list[tuple[int, int]], chunk: int, gap: int
) -> None:
    targets, offset = [], 3
    for n, (size, hole) in enumerate(sizes):
        targets.append((TensorRef(f"w{n}", n % 2, "U8", (size,), offset, size), n * 1_000_000))
        offset += size + hole
    copied: dict[int, int] = {}
    last = {0: 0, 1: 0}
    for piece in plan_chunks(targets, chunk, gap):
        assert 0 < piece.nbytes <= chunk
        assert piece.offset >= last[piece.file]
        last[piece.file] = piece.offset + piece.nbytes
        for copy in piece.copies:
            assert copy.at >= 0
            assert copy.at + copy.nbytes <= piece.nbytes
            n, start = divmod(copy.dst, 1_000_000)
            ref = targets[n][0]
            assert (piece.file, piece.offset + copy.at) == (ref.file, ref.offset + start)
            assert copied.get(n, 0) == start
            copied[n] = start + copy.nbytes
    assert copied == {n: size for n, (size, _) in enumerate(sizes) if size}


def test_arena_and_ring_import_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import hotstart.loading.ring, hotstart.device.cuda"
    subprocess.run([sys.executable, "-c", code], check=True)
