from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from hotstart.messages import unpack_ids

from .conftest import CONTEXT, Launch, Running
from .fake_engine import PATIENCE

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    server.engine.answer_with(server.ids("the fox"), eos=1)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: Running, messages: list[dict[str, Any]] | None = None, **body: Any) -> Any:
    response = server.ask("/v1/chat/completions", messages=messages or HELLO, **body).result(PATIENCE)
    assert response.status_code == 200, response.text
    return response.json()


def prompt(server: Running) -> str:
    """The text of the last prompt that the engine got."""
    ids = unpack_ids(server.engine.requests[-1].prompt)
    return server.text.tokenizer.decode(ids, skip_special_tokens=False)


def test_the_assistant_answers(server: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "the fox"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert prompt(server) == "<s><user>hello\n<assistant>"


def test_a_stream_opens_with_the_role_and_continues_with_text(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "the fox"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_streamed_choice_each_has_its_own_role_and_text(client: openai.OpenAI) -> None:
    texts, roles = ["", ""], ["", ""]
    messages: Any = HELLO
    for chunk in client.chat.completions.create(model="tiny", messages=messages, n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role or ""
    assert (texts, roles) == (["the fox"] * 2, ["assistant"] * 2)


def test_the_usage_event_comes_last(client: openai.OpenAI) -> None:
    messages: Any = HELLO
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 0


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_roles_reach_the_template(server: Running, client: openai.OpenAI, role: str) -> None:
    post(server, [{"role": role, "content": "hello"}])
    assert prompt(server) == f"<s><{role}>hello\n<assistant>"


def test_a_developer_is_the_system_of_a_template_that_does_not_know_developers(
    server: Running, client: openai.OpenAI
) -> None:
    post(server, [{"role": "developer", "content": "hello"}])
    assert prompt(server) == "<s><system>hello\n<assistant>"


def test_text_parts_are_joined_for_templates_that_expect_text(server: Running, client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    post(server, [{"role": "user", "content": parts}])
    assert prompt(server) == "<s><user>hello\nworld\n<assistant>"


def test_text_becomes_parts_for_templates_that_expect_parts(launch: Launch) -> None:
    template = (
        "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
    )
    server = launch(model={"chat_template": template})
    server.make_ready()
    server.engine.answer_with([5])
    post(server)
    assert prompt(server) == "[text:hello]"


def test_earlier_tool_calls_reach_the_template_with_arguments_as_objects(launch: Launch) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    server = launch(model={"chat_template": template})
    server.make_ready()
    server.engine.answer_with([5])
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "the fox"}'},
    }
    post(server, [{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert prompt(server) == "the fox"


def test_template_arguments_of_the_request_win_over_those_of_the_server(launch: Launch) -> None:
    template = "{{ style }}{{ tone }}{{ reasoning_effort }}"
    server = launch(
        model={"chat_template": template, "default_chat_template_kwargs": {"style": "a", "tone": "b"}}
    )
    server.make_ready()
    server.engine.answer_with([5])
    post(server, chat_template_kwargs={"tone": "c"}, reasoning_effort="low")
    assert prompt(server) == "aclow"


def test_the_final_message_can_be_continued_and_echoed(server: Running, client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "the quick"}]
    options = {"add_generation_prompt": False, "continue_final_message": True, "echo": True}
    answer = post(server, messages, **options)
    assert prompt(server) == "<s><user>hello\n<assistant>the quick"
    assert answer["choices"][0]["message"]["content"] == "the quickthe fox"


def test_without_a_limit_an_answer_may_fill_the_context(server: Running, client: openai.OpenAI) -> None:
    post(server)
    request = server.engine.requests[-1]
    assert request.params.max_tokens == CONTEXT - len(unpack_ids(request.prompt))


def test_max_completion_tokens_wins_over_max_tokens(server: Running, client: openai.OpenAI) -> None:
    post(server, max_tokens=9, max_completion_tokens=3)
    assert server.engine.requests[-1].params.max_tokens == 3


def test_logprobs_have_text_bytes_and_alternatives(server: Running) -> None:
    (fox,) = server.ids(" fox")
    server.engine.answer_with([fox])
    content = post(server, logprobs=True, top_logprobs=1, max_tokens=1)["choices"][0]["logprobs"]["content"]
    other = server.text.tokenizer.token_bytes(fox + 1)
    assert content == [
        {
            "token": " fox",
            "logprob": -0.5,
            "bytes": list(b" fox"),
            "top_logprobs": [{"token": other.decode(), "logprob": -1.0, "bytes": list(other)}],
        }
    ]


def test_streamed_logprobs_cover_every_token(server: Running) -> None:
    tokens = server.ids("the quick fox")
    server.engine.answer_with(tokens)
    events = server.stream("/v1/chat/completions", messages=HELLO, logprobs=True, max_tokens=len(tokens))
    seen = ""
    while (event := events.get(timeout=PATIENCE)) != "[DONE]":
        for entry in (json.loads(event)["choices"][0]["logprobs"] or {"content": []})["content"]:
            seen += entry["token"]
    assert seen == "the quick fox"


def test_without_a_template_chat_says_what_to_do_and_completions_work(launch: Launch) -> None:
    bare = launch(without_template=True)
    bare.make_ready()
    bare.engine.answer_with([5])
    refused = bare.ask("/v1/chat/completions", messages=HELLO).result(PATIENCE)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert "--chat-template" in message
    assert "tokenizer_config.json" in message
    assert bare.ask("/v1/completions", prompt="the").result(PATIENCE).status_code == 200


def test_what_the_template_refuses_is_the_clients_error(launch: Launch) -> None:
    server = launch(model={"chat_template": "{{ raise_exception('roles must alternate') }}"})
    server.make_ready()
    refused = server.ask("/v1/chat/completions", messages=HELLO).result(PATIENCE)
    assert refused.status_code == 400
    assert "roles must alternate" in refused.json()["error"]["message"]
