"""A model served from an object store: nothing but its small files touches this machine's disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fault_proxy import FaultServer
from object_servers import S3Server
from running_server import RunningServer

Model = Callable[..., Path]


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


def test_headers_are_asked_for_once_by_a_server_of_two_processes(tiny_model: Model, tmp_path: Path) -> None:
    """The checks read them, and the engine is told; each shard is smaller than a range."""
    model = tiny_model(shards=5)
    files = {f"m/{file.name}": file.read_bytes() for file in model.iterdir() if file.is_file()}
    shards = [name for name in files if name.endswith(".safetensors")]
    with FaultServer(files) as web:
        with RunningServer(f"{web.url}/m", "--threads", "1", log=tmp_path / "log") as server:
            server.until_ready()
        asked = [request.path.lstrip("/") for request in web.requests if request.method == "GET"]
    assert len(shards) == 5
    assert {name: asked.count(name) for name in shards} == dict.fromkeys(shards, 2)  # header, weights
