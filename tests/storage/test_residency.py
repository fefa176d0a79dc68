"""How much of a file is in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotstart.storage import residency
from hotstart.storage.mounts import mount_of
from hotstart.storage.residency import evict, resident_fraction

MIB = 1 << 20


@pytest.fixture
def file() -> Iterator[Path]:
    """On the disk of the checkout: files of a memory file system cannot be evicted."""
    mount = mount_of(os.getcwd())
    if mount is None or mount.memory or mount.network:
        pytest.skip("needs a local disk")
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        file.write(os.urandom(8 * MIB))
        file.flush()
        yield Path(file.name)


def test_written_file_is_resident_until_it_is_evicted(file: Path) -> None:
    assert resident_fraction(str(file)) == 1.0
    evict(str(file))
    assert resident_fraction(str(file)) == 0.0


def test_half_of_a_file_counts_as_half(file: Path) -> None:
    evict(str(file))
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(fd, 4 * MIB, 0)
    share = resident_fraction(fd)
    os.close(fd)
    assert share is not None
    assert 0.5 <= share < 0.6


@pytest.mark.parametrize("call", ["cachestat", "mincore"])
def test_a_range_of_a_file_is_asked_alone(call: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if call == "mincore":
        monkeypatch.setattr(residency, "_CACHESTAT", 100_000)  # no such call
    evict(str(file))
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(fd, 2 * MIB, 4 * MIB)
    os.close(fd)
    assert resident_fraction(str(file), 4 * MIB, 2 * MIB) == 1.0
    assert resident_fraction(str(file), 0, 4 * MIB) == 0.0
    assert resident_fraction(str(file), 6 * MIB, 100 * MIB) == 0.0


def test_older_kernels_are_asked_page_by_page(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_CACHESTAT", 100_000)  # no such call
    assert resident_fraction(str(file)) == 1.0
    evict(str(file))
    assert resident_fraction(str(file)) == 0.0


def test_empty_file_is_resident(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert resident_fraction(str(tmp_path / "empty")) == 1.0


def test_absent_file_is_unknown(tmp_path: Path) -> None:
    assert resident_fraction(str(tmp_path / "gone")) is None
