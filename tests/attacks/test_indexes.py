"""Indexes and small files from strangers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint_files import read_index, write_index, write_model
from hotstart.checkpoint.files import MAX_TEMPLATE, load_model_files
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.errors import ModelError


@pytest.mark.parametrize(
    "name",
    ["../elsewhere.safetensors", "/etc/passwd", "a/../../b.safetensors", "", "a\0b.safetensors", "../../x"],
)
def test_index_may_not_name_files_outside_the_directory(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "elsewhere.safetensors").write_bytes(
        (model / "model-00001-of-00002.safetensors").read_bytes()
    )
    write_index(model, {**read_index(model), "lm_head.weight": name})
    with pytest.raises(ModelError, match="outside the model's directory"):
        open_checkpoint(str(model))


def test_index_may_not_name_a_pickle(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    write_index(model, {**read_index(model), "lm_head.weight": "pytorch_model.bin"})
    with pytest.raises(ModelError, match=r"expected names that end in \.safetensors"):
        open_checkpoint(str(model))


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": None}, "model.safetensors"])
def test_index_with_a_weight_map_of_another_type(weight_map: object, tmp_path: Path) -> None:
    write_index(write_model(tmp_path), weight_map)
    with pytest.raises(ModelError, match="no usable weight_map"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_deeply_nested_json_is_refused(name: str, tmp_path: Path) -> None:
    (write_model(tmp_path) / name).write_text('{"a":' + "[" * 200_000)
    with pytest.raises(ModelError, match="nests too deeply"):
        load_model_files(str(tmp_path)) if name == "config.json" else open_checkpoint(str(tmp_path))


def test_number_of_a_million_digits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size":' + "9" * 1_000_000 + "}")
    with pytest.raises(ModelError, match="is not usable"):
        load_model_files(str(tmp_path))


def test_small_file_that_is_not_small_is_refused_unread(tmp_path: Path) -> None:
    write_model(tmp_path)
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(MAX_TEMPLATE + 1)
    with pytest.raises(ModelError, match="expected at most"):
        load_model_files(str(tmp_path))


def test_directory_in_place_of_a_small_file(tmp_path: Path) -> None:
    (write_model(tmp_path) / "generation_config.json").mkdir()
    with pytest.raises(ModelError, match="is no regular file"):
        load_model_files(str(tmp_path))


def test_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="holds a list; expected a JSON object"):
        load_model_files(str(tmp_path))
