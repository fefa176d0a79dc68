"""An object of a store as an open file: the same bytes, whatever is read ahead, and nothing left behind."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fault_proxy import Fault, FaultServer
from hotstart.errors import StorageError
from hotstart.loading.streams.stored_file import Ranges, StoredFile
from hotstart.storage.location import parse_location
from hotstart.storage.object_store import ObjectStore
from hotstart.storage.source import FileSource

DATA = bytes(range(256)) * 20
AT = st.integers(0, len(DATA) + 50)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("seek"), AT, st.just(os.SEEK_SET)),
        st.tuples(st.just("seek"), st.integers(0, 300), st.just(os.SEEK_CUR)),
        st.tuples(st.just("seek"), st.integers(-300, 0), st.just(os.SEEK_END)),
        st.tuples(st.just("read"), st.integers(-1, 700)),
        st.tuples(st.just("readinto"), st.integers(0, 700)),
    ),
    max_size=20,
)


@pytest.fixture(scope="module")
def ranges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranges]:
    path = tmp_path_factory.mktemp("stored") / "file"
    path.write_bytes(DATA)
    opened = Ranges(FileSource(str(path)), 3)
    yield opened
    opened.close()


@given(steps=STEPS, ahead=st.integers(1, 400), at=AT, end=st.none() | AT)
def test_it_is_read_as_any_file_is(
    ranges: Ranges, steps: list[tuple[str, int, int]], ahead: int, at: int, end: int | None
) -> None:
    file, true = StoredFile(ranges, ahead=ahead, at=at, end=end), io.BytesIO(DATA)
    true.seek(at)
    for name, *values in steps:
        if name == "readinto":
            buffers = bytearray(values[0]), bytearray(values[0])
            assert file.readinto(buffers[0]) == true.readinto(buffers[1])
            assert buffers[0] == buffers[1]
        else:
            assert getattr(file, name)(*values) == getattr(true, name)(*values)
        assert file.tell() == true.tell()


@pytest.mark.parametrize("end", [3000, None])
def test_nothing_is_read_behind_the_end(end: int | None) -> None:
    with FaultServer({"m/file": DATA}) as web:
        store = ObjectStore(parse_location(f"{web.url}/m"), environ={})
        opened = Ranges(store.source("m/file", len(DATA), ""), 4)
        StoredFile(opened, ahead=1000, at=1900, end=end).read(100)
        opened.close()
        last = max(request.range[1] for request in web.requests)
    assert last == (end or 2900 + 1000)


def test_what_cannot_be_had_is_raised_and_reads_under_way_end() -> None:
    before = set(threading.enumerate())
    with FaultServer({"m/file": DATA}) as web:
        web.faults += [Fault(if_range=lambda begin, end: begin >= 1000, stall=-1), Fault(status=404)]
        store = ObjectStore(parse_location(f"{web.url}/m"), environ={})
        opened = Ranges(store.source("m/file", len(DATA), ""), 4)
        file = StoredFile(opened, ahead=1000)
        with pytest.raises(StorageError, match="is gone"):
            file.read(2000)
        opened.close()
        assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("ranges")]
