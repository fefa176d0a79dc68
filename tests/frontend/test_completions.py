from __future__ import annotations

import openai
import pytest

from .conftest import Running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_completion_is_the_text_of_the_engines_tokens(server: Running, client: openai.OpenAI) -> None:
    server.engine.answer_with(server.ids(" quick brown fox"))
    answer = client.completions.create(model="tiny", prompt="the")
    assert answer.choices[0].text == " quick brown fox"
    assert answer.choices[0].finish_reason == "length"


def test_streamed_chunks_join_to_the_whole_text(server: Running, client: openai.OpenAI) -> None:
    server.engine.answer_with(server.ids(" quick brown fox"), eos=1)
    chunks = list(client.completions.create(model="tiny", prompt="the", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " quick brown fox"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
