"""Every loader of another library fills the stores as ours does, and none of them is loaded unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotstart.config.load_formats import FORMATS
from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.engine.assemble import Prepared, prepare
from hotstart.engine.placement import Weights

STREAMS = ["runai_streamer", "fastsafetensors"]
"""Those that read plain checkpoints into memory."""
MODELS = ["llama", "llama-tied", "qwen2", "qwen3", "opt", "opt-plain"]


def prepared(
    path: Path, load_format: str, *, dtype: str = "auto", device: str = "cpu", **extra: Any
) -> Prepared:
    load = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
    model = ModelConfig(model=str(path), path=str(path), dtype=dtype)
    return prepare(Config(model=model, load=load, device=DeviceConfig(device=device)))


def loaded(start: Prepared) -> tuple[dict[str, Tensor], Weights, list[int]]:
    """The weights by slot, and the bytes that were reported on the way."""
    told: list[int] = []
    weights = start.placement.weights(start, told.append)
    weights.start()
    store = weights.store()
    weights.wait()
    slots = {}
    for slot in dict.fromkeys(spec.slot for spec in start.family.specs(start.geometry)):
        tensor = store.tensor(slot)  # once: of what it has converted, our own store keeps no copy
        slots[slot] = tensor if isinstance(tensor, Tensor) else torch.cat(tensor)
    return slots, weights, told


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[slot].dtype == other[slot].dtype
        and torch.equal(one[slot].view(torch.uint8), other[slot].view(torch.uint8))
        for slot in one
    )


@pytest.fixture
def library(request: pytest.FixtureRequest) -> str:
    """A format whose library is installed."""
    pytest.importorskip(FORMATS[request.param].library)
    return str(request.param)


each_library = pytest.mark.parametrize("library", STREAMS, indirect=True)


@each_library
@pytest.mark.parametrize("model", MODELS)
def test_every_bit_is_where_our_own_reader_puts_it(
    library: str, model: str, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(model, dtype="bfloat16", shards=2)
    ours, _, _ = loaded(prepared(path, "auto"))
    theirs, _, _ = loaded(prepared(path, library))
    assert same(ours, theirs)


@each_library
def test_weights_are_converted_as_they_come(library: str, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", dtype="float32")
    ours, _, _ = loaded(prepared(path, "auto", dtype="bfloat16"))
    theirs, _, _ = loaded(prepared(path, library, dtype="bfloat16"))
    assert theirs["embed"].dtype == torch.bfloat16
    assert same(ours, theirs)


@each_library
def test_progress_grows_up_to_all_bytes(library: str, tiny_model: Callable[..., Path]) -> None:
    _, weights, told = loaded(prepared(tiny_model("llama"), library))
    assert told == sorted(told)
    assert told[-1] == weights.total


@each_library
def test_the_log_names_the_library_and_what_it_was_told(
    library: str, tiny_model: Callable[..., Path]
) -> None:
    extra = {"concurrency": 3, "memory_limit": 1 << 20}
    _, weights, _ = loaded(prepared(tiny_model("llama"), library, **extra))
    row = FORMATS[library]
    assert weights.describe().startswith(f"{row.distribution} ")
    assert "concurrency 3, memory limit 1.05 MB" in weights.describe()


@pytest.mark.gpu
@pytest.mark.parametrize("library", [*STREAMS, "instanttensor"], indirect=True)
def test_on_a_gpu_every_bit_is_where_our_own_reader_puts_it(
    library: str, tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model("qwen2", dtype="bfloat16", shards=2)
    ours, _, _ = loaded(prepared(path, "auto", device="cuda"))
    theirs, _, _ = loaded(prepared(path, library, device="cuda"))
    assert same(ours, theirs)
