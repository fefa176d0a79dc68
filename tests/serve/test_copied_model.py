"""A copy on the disk of what an object store sent: used by the next start, in nobody's way, never trusted."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from object_servers import S3Server
from running_server import RunningServer, run_to_end

Model = Callable[..., Path]
S3 = "s3://models/tiny"


@pytest.fixture(scope="module")
def expected(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> str:
    log = tmp_path_factory.mktemp("directory") / "log"
    with RunningServer(tiny_model(shards=3), "--threads", "1", log=log) as server:
        return text(server.until_ready())


def text(server: RunningServer) -> str:
    return str(server.complete()["choices"][0]["text"])


def start(s3: S3Server, log: Path, *flags: str) -> RunningServer:
    return RunningServer(S3, "--threads", "1", *flags, env=s3.environ, log=log)


def shards(s3_or_copies: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in s3_or_copies.glob("*.safetensors")}


def copies(directory: Path, name: str = "data") -> list[Path]:
    return sorted(directory.glob(f"*/{name}"))


def fill(s3: S3Server, directory: Path, log: Path) -> None:
    """A first start, until its copies are complete."""
    with start(s3, log, "--disk-cache", str(directory)) as server:
        server.until_ready()
        server.until(lambda: "3 files complete" in server.output)
        written = sum(path.stat().st_size for path in copies(directory))
        server.until(lambda: server.metric("hotstart:disk_copy_written_bytes_total") == written)


def test_the_second_start_reads_the_copies_and_answers_the_same(
    s3: S3Server, tiny_model: Model, tmp_path: Path, expected: str
) -> None:
    directory = tmp_path / "copies"
    fill(s3, directory, tmp_path / "first.log")
    stored = {hashlib.sha256(data).hexdigest() for data in shards(tiny_model(shards=3)).values()}
    assert {hashlib.sha256(path.read_bytes()).hexdigest() for path in copies(directory)} == stored
    with start(s3, tmp_path / "second.log", "--disk-cache", str(directory)) as server:
        assert text(server.until_ready()) == expected
        assert f"disk copy: 3 files of 3 read from {directory}" in server.output
        assert "resident in the page cache" in server.output  # mapped, like any file
        assert 'source="disk_copy",strategy="map"' in server.http.get("/metrics").text


def test_four_starts_at_once_share_one_copy(s3: S3Server, tmp_path: Path, expected: str) -> None:
    flags = ("--disk-cache", str(tmp_path / "copies"))
    servers = [start(s3, tmp_path / f"{n}.log", *flags) for n in range(4)]
    try:
        assert [text(server.until_ready()) for server in servers] == [expected] * 4
        servers[0].until(lambda: len(copies(tmp_path / "copies")) == 3)
        assert "not written" not in "".join(server.output for server in servers)
    finally:
        for server in servers:
            server.__exit__()


def test_weights_that_are_converted_are_copied_as_they_are_stored(
    s3: S3Server, tiny_model: Model, tmp_path: Path
) -> None:
    """The model gives their memory back before it answers, and the copy is written afterwards."""
    directory = tmp_path / "copies"
    with start(s3, tmp_path / "log", "--dtype", "bfloat16", "--disk-cache", str(directory)) as server:
        server.until_ready()
        server.until(lambda: "3 files complete" in server.output)
    stored = shards(tiny_model(shards=3)).values()
    assert sorted(path.read_bytes() for path in copies(directory)) == sorted(stored)


def test_a_partial_copy_is_used_for_what_it_has_and_completed(
    s3: S3Server, tmp_path: Path, expected: str
) -> None:
    directory = tmp_path / "copies"
    fill(s3, directory, tmp_path / "first.log")
    for copy in copies(directory)[1:]:
        copy.rename(copy.with_name("partial"))
    copies(directory, "partial")[0].with_name("chunks").unlink()
    with start(s3, tmp_path / "second.log", "--disk-cache", str(directory)) as server:
        assert text(server.until_ready()) == expected
        assert re.search(r"1 file of 3 read from .* kB\), and .* kB of .* whose copies", server.output)
        server.until(lambda: "2 files complete" in server.output)
    assert len(copies(directory)) == 3


def test_a_server_killed_as_soon_as_it_is_ready_leaves_nothing_wrong(
    s3: S3Server, tmp_path: Path, expected: str
) -> None:
    directory = tmp_path / "copies"
    for n in range(2):
        with start(s3, tmp_path / f"{n}.log", "--disk-cache", str(directory)) as server:
            assert text(server.until_ready()) == expected
            server.process.kill()
    with start(s3, tmp_path / "last.log", "--disk-cache", str(directory)) as server:
        assert text(server.until_ready()) == expected
        server.until(lambda: len(copies(directory)) == 3)


def test_a_disk_that_is_full_costs_the_copy_and_one_line(s3: S3Server, tmp_path: Path, expected: str) -> None:
    """A limit on the size of files stands in for the end of the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        server = start(s3, tmp_path / "log", "--disk-cache", str(tmp_path / "copies"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with server:
        assert text(server.until_ready()) == expected
        server.until(lambda: "not written to" in server.output)
        assert server.output.count("disk copy:") == 2
        assert copies(tmp_path / "copies", "partial") == []


def test_a_directory_that_cannot_be_written_costs_the_copy_and_one_line(
    s3: S3Server, tmp_path: Path, expected: str
) -> None:
    (tmp_path / "file").write_text("no directory")
    with start(s3, tmp_path / "log", "--disk-cache", str(tmp_path / "file" / "copies")) as server:
        assert text(server.until_ready()) == expected
        server.until(lambda: "not written to" in server.output)


def test_a_damaged_copy_is_named_and_removed_after_the_start(s3: S3Server, tmp_path: Path) -> None:
    directory = tmp_path / "copies"
    fill(s3, directory, tmp_path / "first.log")
    victim = copies(directory)[0]
    with victim.open("r+b") as file:
        file.seek(victim.stat().st_size - 5)
        file.write(b"\x55\xaa")
    with start(s3, tmp_path / "second.log", "--disk-cache", str(directory)) as server:
        server.until_ready()
        server.until(lambda: "was damaged" in server.output)
        assert str(victim) in server.output
        assert len(copies(directory)) == 2
    with start(s3, tmp_path / "third.log", "--disk-cache", str(directory)) as server:
        server.until(lambda: "1 file complete" in server.output)


def sums(folder: Path) -> str:
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in shards(folder).items())


@pytest.fixture
def digested(tiny_model: Model, tmp_path: Path) -> Iterator[tuple[S3Server, Path]]:
    """A store of its own, whose model has a SHA256SUMS."""
    root = tmp_path / "buckets"
    folder = Path(shutil.copytree(tiny_model(shards=3), root / "models" / "tiny"))
    (folder / "SHA256SUMS").write_text(sums(folder))
    with S3Server(root) as server:
        yield server, folder


def corrupt(path: Path) -> None:
    """A byte of the last tensor; size and date stay."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size - 3)
        byte = file.read(1)[0]
        file.seek(status.st_size - 3)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_corrupted_byte_ends_a_start_that_compares_digests_before_it_is_ready(
    digested: tuple[S3Server, Path], tmp_path: Path
) -> None:
    s3, folder = digested
    with start(s3, tmp_path / "log", "--verify", "digest") as server:
        server.until_ready()
        assert "SHA-256 of 3 files as SHA256SUMS says" in server.output
    victim = sorted(folder.glob("*.safetensors"))[1]
    right = hashlib.sha256(victim.read_bytes()).hexdigest()
    corrupt(victim)
    flags = ("--threads", "1", "--disk-cache", str(tmp_path / "copies"))
    code, output = run_to_end(S3, "--verify", "digest", *flags, env=s3.environ)
    assert code == 3
    found = hashlib.sha256(victim.read_bytes()).hexdigest()
    assert f"{S3}/{victim.name} has the SHA-256 {found}; expected {right}, by SHA256SUMS" in output
    assert "ready" not in output
    with start(s3, tmp_path / "size.log", *flags[2:]) as server:
        server.until_ready()  # nobody ordered the comparison: it comes later
        server.until(lambda: "this server answers from damaged weights" in server.output)
        assert f"{S3}/{victim.name} has the SHA-256 {found}; expected {right}, by SHA256SUMS" in server.output


def test_without_published_digests_those_of_the_first_start_are_compared_by_the_next(
    tiny_model: Model, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    flags = ("--verify", "digest", "--threads", "1")
    with RunningServer(model, *flags, log=tmp_path / "first.log") as server:
        server.until_ready()
        server.until(lambda: "SHA-256 of 1 file recorded" in server.output)
    with RunningServer(model, *flags, log=tmp_path / "second.log") as server:
        server.until_ready()
        assert "SHA-256 of 1 file as an earlier start says" in server.output
    corrupt(model / "model.safetensors")
    cache = {"HOTSTART_CACHE_ROOT": str(tmp_path / "cache")}
    code, output = run_to_end(model, *flags, env=cache)
    assert code == 3
    assert "by an earlier start" in output


def test_digests_of_an_object_hold_for_its_copy(s3: S3Server, tmp_path: Path) -> None:
    flags = ("--verify", "digest", "--disk-cache", str(tmp_path / "copies"))
    with start(s3, tmp_path / "first.log", *flags) as server:
        server.until_ready()
        server.until(lambda: "SHA-256 of 3 files recorded" in server.output)
    victim = copies(tmp_path / "copies")[0]
    corrupt(victim)
    cache = {"HOTSTART_CACHE_ROOT": str(tmp_path / "cache")}
    code, output = run_to_end(S3, "--threads", "1", *flags, env={**s3.environ, **cache})
    assert (code, f"{victim} has the SHA-256" in output) == (3, True)
    assert "comes from the store" in output
    assert not victim.exists()
    with start(s3, tmp_path / "third.log", *flags) as server:
        server.until_ready()
