"""Models by hub name in the formats of ``--load-format``: what is downloaded, and what is refused before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hub_stand_in
from hotstart.cli.main import main
from hub_stand_in import Hub
from sharded_files import write_sharded
from tensorizer_files import write_tensorizer

Model = Callable[..., Path]
NAME = "someone/tiny"
WEIGHTS = (".safetensors", ".tensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Empty."""
    with hub_stand_in.serve(Hub(NAME, {})) as running:
        # The library has read its variables when it was imported: the cache is hotstart's, by its own flag.
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HOTSTART_CACHE_ROOT", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield running


def holds(hub: Hub, *directories: Path) -> None:
    for directory in directories:
        hub.files |= {file.name: file.read_bytes() for file in directory.iterdir()}


def check(load_format: str, extra: str = "{}") -> int:
    flags = ("--device", "cpu", "--load-format", load_format, "--model-loader-extra-config", extra)
    return main(["check", NAME, *flags])


def weights(hub: Hub) -> list[str]:
    """Of the files that were downloaded."""
    return sorted(name for name in hub.downloaded if name.endswith(WEIGHTS))


def test_a_tensorizer_file_is_downloaded_and_no_other_weights(
    hub: Hub, tiny_model: Model, tmp_path: Path
) -> None:
    holds(hub, tiny_model("llama"), write_tensorizer(tiny_model("llama"), tmp_path / "m"))
    assert check("tensorizer") == 0
    assert weights(hub) == ["model.tensors"]


def test_a_plain_checkpoint_comes_without_the_tensorizer_file_beside_it(
    hub: Hub, tiny_model: Model, tmp_path: Path
) -> None:
    holds(hub, tiny_model("llama"), write_tensorizer(tiny_model("llama"), tmp_path / "m"))
    assert check("auto") == 0
    assert weights(hub) == ["model.safetensors"]


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
def test_of_pre_sharded_files_those_of_the_pattern_are_downloaded(
    load_format: str, hub: Hub, tiny_model: Model, tmp_path: Path
) -> None:
    holds(hub, tiny_model("llama"), write_sharded(tiny_model("llama"), tmp_path / "m", parts=2))
    assert check(load_format) == 0
    assert weights(hub) == [f"model-rank-0-part-{part}.safetensors" for part in range(2)]


def test_random_weights_need_no_download_of_any(hub: Hub, tiny_model: Model) -> None:
    holds(hub, tiny_model("llama"))
    assert check("dummy") == 0
    assert weights(hub) == []


@pytest.mark.parametrize(
    ("load_format", "message"),
    [
        ("tensorizer", "it is an ordinary checkpoint"),
        ("sharded_state", "holds no pre-sharded weight files"),
        ("runai_streamer_sharded", "holds no pre-sharded weight files"),
    ],
)
def test_a_plain_checkpoint_is_refused_by_its_names_before_a_file_is_downloaded(
    load_format: str, message: str, hub: Hub, tiny_model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    holds(hub, tiny_model("llama"))
    assert check(load_format) == 3
    assert message in capsys.readouterr().out
    assert hub.downloaded == set()


def test_ranks_that_do_not_fit_are_refused_before_a_file_is_downloaded(
    hub: Hub, tiny_model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holds(hub, write_sharded(tiny_model("llama"), tmp_path / "m", tp=2))
    assert check("sharded_state") == 3
    assert "has pre-sharded files for --tensor-parallel-size 2" in capsys.readouterr().out
    assert hub.downloaded == set()


@pytest.mark.parametrize(
    ("load_format", "extra"),
    [
        ("tensorizer", '{"stream_kwargs": {"foo": 1}}'),
        ("tensorizer", '{"num_readers": 1, "concurrency": 2}'),
        ("tensorizer", '{"encryption_keyfile": "/none"}'),
        ("tensorizer", '{"tensorizer_uri": "/elsewhere/m.tensors"}'),
        ("sharded_state", '{"pattern": "m-{rank}.bin"}'),
        ("runai_streamer", '{"concurrency": 0}'),
        ("auto", '{"concurrency": 2, "num_threads": 3}'),
    ],
)
def test_wrong_options_are_refused_before_the_hub_is_asked(
    load_format: str, extra: str, hub: Hub, tiny_model: Model
) -> None:
    holds(hub, tiny_model("llama"))
    assert check(load_format, extra) == 2
    assert hub.requests == []


def test_a_tokenizer_of_another_model_comes_without_its_weights(hub: Hub, tiny_model: Model) -> None:
    holds(hub, tiny_model("llama"))
    assert main(["check", str(tiny_model("llama")), "--device", "cpu", "--tokenizer", NAME]) == 0
    assert weights(hub) == []
    assert "tokenizer.json" in hub.downloaded
