"""A GPU's weights from files: through the page cache or past it, whatever file system they lie on."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import re
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_files import file_of, shard_name, write_index, write_shard
from fuse_pass_through import SUBTYPE, Mount, mounted
from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.device.fake import FakeDevice
from hotstart.errors import StorageError
from hotstart.loading import opened, ring
from hotstart.loading.arena import Arena, Layout
from hotstart.loading.choice import Choice, choose_for_gpu
from hotstart.loading.ring import Loading
from hotstart.models.spec import WeightSpec
from hotstart.storage.residency import resident_fraction
from hotstart.units import format_rate
from image_files import cold, write_large

MB = 1 << 20
SHARD = 24 * MB
NAMES = [shard_name(number, 2) for number in (1, 2)]


class Loaded:
    """A load into the memory of a fake GPU, and what became of it."""

    def __init__(self, checkpoint: Checkpoint, *, only: tuple[str, ...] = (), **options: Any) -> None:
        specs = [
            (WeightSpec(slot=name, stored=(name,), shape=ref.shape), ref)
            for name, ref in checkpoint.tensors.items()
            if name in (only or checkpoint.tensors)
        ]
        arena = Arena(Layout.of(specs), FakeDevice())
        with closing(Loading(checkpoint, arena, **options)) as loading:
            self.report = loading.wait()
        self.how = loading.describe()
        self.tensors = {
            part.ref.name: ctypes.string_at(arena.address(part), part.ref.nbytes)
            for part in arena.layout.parts
        }
        arena.close()


def stored(checkpoint: Checkpoint, name: str) -> bytes:
    ref = checkpoint.tensors[name]
    with open(checkpoint.files[ref.file].path, "rb") as file:
        file.seek(ref.offset)
        return file.read(ref.nbytes)


def assert_same(loaded: Loaded, checkpoint: Checkpoint) -> None:
    for name, content in loaded.tensors.items():
        assert content == stored(checkpoint, name), name


class Preadv:
    """The system call, which writes down how it was used, and may be short, late or refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seed: int = 0, refused: int = 0) -> None:
        """``seed``: not 0 makes some reads short and lets others go first. ``refused``: which direct one."""
        self.ways: list[tuple[str, int]] = []
        """Way and offset of each."""
        self._random = random.Random(seed)
        self._shuffles = seed != 0
        self._refused = refused
        self._real = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        self.ways.append(("direct" if direct else "buffered", offset))
        if direct:
            self._refused -= 1
            if self._refused == 0:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        [buffer] = buffers
        if self._shuffles:
            for _ in range(self._random.randrange(4)):
                os.sched_yield()
            if len(buffer) > 4096:
                buffer = buffer[: self._random.randrange(1, len(buffer) // 4096 + 1) * 4096]
        return self._real(fd, [buffer], offset)

    def count(self, way: str) -> int:
        return sum(each == way for each, _ in self.ways)


def write_files(directory: Path, sizes: list[tuple[int, int]], files: int) -> Checkpoint:
    """Tensors and what lies between them, which is a tensor too that nobody asks for."""
    for old in directory.iterdir():
        old.unlink()
    for file in range(files):
        header: dict[str, Any] = {}
        end = 0
        for number, (size, hole) in enumerate(sizes):
            if number % files == file:
                for name, length in ((f"hole{number}", hole), (f"w{number}", size)):
                    header[name] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length]}
                    end += length
        content = random.Random(end).randbytes(end)
        (directory / shard_name(file + 1, files)).write_bytes(file_of(header, content))
    return open_checkpoint(str(directory))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 90_000)), min_size=1, max_size=8),
    files=st.integers(1, 3),
    ways=st.lists(st.sampled_from(["direct", "buffered", "ordered"]), min_size=3, max_size=3),
    buffer_pages=st.sampled_from([1, 2, 3, 5, 64]),
    buffers=st.integers(1, 2),
    threads=st.integers(1, 3),
    seed=st.integers(1, 1 << 16),
    refused=st.integers(0, 6),
)
@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_cutting_and_interleaving_direct_or_not_gives_the_stored_bytes(
    disk: Path,
    sizes: list[tuple[int, int]],
    files: int,
    ways: list[str],
    buffer_pages: int,
    buffers: int,
    threads: int,
    seed: int,
    refused: int,
) -> None:
    """Reads come back short and in any order; one direct read is refused where that may be."""
    checkpoint = write_files(disk, sizes, files)
    choices = [
        Choice("buffered" if way == "buffered" else "direct", "drawn", 0.0, ordered=way == "ordered")
        for way in ways[:files]
    ]
    if "ordered" in ways[:files]:
        refused = 0
    with pytest.MonkeyPatch.context() as patch:
        Preadv(patch, seed=seed, refused=refused)
        loaded = Loaded(
            checkpoint,
            only=tuple(f"w{number}" for number in range(len(sizes))),
            choices=choices,
            threads=threads,
            buffers=buffers,
            buffer_bytes=buffer_pages * 4096,
        )
    assert_same(loaded, checkpoint)
    assert loaded.report.bytes >= sum(size for size, _ in sizes)


def test_cold_file_is_read_through_the_page_cache_for_the_next_start(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(disk)
    cold(checkpoint)
    reads = Preadv(monkeypatch)
    first = Loaded(checkpoint)
    assert resident_fraction(checkpoint.files[0].path) == 1
    assert reads.count("direct") == 0
    assert first.how.startswith("buffered (0% resident in the page cache; the rest is read ahead into it), ")
    assert_same(first, checkpoint)
    second = Loaded(checkpoint)
    assert second.how == "buffered (100% resident in the page cache), through a ring of pinned memory"


@pytest.mark.parametrize(("direct", "verdict"), [(2e9, "direct"), (1.2e9, "buffered"), (0.5e9, "buffered")])
def test_cold_files_are_read_as_the_first_chunks_came_faster(
    direct: float, verdict: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(disk, 40 * (64 << 10))
    cold(checkpoint)
    monkeypatch.setattr(opened, "TRIAL_FROM", 1 << 20)
    rates, seconds = {"direct": direct, "buffered": 1e9}, [0.0]
    reads = Preadv(monkeypatch)
    call = os.preadv

    def timed(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = call(fd, buffers, offset)
        seconds[0] += got / rates[reads.ways[-1][0]]
        return got

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return seconds[0]

    monkeypatch.setattr(os, "preadv", timed)
    monkeypatch.setattr(ring, "time", Clock)
    loaded = Loaded(checkpoint, threads=1, buffer_bytes=64 << 10)
    ways = [way for way, _ in reads.ways]
    assert ways[:7] == ["buffered"] * 3 + ["direct"] * 2 + ["buffered"] * 2
    assert set(ways[9:]) == {verdict}, "nothing but samples in the other way"
    said = f"buffered {format_rate(1e9, 1)} a reader, direct {format_rate(direct, 1)}, measured on"
    assert loaded.how.startswith(f"{verdict} (0% resident in the page cache; {said} ")
    assert_same(loaded, checkpoint)


def test_direct_reads_that_the_buffers_do_not_suit_are_replaced_with_one_line(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(shards, tmp_path / "far") as mount:
        Preadv(monkeypatch, refused=2)
        loaded = load(mount, shards)
    assert re.match(
        rf"buffered \(fuse\.{SUBTYPE} mounted at {mount.path} refuses direct reads into this memory\)",
        loaded.how,
    )


def test_ordered_direct_reads_do_not_fall_back(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_large(disk)
    reads = Preadv(monkeypatch, refused=2)
    with pytest.raises(StorageError, match=r"Cannot read .*model\.safetensors at byte \d+: Bad address"):
        Loaded(checkpoint, choices=choose_for_gpu(checkpoint.files, "direct"))
    assert reads.count("buffered") == 0


def test_order_to_read_through_the_page_cache_is_followed(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(disk)
    cold(checkpoint)
    reads = Preadv(monkeypatch)
    loaded = Loaded(checkpoint, choices=choose_for_gpu(checkpoint.files, "buffered"))
    assert reads.count("direct") == 0
    assert loaded.how == "buffered (as ordered by --read-strategy), through a ring of pinned memory"


@pytest.mark.parametrize(("available", "left"), [(0, False), (10, True)])
def test_where_memory_is_tight_a_cold_file_leaves_nothing_in_the_page_cache(
    available: int, left: bool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(disk)
    cold(checkpoint)
    choices = choose_for_gpu(checkpoint.files, "buffered")
    memory = ring.host.HostMemory(1 << 40, "test", available * checkpoint.files[0].size)
    monkeypatch.setattr(ring.host, "memory", lambda: memory)
    Loaded(checkpoint, choices=choices)
    assert ((resident_fraction(checkpoint.files[0].path) or 0.0) > 0.5) is left


def test_buffers_are_whole_pages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="buffers of 10000 bytes"):
        Loaded(write_large(tmp_path, 100), buffer_bytes=10_000)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of three buffers each, and nothing but weights."""
    directory = tmp_path_factory.mktemp("shards")
    for number, name in enumerate(NAMES):
        content = random.Random(number).randbytes(SHARD)
        write_shard(directory / name, {f"w{number}": ("BF16", (SHARD // 2,))}, {f"w{number}": content})
    write_index(directory, {"w0": NAMES[0], "w1": NAMES[1]})
    return directory


def load(mount: Mount, shards: Path, **options: Any) -> Loaded:
    loaded = Loaded(open_checkpoint(str(mount.path)), **options)
    assert_same(loaded, open_checkpoint(str(shards)))
    return loaded


def test_fuse_gets_few_large_reads_by_readers_with_descriptors_of_their_own(
    shards: Path, tmp_path: Path
) -> None:
    with mounted(shards, tmp_path / "far", delay=0.005, handle_rate=100e6) as mount:
        loaded = load(mount, shards)
        weights = [read for read in mount.reads() if read.size > 128 << 10]
        small = [read for read in mount.reads() if read.size <= 128 << 10]
    assert (
        loaded.how == f"direct (fuse.{SUBTYPE} gets large ordered reads) x2, through a ring of pinned memory"
    )
    assert len(weights) <= 2 * SHARD / MB + 8
    assert len(small) < 12  # headers, and the last page of each file
    by_handle: dict[tuple[str, int], int] = {}
    for read in weights:
        by_handle[read.name, read.handle] = by_handle.get((read.name, read.handle), 0) + read.size
    assert len(by_handle) >= 5
    assert max(by_handle.values()) <= 2 * ring.BUFFER_BYTES


def test_files_of_a_fuse_mount_that_lie_in_the_page_cache_are_read_from_there(
    shards: Path, tmp_path: Path
) -> None:
    with mounted(shards, tmp_path / "far", keeps_pages=True) as mount:
        for name in NAMES:
            (mount.path / name).read_bytes()
        before = len(mount.reads())
        loaded = load(mount, shards)
        again = [read for read in mount.reads()[before:] if read.size > 64 << 10]
    assert loaded.how.startswith(f"buffered (fuse.{SUBTYPE} gets large ordered reads) x2")
    assert again == []


def test_mount_that_refuses_direct_reads_is_read_through_the_page_cache_with_one_line(
    shards: Path, tmp_path: Path
) -> None:
    with mounted(shards, tmp_path / "stubborn", direct=False) as mount:
        loaded = load(mount, shards)
    where = f"fuse.{SUBTYPE} mounted at {mount.path}"
    assert loaded.how == (
        f"buffered ({where} has no direct reads (O_DIRECT)) x2, through a ring of pinned memory"
    )


def test_read_past_the_page_cache_that_hangs_is_taken_over_on_a_new_descriptor(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(shards, tmp_path / "hanging", stuck_from=(NAMES[0], 20 * MB, 1)) as mount:
        load(mount, shards, patience=1.0)
        assert mount.stuck() > 0
        mount.answer()
    assert re.search(rf"{NAMES[0]} gives no byte at offset \d+ since 1\.\d+ s: reading on", caplog.text)


def test_read_that_fails_either_way_is_named_with_file_and_offset(shards: Path, tmp_path: Path) -> None:
    with mounted(shards, tmp_path / "broken", fails=(NAMES[1], 10 * MB, errno.EIO)) as mount:
        with pytest.raises(StorageError) as raised:
            Loaded(open_checkpoint(str(mount.path)))
    assert re.fullmatch(rf"Cannot read .*{NAMES[1]} at byte \d+: Input/output error", raised.value.found)


def test_readers_end_with_their_load(shards: Path, tmp_path: Path) -> None:
    """Descriptors of their own go with the threads."""
    before = len(os.listdir("/proc/self/fd"))
    with mounted(shards, tmp_path / "far") as mount:
        load(mount, shards)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]
        own = [link for link in os.scandir("/proc/self/fd") if str(mount.path) in os.readlink(link)]
        assert own == []
    assert len(os.listdir("/proc/self/fd")) <= before + 1
