"""``hotstart convert`` from object stores and web servers, and to object stores."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hub_stand_in
import tiny_models
from hotstart.cli.main import main
from hotstart.convert.reading import Reader
from hotstart.units import format_size
from object_servers import AzureServer, GcsServer, NanioServer, OpenS3Server, S3Server

COMMAND = [sys.executable, "-m", "hotstart", "convert", "safetensors"]


def convert(*words: str | Path) -> int:
    return main(["convert", "safetensors", *map(str, words)])


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_models.write("llama", tmp_path_factory.mktemp("store") / "tiny", shards=2)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (directory / "LICENSE").write_text("free")
    return directory


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a conversion from directory to directory writes."""
    target = tmp_path_factory.mktemp("converted") / "new"
    assert convert(model, target, "--shard-size", "100kB") == 0
    return snapshot(target)


@pytest.fixture
def root(model: Path, tmp_path: Path) -> Path:
    """A bucket with the model."""
    shutil.copytree(model, tmp_path / "buckets/models/tiny")
    return tmp_path / "buckets"


def use(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], cache: Path) -> None:
    for name, value in {**environ, "HOTSTART_CACHE_ROOT": str(cache)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("kind", [S3Server, GcsServer])
def test_a_store_gives_what_a_directory_gives(
    kind: type[S3Server | GcsServer],
    root: Path,
    converted: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with kind(root) as server:
        use(monkeypatch, server.environ, tmp_path / "cache")
        scheme = "s3" if kind is S3Server else "gs"
        assert convert(f"{scheme}://models/tiny", tmp_path / "new", "--shard-size", "100kB") == 0
    assert snapshot(tmp_path / "new") == converted


def test_a_web_server_gives_weights_and_what_a_start_reads(
    root: Path, converted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OpenS3Server(root) as server:
        monkeypatch.setenv("HOTSTART_CACHE_ROOT", str(tmp_path / "cache"))
        assert convert(f"{server.endpoint}/models/tiny", tmp_path / "new", "--shard-size", "100kB") == 0
    unlisted = {"LICENSE", "additional_chat_templates/tools.jinja", "SHA256SUMS"}
    written = snapshot(tmp_path / "new")
    assert written.keys() == converted.keys() - (unlisted - {"SHA256SUMS"})
    assert all(written[name] == converted[name] for name in written.keys() - unlisted)


def test_a_name_on_the_hub_is_downloaded_first(
    model: Path, converted: dict[str, bytes], tmp_path: Path
) -> None:
    with hub_stand_in.serve(hub_stand_in.Hub("org/tiny", snapshot(model))) as hub:
        environ = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
        command = [*COMMAND, "org/tiny", str(tmp_path / "new"), "--shard-size", "100kB"]
        subprocess.run(command, env={**os.environ, **environ}, check=True, capture_output=True)
    assert (
        snapshot(tmp_path / "new").items()
        >= {name: data for name, data in converted.items() if name not in ("LICENSE", "SHA256SUMS")}.items()
    )


@pytest.fixture(params=[OpenS3Server, NanioServer])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The root of a store with a bucket ``models`` that can be written to."""
    root = tmp_path / "store"
    (root / "models").mkdir(parents=True)
    with request.param(root) as server:
        use(monkeypatch, server.environ, tmp_path / "cache")
        yield root


def objects(root: Path) -> dict[str, bytes]:
    """Everything below the root, parts of uploads too; not what servers keep for themselves."""
    kept = ("upload", "multipart")
    return {
        name: data
        for name, data in snapshot(root).items()
        if "/." not in f"/{name}" or any(word in name for word in kept)
    }


def test_a_directory_goes_to_a_store(model: Path, converted: dict[str, bytes], store: Path) -> None:
    assert convert(model, "s3://models/new", "--shard-size", "100kB") == 0
    assert objects(store / "models/new") == converted


def test_a_store_goes_to_a_store(
    model: Path, converted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model, tmp_path / "store/models/tiny")
    with OpenS3Server(tmp_path / "store") as server:
        use(monkeypatch, server.environ, tmp_path / "cache")
        assert convert("s3://models/tiny", "s3://models/new", "--shard-size", "100kB") == 0
    assert snapshot(tmp_path / "store/models/new") == converted


@pytest.mark.skipif(AzureServer.program is None, reason="azurite is not installed")
def test_a_directory_goes_to_azure_and_comes_back(
    model: Path, converted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "containers/models").mkdir(parents=True)
    with AzureServer(tmp_path / "containers", tmp_path / "state") as server:
        use(monkeypatch, server.environ, tmp_path / "cache")
        assert convert(model, "az://models/new", "--shard-size", "100kB") == 0
        assert convert("az://models/new", tmp_path / "back", "--shard-size", "100kB") == 0
    assert snapshot(tmp_path / "back") == converted


def test_a_prefix_that_holds_something_is_not_touched(
    model: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "models/new").mkdir()
    (store / "models/new/mine").write_text("mine")
    assert convert(model, "s3://models/new") == 2
    assert "s3://models/new is not empty: it holds mine" in capsys.readouterr().err
    assert objects(store) == {"models/new/mine": b"mine"}


def test_a_signal_in_the_middle_of_an_upload_leaves_no_object_and_no_part(
    tmp_path: Path, store: Path
) -> None:
    source = tmp_path / "large"
    source.mkdir()
    head = b'{"a":{"dtype":"U8","shape":[200000000],"data_offsets":[0,200000000]}}'
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 200_000_000)
    (source / "config.json").write_text("{}")
    child = subprocess.Popen(
        [*COMMAND, str(source), "s3://models/new"], env={**os.environ}, stderr=subprocess.DEVNULL
    )
    while sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) < 16_000_000:
        assert child.poll() is None
        time.sleep(0.002)  # the child tells nobody
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 143
    assert objects(store) == {}


def test_a_store_that_takes_nothing_says_what_it_must_allow(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "buckets/models").mkdir(parents=True)
    with S3Server(tmp_path / "buckets") as server:  # it can only be read
        use(monkeypatch, server.environ, tmp_path / "cache")
        assert convert(model, "s3://models/new") == 4
    error = capsys.readouterr().err
    assert "Cannot write s3://models/new/" in error
    assert "s3:PutObject" in error


def test_a_web_server_is_no_place_to_write_to(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(model, "https://models.example.com/new") == 2
    assert "is no place to write to" in capsys.readouterr().err


@pytest.mark.parametrize("free", [1_000_000, 1_600_000])
def test_room_for_files_that_lie_here_before_they_are_uploaded_is_looked_for_first(
    free: int,
    model: Path,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A Tensorizer file is written by its name, below TMPDIR; nothing is read for one that has no room."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    monkeypatch.setattr(Reader, "deliver", lambda *given: pytest.fail("weights were read"))
    with NanioServer(root) as server:
        use(monkeypatch, server.environ, tmp_path / "cache")
        assert main(["convert", "tensorizer", str(model), "s3://models/new"]) == 4
    said = capsys.readouterr().err
    assert f"{temporary} has {format_size(free)} free, where these files lie until they are uploaded" in said
    assert "TMPDIR=" in said
    assert not (root / "models/new").exists()


def test_files_that_need_no_name_need_no_room_here(
    model: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with NanioServer(root) as server:
        use(monkeypatch, server.environ, tmp_path / "cache")
        assert convert(model, "s3://models/new") == 0
