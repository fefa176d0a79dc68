"""Digests that no start waits for: compared, recorded and told once the model answers."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_files import file_of
from fault_proxy import Fault, FaultServer, until
from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.folder import LocalFolder
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder, open_store
from hotstart.config.settings import LoadConfig
from hotstart.device import host
from hotstart.loading.afterwards import Afterwards
from hotstart.loading.image import Image

SIZE = 9_000_000
SHARD = file_of(
    {"w": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}, random.Random(4).randbytes(SIZE)
)
NAME = "model.safetensors"
SHA256 = hashlib.sha256(SHARD).hexdigest()


class Start:
    """A load up to where the model answers. Says what it says to ``lines``."""

    def __init__(self, checkpoint: Checkpoint, cache: Path | str = "", verify: str = "size") -> None:
        self.lines: list[tuple[int, str]] = []
        self.afterwards = Afterwards(checkpoint, LoadConfig(verify=verify), str(cache), self._say)
        self.image = Image(checkpoint)
        self.image.follow(self.afterwards)
        self.afterwards.start([memoryview(self.image.memory(0))])
        self.image.start()
        self.image.wait()
        self.afterwards.confirm()

    def _say(self, level: int, text: str) -> None:
        self.lines.append((level, text))

    def to_the_end(self) -> str:
        self.afterwards.go_on()
        self.afterwards.wait()
        self.image.close()
        return "\n".join(text for _, text in self.lines)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / NAME).write_bytes(SHARD)
    return folder


def local(model: Path) -> Checkpoint:
    return open_checkpoint(LocalFolder(str(model)))


def stored(server: FaultServer, small_files: Path) -> Checkpoint:
    return open_checkpoint(
        ObjectFolder(open_store(f"{server.url}/m", environ={}, patience=5.0), str(small_files))
    )


def damage(path: Path) -> None:
    """Size and date stay."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_first_start_records_and_the_next_compares(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "SHA-256 of 1 file recorded" in Start(local(model), cache).to_the_end()
    assert "SHA-256 of 1 file as an earlier start says" in Start(local(model), cache).to_the_end()


def test_bytes_that_changed_by_themselves_are_told_by_a_server_that_goes_on(
    model: Path, tmp_path: Path
) -> None:
    Start(local(model), tmp_path / "cache").to_the_end()
    damage(model / NAME)
    start = Start(local(model), tmp_path / "cache")
    text = start.to_the_end()
    found = hashlib.sha256((model / NAME).read_bytes()).hexdigest()
    assert f"{model / NAME} has the SHA-256 {found}; expected {SHA256}, by an earlier start" in text
    assert "this server answers from damaged weights" in text
    assert logging.ERROR in [level for level, _ in start.lines]


def test_a_damaged_file_is_not_recorded_as_it_is(model: Path, tmp_path: Path) -> None:
    (model / "SHA256SUMS").write_text(f"{SHA256}  {NAME}\n")
    damage(model / NAME)
    for _ in range(2):
        assert "by SHA256SUMS" in Start(local(model), tmp_path / "cache").to_the_end()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("origin", ["SHA256SUMS", f"{NAME}.sha256", "Repr-Digest"])
def test_a_byte_that_changed_on_the_way_is_told(origin: str, tmp_path: Path) -> None:
    files = {f"m/{NAME}": SHARD}
    headers: dict[str, str | None] = {}
    if origin == "Repr-Digest":
        headers["Digest"] = f"sha-256={base64.b64encode(bytes.fromhex(SHA256)).decode()}"
    else:
        files[f"m/{origin}"] = f"{SHA256}  {NAME}\n".encode()
    spared = Fault(path=".sha256")
    with FaultServer(files, spared, Fault(path=NAME, headers=headers, corrupt=SIZE - 1)) as server:
        text = Start(stored(server, tmp_path)).to_the_end()
    assert "this server answers from damaged weights" in text
    assert "digest" in text


def test_nobody_is_asked_for_digests_before_the_model_answers(tmp_path: Path) -> None:
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        start = Start(stored(server, tmp_path), tmp_path / "cache")
        before = {request.path for request in server.requests}
        assert "recorded" in start.to_the_end()
        assert "/m/SHA256SUMS" in {request.path for request in server.requests} - before


def test_a_long_load_is_hashed_while_it_arrives_if_processors_are_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotstart.loading.afterwards._QUIET", 0.0)
    monkeypatch.setattr("hotstart.loading.afterwards._NAP", 0.01)
    monkeypatch.setattr("hotstart.storage.idle.SpareProcessors.now", lambda self: True)
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        start = Start(stored(server, tmp_path), tmp_path / "cache")
        until(lambda: any("recorded" in text for _, text in start.lines))  # and nobody said that it answers
        start.to_the_end()


@pytest.mark.parametrize("name", ["SHA256SUMS", f"{NAME}.sha256"])
def test_a_pipe_in_the_place_of_digests_holds_nothing_up(name: str, model: Path) -> None:
    os.mkfifo(model / name)
    assert "digests: SHA-256 of 1 file" in Start(local(model), model / "cache", "digest").to_the_end()


def test_verify_off_compares_and_records_nothing(model: Path, tmp_path: Path) -> None:
    (model / "SHA256SUMS").write_text(f"{'0' * 64}  {NAME}\n")
    assert Start(local(model), tmp_path / "cache", verify="off").to_the_end() == ""
    assert not (tmp_path / "cache").exists()


def without_memories(model: Path, load_format: str) -> list[str]:
    """The lines of a load whose bytes do not stay."""
    lines: list[str] = []
    load = LoadConfig(load_format=load_format)
    afterwards = Afterwards(local(model), load, str(model / "cache"), lambda level, text: lines.append(text))
    afterwards.start(())
    afterwards.go_on()
    afterwards.wait()
    assert not (model / "cache").exists()
    return lines


def test_where_bytes_do_not_stay_in_memory_nothing_is_read_again(model: Path) -> None:
    assert without_memories(model, "auto") == []


@pytest.mark.parametrize("load_format", ["runai_streamer_sharded", "fastsafetensors"])
def test_of_a_library_that_shows_no_bytes_it_is_said_that_nothing_is_compared(
    load_format: str, model: Path
) -> None:
    (line,) = without_memories(model, load_format)
    assert line.startswith(f"digests: not compared, for --load-format {load_format} shows no bytes")
    assert "--verify digest" in line


def test_memory_that_the_model_gives_back_stays_until_it_is_hashed(tmp_path: Path) -> None:
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        start = Start(stored(server, tmp_path), tmp_path / "cache")
        start.image.release(0, 0, len(SHARD))
        assert start.image.memory(0)[4096:8192] == SHARD[4096:8192]
        start.afterwards.go_on()
        start.afterwards.wait()
        assert start.image.memory(0)[4096:8192] == bytes(4096)
        assert "recorded" in start.to_the_end()


def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(1 << 30, "test", 1 << 20))


def test_memory_that_is_short_goes_first_and_the_file_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotstart.loading.afterwards._LOOK_EVERY", 1)
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        start = Start(stored(server, tmp_path), tmp_path / "cache")
        short_of_memory(monkeypatch)
        given_back: Callable[[], None] = (done := threading.Event()).set
        assert start.afterwards.keeps(0, 0, len(SHARD), given_back)
        assert done.wait(60)
        assert "1 file of 1 passed over: the memory was needed" in start.to_the_end()
    assert not (tmp_path / "cache").exists()


def test_a_store_that_is_gone_costs_the_comparison_and_one_line(tmp_path: Path) -> None:
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        store = open_store(f"{server.url}/m", environ={}, patience=0.2)
        start = Start(open_checkpoint(ObjectFolder(store, str(tmp_path))), tmp_path / "cache")
    text = start.to_the_end()
    assert "digests: not compared" in text
    assert [level for level, _ in start.lines] == [logging.WARNING]
