"""``hotstart convert`` to a prefix of a store at which others write too, and what is left when it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import tiny_models
from hotstart.cli.main import main
from object_servers import NanioServer, OpenS3Server

COMMAND = [sys.executable, "-m", "hotstart", "convert", "safetensors"]
SIZES = (10_000_000, 100_000_000, 100_000_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("beside") / "tiny")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """210 MB in three tensors; sparse, so it costs nothing."""
    directory = tmp_path_factory.mktemp("large")
    entries, end = {}, 0
    for number, size in enumerate(SIZES):
        entries[f"tensor.{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(entries).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(params=[OpenS3Server, NanioServer])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The bucket ``models``. The first kind has no DeleteObjects, the second creates what exists."""
    root = tmp_path / "store"
    (root / "models").mkdir(parents=True)
    with request.param(root) as server:
        for name, value in {**server.environ, "HOTSTART_CACHE_ROOT": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        yield root / "models"


def objects(bucket: Path) -> set[str]:
    """Parts of uploads too; not what the servers keep for themselves."""
    names = {str(path.relative_to(bucket.parent)) for path in bucket.parent.rglob("*") if path.is_file()}
    # localbucket takes parts of an upload that is given up already, where others answer NoSuchUpload.
    names = {name for name in names if not name.startswith(".localbucket-uploads/")}
    return {name for name in names if "/." not in f"/{name}" or "upload" in name or "converting" in name}


def in_the_middle(source: Path, bucket: Path, *flags: str) -> subprocess.Popen[str]:
    """A conversion that has written its first object, uploads the second, and stands still."""
    command = [*COMMAND, str(source), "s3://models/new", "--shard-size", "100MB", *flags]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    while _stored(bucket.parent) < 26_000_000:
        assert child.poll() is None, child.stderr and child.stderr.read()
        time.sleep(0.002)  # the child tells nobody
    child.send_signal(signal.SIGSTOP)
    assert (bucket / "new/model-00001-of-00003.safetensors").exists()
    return child


def _stored(root: Path) -> int:
    """Bytes of all files, of which any may be renamed or removed now."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def end(child: subprocess.Popen[str], number: int = 0) -> tuple[int, str]:
    """Let it go on, to a signal where there is one; its code, and what it says."""
    if number:
        child.send_signal(number)
    child.send_signal(signal.SIGCONT)
    _, error = child.communicate(timeout=60)
    return child.returncode, error


def test_what_was_whole_and_what_is_under_way_go_when_it_is_stopped(large: Path, store: Path) -> None:
    code, said = end(in_the_middle(large, store), signal.SIGTERM)
    assert code == 143
    assert said.splitlines()[-1] == "hotstart: stopped on SIGTERM; nothing was left behind"
    assert objects(store) == set()


def test_a_second_conversion_to_the_same_prefix_is_refused(
    model: Path, large: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = in_the_middle(large, store)
    before = set((store / "new").iterdir())
    assert main(["convert", "safetensors", str(model), "s3://models/new"]) == 2
    assert "Another conversion writes to s3://models/new" in capsys.readouterr().err
    assert set((store / "new").iterdir()) == before
    assert end(first)[0] == 0
    assert {path.name for path in (store / "new").iterdir()} >= {"config.json", "SHA256SUMS"}
    assert not any("converting" in name for name in objects(store))


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_what_another_program_wrote_meanwhile_stays(name: str, number: int, large: Path, store: Path) -> None:
    child = in_the_middle(large, store)
    _put(name, b"mine")
    code, said = end(child, number)
    assert code == (143 if number else 4)
    assert "written by somebody else" in said or "others wrote" in said or number
    assert (store / "new" / name).read_bytes() == b"mine"
    assert objects(store) == {f"models/new/{name}"}


def test_an_object_that_went_meanwhile_makes_no_model(large: Path, store: Path) -> None:
    child = in_the_middle(large, store)
    _delete("model-00001-of-00003.safetensors")
    code, said = end(child)
    assert code == 4
    assert "model-00001-of-00003.safetensors went while this conversion ran" in said
    assert objects(store) == set()


def test_a_store_that_deletes_nothing_leaves_what_the_last_line_names(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "store/models"
    bucket.mkdir(parents=True)
    with OpenS3Server(bucket.parent) as server, Undeletable(server.port) as url:
        for name, value in {**server.environ, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        code, said = end(in_the_middle(large, bucket), signal.SIGTERM)
    assert code == 143
    (mark,) = (path.name for path in (bucket / "new").iterdir() if path.name.startswith("."))
    assert said.splitlines()[-1] == (
        "hotstart: stopped on SIGTERM; 2 objects of it may be left in s3://models/new: "
        f"model-00001-of-00003.safetensors, {mark}; delete them, or name another prefix the next time"
    )
    assert objects(bucket) == {"models/new/model-00001-of-00003.safetensors", f"models/new/{mark}"}


def _client() -> object:
    from hotstart.storage.cloud_settings import settings_for
    from hotstart.storage.location import parse_location

    location = parse_location("s3://models/new")
    settings = settings_for(location, os.environ)
    settings.config = {**settings.config, "disable_bulk_delete": "true"}
    return settings.open(location)


def _put(name: str, data: bytes) -> None:
    import obstore

    obstore.put(_client(), f"new/{name}", data)  # type: ignore[call-overload]


def _delete(name: str) -> None:
    import obstore

    obstore.delete(_client(), f"new/{name}")  # type: ignore[arg-type]


class Undeletable:
    """``with Undeletable(port) as url``: a store that refuses to delete, before one that would."""

    def __init__(self, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if self.command == "DELETE" and "uploadId" not in self.path:
                    self.send_response(403)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "date", "server", "connection"):
                        self.send_header(name, value)
                if answer.getheader("content-length") is None:
                    self.send_header("content-length", str(len(data)))
                self.end_headers()
                with suppress(OSError):  # a client that was stopped does not listen
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

            def log_message(self, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
