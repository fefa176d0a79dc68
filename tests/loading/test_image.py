"""File images and the tensors over them: the same bytes whichever way they came in."""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.device import host
from hotstart.errors import StorageError
from hotstart.loading import choice as choice_module
from hotstart.loading import image as image_module
from hotstart.loading.choice import choose
from hotstart.loading.image import STEP, Image
from hotstart.loading.image_store import ImageStore
from hotstart.loading.opened import Opened
from hotstart.models.spec import WeightSpec
from hotstart.storage.mounts import Mount, mount_of
from hotstart.storage.residency import resident_fraction
from hotstart.storage.source import ReadCancelled
from hotstart.units import format_seconds
from image_files import cold, random_tensors, write, write_large

STRATEGIES = pytest.mark.parametrize("strategy", ["map", "buffered", "direct"])
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


def store(
    checkpoint: Checkpoint,
    slots: dict[str, list[str]],
    *,
    strategy: str = "buffered",
    dtype: torch.dtype = torch.float32,
    aliases: dict[str, str] | None = None,
) -> ImageStore:
    """A store whose readers have begun."""
    loads = []
    for slot, names in slots.items():
        at = 0
        for name in names:
            ref = checkpoint.tensors[name]
            loads.append((WeightSpec(slot=slot, stored=(name,), shape=ref.shape, at=at), ref))
            at += ref.shape[0] if ref.shape else 1
    image = Image(checkpoint, strategy=strategy)
    image.start()
    made = ImageStore(image, list(reversed(loads)), aliases or {}, dtype)
    image.wait()
    return made


@STRATEGIES
def test_tensors_are_the_stored_ones_whichever_way_they_are_read(strategy: str, disk: Path) -> None:
    tensors = random_tensors(a=(700, 33), b=(5,), c=(1, 2, 3))
    found = store(write(disk, tensors), {name: [name] for name in tensors}, strategy=strategy)
    for name, tensor in tensors.items():
        assert torch.equal(found.tensor(name), tensor)  # type: ignore[arg-type]


@STRATEGIES
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_tensors_misaligned_for_their_dtype_are_copied(strategy: str, shift: int, disk: Path) -> None:
    tensors = random_tensors(a=(9, 5), b=(7,))
    found = store(write(disk, tensors, shift=shift), {name: [name] for name in tensors}, strategy=strategy)
    for name, tensor in tensors.items():
        got = found.tensor(name)
        assert isinstance(got, Tensor)
        assert torch.equal(got, tensor)
        assert got.data_ptr() % 4 == 0


@STRATEGIES
def test_every_file_of_several_steps_is_read_whole(strategy: str, disk: Path) -> None:
    checkpoint = write_large(disk)
    done: list[int] = []
    reports: list[object] = []
    image = Image(checkpoint, strategy=strategy, progress=done.append)
    image.start(reports.append)
    report = image.wait()
    path = checkpoint.files[0].path
    assert image.memory(0)[: checkpoint.files[0].size] == Path(path).read_bytes()
    assert done == sorted(set(done))
    assert done[-1] == image.total == report.bytes == os.path.getsize(path)
    assert reports == [report]
    assert str(report) == f"longest stall {format_seconds(report.longest_stall)}"


def test_neighbours_in_the_file_are_one_view_and_others_a_tuple(tmp_path: Path) -> None:
    tensors = random_tensors(gate=(4, 3), up=(6, 3), k=(2, 3), q=(4, 3), v=(2, 3))
    found = store(write(tmp_path, tensors), {"gate_up": ["gate", "up"], "qkv": ["q", "k", "v"]})
    gate_up = found.tensor("gate_up")
    assert isinstance(gate_up, Tensor)
    assert torch.equal(gate_up, torch.cat([tensors["gate"], tensors["up"]]))
    assert gate_up.data_ptr() == found.tensor("gate_up").data_ptr(), "a view, not a copy"  # type: ignore[union-attr]
    qkv = found.tensor("qkv")
    assert isinstance(qkv, tuple)
    assert all(torch.equal(part, tensors[name]) for part, name in zip(qkv, "qkv", strict=True))


@STRATEGIES
def test_other_dtypes_are_converted_and_joined(strategy: str, disk: Path) -> None:
    tensors = random_tensors(k=(2, 3), q=(4, 3))
    tensors["q"] = tensors["q"].to(torch.bfloat16)
    found = store(write(disk, tensors), {"qk": ["q", "k"]}, strategy=strategy, dtype=torch.bfloat16)
    expected = torch.cat([tensors["q"], tensors["k"].to(torch.bfloat16)])
    assert torch.equal(found.tensor("qk"), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", [0, 1])
def test_converting_and_copying_wait_for_the_bytes(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = random_tensors(a=(64, 64))
    checkpoint = write(tmp_path, tensors, shift=shift)
    image = Image(checkpoint, strategy="buffered")
    waited_for, read, wait = threading.Event(), os.preadv, image.wait
    # Not a byte arrives before somebody waits for it.
    monkeypatch.setattr(os, "preadv", lambda *args: read(*args) if waited_for.wait(10) else 0)
    monkeypatch.setattr(image, "wait", lambda: (waited_for.set(), wait()))
    image.start()
    ref, dtype = checkpoint.tensors["a"], torch.float32 if shift else torch.float64
    spec = WeightSpec(slot="a", stored=("a",), shape=ref.shape)
    found = ImageStore(image, [(spec, ref)], {}, dtype).tensor("a")
    waited_for.set()
    assert torch.equal(found, tensors["a"].to(dtype))  # type: ignore[arg-type]


def test_tied_weight_is_its_alias(tmp_path: Path) -> None:
    tensors = random_tensors(embed=(8, 4))
    found = store(write(tmp_path, tensors), {"embed": ["embed"]}, aliases={"head": "embed"})
    assert torch.equal(found.tensor("head"), tensors["embed"])  # type: ignore[arg-type]


def test_scalars_have_no_dimension(tmp_path: Path) -> None:
    tensors = {"scale": torch.tensor(3.5)}
    assert torch.equal(
        store(write(tmp_path, tensors), {"scale": ["scale"]}).tensor("scale"), tensors["scale"]
    )  # type: ignore[arg-type]


@STRATEGIES
def test_file_that_shrank_before_it_was_read_is_an_error_with_its_size(strategy: str, disk: Path) -> None:
    checkpoint = write_large(disk)
    image = Image(checkpoint, strategy=strategy)
    os.truncate(checkpoint.files[0].path, STEP)
    image.start()
    with pytest.raises(StorageError, match=f"shrank from {checkpoint.files[0].size} to {STEP} bytes"):
        image.wait()


@STRATEGIES
def test_file_that_shrank_before_it_was_opened_is_an_error(strategy: str, disk: Path) -> None:
    checkpoint = write_large(disk)
    os.truncate(checkpoint.files[0].path, STEP)
    with pytest.raises(StorageError, match="changed"):
        Image(checkpoint, strategy=strategy)


@STRATEGIES
def test_file_that_was_replaced_before_it_was_opened_is_an_error(strategy: str, disk: Path) -> None:
    checkpoint = write_large(disk)
    path = Path(checkpoint.files[0].path)
    path.with_suffix(".new").write_bytes(path.read_bytes())
    os.replace(path.with_suffix(".new"), path)
    with pytest.raises(StorageError, match="was replaced or changed after its header was read"):
        Image(checkpoint, strategy=strategy)


@STRATEGIES
def test_file_that_was_written_to_during_the_load_is_an_error(strategy: str, disk: Path) -> None:
    checkpoint = write_large(disk)
    image = Image(checkpoint, strategy=strategy)
    with open(checkpoint.files[0].path, "r+b") as file:
        file.seek(100_000)
        file.write(b"other bytes")
    os.utime(checkpoint.files[0].path, ns=(1, 1))
    image.start()
    with pytest.raises(StorageError, match="was changed while it was being read"):
        image.wait()


def test_error_of_a_reader_surfaces_and_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(tmp_path)

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    image = Image(checkpoint, strategy="buffered")
    image.start()
    with pytest.raises(StorageError, match="Input/output error"):
        image.wait()


def test_store_that_must_convert_raises_what_the_readers_raise(tmp_path: Path) -> None:
    checkpoint = write_large(tmp_path)
    image = Image(checkpoint, strategy="buffered")
    os.truncate(checkpoint.files[0].path, 1000)
    image.start()
    ref = checkpoint.tensors["weight"]
    made = ImageStore(
        image, [(WeightSpec(slot="w", stored=("weight",), shape=ref.shape), ref)], {}, torch.float32
    )
    with pytest.raises(StorageError, match="shrank"):
        made.tensor("w")


@STRATEGIES
def test_cancelled_load_is_never_taken_for_a_whole_one(strategy: str, disk: Path) -> None:
    image = Image(write_large(disk), strategy=strategy)
    image.cancel()
    image.start()
    with pytest.raises(ReadCancelled):
        image.wait()


@STRATEGIES
def test_closed_image_keeps_its_bytes_and_no_file_open(strategy: str, disk: Path) -> None:
    checkpoint = write_large(disk)
    path = Path(checkpoint.files[0].path)
    image = Image(checkpoint, strategy=strategy)
    image.start()
    report = image.wait()
    mapped = int(strategy == "map")  # a map of Python's holds a descriptor of its own
    assert open_files(path) == 1 + mapped
    image.close()
    image.close()
    assert open_files(path) == mapped
    assert image.memory(0)[: checkpoint.files[0].size] == path.read_bytes()
    assert image.wait() == report


def open_files(path: Path) -> int:
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(link) and os.readlink(link) == str(path) for link in links)


def test_where_no_more_threads_can_be_begun_fewer_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_large(disk)
    image = Image(checkpoint, strategy="buffered")
    start, begun = threading.Thread.start, []

    def begin(thread: threading.Thread) -> None:
        if thread.name.startswith("weights-") and thread.name != "weights-watch":
            if begun:
                raise RuntimeError("can't start new thread")
            begun.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    image.start()
    image.wait()
    assert begun == ["weights-1"]
    path = checkpoint.files[0].path
    assert image.memory(0)[: checkpoint.files[0].size] == Path(path).read_bytes()


def test_cancel_stops_readers_between_steps(tmp_path: Path) -> None:
    image = Image(write_large(tmp_path), strategy="buffered", readers=1, progress=lambda done: image.cancel())
    image.start()
    with pytest.raises(ReadCancelled):
        image.wait()


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_(path: str, flags: int, *rest: int, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_)


def refuse_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmap.mmap

    def mmap_(fd: int, *rest: int) -> mmap.mmap:
        if fd >= 0:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return real(fd, *rest)

    monkeypatch.setattr(image_module.mmap, "mmap", mmap_)


def test_file_system_without_maps_is_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_large(disk)
    refuse_maps(monkeypatch)
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert re.fullmatch(
        r"buffered \(\S+ mounted at /\S* cannot be mapped: No such device\)", image.describe()
    )
    path = checkpoint.files[0].path
    assert image.memory(0)[: checkpoint.files[0].size] == Path(path).read_bytes()


def test_files_are_closed_where_an_image_cannot_be_made(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write(disk, random_tensors(**{name: (4, 4)}), name=name)
    checkpoint = open_checkpoint(str(disk))
    assert len(checkpoint.files) == 2
    real, maps = Opened.map, iter([True, False])

    def no_memory(opened: Opened) -> mmap.mmap:
        if next(maps):
            return real(opened)
        raise MemoryError

    monkeypatch.setattr(Opened, "map", no_memory)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        Image(checkpoint)
    assert len(os.listdir("/proc/self/fd")) == before


def test_file_that_is_opened_again_keeps_leaving_no_second_copy(disk: Path) -> None:
    checkpoint = write_large(disk)
    cold(checkpoint)
    file = checkpoint.files[0]
    assert checkpoint.folder is not None
    opened = Opened(checkpoint.folder, file, choose(file, "buffered"))
    opened.drop_behind()
    again = opened.again()
    source = again.source("buffered")
    source.read_into(memoryview(bytearray(STEP)), 0, threading.Event())
    assert (resident_fraction(file.path) or 0.0) < 0.5
    again.close()
    opened.close()


def test_ordered_strategy_does_not_fall_back(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_large(disk)
    refuse_direct(monkeypatch)
    with pytest.raises(StorageError, match="--read-strategy buffered"):
        Image(checkpoint, strategy="direct")
    refuse_maps(monkeypatch)
    with pytest.raises(StorageError, match="--read-strategy buffered"):
        Image(checkpoint, strategy="map")


@pytest.mark.parametrize(("window", "rival"), [(128 << 10, "direct"), (4 << 20, "")])
def test_file_of_a_local_disk_is_mapped_and_read_ahead_where_it_is_cold(
    window: int, rival: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mount, "window", window)
    checkpoint = write_large(disk)
    file = checkpoint.files[0]
    warm = choose(file)
    assert (warm.strategy, warm.reason, warm.rival) == ("map", "100% resident in the page cache", "")
    cold(checkpoint)
    chosen = choose(file)
    assert (chosen.strategy, chosen.rival) == ("map", rival)
    assert chosen.reason == "0% resident in the page cache; the rest is read ahead into it"


@pytest.mark.parametrize(("available", "left"), [(1, False), (10, True)])
def test_where_memory_is_tight_a_cold_file_leaves_no_second_copy_in_the_page_cache(
    available: int, left: bool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(disk)
    file = checkpoint.files[0]
    cold(checkpoint)
    memory = replace(host.memory(), available=available * file.size)
    monkeypatch.setattr(image_module.host, "memory", lambda: memory)
    image = Image(checkpoint, strategy="buffered")
    image.start()
    image.wait()
    assert ((resident_fraction(file.path) or 0.0) > 0.5) is left
    assert image.memory(0)[: file.size] == Path(file.path).read_bytes()


def test_file_of_unknown_residency_is_mapped_and_never_read_past_the_page_cache(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(disk)
    monkeypatch.setattr(choice_module, "resident_fraction", lambda path: None)
    chosen = choose(checkpoint.files[0])
    assert (chosen.strategy, chosen.known, chosen.rival) == ("map", False, "")


def test_memory_file_system_is_mapped() -> None:
    mount = mount_of("/dev/shm") if os.path.isdir("/dev/shm") else None
    if mount is None or not mount.memory:
        pytest.skip("needs /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        chosen = choose(write_large(Path(directory)).files[0])
    assert (chosen.strategy, chosen.reason) == ("map", "tmpfs is memory already")


def test_order_is_followed_whatever_is_resident(tmp_path: Path) -> None:
    chosen = choose(write_large(tmp_path).files[0], "direct")
    assert (chosen.strategy, chosen.reason) == ("direct", "as ordered by --read-strategy")


def test_several_files_are_described_together(tmp_path: Path) -> None:
    from checkpoint_files import write_model

    checkpoint = open_checkpoint(str(write_model(tmp_path, shards=3)))
    image = Image(checkpoint, strategy="buffered")
    assert image.describe() == "buffered (as ordered by --read-strategy) x3"
    image.start()
    assert image.wait().bytes == sum(file.size for file in checkpoint.files)
