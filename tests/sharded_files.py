"""Pre-sharded checkpoints as vLLM writes them, made from plain ones: for tests of those who read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TP = "model-rank-{rank}-part-{part}.safetensors"
PP = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"


def write_sharded(
    plain: Path, target: Path, *, tp: int = 1, pp: int = 1, parts: int = 1, pattern: str | None = None
) -> Path:
    """Write the files of all ranks of a Llama, and copy what is no weight file."""
    target.mkdir(parents=True)
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    config = json.loads((plain / "config.json").read_text())
    stored = {
        name: tensor for file in plain.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    pattern = pattern or (PP if pp > 1 else TP)
    for stage in range(pp):
        for rank in range(tp):
            tensors = parameters(stored, config, tp, rank, pp, stage)
            names = list(tensors)
            for part in range(parts):
                own = names[len(names) * part // parts : len(names) * (part + 1) // parts]
                name = pattern.format(rank=rank, tp_rank=rank, pp_rank=stage, part=part)
                save_file({name: tensors[name].contiguous() for name in own}, target / name)
    return target


def parameters(
    stored: dict[str, Tensor], config: dict[str, int], tp: int, rank: int, pp: int = 1, stage: int = 0
) -> dict[str, Tensor]:
    """What a rank of vLLM's Llama holds, by parameter name; layers divide by stages."""
    layers = config["num_hidden_layers"] // pp
    first, last = stage == 0, stage == pp - 1
    found: dict[str, Tensor] = {}
    if first:
        found["model.embed_tokens.weight"] = _rows(_padded(stored["model.embed_tokens.weight"]), tp, rank)
    for layer in range(stage * layers, (stage + 1) * layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{norm}.weight"] = stored[f"{at}{norm}.weight"]
        heads = [stored[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]
        repeated = max(1, tp // config["num_key_value_heads"])
        found[f"{at}self_attn.qkv_proj.weight"] = torch.cat(
            [_rows(heads[0], tp, rank)]
            + [_rows(head, tp // repeated, rank // repeated) for head in heads[1:]]
        )
        found[f"{at}self_attn.o_proj.weight"] = _columns(stored[f"{at}self_attn.o_proj.weight"], tp, rank)
        gate_up = [stored[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found[f"{at}mlp.gate_up_proj.weight"] = torch.cat([_rows(half, tp, rank) for half in gate_up])
        found[f"{at}mlp.down_proj.weight"] = _columns(stored[f"{at}mlp.down_proj.weight"], tp, rank)
    if last:
        found["model.norm.weight"] = stored["model.norm.weight"]
        tied = config["tie_word_embeddings"]
        head = stored["model.embed_tokens.weight" if tied else "lm_head.weight"]
        if not (tied and first):
            found["lm_head.weight"] = _rows(_padded(head), tp, rank)
    return found


def _padded(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % 64
    return torch.cat([rows, torch.full((missing, rows.shape[1]), 7.0, dtype=rows.dtype)])


def _rows(tensor: Tensor, tp: int, rank: int) -> Tensor:
    return tensor.chunk(tp)[rank]


def _columns(tensor: Tensor, tp: int, rank: int) -> Tensor:
    return tensor.chunk(tp, dim=1)[rank]
