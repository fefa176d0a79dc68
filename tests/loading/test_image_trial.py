"""Cold files: mapped and read ahead, or past the page cache, found out by the first steps of a load."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from checkpoint_files import file_of
from hotstart.loading import image as image_module
from hotstart.loading import opened as opened_module
from hotstart.loading.image import STEP, Image
from hotstart.storage.mounts import Mount
from hotstart.storage.residency import resident_fraction
from hotstart.units import format_rate
from image_files import cold, write_large


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads little ahead by itself, as on most machines."""
    monkeypatch.setattr(Mount, "window", 128 << 10)


class Disk:
    """Counts the steps that come in each way, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, map: float, direct: float) -> None:
        self.rates = {"map": map, "direct": direct}
        self.ways: list[str] = []
        self.seconds = 0.0
        fill = image_module._File.fill

        def timed(
            file: image_module._File, offset: int, length: int, way: str, cancel: threading.Event
        ) -> None:
            fill(file, offset, length, way, cancel)
            self.ways.append(way)
            self.seconds += length / self.rates[way]

        monkeypatch.setattr(image_module._File, "fill", timed)
        monkeypatch.setattr(image_module, "time", self)

    def monotonic(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("map", "direct", "verdict"), [(2e9, 1e9, "map"), (1e9, 1e9, "map"), (1e9, 2e9, "direct")]
)
def test_cold_files_are_read_as_the_first_steps_came_faster(
    map: float, direct: float, verdict: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_module, "STEP", 64 << 10)
    monkeypatch.setattr(opened_module, "TRIAL_FROM", 1 << 20)
    checkpoint = write_large(disk, 40 * (64 << 10))
    cold(checkpoint)
    reads = Disk(monkeypatch, map=map, direct=direct)
    image = Image(checkpoint, readers=1)
    details: list[str] = []
    image.start(lambda report: details.append(image.describe()))
    image.wait()
    rates = f"map {format_rate(map, 1)} a reader, direct {format_rate(direct, 1)}"
    assert details[0].startswith(f"{verdict} (0% resident in the page cache; {rates}, measured on ")
    assert reads.ways[:9] == ["map"] * 3 + ["direct"] * 2 + ["map"] * 2 + ([verdict] * 2)
    assert set(reads.ways[9:]) == {verdict}
    assert image.memory(0)[: checkpoint.files[0].size] == Path(checkpoint.files[0].path).read_bytes()


def test_pages_released_from_a_mapping_that_holds_none_of_what_was_read_past_it_come_back(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_module, "STEP", 64 << 10)
    checkpoint = write_large(disk, 40 * (64 << 10))
    for trial_from, mapped in ((1 << 20, False), (1 << 40, True)):
        monkeypatch.setattr(opened_module, "TRIAL_FROM", trial_from)
        cold(checkpoint)
        image = Image(checkpoint, readers=1)
        image.start()
        image.wait()
        assert image.is_mapped(0) is mapped
        image.close()
        del image


def test_a_mapping_is_read_ahead_also_after_parts_of_its_file_were_read_past_it(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_module, "STEP", 64 << 10)
    monkeypatch.setattr(opened_module, "TRIAL_FROM", 1 << 20)
    checkpoint = write_large(disk, 40 * (64 << 10))
    cold(checkpoint)
    reads = Disk(monkeypatch, map=2e9, direct=1e9)
    ahead: list[int] = []
    monkeypatch.setattr(opened_module.Opened, "read_ahead", lambda file, offset, length: ahead.append(offset))
    image = Image(checkpoint, readers=1)
    image.start()
    image.wait()
    mapped = [number * image_module.STEP for number, way in enumerate(reads.ways) if way == "map"]
    assert set(mapped) <= set(ahead)


def test_small_cold_files_are_not_worth_a_comparison(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_large(disk)
    cold(checkpoint)
    reads = Disk(monkeypatch, map=1e9, direct=1e9)
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert set(reads.ways) == {"map"}
    assert image.describe() == "map (0% resident in the page cache; the rest is read ahead into it)"


def test_what_a_start_reads_is_in_the_page_cache_for_the_next_one(disk: Path) -> None:
    checkpoint = write_large(disk, 6 * STEP)
    cold(checkpoint)
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert resident_fraction(checkpoint.files[0].path) == 1
    assert Image(checkpoint).describe() == "map (100% resident in the page cache)"


def test_file_that_is_partly_resident_is_read_ahead_where_it_is_not(disk: Path) -> None:
    checkpoint = write_large(disk, 4 * STEP - len(file_of({})))
    path = checkpoint.files[0].path
    cold(checkpoint)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(fd, STEP, STEP)
    os.close(fd)
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert image.describe() == "map (25% resident in the page cache; the rest is read ahead into it)"
    assert image.memory(0)[: checkpoint.files[0].size] == Path(path).read_bytes()


def test_disk_that_refuses_direct_reads_after_all_is_mapped_to_the_end(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_module, "STEP", 64 << 10)
    monkeypatch.setattr(opened_module, "TRIAL_FROM", 1 << 20)
    checkpoint = write_large(disk, 40 * (64 << 10))
    cold(checkpoint)
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    image = Image(checkpoint, readers=1)
    image.start()
    image.wait()
    monkeypatch.undo()
    assert image.describe().startswith("map (0% resident in the page cache")
    assert image.memory(0)[: checkpoint.files[0].size] == Path(checkpoint.files[0].path).read_bytes()
