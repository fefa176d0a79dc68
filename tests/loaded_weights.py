"""A model loaded as a start loads it, without a server: for tests that compare what loaders bring."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.engine.assemble import Prepared, prepare
from hotstart.engine.placement import Weights


class Loaded(NamedTuple):
    """``slots``: every slot of the store, whole; ``told``: the bytes that were reported on the way."""

    slots: dict[str, Tensor]
    weights: Weights
    told: list[int]


def start_with(
    path: Path,
    load_format: str = "auto",
    *,
    location: str = "",
    dtype: str = "auto",
    device: str = "cpu",
    **extra: Any,
) -> Prepared:
    """``location``: where the model's files are read in place of the directory; ``extra``: loader's keys."""
    load = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
    model = ModelConfig(model=location or str(path), path=str(path), location=location, dtype=dtype)
    return prepare(Config(model=model, load=load, device=DeviceConfig(device=device)))


def filled(start: Prepared) -> Loaded:
    """Load it. Raises what the load raises."""
    told: list[int] = []
    weights = start.placement.weights(start, told.append)
    weights.start()
    store = weights.store()
    weights.wait()
    slots = {}
    for slot in dict.fromkeys(spec.slot for spec in start.family.specs(start.geometry)):
        tensor = store.tensor(slot)  # once: of what it has converted, our own store keeps no copy
        slots[slot] = tensor if isinstance(tensor, Tensor) else torch.cat(tensor)
    return Loaded(slots, weights, told)


def loaded(path: Path, load_format: str = "auto", **how: Any) -> Loaded:
    """See :func:`start_with` and :func:`filled`."""
    return filled(start_with(path, load_format, **how))


def checksums(slots: dict[str, Tensor]) -> dict[str, str]:
    """Of each slot its dtype, shape and the SHA-256 of its bytes."""
    found = {}
    for slot, tensor in slots.items():
        data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
        found[slot] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
    return found
