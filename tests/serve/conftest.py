from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny_models
from checkpoint_files import write_model
from object_servers import S3Server


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 MB in two shards: several reads each."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
    directory = tmp_path_factory.mktemp("large") / "model"
    write_model(directory, vocab_size=tiny_models.VOCAB, **shape)
    tiny_models.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def s3(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A store that holds the tiny model in three shards at ``s3://models/tiny``."""
    root = tmp_path_factory.mktemp("buckets")
    (root / "models").mkdir()
    shutil.copytree(tiny_model(shards=3), root / "models" / "tiny")
    with S3Server(root) as server:
        yield server
