"""Cold files: past the page cache or through it, found out by the first steps of a load."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from checkpoint_files import file_of
from hotstart.loading import image as image_module
from hotstart.loading.image import STEP, Image
from hotstart.units import format_rate
from image_files import cold, write_large


class Disk:
    """Counts the bytes that are read past the page cache and through it, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, direct: float, buffered: float) -> None:
        self.rates = {"direct": direct, "buffered": buffered}
        self.offsets: dict[str, list[int]] = {"direct": [], "buffered": []}
        self.seconds = 0.0
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(image_module, "time", self)

    def monotonic(self) -> float:
        return self.seconds

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        way = "direct" if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else "buffered"
        got = self._preadv(fd, buffers, offset)
        self.offsets[way].append(offset)
        self.seconds += got / self.rates[way]
        return got


@pytest.mark.parametrize(
    ("direct", "buffered", "verdict"),
    [(2e9, 1e9, "direct"), (1e9, 1e9, "direct"), (1e9, 2e9, "buffered")],
)
def test_cold_files_are_read_as_the_first_steps_came_faster(
    direct: float, buffered: float, verdict: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_module, "STEP", 64 << 10)
    monkeypatch.setattr(image_module, "TRIAL_FROM", 1 << 20)
    checkpoint = write_large(disk, 40 * (64 << 10))
    cold(checkpoint)
    reads = Disk(monkeypatch, direct=direct, buffered=buffered)
    image = Image(checkpoint, readers=1)
    details: list[str] = []
    image.start(lambda report: details.append(image.describe()))
    image.wait()
    path = checkpoint.files[0].path
    rates = f"direct {format_rate(direct, 1)} a reader against buffered {format_rate(buffered, 1)}"
    assert details[0].startswith(f"{verdict} (0% resident in the page cache; {rates}, measured on ")
    samples = {"direct": 4, "buffered": 4} if verdict == "direct" else {"direct": 1 + 8, "buffered": 8}
    other = "buffered" if verdict == "direct" else "direct"
    assert len(reads.offsets[other]) == samples[other], "nothing but samples"
    assert image.memory(0)[: checkpoint.files[0].size] == Path(path).read_bytes()


def test_small_cold_files_are_not_worth_a_comparison(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_large(disk)
    cold(checkpoint)
    reads = Disk(monkeypatch, direct=1e9, buffered=1e9)
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert not reads.offsets["buffered"]
    assert image.describe() == "direct (0% resident in the page cache; reading past it saves a copy)"


def test_resident_steps_of_a_cold_file_are_copied_from_the_page_cache(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_large(disk, 4 * STEP - len(file_of({})))
    path = checkpoint.files[0].path
    cold(checkpoint)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(fd, STEP, STEP)
    os.close(fd)
    reads = Disk(monkeypatch, direct=1e9, buffered=1e9)
    image = Image(checkpoint)
    image.start()
    image.wait()
    assert {offset // STEP for offset in reads.offsets["buffered"]} == {1}
    assert {offset // STEP for offset in reads.offsets["direct"]} >= {0, 2, 3}
    assert 1 not in {offset // STEP for offset in reads.offsets["direct"]}
    assert image.describe().endswith("resident in the page cache; that is copied, the rest read past it)")
    assert image.memory(0)[: checkpoint.files[0].size] == Path(path).read_bytes()
