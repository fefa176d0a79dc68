"""What a load is compared with and what it leaves behind, beside a model that gives its memory back."""

from __future__ import annotations

import base64
import hashlib
import logging
import random
import threading
import zlib
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


def reads(server: FaultServer) -> int:
    """Requests for bytes of the weight file."""
    return [(request.method, request.path) for request in server.requests].count(("GET", f"/m/{NAME}"))


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
        asked = reads(server)
        image.release(0, 0, len(SHARD))
        assert image.memory(0)[: len(SHARD)] == SHARD
        afterwards.go_on()
        afterwards.wait()
        assert written(tmp_path / "copies") == [SHARD]
        assert image.memory(0)[4096:8192] == bytes(4096)
        assert reads(server) == asked
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


def of_store(server: FaultServer, copies: Path, small_files: Path, log: Log) -> tuple[Afterwards, Image]:
    """A load whose digests are compared, up to where all has arrived."""
    checkpoint = stored(server, small_files, copies)
    load = LoadConfig(disk_cache=str(copies), verify="digest")
    afterwards, image = Afterwards(checkpoint, load, "", log), Image(checkpoint)
    image.follow(afterwards)
    afterwards.start([memoryview(image.memory(0))])
    image.start()
    image.wait()
    return afterwards, image


MD5 = base64.b64encode(hashlib.md5(SHARD).digest()).decode()
CRC32 = base64.b64encode(zlib.crc32(SHARD).to_bytes(4, "big")).decode()
SHA256 = base64.b64encode(hashlib.sha256(SHARD).digest()).decode()
GIVEN = {
    "s3": ("x-amz-checksum-crc32", CRC32, "CRC-32"),
    "google": ("x-goog-hash", f"crc32c=AAAAAA==,md5={MD5}", "MD5"),
    "azure": ("Content-MD5", MD5, "MD5"),
    "a web server": ("Repr-Digest", f"sha-256=:{SHA256}:", "SHA-256"),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_a_byte_that_changed_on_the_way_is_found_by_the_stores_own_checksum(
    kind: str, tmp_path: Path
) -> None:
    header, value, label = GIVEN[kind]
    log = Log()
    with FaultServer({f"m/{NAME}": SHARD}, Fault(headers={header: value})) as server:
        afterwards, image = of_store(server, tmp_path / "copies", tmp_path, log)
        afterwards.confirm()
        assert f"digests: {label} of 1 file as the store's {header.lower()} says" in log.text
        afterwards.close()
        image.close()
        server.faults = [Fault(headers={header: value}, corrupt=len(SHARD) - 10)]
        afterwards, image = of_store(server, tmp_path / "other", tmp_path, log)
        with pytest.raises(ModelError) as raised:
            afterwards.confirm()
        afterwards.close()
        image.close()
        assert f"{server.url}/m/{NAME} has the {label} " in raised.value.found
        assert raised.value.expected.endswith(f", by the store's {header.lower()}")
        assert "start again" in raised.value.advice


def test_a_checksum_that_is_not_compared_is_named(tmp_path: Path) -> None:
    log = Log()
    fault = Fault(headers={"x-amz-checksum-crc64nvme": "AAAAAAAAAAA="})
    with FaultServer({f"m/{NAME}": SHARD}, fault) as server:
        afterwards, image = of_store(server, tmp_path / "copies", tmp_path, log)
        afterwards.confirm()
        afterwards.close()
        image.close()
    assert "digests: the store's checksums of 1 file are not compared (CRC-64/NVME)" in log.text


def test_what_was_published_goes_before_the_stores_own_checksum(tmp_path: Path) -> None:
    log = Log()
    files = {f"m/{NAME}": SHARD, f"m/{NAME}.sha256": hashlib.sha256(SHARD).hexdigest().encode()}
    with FaultServer(files, Fault(path=NAME, headers={"Content-MD5": "AAAAAAAAAAAAAAAAAAAAAA=="})) as server:
        afterwards, image = of_store(server, tmp_path / "copies", tmp_path, log)
        afterwards.confirm()
        afterwards.close()
        image.close()
        assert "HEAD" not in [request.method for request in server.requests]
    assert f"SHA-256 of 1 file as {NAME}.sha256 says" in log.text


def test_digests_hold_for_names_in_the_models_folder_whatever_links_lead_to(tmp_path: Path) -> None:
    """As in the hub's cache."""
    folder = tmp_path / "look at me"
    folder.mkdir()
    (tmp_path / "blob").write_bytes(SHARD)
    (folder / NAME).symlink_to(tmp_path / "blob")
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(SHARD).hexdigest()}  {NAME}\n")
    log = Log()
    afterwards = Afterwards(open_checkpoint(LocalFolder(str(folder))), LoadConfig(verify="digest"), "", log)
    afterwards.start(())
    afterwards.confirm()
    afterwards.close()
    assert log.text == "digests: SHA-256 of 1 file as SHA256SUMS says"


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
