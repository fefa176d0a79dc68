"""``bench load`` of checkpoints that are no plain ones: what was found, and who reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hotstart.bench import load
from hotstart.bench.load_formats import format_of
from hotstart.cli.main import main
from hotstart.errors import ConfigError

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def converted(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, folder = tiny_model("llama", dtype="bfloat16"), tmp_path_factory.mktemp("converted")
    assert main(["convert", "sharded", str(model), str(folder / "sharded"), "-tp", "2"]) == 0
    assert main(["convert", "tensorizer", str(model), str(folder / "tensorizer")]) == 0
    return {"safetensors": model, "sharded_state": folder / "sharded", "tensorizer": folder / "tensorizer"}


def test_format_is_found_by_the_names_of_the_files(converted: dict[str, Path], tmp_path: Path) -> None:
    assert {name: format_of(str(path)) for name, path in converted.items()} == {
        name: name for name in converted
    }
    for name in ("model.safetensors", "model-rank-0-part-0.safetensors", "model.tensors"):
        (tmp_path / name).touch()
    assert format_of(str(tmp_path)) == "safetensors"


@pytest.mark.parametrize(
    ("name", "loaders", "says"),
    [
        ("sharded_state", ["hotstart", "runai"], "(sharded_state, rank 0 of 2)"),
        ("tensorizer", ["hotstart", "tensorizer"], "(tensorizer, model.tensors)"),
    ],
)
def test_a_format_is_read_by_ours_and_by_its_library(
    converted: dict[str, Path],
    name: str,
    loaders: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--loader", *loaders, "--iterations", "1", "--json", str(tmp_path / "load.json")]
    assert load.main([str(converted[name]), *words]) == 0
    text = capsys.readouterr().out
    assert says in text
    assert f"hotstart: as --load-format {name}: " in text
    document = json.loads((tmp_path / "load.json").read_text())
    (state,) = document["states"]
    assert document["format"] == name
    assert list(state["loaders"]) == loaders
    everything = [each for rows in (*state["loaders"].values(), *state["plain"].values()) for each in rows]
    assert len({each["digest"] for each in everything if not each["error"]}) == 1


def test_a_loader_that_does_not_read_the_format_is_refused(converted: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="--loader safetensors does not read the format tensorizer"):
        load.main([str(converted["tensorizer"]), "--loader", "safetensors"])


def test_a_copy_in_another_format_is_named_as_one_and_read_cold_as_said(
    converted: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--loader", "tensorizer", "--iterations", "1", "--cache", "cold"]
    assert load.main([str(converted["safetensors"]), *words]) == 0
    text = capsys.readouterr().out
    assert "tensorizer: a copy converted for this run, on " in text
    assert "the host of a virtual machine may still hold in memory what was evicted here" in text
