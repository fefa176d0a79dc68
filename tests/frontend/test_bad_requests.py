"""Wrong requests get OpenAI's error body, a 4xx, and the name of the field."""

from __future__ import annotations

import gzip
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import tokenizers

from hotstart.checkpoint.base import ModelFiles

from .conftest import CONTEXT, Launch, Running, running_servers
from .fake_engine import PATIENCE

PROMPT: dict[str, Any] = {"prompt": "the"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server(files: ModelFiles) -> Iterator[Running]:
    """One for all: what is refused leaves no trace."""
    with running_servers(files) as launch:
        running = launch()
        running.make_ready()
        running.engine.answer_with([5])
        yield running


def refusal(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "16"),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("temperature", -0.5),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 1000),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("seed", 2**70),
        ("min_tokens", 17),
        ("stop", ["x"] * 10_000),
        ("stop", [""]),
        ("stop", 5),
        ("stop_token_ids", ["x"]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", {"400": 1}),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", [1, "x"]),
        ("prompt", [[1], "x"]),
        ("prompt", [-1]),
        ("prompt", [400]),
        ("prompt", [[]]),
        ("prompt", [2**40]),
    ],
)
def test_a_wrong_value_names_its_field(server: Running, field: str, value: Any) -> None:
    before = len(server.engine.requests)
    error = refusal(server, "/v1/completions", {**PROMPT, field: value})
    assert str(error["param"]).startswith(field)
    assert len(server.engine.requests) == before


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"content": "hello"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_wrong_message_is_named(server: Running, messages: Any, param: str) -> None:
    assert refusal(server, "/v1/chat/completions", {"messages": messages})["param"] == param


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "suffix", "end"),
        ("/v1/completions", "best_of", 2),
        ("/v1/completions", "use_beam_search", True),
        ("/v1/completions", "guided_regex", "a+"),
        ("/v1/completions", "guided_whitespace_pattern", " ?"),
        ("/v1/chat/completions", "guided_decoding_backend", "xgrammar"),
        ("/v1/completions", "truncate_prompt_tokens", 5),
        ("/v1/chat/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
        ("/v1/chat/completions", "tool_choice", "required"),
        ("/v1/chat/completions", "response_format", {"type": "json_object"}),
        ("/v1/chat/completions", "guided_json", {"type": "object"}),
        ("/v1/chat/completions", "structured_outputs", {"regex": "a+"}),
        ("/v1/chat/completions", "audio", {"voice": "x"}),
        ("/v1/chat/completions", "web_search_options", {"user_location": None}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Running, path: str, field: str, value: Any) -> None:
    body = CHAT if "chat" in path else PROMPT
    error = refusal(server, path, {**body, field: value})
    assert error["param"] == field
    assert "not supported" in error["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"best_of": 1},
        {"use_beam_search": False},
        {"guided_decoding_backend": None, "guided_whitespace_pattern": ""},
    ],
)
def test_neutral_values_of_unsupported_fields_are_accepted_without_a_word(
    server: Running, extra: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert server.ask("/v1/chat/completions", **CHAT, **extra).result(PATIENCE).status_code == 200
    assert not [message for message in caplog.messages if "request field" in message]


@pytest.mark.parametrize(
    "body",
    [
        {**CHAT, "top_logprobs": 2},
        {**CHAT, "logprobs": True, "top_logprobs": 50},
        {**CHAT, "continue_final_message": True},
        {**CHAT, "max_completion_tokens": 0},
        {**CHAT, "stream": True, "prompt_logprobs": 1},
    ],
)
def test_contradictions_in_a_chat_are_refused(server: Running, body: dict[str, Any]) -> None:
    assert refusal(server, "/v1/chat/completions", body)["param"] in body


def test_an_unknown_field_is_logged_once_and_ignored(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hotstart.frontend"):
        for _ in range(2):
            answer = server.ask("/v1/completions", **PROMPT, no_such_field=1).result(PATIENCE)
            assert answer.status_code == 200
    assert [record for record in caplog.messages if "no_such_field" in record] == [
        "the request field 'no_such_field' is unknown and ignored (logged once)"
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"a":' * 5000,
        b'{"prompt": ' + b"[" * 5000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(server: Running, body: bytes) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


def test_a_body_over_the_limit_is_refused_with_or_without_its_length(launch: Launch) -> None:
    server = launch(http={"max_body_bytes": 100})
    server.make_ready()
    headers = {"Content-Type": "application/json"}
    with server.client() as client:
        announced = client.post("/v1/completions", content=b"x" * 200, headers=headers)
        chunked = client.post("/v1/completions", content=iter([b"x" * 60] * 4), headers=headers)
    assert (announced.status_code, chunked.status_code) == (413, 413)


def test_a_form_is_not_json(server: Running) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", data={"prompt": "the"})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


def test_a_compressed_body_is_no_supported_type(server: Running) -> None:
    body = gzip.compress(b'{"prompt": "the"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with server.client() as client:
        answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding gzip" in answer.json()["error"]["message"]


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(server: Running) -> None:
    message = refusal(server, "/v1/completions", {"prompt": [5] * CONTEXT})["message"]
    assert f"maximum context length is {CONTEXT} tokens" in message
    assert f"{CONTEXT} input tokens" in message


def test_more_tokens_than_the_context_has_are_refused_with_the_numbers(server: Running) -> None:
    error = refusal(server, "/v1/completions", {"prompt": [5] * 10, "max_tokens": CONTEXT})
    assert error["param"] == "max_tokens"
    assert f"{CONTEXT + 10} tokens (10 in the input, {CONTEXT} in the output)" in error["message"]


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": "x" * 2_000_000}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "x" * 2_000_000}]}),
    ],
)
def test_a_huge_prompt_is_refused_without_encoding_it(
    server: Running, path: str, param: str, body: dict[str, object]
) -> None:
    error = refusal(server, path, body)
    assert re.search(r"maximum context length is 64 tokens.*has at least \d+ input tokens", error["message"])
    assert error["param"] == param


def test_an_unknown_model_is_not_found(server: Running) -> None:
    error = refusal(server, "/v1/completions", {**PROMPT, "model": "gpt-5"}, 404)
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert "`gpt-5` does not exist" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/embeddings", 404),
        ("POST", "/nowhere", 404),
        ("GET", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/gpt-5", 404),
    ],
)
def test_unknown_routes_and_methods_have_openais_body(
    server: Running, method: str, path: str, status: int
) -> None:
    with server.client() as client:
        answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


def test_the_official_client_raises_its_own_errors(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-5", prompt="the")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="the", temperature=-1)


@pytest.mark.parametrize(
    "value",
    [
        b"1e999",
        b"[1e400]",
        b'{"a": 1e400}',
        b"-" + b"1" * 200 + b"e999",
        b'"\xff\xfe"',
        b'"\\ud800"',
        b'{"\xff": 1}',
        b"[" * 120 + b"1e999" + b"]" * 120,
        b"[" * 5000 + b"]" * 5000,
    ],
)
@pytest.mark.parametrize("field", ["best_of", "tools", "chat_template_kwargs", "messages"])
def test_a_value_that_is_no_json_is_refused_wherever_it_stands(
    server: Running, field: str, value: bytes
) -> None:
    messages = b'"messages": [{"role": "user", "content": "hello"}], ' if field != "messages" else b""
    body = b"{" + messages + b'"%s": {"x": ' % field.encode() + value + b"}}"
    plain = b"{" + messages + b'"%s": ' % field.encode() + value + b"}"
    for content in (body, plain):
        with server.client() as client:
            answer = client.post(
                "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
            )
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("value", [b'"\xff"', b"1e999", b"1" * 5000])
def test_the_value_of_an_ignored_field_is_never_looked_at(server: Running, value: bytes) -> None:
    body = b'{"prompt": "the", "user": ' + value + b', "no_such_field_2": ' + value + b"}"
    with server.client() as client:
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


def test_a_text_that_the_tokenizer_has_no_tokens_for_is_a_bad_request(
    files: ModelFiles, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0}, unk_token="[UNK]")).save(str(path))
    with running_servers(msgspec.structs.replace(files, tokenizer_json=str(path))) as launch:
        server = launch()
        server.make_ready()
        with server.client() as client:
            for route in ("/v1/completions", "/tokenize"):
                response = client.post(route, json={"prompt": "fox"})
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "prompt"
                assert "cannot encode this text" in response.json()["error"]["message"]
