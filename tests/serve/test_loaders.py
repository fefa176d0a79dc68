"""Whoever reads the weights, the server answers the same, and its log says who it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fault_proxy import FaultServer
from hotstart.cli.main import main
from object_servers import S3Server
from running_server import RunningServer
from sharded_files import write_sharded
from tensorizer_files import write_tensorizer

Model = Callable[..., Path]

pytest.importorskip("runai_model_streamer_s3")
pytest.importorskip("fastsafetensors")


def answer(server: RunningServer) -> str:
    text: str = server.complete("the quick", max_tokens=12)["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def expected(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer with hotstart's own readers."""
    log = tmp_path_factory.mktemp("auto") / "log"
    with RunningServer(tiny_model(shards=3), "--threads", "1", log=log) as server:
        return answer(server.until_ready())


@pytest.mark.parametrize(
    ("load_format", "says"),
    [
        ("runai_streamer", "runai-model-streamer 0.17"),
        ("fastsafetensors", "direct: no, because the weights go into memory, not into a GPU"),
    ],
)
def test_the_same_text_from_a_directory(
    load_format: str, says: str, expected: str, tiny_model: Model, tmp_path: Path
) -> None:
    flags = ("--load-format", load_format, "--threads", "1")
    with RunningServer(tiny_model(shards=3), *flags, log=tmp_path / "log") as server:
        assert answer(server.until_ready()) == expected
        assert says in server.output
        assert "read plan" not in server.output


def test_the_same_text_from_s3_by_run_ai(s3: S3Server, expected: str, tmp_path: Path) -> None:
    """The store checks signatures: the library has the endpoint and the keys that our own checks had."""
    extra = '{"concurrency":2,"memory_limit":5368709120}'
    flags = ("--load-format", "runai_streamer", "--model-loader-extra-config", extra, "--threads", "1")
    with RunningServer("s3://models/tiny", *flags, env=s3.environ, log=tmp_path / "log") as server:
        assert answer(server.until_ready()) == expected
        assert "concurrency 2, memory limit 5.37 GB" in server.output
        assert s3.environ["AWS_SECRET_ACCESS_KEY"] not in server.output


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
def test_the_same_text_from_a_pre_sharded_directory(
    load_format: str, expected: str, tiny_model: Model, tmp_path: Path
) -> None:
    sharded = write_sharded(tiny_model(shards=3), tmp_path / "sharded", parts=2)
    flags = ("--load-format", load_format, "--threads", "1")
    with RunningServer(sharded, *flags, log=tmp_path / "log") as server:
        assert answer(server.until_ready()) == expected


def test_the_same_text_from_a_web_server_by_tensorizer(
    expected: str, tiny_model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No credentials are anybody's there, and ``hotstart check`` says what the library would be told."""
    model = write_tensorizer(tiny_model(shards=3), tmp_path / "m")
    flags = ("--load-format", "tensorizer", "--threads", "1")
    with FaultServer({f"m/{file.name}": file.read_bytes() for file in model.iterdir()}) as web:
        assert main(["check", f"{web.url}/m", *flags, "--device", "cpu"]) == 0
        assert f"reached by web server {web.url}" in capsys.readouterr().out
        with RunningServer(f"{web.url}/m", *flags, log=tmp_path / "log") as server:
            assert answer(server.until_ready()) == expected


def test_the_same_text_from_s3_by_tensorizer(expected: str, tiny_model: Model, tmp_path: Path) -> None:
    """Configuration and tokenizer come from the same place; who was asked with which keys is in the log."""
    write_tensorizer(tiny_model(shards=3), tmp_path / "models" / "m")
    flags = ("--load-format", "tensorizer", "--threads", "1")
    with S3Server(tmp_path) as store:
        with RunningServer("s3://models/m", *flags, env=store.environ, log=tmp_path / "log") as server:
            assert answer(server.until_ready()) == expected
            assert "credentials: keys of AWS_ACCESS_KEY_ID" in server.output
            assert store.environ["AWS_SECRET_ACCESS_KEY"] not in server.output
