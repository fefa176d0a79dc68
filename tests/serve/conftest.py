from __future__ import annotations

from pathlib import Path

import pytest

import tiny_models
from checkpoint_files import write_model


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 MB in two shards: several reads each."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
    directory = tmp_path_factory.mktemp("large") / "model"
    write_model(directory, vocab_size=tiny_models.VOCAB, **shape)
    tiny_models.write_tokenizer(directory)
    return directory
