"""Cold files of a device that the kernel reads far ahead of: each reader goes through a region in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotstart.loading import first_touch
from hotstart.loading import image as image_module
from hotstart.loading.image import Image
from hotstart.loading.opened import Opened
from hotstart.storage.mounts import Mount
from hotstart.storage.residency import resident_fraction
from image_files import cold, write_large

REGION = 64 << 10


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mount, "window", 8 << 20)
    monkeypatch.setattr(image_module, "STEP", 16 << 10)
    monkeypatch.setattr(image_module, "_REGION", REGION)
    monkeypatch.setattr(first_touch, "touch", lambda address, pages: 0.0)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets for which a reader asked for a descriptor of its own."""
    offsets: list[int] = []
    stream = Opened.stream

    def counted(opened: Opened, offset: int) -> int:
        offsets.append(offset)
        return stream(opened, offset)

    monkeypatch.setattr(Opened, "stream", counted)
    return offsets


def test_each_region_is_read_in_order_through_a_descriptor_of_its_own(disk: Path, begun: list[int]) -> None:
    checkpoint = write_large(disk, 10 * REGION)
    file = checkpoint.files[0]
    cold(checkpoint)
    before = len(os.listdir("/proc/self/fd"))
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert sorted(begun) == list(range(0, file.size, REGION))
    assert image.memory(0)[: file.size] == Path(file.path).read_bytes()
    image.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # that of the mapping


def test_it_stays_mapped_and_the_next_start_finds_its_pages(disk: Path, begun: list[int]) -> None:
    checkpoint = write_large(disk, 10 * REGION)
    path = checkpoint.files[0].path
    cold(checkpoint)
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert image.is_mapped(0)
    assert resident_fraction(path) == 1
    image.release(0, 0, 2 * REGION)
    assert image.memory(0)[: 2 * REGION] == Path(path).read_bytes()[: 2 * REGION]


def test_small_model_is_shared_among_the_readers(disk: Path, begun: list[int]) -> None:
    checkpoint = write_large(disk, REGION)
    cold(checkpoint)
    image = Image(checkpoint, readers=2)
    image.start()
    image.wait()
    assert sorted(begun)[:2] == [0, REGION // 2]


def test_readers_of_a_warm_file_need_none(disk: Path, begun: list[int]) -> None:
    image = Image(write_large(disk, 10 * REGION))
    image.start()
    image.wait()
    assert begun == []


def test_large_pages_that_are_slow_to_touch_are_given_up(
    disk: Path, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_touch, "touch", lambda address, pages: pages * 3e-6)
    checkpoint = write_large(disk, 10 * REGION)
    file = checkpoint.files[0]
    cold(checkpoint)
    asked: list[int] = []
    read_ahead = Opened.read_ahead

    def counted(opened: Opened, offset: int, length: int) -> None:
        asked.append(offset)
        read_ahead(opened, offset, length)

    monkeypatch.setattr(Opened, "read_ahead", counted)
    image = Image(checkpoint, readers=1)
    image.start()
    image.wait()
    assert begun == [0, REGION]
    assert min(asked) == REGION + image_module.STEP  # after the second sample
    assert image.memory(0)[: file.size] == Path(file.path).read_bytes()


def test_where_a_file_cannot_be_opened_once_more_it_is_read_all_the_same(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(disk, 10 * REGION)
    file = checkpoint.files[0]
    cold(checkpoint)
    image = Image(checkpoint)

    def refused(opened: Opened, offset: int) -> int:
        raise PermissionError("no /proc here")

    monkeypatch.setattr(Opened, "stream", refused)
    image.start()
    image.wait()
    assert image.memory(0)[: file.size] == Path(file.path).read_bytes()


def test_another_file_that_takes_its_name_meanwhile_is_not_read(disk: Path, begun: list[int]) -> None:
    checkpoint = write_large(disk, 10 * REGION)
    file = checkpoint.files[0]
    content = Path(file.path).read_bytes()
    cold(checkpoint)
    image = Image(checkpoint)
    other = disk / "other"
    other.write_bytes(bytes(file.size))
    other.rename(file.path)
    image.start()
    image._ended.wait()
    assert begun
    assert image.memory(0)[: file.size] == content


def test_what_is_asked_for_at_once_is_as_much_as_the_kernel_takes(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mount, "window", 0)
    monkeypatch.setattr(Mount, "read_ahead", 4096)
    checkpoint = write_large(disk, 4 * REGION)
    cold(checkpoint)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, offset, length, advice: asked.append((offset, length))
    )
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert max(length for _, length in asked) == 4096
    assert sum(length for _, length in asked) == checkpoint.files[0].size
