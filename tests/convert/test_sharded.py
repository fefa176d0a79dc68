"""``hotstart convert sharded``: what vLLM's own saver writes, to the byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from hotstart.cli.main import main

RECORDED = Path(__file__).parents[1] / "recorded"
STATES = sorted(path.name for path in RECORDED.iterdir() if "-tp" in path.name)


def convert(source: Path, target: Path, *flags: str) -> int:
    return main(["convert", "sharded", str(source), str(target), *flags])


@pytest.mark.parametrize("state", STATES)
def test_files_are_those_that_vllm_saves(state: str, tmp_path: Path) -> None:
    name, _, sizes = state.partition("-tp")
    ranks, stages = sizes.split("-pp")
    flags = ("--tensor-parallel-size", ranks, "--pipeline-parallel-size", stages)
    assert convert(RECORDED / name, tmp_path / "new", *flags) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").glob("*.safetensors")}
    assert written == {path.name: path.read_bytes() for path in (RECORDED / state).iterdir()}


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3", "mistral", "opt", "opt-post-norm"])
def test_ranks_together_hold_what_one_rank_holds(name: str, tmp_path: Path) -> None:
    """Of every family: rows and columns in order, and what is not cut alike in both."""
    source = tiny_models.write(name, tmp_path / "plain", config={"vocab_size": tiny_models.VOCAB})
    convert(source, tmp_path / "one")
    convert(source, tmp_path / "two", "--tensor-parallel-size", "2")
    whole = load_file(tmp_path / "one/model-rank-0-part-0.safetensors")
    first, second = (load_file(tmp_path / f"two/model-rank-{rank}-part-0.safetensors") for rank in (0, 1))
    assert whole.keys() == first.keys() == second.keys()
    for key, tensor in whole.items():
        a, b = first[key], second[key]
        if a.shape == tensor.shape:
            assert torch.equal(a, tensor)
            assert torch.equal(b, tensor)
            continue
        parts = 3 if "qkv_proj" in key else 2 if "gate_up_proj" in key else 1
        if parts == 3:
            config = json.loads((source / "config.json").read_text())
            heads = config["num_attention_heads"]
            kv = config.get("num_key_value_heads", heads)
            unit = a.shape[0] // ((heads + 2 * kv) // 2)
            sizes = [heads // 2 * unit, kv // 2 * unit, kv // 2 * unit]
        else:
            sizes = [a.shape[0] // parts] * parts
        if a.shape[0] == tensor.shape[0]:
            joined = torch.cat([a, b], dim=1)
        else:
            pairs = zip(a.split(sizes), b.split(sizes), strict=True)
            joined = torch.cat([half for pair in pairs for half in pair])
        assert torch.equal(joined, tensor), key


def test_hotstart_finds_nothing_wrong_with_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_models.write("llama-tied", tmp_path / "plain")
    convert(source, tmp_path / "new")
    assert main(["check", str(tmp_path / "new"), "--load-format", "sharded_state", "--port", "0"]) == 0
    assert "22 tensors" in capsys.readouterr().out


def test_parts_have_at_most_the_size_asked_for(tmp_path: Path) -> None:
    convert(RECORDED / "qwen2", tmp_path / "new", "--tensor-parallel-size", "2", "--shard-size", "4kB")
    names = [path.name for path in (tmp_path / "new").glob("model-rank-1-*")]
    assert sorted(names) == [f"model-rank-1-part-{part}.safetensors" for part in range(len(names))]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        part = load_file(tmp_path / "new" / name)
        assert sum(tensor.nbytes for tensor in part.values()) <= 4096 or len(part) == 1
        tensors |= part
    whole = load_file(RECORDED / "qwen2-tp2-pp1/model-rank-1-part-0.safetensors")
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("flags", "found", "expected"),
    [
        (
            ("--tensor-parallel-size", "3"),
            "4 heads of model.layers.0.self_attn.q_proj.weight",
            "one of 1, 2, 4",
        ),
        (("--pipeline-parallel-size", "3"), "more than the model has layers", "at most 2"),
    ],
)
def test_sizes_that_the_model_cannot_be_cut_into_are_refused(
    flags: tuple[str, ...], found: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(RECORDED / "llama-tied", tmp_path / "new", *flags) == 2
    error = capsys.readouterr().err
    assert found in error
    assert expected in error
    assert not (tmp_path / "new").exists()


def test_parts_of_different_dtypes_cannot_be_fused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(RECORDED / "qwen2", tmp_path / "mixed")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, source / "model.safetensors")
    assert convert(source, tmp_path / "new") == 3
    assert "stored as BF16 and F32" in capsys.readouterr().err


def test_an_architecture_without_a_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(RECORDED / "qwen2", tmp_path / "other")
    (source / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert convert(source, tmp_path / "new") == 3
    assert "architecture MambaForCausalLM is not supported" in capsys.readouterr().err
