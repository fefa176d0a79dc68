"""Weight files for tests of images: random, of several steps, and out of the page cache."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_files import file_of
from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.loading.image import STEP
from hotstart.storage.residency import evict, resident_fraction

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


def random_tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(directory: Path, tensors: dict[str, Tensor], *, shift: int = 0, name: str = "model") -> Checkpoint:
    """Tensors in the order given; ``shift`` makes the data begin at an address that is odd to 8."""
    header: dict[str, Any] = {}
    data = b""
    for key, tensor in tensors.items():
        raw = bytes(tensor.flatten().view(torch.uint8).tolist())
        header[key] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    header["__metadata__"] = {"pad": ""}
    while (8 + len(file_of(header)) - 8) % 8 != shift:
        header["__metadata__"]["pad"] += "x"
    (directory / f"{name}.safetensors").write_bytes(file_of(header, data))
    return open_checkpoint(str(directory))


def write_large(directory: Path, size: int = 3 * STEP + 12345) -> Checkpoint:
    """One file of several steps."""
    header = {"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    (directory / "model.safetensors").write_bytes(file_of(header, os.urandom(size)))
    return open_checkpoint(str(directory))


def cold(checkpoint: Checkpoint) -> None:
    """No page of its file is in the page cache."""
    for _ in range(200):
        evict(checkpoint.files[0].path)
        if resident_fraction(checkpoint.files[0].path) == 0:
            return
        time.sleep(0.01)  # a reader of an earlier load, on its way out, may still have pages mapped
    pytest.skip("this file system keeps its pages")
