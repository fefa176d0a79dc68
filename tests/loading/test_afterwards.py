"""What a load is compared with and what it leaves behind, beside a model that gives its memory back."""

from __future__ import annotations

import hashlib
import logging
import random
import threading
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
from hotstart.errors import ModelError
from hotstart.loading.afterwards import Afterwards
from hotstart.loading.image import Image
from hotstart.storage.disk_copy import DiskCopies, Limit

SIZE = 3_000_000
SHARD = file_of(
    {"w": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}, random.Random(3).randbytes(SIZE)
)
NAME = "model.safetensors"


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def __call__(self, level: int, text: str) -> None:
        self.lines.append((level, text))

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.lines)


def stored(server: FaultServer, small_files: Path, copies: Path) -> Checkpoint:
    store = open_store(f"{server.url}/m", environ={}, patience=5.0)
    return open_checkpoint(ObjectFolder(store, str(small_files), DiskCopies(Limit(str(copies), None))))


def written(copies: Path) -> list[bytes]:
    return [path.read_bytes() for path in copies.glob("*/data")]


def test_memory_is_given_back_once_it_is_written(tmp_path: Path) -> None:
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        checkpoint = stored(server, tmp_path, tmp_path / "copies")
        load = LoadConfig(disk_cache=str(tmp_path / "copies"))
        afterwards, image = Afterwards(checkpoint, load, "", Log()), Image(checkpoint)
        image.follow(afterwards)
        afterwards.start([memoryview(image.memory(0))])
        image.start()
        image.wait()
        asked = len(server.requests)
        image.release(0, 0, len(SHARD))
        assert image.memory(0)[: len(SHARD)] == SHARD
        afterwards.go_on()
        afterwards.wait()
        assert written(tmp_path / "copies") == [SHARD]
        assert image.memory(0)[4096:8192] == bytes(4096)
        assert len(server.requests) == asked
        image.close()


def test_memory_that_is_short_is_given_back_at_once_and_the_copy_asks_the_store_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotstart.loading.afterwards._LOOK_EVERY", 1)
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        checkpoint = stored(server, tmp_path, tmp_path / "copies")
        load = LoadConfig(disk_cache=str(tmp_path / "copies"))
        afterwards, image = Afterwards(checkpoint, load, "", Log()), Image(checkpoint)
        image.follow(afterwards)
        afterwards.start([memoryview(image.memory(0))])
        image.start()
        image.wait()
        monkeypatch.setattr(host, "memory", lambda: host.HostMemory(1 << 30, "test", 1 << 20))
        asked, given_back = len(server.requests), threading.Event()
        assert afterwards.keeps(0, 0, len(SHARD), given_back.set)
        assert given_back.wait(60)  # and nobody has said that the model answers
        afterwards.go_on()
        afterwards.wait()
        assert written(tmp_path / "copies") == [SHARD]
        assert len(server.requests) > asked
        image.close()


def test_where_bytes_do_not_stay_in_memory_the_copy_comes_from_the_store(tmp_path: Path) -> None:
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        checkpoint = stored(server, tmp_path, tmp_path / "copies")
        log = Log()
        afterwards = Afterwards(checkpoint, LoadConfig(disk_cache=str(tmp_path / "copies")), "", log)
        afterwards.start(())
        afterwards.confirm()
        afterwards.go_on()
        afterwards.wait()
        assert written(tmp_path / "copies") == [SHARD]
        assert "1 file complete" in log.text


def test_an_object_replaced_before_its_copy_is_complete_leaves_none(tmp_path: Path) -> None:
    with FaultServer({f"m/{NAME}": SHARD}) as server:
        checkpoint = stored(server, tmp_path, tmp_path / "copies")
        log = Log()
        afterwards = Afterwards(checkpoint, LoadConfig(disk_cache=str(tmp_path / "copies")), "", log)
        server.files[f"m/{NAME}"] = bytes(len(SHARD))
        afterwards.start(())
        afterwards.go_on()
        afterwards.wait()
        assert written(tmp_path / "copies") == []
        assert [level for level, text in log.lines if "not written" in text] == [logging.WARNING]


def test_a_byte_that_the_network_changed_is_found_and_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even of a load so long that its copy was begun meanwhile."""
    monkeypatch.setattr("hotstart.loading.afterwards._QUIET", 0.0)
    monkeypatch.setattr("hotstart.storage.idle.SpareProcessors.now", lambda self: True)
    sums = f"{hashlib.sha256(SHARD).hexdigest()}  {NAME}\n".encode()
    fault = Fault(path=NAME, nth=2, corrupt=len(SHARD) - 10)
    with FaultServer({f"m/{NAME}": SHARD, "m/SHA256SUMS": sums}, fault) as server:
        checkpoint = stored(server, tmp_path, tmp_path / "copies")
        load = LoadConfig(disk_cache=str(tmp_path / "copies"), verify="digest")
        afterwards, image = Afterwards(checkpoint, load, "", Log()), Image(checkpoint)
        image.follow(afterwards)
        afterwards.start([memoryview(image.memory(0))])
        image.start()
        image.wait()
        until(lambda: any(path.read_bytes() for path in tmp_path.glob("copies/*/chunks")))
        with pytest.raises(ModelError, match=r"by SHA256SUMS") as raised:
            afterwards.confirm()
        assert hashlib.sha256(image.memory(0)[: len(SHARD)]).hexdigest() in str(raised.value)
        afterwards.close()
        left = {path.name for path in tmp_path.glob("copies/*/*")}
        assert left.isdisjoint({"data", "partial", "chunks"})
        image.close()


@pytest.mark.parametrize("strategy", ["map", "buffered", "direct", "none"])
def test_digests_of_a_directory_however_it_is_read(tmp_path: Path, strategy: str) -> None:
    """``none``: by a GPU, whose buffers are used again."""
    (tmp_path / NAME).write_bytes(SHARD)
    (tmp_path / f"{NAME}.sha256").write_text(hashlib.sha256(SHARD).hexdigest())
    checkpoint = open_checkpoint(LocalFolder(str(tmp_path)))
    log = Log()
    afterwards = Afterwards(checkpoint, LoadConfig(verify="digest"), "", log)
    assert afterwards.compares
    if strategy == "none":
        afterwards.start(())
    else:
        image = Image(checkpoint, strategy=strategy)
        image.follow(afterwards)
        afterwards.start([memoryview(image.memory(0))])
        image.start()
        image.wait()
    afterwards.confirm()
    assert log.text == f"digests: SHA-256 of 1 file as {NAME}.sha256 says"
    afterwards.close()
