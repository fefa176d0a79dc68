"""Checkpoints of a few kilobytes, written byte by byte: tests of bad input need neither torch nor luck."""

from __future__ import annotations

import json
import random
from math import prod
from pathlib import Path
from typing import Any

from hotstart.models.registry import family_for

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "F8_E4M3": 1, "I64": 8}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

STUB = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 4976698672\n"
)

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""name → (dtype, shape)."""


def file_of(header: dict[str, Any] | str | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with this header, right or wrong."""
    text = header if isinstance(header, (str, bytes)) else json.dumps(header, separators=(",", ":"))
    raw = text if isinstance(text, bytes) else text.encode()
    return len(raw).to_bytes(8, "little") + raw + data


def write_shard(path: Path, tensors: Tensors, contents: dict[str, bytes] | None = None) -> None:
    """A whole file: the tensors one after the other; random bytes by name unless ``contents`` has them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (dtype, shape) in tensors.items():
        size = BYTES[dtype] * prod(shape)
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + size],
        }
        data += (contents or {}).get(name) or random.Random(name).randbytes(size)
    path.write_bytes(file_of(header, bytes(data)))


def weights(config: dict[str, Any] | None = None, dtype: str = "BF16") -> Tensors:
    """Every stored tensor of a configuration."""
    config = CONFIG if config is None else config
    family = family_for(config)
    specs = family.specs(family.geometry(config))
    return {spec.stored[0]: (dtype, spec.shape) for spec in specs if spec.alias_of is None}


def write_model(
    directory: Path, *, shards: int = 2, tensors: Tensors | None = None, index: bool = True, **config: Any
) -> Path:
    """config.json and weights; ``shards`` 1: model.safetensors without an index."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {**CONFIG, **config}
    (directory / "config.json").write_text(json.dumps(content))
    tensors = weights(content) if tensors is None else tensors
    if shards == 1:
        write_shard(directory / "model.safetensors", tensors)
        return directory
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        file = shard_name(number + 1, shards)
        write_shard(directory / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    if index:
        write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    """model.safetensors.index.json."""
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def read_index(directory: Path) -> dict[str, str]:
    """The index's weight_map."""
    text = (directory / "model.safetensors.index.json").read_text()
    found: dict[str, str] = json.loads(text)["weight_map"]
    return found


def shard_name(number: int, total: int) -> str:
    """model-00001-of-00002.safetensors."""
    return f"model-{number:05}-of-{total:05}.safetensors"
