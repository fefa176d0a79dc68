"""Token ids are those of transformers for the same directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from hotstart.checkpoint.base import ModelFiles
from hotstart.errors import ModelError
from hotstart.frontend.tokenizer import load_tokenizer

TEXTS = ["hello world", " the quick  brown fox\n", "wörld 🎉", "", "</s> inside <s>"]


def write_config(path: Path, **values: object) -> dict[str, Any]:
    config = {"bos_token": "<s>", "eos_token": "</s>", **values}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return config


def transformers_ids(path: Path, cls: str, text: str) -> list[int]:
    import transformers

    loaded = getattr(transformers, cls).from_pretrained(path)
    ids: list[int] = loaded(text)["input_ids"]
    return ids


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]
)
def test_tokenizer_json_gives_the_ids_of_transformers(
    tokenizer: tokenizers.Tokenizer, tmp_path: Path, flags: dict[str, bool]
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = write_config(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **flags)
    ours = load_tokenizer(
        ModelFiles(
            path=str(tmp_path),
            config={},
            tokenizer_config=config,
            tokenizer_json=str(tmp_path / "tokenizer.json"),
        )
    )
    for text in TEXTS:
        assert ours.encode(text) == transformers_ids(tmp_path, "PreTrainedTokenizerFast", text)


@pytest.fixture
def opt_dir(tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> Path:
    """vocab.json and merges.txt as OPT has them: ``</s>`` begins a text and is its unknown token."""
    model = json.loads(tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return tmp_path


def test_opt_begins_every_text_with_its_end_token(opt_dir: Path) -> None:
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<s>"}
    config = write_config(opt_dir, tokenizer_class="GPT2Tokenizer", add_bos_token=True, **names)
    ours = load_tokenizer(
        ModelFiles(
            path=str(opt_dir),
            config={"model_type": "opt"},
            tokenizer_config=config,
            vocab_json=str(opt_dir / "vocab.json"),
            merges_txt=str(opt_dir / "merges.txt"),
        )
    )
    for text in TEXTS:
        assert ours.encode(text) == transformers_ids(opt_dir, "GPT2Tokenizer", text)


def test_special_tokens_are_found_beyond_the_gaps_of_a_vocabulary(opt_dir: Path) -> None:
    vocab = json.loads((opt_dir / "vocab.json").read_text())
    last = max(vocab, key=lambda piece: vocab[piece])
    vocab[last] = 5000
    (opt_dir / "vocab.json").write_text(json.dumps(vocab))
    (opt_dir / "merges.txt").write_text("#version: 0.2\n")
    ours = load_tokenizer(
        ModelFiles(
            path=str(opt_dir),
            config={"model_type": "llama", "eos_token_id": 5000},
            vocab_json=str(opt_dir / "vocab.json"),
            merges_txt=str(opt_dir / "merges.txt"),
        )
    )
    assert ours.special_tokens["eos_token"] == last


def test_opt_needs_no_tokenizer_configuration(opt_dir: Path) -> None:
    ours = load_tokenizer(
        ModelFiles(
            path=str(opt_dir),
            config={"model_type": "opt", "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0},
            vocab_json=str(opt_dir / "vocab.json"),
            merges_txt=str(opt_dir / "merges.txt"),
        )
    )
    ids = ours.encode("hello world")
    assert ids[0] == 1
    assert ours.decode(ids) == "hello world"


def test_a_text_longer_than_the_inline_limit_has_the_same_ids(files: ModelFiles) -> None:
    import asyncio

    ours = load_tokenizer(files)
    text = "the quick brown fox " * 5000
    assert asyncio.run(ours.encode_async(text)) == ours.encode(text)


def test_no_tokenizer_is_an_error_that_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer in .*save_pretrained"):
        load_tokenizer(ModelFiles(path=str(tmp_path), config={}))


@pytest.mark.parametrize("content", ["", "{}", "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"])
def test_a_damaged_tokenizer_json_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=str(path)):
        load_tokenizer(ModelFiles(path=str(tmp_path), config={}, tokenizer_json=str(path)))


@pytest.mark.parametrize(
    ("file", "entry", "value"),
    [
        ("tokenizer_config.json", 'added_tokens_decoder["a"]', {"added_tokens_decoder": {"a": "b"}}),
        ("tokenizer_config.json", 'added_tokens_decoder["1"]', {"added_tokens_decoder": {"1": "b"}}),
        (
            "tokenizer_config.json",
            'added_tokens_decoder["1"]',
            {"added_tokens_decoder": {"1": {"content": 5}}},
        ),
        (
            "tokenizer_config.json",
            'added_tokens_decoder["x"]',
            {"added_tokens_decoder": {"x": {"content": "x"}}},
        ),
        ("tokenizer_config.json", "added_tokens_decoder", {"added_tokens_decoder": ["<s>"]}),
        ("tokenizer_config.json", "bos_token", {"bos_token": 5}),
        ("tokenizer_config.json", "eos_token", {"eos_token": "\ud800"}),
        ("special_tokens_map.json", "pad_token", {"pad_token": {"content": None}}),
        ("special_tokens_map.json", "unk_token", {"unk_token": ["<unk>"]}),
        ("tokenizer_config.json", "add_bos_token", {"add_bos_token": "no"}),
    ],
)
def test_an_entry_of_a_wrong_type_is_named_with_its_file(
    tokenizer: tokenizers.Tokenizer, tmp_path: Path, file: str, entry: str, value: dict[str, Any]
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = ModelFiles(path=str(tmp_path), config={}, tokenizer_json=str(tmp_path / "tokenizer.json"))
    files = msgspec.structs.replace(files, **{file.removesuffix(".json"): value})
    with pytest.raises(ModelError) as error:
        load_tokenizer(files)
    assert error.value.found.startswith(f"{file} sets {entry} to ")


def test_an_id_of_the_configuration_that_no_token_has_names_nothing(opt_dir: Path) -> None:
    files = ModelFiles(
        path=str(opt_dir),
        config={"model_type": "opt", "bos_token_id": -1, "eos_token_id": 2**40},
        vocab_json=str(opt_dir / "vocab.json"),
        merges_txt=str(opt_dir / "merges.txt"),
    )
    assert load_tokenizer(files).special_tokens == {}
