"""The small files: where templates come from, and errors that say file, line and column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint_files import STUB, write_model
from hotstart.checkpoint.files import load_model_files, overrides_of
from hotstart.config.settings import ModelConfig
from hotstart.errors import ModelError, ProblemsFound


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", shards=1)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def test_absent_optional_files_are_none(model: Path) -> None:
    files = load_model_files(str(model))
    assert files.config["model_type"] == "llama"
    assert (files.generation_config, files.tokenizer_config, files.tokenizer_json) == (None, None, None)
    assert (files.chat_template, files.chat_templates, files.chat_template_source) == (None, {}, "")


def test_tokenizer_files_are_given_by_path(model: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (model / name).write_text("{}")
    files = load_model_files(str(model))
    found = (files.tokenizer_json, files.vocab_json, files.merges_txt)
    assert found == tuple(str(model / name) for name in ("tokenizer.json", "vocab.json", "merges.txt"))


def test_jinja_file_wins_over_the_tokenizer_configuration(model: Path) -> None:
    write_json(model / "tokenizer_config.json", {"chat_template": "old"})
    assert load_model_files(str(model)).chat_template == "old"
    (model / "chat_template.jinja").write_text("new")
    files = load_model_files(str(model))
    assert (files.chat_template, files.chat_template_source) == ("new", str(model / "chat_template.jinja"))


def test_named_templates_in_the_tokenizer_configuration(model: Path) -> None:
    rows = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_json(model / "tokenizer_config.json", {"chat_template": rows})
    files = load_model_files(str(model))
    assert files.chat_template == "d"
    assert files.chat_templates == {"default": "d", "tool_use": "t"}


def test_additional_templates_stand_beside_the_default(model: Path) -> None:
    (model / "chat_template.jinja").write_text("d")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("r")
    files = load_model_files(str(model))
    assert files.chat_template == "d"
    assert files.chat_templates == {"default": "d", "rag": "r"}


def test_template_of_an_old_processor(model: Path) -> None:
    write_json(model / "chat_template.json", {"chat_template": "p"})
    assert load_model_files(str(model)).chat_template == "p"


def test_template_of_another_type_is_refused(model: Path) -> None:
    write_json(model / "tokenizer_config.json", {"chat_template": 7})
    with pytest.raises(ModelError, match=r"chat_template in .*tokenizer_config\.json is a number"):
        load_model_files(str(model))


def test_broken_json_names_file_line_and_column(model: Path) -> None:
    (model / "config.json").write_text('{\n  "a": 1,\n  "b" 2\n}')
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON: .* at line 3, column 7"):
        load_model_files(str(model))


def test_other_encoding_names_file_line_and_column(model: Path) -> None:
    (model / "tokenizer_config.json").write_bytes(b'{\n "a": "\xe9"}')
    with pytest.raises(ModelError, match="is not UTF-8: byte 0xe9 at line 2, column 8"):
        load_model_files(str(model))


def test_byte_order_mark_is_forgiven(model: Path) -> None:
    (model / "config.json").write_bytes(b"\xef\xbb\xbf" + (model / "config.json").read_bytes())
    assert load_model_files(str(model)).config["model_type"] == "llama"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "vocab.json"])
def test_pointer_stub_of_a_small_file(name: str, model: Path) -> None:
    (model / name).write_bytes(STUB)
    with pytest.raises(ModelError, match=rf"{name} is a pointer stub"):
        load_model_files(str(model))


def test_problems_of_several_files_are_reported_together(model: Path) -> None:
    (model / "config.json").write_text("{")
    (model / "generation_config.json").write_text("[]")
    (model / "tokenizer.json").write_bytes(STUB)
    with pytest.raises(ProblemsFound) as caught:
        load_model_files(str(model))
    assert len(caught.value.problems) == 3


def test_weights_without_configuration(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"holds weights but no config\.json"):
        load_model_files(str(model))


def test_overrides_are_laid_over_the_configuration_key_by_key(model: Path) -> None:
    write_json(model / "config.json", {"a": 1, "rope": {"x": 1, "y": 2}})
    files = load_model_files(str(model), overrides={"rope": {"y": 3}, "b": [1]})
    assert files.config == {"a": 1, "rope": {"x": 1, "y": 3}, "b": [1]}


def test_tie_flag_is_an_override() -> None:
    config = ModelConfig(model="m", hf_overrides={"a": 1}, tie_word_embeddings=True)
    assert overrides_of(config) == {"a": 1, "tie_word_embeddings": True}


def test_an_empty_template_counts_as_none_and_is_named(model: Path) -> None:
    (model / "chat_template.jinja").write_text(" \n")
    files = load_model_files(str(model))
    assert (files.chat_template, files.empty_templates) == (None, ("chat_template.jinja",))
    write_json(model / "tokenizer_config.json", {"chat_template": "older and not empty"})
    assert load_model_files(str(model)).chat_template == "older and not empty"
