"""A pre-sharded checkpoint, served: the same text as from the plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from running_server import RunningServer
from sharded_files import write_sharded

Model = Callable[..., Path]


def answer(server: RunningServer) -> str:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 12, "temperature": 0}
    text: str = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    return text


def test_the_same_text_as_from_the_plain_checkpoint(tiny_model: Model, tmp_path: Path) -> None:
    plain = tiny_model("llama-tied")
    flags = ("--threads", "1")
    with RunningServer(plain, *flags, log=tmp_path / "plain.log") as server:
        expected = answer(server.until_ready())
    sharded = write_sharded(plain, tmp_path / "sharded", parts=2)
    flags = (*flags, "--load-format", "sharded_state")
    with RunningServer(sharded, *flags, log=tmp_path / "sharded.log") as server:
        assert answer(server.until_ready()) == expected
