"""Models in Tensorizer's format, written by its own library: for tests of those who read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensorizer import TensorSerializer

from sharded_files import parameters


def write_tensorizer(plain: Path, target: Path, *, fused: bool = False, **options: Any) -> Path:
    """The files of a plain directory, with its weights in ``model.tensors``.

    ``fused``: under vLLM's names, as it writes a Llama. ``options`` are the library's.
    """
    target.mkdir(parents=True)
    for file in plain.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    tensors = {name: each for file in plain.glob("*.safetensors") for name, each in load_file(file).items()}
    if fused:
        config = json.loads((plain / "config.json").read_text())
        tensors = parameters(tensors, config, 1, 0)
        tensors["model.layers.0.self_attn.attn._k_scale"] = torch.tensor(1.0)
        tensors[".vllm_tensorized_marker"] = torch.tensor((1,), device="meta")
    serializer = TensorSerializer(str(target / "model.tensors"), **options)
    serializer.write_state_dict(tensors)
    serializer.close()
    return target
