"""A benchmark makes prompts of a known length with nothing but a server's ``/tokenize``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotstart.bench.serving.datasets_random import AsText, Lengths, random_requests
from hotstart.bench.serving.datasets_tokenizer import (
    DirectoryTokenizer,
    ServerTokenizer,
    tokenizer_for,
)
from hotstart.errors import ConfigError, StorageError

from .conftest import Launch, Running


@pytest.fixture
def asked(server: Running) -> Iterator[ServerTokenizer]:
    with ServerTokenizer(server.url, "tiny") as tokenizer:
        yield tokenizer


def test_random_prompts_have_the_tokens_that_the_server_counts(
    server: Running, asked: ServerTokenizer
) -> None:
    found = random_requests(4, Lengths(20, 5), AsText(asked), random.Random(1))
    assert {request.prompt_len for request in found} == {20}
    assert {len(server.text.tokenizer.encode(str(request.prompt))) for request in found} == {20}


def test_a_prompt_is_put_into_the_servers_template(server: Running, launch: Launch) -> None:
    bare = launch(without_template=True)
    bare.make_ready()
    prompts = {server.url + "/v1": "<s><user>hello\n<assistant>", bare.url: None}
    for url, prompt in prompts.items():
        with ServerTokenizer(url, "tiny") as asked:
            assert asked.conversation("hello", {}) == prompt


def test_directory_of_the_model_is_read_before_the_server_is_asked(
    asked: ServerTokenizer, model_dir: Path
) -> None:
    assert tokenizer_for(None, "tiny", asked) == (asked, "the server's /tokenize")
    for name, model in ((str(model_dir), "tiny"), (None, str(model_dir))):
        found, origin = tokenizer_for(name, model, asked)
        assert isinstance(found, DirectoryTokenizer)
        assert origin == f"the tokenizer in {model_dir}"


def test_without_any_tokenizer_it_is_said_how_to_name_one(server: Running, asked: ServerTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer \./none is no directory"):
        tokenizer_for("./none", "tiny", asked)
    advice = r"expected the tokens of a text.*--tokenizer DIR"
    with (
        ServerTokenizer(server.url, "other") as other,
        pytest.raises(ConfigError, match=rf"/tokenize answers 404: .*{advice}"),
    ):
        tokenizer_for(None, "other", other)


def test_server_that_is_not_there_is_named() -> None:
    with pytest.raises(StorageError, match=r"http://127\.0\.0\.1:9/tokenize cannot be asked: .*refused"):
        tokenizer_for(None, "tiny", ServerTokenizer("http://127.0.0.1:9", "tiny"))
