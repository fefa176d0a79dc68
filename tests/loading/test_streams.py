"""What every loader of another library does on the way: conversion, progress, and what it was told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hotstart.config.load_formats import FORMATS
from loaded_weights import checksums, loaded

STREAMS = ["runai_streamer", "fastsafetensors"]
"""Those that read plain checkpoints into memory."""


@pytest.fixture
def library(request: pytest.FixtureRequest) -> str:
    """A format whose library is installed."""
    pytest.importorskip(FORMATS[request.param].library)
    return str(request.param)


each_library = pytest.mark.parametrize("library", STREAMS, indirect=True)


@each_library
def test_weights_are_converted_as_they_come(library: str, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", dtype="float32")
    ours = loaded(path, dtype="bfloat16")
    theirs = loaded(path, library, dtype="bfloat16")
    assert theirs.slots["embed"].dtype == torch.bfloat16
    assert checksums(theirs.slots) == checksums(ours.slots)


@each_library
def test_progress_grows_up_to_all_bytes(library: str, tiny_model: Callable[..., Path]) -> None:
    _, weights, told = loaded(tiny_model("llama"), library)
    assert told == sorted(told)
    assert told[-1] == weights.total


@each_library
def test_the_log_names_the_library_and_what_it_was_told(
    library: str, tiny_model: Callable[..., Path]
) -> None:
    extra = {"concurrency": 3, "memory_limit": 1 << 20}
    _, weights, _ = loaded(tiny_model("llama"), library, **extra)
    row = FORMATS[library]
    assert weights.describe().startswith(f"{row.distribution} ")
    assert "concurrency 3, memory limit 1.05 MB" in weights.describe()
