"""Write a random Llama checkpoint: ``make_model.py DIRECTORY --tokenizer DIRECTORY_OF_A_REAL_MODEL``.

The default shape has 1.296 B parameters in bfloat16, 2.59 GB in six shards, untied: large enough
that reading it shows, small enough for a laptop.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Shape = tuple[int, ...]
SHARD_BYTES = 500_000_000
SMALL_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    for name in SMALL_FILES:
        if (args.tokenizer / name).exists():
            shutil.copy(args.tokenizer / name, args.directory)
    vocabulary = json.loads((args.tokenizer / "config.json").read_text())["vocab_size"]
    config = configuration(args, vocabulary)
    (args.directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{write_weights(args.directory, config):,} bytes in {args.directory}")
    return 0


def configuration(args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of the model."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def shards(config: dict[str, Any]) -> list[dict[str, Shape]]:
    """Cut where the next tensor would make a shard larger than it may be."""
    cut: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in tensors(config):
        needed = 2 * torch.Size(shape).numel()
        if size and size + needed > SHARD_BYTES:
            cut.append({})
            size = 0
        cut[-1][name] = shape
        size += needed
    return cut


def write_weights(directory: Path, config: dict[str, Any]) -> int:
    generator = torch.Generator().manual_seed(0)
    parts = shards(config)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        made = {key: values(shape, generator) for key, shape in part.items()}
        save_file(made, directory / name, {"format": "pt"})
        (directory / name).chmod(0o644)  # save_file leaves its temporary file's 0600
        weight_map |= dict.fromkeys(part, name)
    total = sum((directory / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def values(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)


if __name__ == "__main__":
    sys.exit(main())
