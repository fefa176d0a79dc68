"""What ``hotstart convert`` writes, loaded by every loader that reads it: the plain checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotstart.cli.main import main
from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.engine.assemble import prepare

Model = Callable[..., Path]
FAMILIES = [
    "llama",
    "llama-tied",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "opt",
    "opt-post-norm",
    "opt-plain",
]
LOADERS = [("sharded", "sharded_state"), ("sharded", "runai_streamer_sharded"), ("tensorizer", "tensorizer")]


def weights_of(path: Path, load_format: str) -> dict[str, Tensor]:
    start = prepare(
        Config(
            model=ModelConfig(model=str(path), path=str(path)),
            load=LoadConfig(load_format=load_format),
            device=DeviceConfig(device="cpu"),
        )
    )
    weights = start.placement.weights(start, lambda done: None)
    weights.start()
    store = weights.store()
    weights.wait()
    slots = {}
    for slot in dict.fromkeys(spec.slot for spec in start.family.specs(start.geometry)):
        tensor = store.tensor(slot)
        slots[slot] = tensor if isinstance(tensor, Tensor) else torch.cat(tensor)
    return slots


@pytest.mark.parametrize("family", FAMILIES)
def test_every_loader_finds_the_plain_weights(family: str, tiny_model: Model, tmp_path: Path) -> None:
    plain = tiny_model(family, dtype="bfloat16")
    expected = weights_of(plain, "auto")
    for layout in ("sharded", "tensorizer"):
        assert main(["convert", layout, str(plain), str(tmp_path / layout)]) == 0
    for layout, load_format in LOADERS:
        found = weights_of(tmp_path / layout, load_format)
        assert found.keys() == expected.keys()
        for slot, tensor in found.items():
            assert torch.equal(tensor, expected[slot]), (load_format, slot)
