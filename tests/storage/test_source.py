"""Files as sources: right bytes, and named errors when the file changes under the reader."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotstart.errors import ModelError, StorageError
from hotstart.storage.source import DIRECT_ALIGN, FileSource, ReadCancelled

SIZE = 3 * DIRECT_ALIGN + 100
NEVER = threading.Event()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(SIZE))
    return path


@given(st.integers(0, SIZE), st.integers(0, SIZE))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_range_arrives_whole(file: Path, start: int, length: int) -> None:
    source = FileSource(str(file))
    buffer = bytearray(min(length, SIZE - start))
    source.read_into(memoryview(buffer), start, NEVER)
    source.close()
    assert buffer == file.read_bytes()[start : start + length]


def test_direct_read_reaches_to_the_end_of_the_file() -> None:
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:  # pytest's folder may lie in memory
        file.write(os.urandom(SIZE))
        file.flush()
        try:
            source = FileSource(file.name, direct=True)
        except StorageError as error:
            pytest.skip(str(error))
        buffer = memoryview(mmap.mmap(-1, 4 * DIRECT_ALIGN))
        source.read_into(buffer, 0, NEVER)
        source.close()
        assert source.align == DIRECT_ALIGN
        assert buffer[:SIZE] == Path(file.name).read_bytes()


def test_range_beyond_the_end_is_a_defect_of_the_caller(file: Path) -> None:
    source = FileSource(str(file))
    with pytest.raises(ValueError, match="which has"):
        source.read_into(memoryview(bytearray(10)), SIZE - 5, NEVER)
    source.close()


def test_file_that_shrinks_is_named_with_both_sizes(file: Path) -> None:
    source = FileSource(str(file))
    os.truncate(file, 1000)
    with pytest.raises(StorageError, match=f"{file} shrank from {SIZE} to 1000 bytes"):
        source.read_into(memoryview(bytearray(SIZE)), 0, NEVER)
    source.close()


def test_file_that_is_rewritten_in_place_is_named(file: Path) -> None:
    source = FileSource(str(file))
    os.utime(file, ns=(0, 0))
    with pytest.raises(StorageError, match="was changed while it was being read"):
        source.read_into(memoryview(bytearray(10)), 0, NEVER)
    source.close()


def test_file_that_is_replaced_by_rename_is_still_read(file: Path) -> None:
    content = file.read_bytes()
    source = FileSource(str(file))
    (file.parent / "new").write_bytes(b"new")
    (file.parent / "new").rename(file)
    buffer = bytearray(SIZE)
    source.read_into(memoryview(buffer), 0, NEVER)
    source.close()
    assert buffer == content


def test_cancelled_read_stops(file: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    source = FileSource(str(file))
    with pytest.raises(ReadCancelled):
        source.read_into(memoryview(bytearray(10)), 0, cancel)
    source.close()


def test_identity_tells_versions_of_a_file_apart(file: Path) -> None:
    first, again = FileSource(str(file)), FileSource(str(file))
    assert first.identity == again.identity
    os.utime(file, ns=(0, 1))
    changed = FileSource(str(file))
    assert changed.identity != first.identity
    for source in (first, again, changed):
        source.close()


def test_directory_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no regular file"):
        FileSource(str(tmp_path))


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone does not exist"):
        FileSource(str(tmp_path / "gone"))


def test_a_read_that_comes_back_after_its_file_was_closed_touches_no_other_file(file: Path) -> None:
    source = FileSource(str(file))
    source.close()
    with file.with_name("other").open("wb+") as other:  # which gets the number that is free now
        other.write(bytes(SIZE))
        other.flush()
        buffer = bytearray(10)
        with pytest.raises(StorageError, match="Bad file descriptor"):
            source.read_into(memoryview(buffer), 0, NEVER)
        with pytest.raises(StorageError, match="Bad file descriptor"):
            source.verify()
