"""Copies on a disk: any order of arrival, any death of the writer, any number of processes, one result."""

from __future__ import annotations

import ast
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotstart.errors import ConfigError, StorageError
from hotstart.loading.copying import CopyJob, Ranges, compare
from hotstart.storage.disk_copy import DiskCopies, Limit
from hotstart.storage.disk_copy_index import CHUNK
from hotstart.storage.disk_copy_source import CopiedSource
from hotstart.storage.idle import SpareProcessors, run_idle
from hotstart.storage.source import Cancel, FileSource

SIZE = 5 * CHUNK + 12_345
DATA = random.Random(1).randbytes(SIZE)
NEVER = threading.Event()


class Store:
    """The object in its store; counts what is asked of it."""

    name, size, identity, align = "s3://bucket/a", SIZE, '"etag"', 1

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.read = 0
        self.gone = False

    def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
        if self.gone:
            raise StorageError("s3://bucket/a is gone")
        buffer[:] = self.data[offset : offset + len(buffer)]
        self.read += len(buffer)

    def verify(self) -> None:
        pass

    def close(self) -> None:
        pass


def job(
    directory: Path,
    store: Store,
    memory: bytes | bytearray | None = DATA,
    identity: str = '"etag"',
    limit: str = "",
) -> CopyJob:
    """A server's, with locks of its own."""
    copies = DiskCopies(Limit.parse(f"{directory}{limit}"))
    view = None if memory is None else memoryview(memory)
    return CopyJob(copies, store.name, identity, SIZE, lambda: store, view)


def copy_of(directory: Path, identity: str = '"etag"') -> bytes | None:
    copies = DiskCopies(Limit(str(directory), None))
    entry = copies.entry(Store.name, identity, SIZE)
    try:
        return Path(entry.data).read_bytes() if entry is not None and entry.complete else None
    finally:
        copies.close()


cuts = st.lists(st.integers(0, SIZE), min_size=0, max_size=6, unique=True)


@settings(deadline=None, max_examples=40)
@given(lives=st.lists(st.tuples(cuts, st.randoms(use_true_random=False), st.booleans()), max_size=3))
def test_any_order_of_arrival_and_any_restarts_give_the_same_bytes(
    lives: list[tuple[list[int], random.Random, bool]],
) -> None:
    """In each life some ranges arrive, in any order; some are released before they are written."""
    with tempfile.TemporaryDirectory() as folder:
        for places, order, loses in lives:
            writer = job(Path(folder), Store())
            edges = sorted({0, *places, SIZE})
            parts = list(pairwise(edges))
            order.shuffle(parts)
            for begin, end in parts[: order.randint(0, len(parts))]:
                writer.arrived(begin, end)
                if loses and order.random() < 0.3:
                    writer.lose(begin, end)
                if order.random() < 0.5:
                    writer.write_arrived()
            writer.close()  # as the kernel does when the process is killed
        store = Store()
        last = job(Path(folder), store, memory=None)
        last.complete(NEVER)
        assert last.problem == ""
        assert copy_of(Path(folder)) == DATA


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=20))
def test_ranges_become_one_where_they_touch(parts: list[tuple[int, int]]) -> None:
    ranges, covered = Ranges(), set[int]()
    for begin, length in parts:
        covered |= set(range(begin, begin + length))
        low, high = ranges.add(begin, begin + length)
        assert set(range(low, high)) <= covered | {begin}
        assert low - 1 not in covered
        assert high not in covered


def test_what_lies_on_the_disk_is_not_asked_of_the_store(tmp_path: Path) -> None:
    writer = job(tmp_path, Store())
    writer.arrived(0, 3 * CHUNK)
    writer.write_arrived()
    writer.close()
    assert copy_of(tmp_path) is None
    store = Store()
    assert read(store, tmp_path) == DATA
    assert store.read == SIZE - 3 * CHUNK


def test_a_pipe_in_the_place_of_a_copy_holds_nothing_up(tmp_path: Path) -> None:
    job(tmp_path, Store()).complete(NEVER)
    (data,) = tmp_path.glob("*/data")
    data.unlink()
    os.mkfifo(data)
    assert read(Store(), tmp_path) == DATA


def read(store: Store, directory: Path, begin: int = 0, end: int = SIZE, step: int = SIZE) -> bytes:
    entry = DiskCopies(Limit(str(directory), None)).entry(store.name, store.identity, SIZE)
    assert entry is not None
    source = CopiedSource(store, entry)
    buffer = bytearray(end - begin)
    for at in range(begin, end, step):
        source.read_into(memoryview(buffer)[at - begin : at - begin + step], at, NEVER)
    source.close()
    return bytes(buffer)


def test_memory_is_needed_until_a_damaged_chunk_of_an_earlier_writer_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = job(tmp_path, Store())
    writer.arrived(0, CHUNK)
    writer.write_arrived()
    writer.close()
    [partial] = tmp_path.glob("*/partial")
    with partial.open("rb+") as file:
        file.write(bytes(100))
    memory = bytearray(DATA)
    last = job(tmp_path, Store(), memory)
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not last.needs(0, CHUNK):  # the model gives it back, while the copy is still compared
            memory[:CHUNK] = bytes(CHUNK)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    last.arrived(0, SIZE)
    last.complete(NEVER)
    assert copy_of(tmp_path) == DATA


@settings(deadline=None, max_examples=30)
@given(
    have=st.lists(st.integers(0, 5), unique=True),
    bad=st.lists(st.integers(0, SIZE - 1), max_size=3),
    begin=st.integers(0, SIZE),
    end=st.integers(0, SIZE),
    step=st.integers(CHUNK // 4, 2 * CHUNK),
)
def test_a_partial_copy_with_damaged_chunks_gives_the_objects_bytes(
    have: list[int], bad: list[int], begin: int, end: int, step: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = job(Path(folder), Store())
        for index in have:
            writer.arrived(index * CHUNK, min((index + 1) * CHUNK, SIZE))
        writer.write_arrived()
        writer.close()
        for partial in Path(folder).glob("*/partial"):
            damage(partial, bad)
        if have:
            assert read(Store(), Path(folder), begin, max(begin, end), step) == DATA[begin : max(begin, end)]
        # What was damaged is written anew.
        job(Path(folder), Store(), memory=None).complete(NEVER)
        assert copy_of(Path(folder)) == DATA


def damage(path: Path, places: list[int]) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            file.write(bytes([DATA[place] ^ 0xFF]))


KILLED = """
    import sys, threading
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_disk_copy import DATA, NEVER, Store, job
    writer = job(Path({directory!r}), Store())
    writer.synced = lambda: (print("synced", flush=True), threading.Event().wait(60))
    writer.arrived(0, {arrived})
    writer.write_arrived()
"""


def test_a_killed_writer_leaves_what_it_had_written_and_no_lock(tmp_path: Path) -> None:
    program = textwrap.dedent(
        KILLED.format(tests=str(Path(__file__).parent), directory=str(tmp_path), arrived=4 * CHUNK)
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"synced\n"
    # While it lives it is the only one that writes; others have what they need.
    other = job(tmp_path, Store())
    other.complete(NEVER)
    assert (other.published, other.problem, copy_of(tmp_path)) == (False, "", None)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store = Store()
    next_one = job(tmp_path, store, memory=None)
    next_one.complete(NEVER)
    assert next_one.published
    assert store.read == SIZE - 4 * CHUNK
    assert copy_of(tmp_path) == DATA


FULL = """
    import sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from test_disk_copy import CHUNK, NEVER, Store, job
    directory, others = Path({directory!r}), Path({directory!r}, "others")
    writer = job(directory, Store())
    writer.arrived(0, CHUNK)
    writer.write_arrived()
    with others.open("wb", buffering=0) as file:  # what other programs write meanwhile
        try:
            while True:
                file.write(bytes(CHUNK // 4))
        except OSError:
            pass
    writer.complete(NEVER)
    print(writer.problem, writer.published, [path.name for path in directory.glob("*/*")])
"""


IN_A_SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


@pytest.mark.skipif(subprocess.call([*IN_A_SMALL_DISK, ":"]) != 0, reason="no mount namespaces here")
def test_a_disk_that_becomes_full_gets_its_room_back(tmp_path: Path) -> None:
    program = textwrap.dedent(FULL.format(tests=str(Path(__file__).parent), directory=str(tmp_path)))
    script = f'mount -t tmpfs -o size=7m none {tmp_path} && exec "$@"'
    inside = (*IN_A_SMALL_DISK, script, "sh", sys.executable, "-c", program)
    ended = subprocess.run(inside, capture_output=True, text=True, check=True)
    problem, _, rest = ended.stdout.partition(" False ")
    assert problem == "No space left on device"
    assert not {"data", "partial", "chunks"} & set(ast.literal_eval(rest))


def test_a_copy_larger_than_the_disk_is_not_begun(tmp_path: Path) -> None:
    copies = DiskCopies(Limit(str(tmp_path), 2**60))
    huge = CopyJob(copies, Store.name, "e", 2**59, Store)
    huge.complete(NEVER)
    assert "more do not fit" in huge.problem
    assert list(tmp_path.glob("*/partial")) == []


def test_the_writers_thread_has_the_lowest_priority_and_no_other_thread_has() -> None:
    found: list[int] = []

    def work() -> None:
        run_idle()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE]
    assert os.sched_getscheduler(0) != os.SCHED_IDLE


@pytest.mark.parametrize(("busy", "idle", "spare"), [(10, 90, True), (90, 10, False), (0, 0, True)])
def test_processors_are_spare_while_most_of_them_are_idle(
    tmp_path: Path, busy: int, idle: int, spare: bool
) -> None:
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc" / "stat"
    stat.write_text("cpu  1000 0 1000 5000 0 0 0 0 0 0\n")
    processors = SpareProcessors(10**6, root=str(tmp_path))
    stat.write_text(f"cpu  {1000 + busy} 0 1000 {5000 + idle} 0 0 0 0 0 0\n")
    assert processors.now() is spare


def test_processors_that_this_process_keeps_busy_are_not_spare(tmp_path: Path) -> None:
    """In a container with fewer than the machine has. Here: none."""
    processors = SpareProcessors(0, root=str(tmp_path))
    assert not processors.now()


def test_an_object_that_was_replaced_is_another_entry(tmp_path: Path) -> None:
    job(tmp_path, Store()).complete(NEVER)
    assert copy_of(tmp_path) == DATA
    assert copy_of(tmp_path, '"another"') is None


def test_an_object_without_identity_has_no_copy(tmp_path: Path) -> None:
    assert DiskCopies(Limit(str(tmp_path), None)).entry("s3://bucket/a", "", SIZE) is None


def made(directory: Path, identity: str, limit: int, *, used: float) -> None:
    """A complete copy that nobody uses since so many seconds."""
    copies = DiskCopies(Limit(str(directory), limit))
    CopyJob(copies, Store.name, identity, SIZE, Store).complete(NEVER)
    entry = copies.entry(Store.name, identity, SIZE)
    assert entry is not None
    assert entry.complete
    copies.close()
    os.utime(Path(entry.path, "use"), (used, used))


def test_the_copy_used_longest_ago_makes_room_and_one_in_use_never(tmp_path: Path) -> None:
    limit = 3 * SIZE + 1000
    for identity, used in (("1", 1e6), ("2", 3e6), ("3", 2e6)):
        made(tmp_path, identity, limit, used=used)
    server = DiskCopies(Limit(str(tmp_path), limit))
    held = server.entry(Store.name, "1", SIZE)
    assert held is not None
    os.utime(Path(held.path, "use"), (1e6, 1e6))
    made(tmp_path, "4", limit, used=4e6)
    assert [copy_of(tmp_path, identity) == DATA for identity in "1234"] == [True, True, False, True]
    assert copy_of(tmp_path, "3") is None


def test_when_all_copies_are_in_use_there_is_no_room(tmp_path: Path) -> None:
    limit = SIZE + 1000
    made(tmp_path, "1", limit, used=1e6)
    server = DiskCopies(Limit(str(tmp_path), limit))
    assert server.entry(Store.name, "1", SIZE) is not None
    writer = job(tmp_path, Store(), identity="2", limit=f":{limit}")
    writer.complete(NEVER)
    assert "more do not fit: the limit is" in writer.problem
    assert copy_of(tmp_path, "1") == DATA
    server.close()
    again = job(tmp_path, Store(), identity="2", limit=f":{limit}")
    again.complete(NEVER)
    assert copy_of(tmp_path, "2") == DATA


@pytest.mark.parametrize(
    ("text", "directory", "nbytes"),
    [
        ("/a", "/a", None),
        ("/a:5GB", "/a", 5_000_000_000),
        ("/a:b/c", "/a:b/c", None),
        ("/a:1GiB", "/a", 2**30),
    ],
)
def test_the_flag_names_a_directory_and_perhaps_a_size(text: str, directory: str, nbytes: int | None) -> None:
    assert Limit.parse(text) == Limit(directory, nbytes)


@pytest.mark.parametrize("text", ["", ":5GB", "/a:", "/a:much", "/a:0"])
def test_a_flag_that_names_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--disk-cache"):
        Limit.parse(text)


def test_what_the_model_releases_is_needed_until_it_is_written(tmp_path: Path) -> None:
    writer = job(tmp_path, Store())
    writer.arrived(0, SIZE)
    assert writer.needs(10, 2 * CHUNK)
    writer.write_arrived()
    assert not writer.needs(10, 2 * CHUNK)


def test_a_store_that_is_gone_leaves_a_partial_copy_and_a_reason(tmp_path: Path) -> None:
    store = Store()
    store.gone = True
    writer = job(tmp_path, store)
    writer.arrived(0, CHUNK)
    writer.complete(NEVER)
    assert writer.problem == "s3://bucket/a is gone"
    assert not writer.needs(0, SIZE)
    assert read(Store(), tmp_path) == DATA


def test_comparing_removes_a_copy_that_is_not_what_was_written(tmp_path: Path) -> None:
    copies = DiskCopies(Limit(str(tmp_path), None))
    CopyJob(copies, Store.name, "e", SIZE, Store).complete(NEVER)
    entry = copies.entry(Store.name, "e", SIZE)
    assert entry is not None
    assert compare(entry, NEVER) == ""
    damage(Path(entry.data), [2 * CHUNK + 7])
    source = FileSource(entry.data)  # as a server that runs on it has it
    assert compare(entry, NEVER) == f"bytes {2 * CHUNK} to {3 * CHUNK} are not what was written"
    assert not entry.complete
    source.close()
