"""A model served from an object store: nothing but its small files touches this machine's disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from object_servers import S3Server
from running_server import RunningServer

Model = Callable[..., Path]


@pytest.fixture(scope="module")
def s3(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    root = tmp_path_factory.mktemp("buckets")
    (root / "models").mkdir()
    shutil.copytree(tiny_model(shards=3), root / "models" / "tiny")
    with S3Server(root) as server:
        yield server


def answer(server: RunningServer) -> str:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 12, "temperature": 0}
    response = server.http.post("/v1/completions", json=body)
    text: str = response.json()["choices"][0]["text"]
    return text


def test_the_same_text_as_from_a_directory(s3: S3Server, tiny_model: Model, tmp_path: Path) -> None:
    with RunningServer(tiny_model(shards=3), log=tmp_path / "directory.log") as server:
        expected = answer(server.until_ready())
    with RunningServer("s3://models/tiny", env=s3.environ, log=tmp_path / "s3.log") as server:
        assert answer(server.until_ready()) == expected
        assert s3.endpoint in server.output
        assert s3.environ["AWS_SECRET_ACCESS_KEY"] not in server.output
