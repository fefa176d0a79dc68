"""``hotstart convert`` from object stores and web servers, and to object stores."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from math import prod
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
        # localbucket takes parts of an upload that is given up already, where others answer NoSuchUpload.
        if not name.startswith(".localbucket-uploads/")
        and ("/." not in f"/{name}" or any(word in name for word in kept))
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


def _wide_llama(directory: Path) -> Path:
    """108 MB in one layer, which 16 ranks can share; sparse, so it costs nothing."""
    layer = "model.layers.0."
    shapes = {f"{layer}self_attn.{name}_proj.weight": [1024, 1024] for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": [16384, 1024] for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj.weight": [1024, 16384], "model.embed_tokens.weight": [512, 1024]}
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    shapes |= {f"{name}.weight": [1024] for name in norms}
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    directory.mkdir()
    head = json.dumps(entries).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    config = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 16384, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 64, "tie_word_embeddings": True}
    config |= {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_memory_is_bounded_however_many_ranks_are_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen files of 6.8 MB; one side by side keeps two parts of 5 MiB of each, or the whole file."""
    source = _wide_llama(tmp_path / "wide")
    peak = "import sys; from hotstart.cli.main import main; code = main(sys.argv[1:]); "
    peak += "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); sys.exit(code)"
    flags = ("--tensor-parallel-size", "16")
    command = [sys.executable, "-c", peak, "convert", "sharded", str(source)]
    (tmp_path / "store/models").mkdir(parents=True)
    with OpenS3Server(tmp_path / "store") as server:
        use(monkeypatch, server.environ, tmp_path / "cache")
        words = [*command, "s3://models/new", *flags, "--memory-limit", "24MB"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) * 1024 < 110_000_000
    assert main(["convert", "sharded", str(source), str(tmp_path / "local"), *flags]) == 0
    assert snapshot(tmp_path / "store/models/new") == snapshot(tmp_path / "local")


def test_a_limit_that_is_too_small_for_an_upload_is_refused_before_anything_is_read(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path / "absent", "s3://models/new", "--memory-limit", "8MB") == 2
    error = capsys.readouterr().err
    assert "--memory-limit 8.00 MB is too small to write to s3://models/new" in error
    assert "expected at least 20MiB" in error


def test_a_file_of_one_object_has_its_licence_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_models.write("llama", tmp_path / "buckets/models/single")
    (source / "LICENSE").write_text("free")
    with S3Server(tmp_path / "buckets") as server:
        use(monkeypatch, server.environ, tmp_path / "cache")
        assert convert("s3://models/single", tmp_path / "new") == 0
    assert (tmp_path / "new/LICENSE").read_text() == "free"
