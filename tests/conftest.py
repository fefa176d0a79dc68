from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("qwen3", dtype="bfloat16", shards=2)``: a model directory, written once a session."""
    written: dict[tuple[object, ...], Path] = {}

    def get(name: str = "llama", *, dtype: str = "float32", shards: int = 1) -> Path:
        key = (name, dtype, shards)
        if key not in written:
            directory = tmp_path_factory.mktemp("models") / f"{name}-{dtype}-{shards}"
            written[key] = tiny_models.write(name, directory, dtype=dtype, shards=shards)
        return written[key]

    return get
