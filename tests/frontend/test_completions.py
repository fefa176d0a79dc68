from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from hotstart.messages import FinishReason, Scheduled, unpack_ids

from .conftest import Launch, Running
from .fake_engine import PATIENCE

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    server.engine.answer_with(server.ids(" quick brown fox"))
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: Running, **body: Any) -> Any:
    with server.client() as http:
        response = http.post("/v1/completions", json={"prompt": "the", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Running, **body: Any) -> list[Any]:
    with (
        server.client() as http,
        http.stream("POST", "/v1/completions", json={"prompt": "the", "stream": True, **body}) as response,
    ):
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_answer_is_the_text_of_the_engines_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="the")
    assert answer.choices[0].text == " quick brown fox"
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("cmpl-")


def test_usage_counts_tokens_of_prompt_and_answer(server: Running, client: openai.OpenAI) -> None:
    usage = client.completions.create(model="tiny", prompt="the").usage
    assert usage is not None
    prompt, answer = server.text.tokenizer.encode("the"), server.ids(" quick brown fox")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(answer))
    assert usage.total_tokens == len(prompt) + len(answer)


def test_streamed_chunks_join_to_the_whole_text(server: Running, client: openai.OpenAI) -> None:
    server.engine.answer_with(server.ids(" quick brown fox"), eos=1)
    chunks = list(client.completions.create(model="tiny", prompt="the", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " quick brown fox"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_each_step_is_one_event_as_soon_as_it_comes(server: Running) -> None:
    fox, dog = server.ids(" fox")[0], server.ids(" dog")[0]
    streamed = server.stream("/v1/completions", prompt="the")
    request = server.engine.next_request()
    for token, text in ((fox, " fox"), (dog, " dog")):
        server.engine.step([(request.id, token, RUNNING)])
        assert json.loads(streamed.get(timeout=PATIENCE))["choices"][0]["text"] == text
    server.engine.step([(request.id, fox, LENGTH)])
    assert json.loads(streamed.get(timeout=PATIENCE))["choices"][0]["finish_reason"] == "length"
    assert streamed.get(timeout=PATIENCE) == "[DONE]"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the", [["the"]]),
        (["the", "fox"], [["the"], ["fox"]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_prompts_come_as_text_or_ids_one_or_many(
    server: Running, client: openai.OpenAI, prompt: Any, expected: list[list[Any]]
) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt)
    ids = [server.text.tokenizer.encode(p[0]) if isinstance(p[0], str) else p for p in expected]
    assert [unpack_ids(request.prompt) for request in server.engine.requests] == ids
    assert [choice.index for choice in answer.choices] == list(range(len(ids)))


def test_n_choices_of_each_prompt_have_seeds_of_their_own(server: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["the", "fox"], n=2, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [request.params.seed for request in server.engine.requests] == [7, 8, 7, 8]


def test_streamed_choices_are_told_apart_by_index(server: Running, client: openai.OpenAI) -> None:
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt="the", n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [" quick brown fox"] * 2


def test_echo_puts_the_prompt_before_the_answer(server: Running, client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="the", echo=True)
    assert whole.choices[0].text == "the quick brown fox"
    chunks = client.completions.create(model="tiny", prompt="the", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the quick brown fox"


def test_echo_without_tokens_returns_the_prompt_alone(server: Running, client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model="tiny", prompt="the", echo=True, max_tokens=0, logprobs=1
    ).choices[0]
    assert choice.text == "the"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == "<s>the"


def test_an_echo_alone_costs_no_token_of_an_answer(server: Running) -> None:
    server.engine.answer_with([42])
    usage = post(server, echo=True, max_tokens=0)["usage"]
    prompt = len(server.text.tokenizer.encode("the"))
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, prompt)


def test_max_completion_tokens_bounds_completions_too(server: Running) -> None:
    server.engine.answer_with([42] * 4)
    assert post(server, max_completion_tokens=2, max_tokens=3)["usage"]["completion_tokens"] == 2


def test_the_best_of_as_many_as_are_answered_are_all_of_them(server: Running) -> None:
    server.engine.answer_with([42])
    assert len(post(server, n=2, best_of=2)["choices"]) == 2


def test_logprobs_list_every_token_with_the_best_beside_it(server: Running) -> None:
    server.engine.answer_with(server.ids(" fox"))
    logprobs = post(server, logprobs=2)["choices"][0]["logprobs"]
    (token,) = server.ids(" fox")
    name = server.text.tokenizer.token_text
    assert logprobs["tokens"] == [" fox"]
    assert logprobs["token_logprobs"] == [-0.5]
    assert logprobs["text_offset"] == [0]
    assert logprobs["top_logprobs"] == [{name(token + 1): -1.0, name(token + 2): -2.0, " fox": -0.5}]


def test_tokens_within_a_character_are_spelled_as_bytes_and_keep_apart(server: Running) -> None:
    # Every byte of this vocabulary is a token; the script makes the two that follow the best beside it.
    fox = server.ids("🦊")
    server.engine.answer_with([*fox, *server.ids("!")])
    choice = post(server, logprobs=2)["choices"][0]
    assert choice["text"] == "🦊!"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x8a", "!"]
    assert logprobs["text_offset"] == [0, 0, 0, 0, 1]
    assert set(logprobs["top_logprobs"][0]) == {"bytes:\\xf0", "bytes:\\xf1", "bytes:\\xf2"}


def test_echoed_prompts_have_logprobs_too(server: Running) -> None:
    server.engine.answer_with(server.ids(" fox"))
    logprobs = post(server, logprobs=1, echo=True)["choices"][0]["logprobs"]
    count = len(server.text.tokenizer.encode("the"))
    assert logprobs["token_logprobs"] == [None] + [-0.5] * count
    assert logprobs["tokens"][-1] == " fox"
    assert logprobs["text_offset"][-1] == len("<s>the")


def test_prompt_logprobs_give_rank_and_text_by_position(server: Running) -> None:
    server.engine.answer_with([5])
    choice = post(server, prompt=[5, 6], prompt_logprobs=1)["choices"][0]
    name = server.text.tokenizer.token_text
    assert choice["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": name(6)},
            "7": {"logprob": -1.0, "rank": 2, "decoded_token": name(7)},
        },
    ]


def test_tokens_can_be_named_by_id(server: Running) -> None:
    server.engine.answer_with([42])
    logprobs = post(server, logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:42"]


def test_token_ids_are_returned_on_request(server: Running) -> None:
    server.engine.answer_with([42, 43])
    choice = post(server, prompt=[5, 6], return_token_ids=True)["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [42, 43])


def test_the_usage_event_comes_last_and_only_on_request(server: Running, client: openai.OpenAI) -> None:
    asked = list(
        client.completions.create(
            model="tiny", prompt="the", stream=True, stream_options={"include_usage": True}
        )
    )
    assert asked[-1].choices == []
    assert asked[-1].usage is not None
    assert asked[-1].usage.completion_tokens == len(server.ids(" quick brown fox"))
    assert [chunk.usage for chunk in asked[:-1]] == [None] * (len(asked) - 1)
    unasked = list(client.completions.create(model="tiny", prompt="the", stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in unasked)


def test_continuous_usage_counts_up(server: Running) -> None:
    server.engine.answer_with(server.ids(" quick brown fox"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in events(server, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == len(server.ids(" quick brown fox"))


def test_cached_tokens_are_reported_when_enabled(launch: Launch) -> None:
    server = launch(http={"enable_prompt_tokens_details": True})
    server.make_ready()
    answer = server.ask("/v1/completions", prompt="the fox")
    request = server.engine.next_request()
    server.engine.step([(request.id, 5, LENGTH)], scheduled=[Scheduled(request.id, time.monotonic(), 2)])
    assert answer.result(PATIENCE).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_stop_string_ends_the_answer_and_frees_the_request(server: Running) -> None:
    server.engine.answer_with(server.ids(" quick brown fox"))
    answer = post(server, stop=["brown"], max_tokens=40)
    choice = answer["choices"][0]
    assert choice["text"] == " quick "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "brown")


def test_a_stop_string_is_kept_when_asked_for(server: Running) -> None:
    server.engine.answer_with(server.ids(" quick brown fox"))
    answer = post(server, stop="brown", include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == " quick brown"


def test_a_stop_string_frees_the_engines_request_at_once(server: Running) -> None:
    answer = server.ask("/v1/completions", prompt="the", stop="fox")
    request = server.engine.next_request()
    server.engine.step([(request.id, server.ids(" fox")[0], RUNNING)])
    assert server.engine.next_abort() == [request.id]
    assert answer.result(PATIENCE).json()["choices"][0]["text"] == " "


def test_min_tokens_lets_stop_strings_pass(server: Running) -> None:
    tokens = server.ids(" fox fox fox")
    server.engine.answer_with(tokens)
    answer = post(server, stop=" fox", min_tokens=1, max_tokens=len(tokens))
    assert answer["choices"][0]["text"] == " fox"
    assert answer["usage"]["completion_tokens"] == 2


def test_a_stop_token_is_named_as_the_reason_and_not_shown(server: Running) -> None:
    answer = server.ask("/v1/completions", prompt="the", stop_token_ids=[9])
    request = server.engine.next_request()
    assert request.params.stop_token_ids == [9]
    server.engine.step([(request.id, 9, STOP)], stop_ids={request.id: 9})
    choice = answer.result(PATIENCE).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", 9)


def test_sampling_parameters_reach_the_engine(server: Running) -> None:
    server.engine.answer_with([5])
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "min_tokens": 1,
        "max_tokens": 2,
        "skip_special_tokens": False,
    }
    post(server, logit_bias={"5": 2.0}, **given)
    params = server.engine.requests[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == {5: 2.0}


def test_null_means_default(server: Running) -> None:
    server.engine.answer_with([5])
    nothing = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "logprobs", "echo", "seed", "logit_bias", "user"]
    )
    post(server, **nothing)
    assert server.engine.requests[0].params.temperature == 1.0


def test_sixteen_tokens_unless_asked_and_never_beyond_the_context(server: Running) -> None:
    server.engine.answer_with([5])
    post(server, prompt=[5] * 10)
    post(server, prompt=[5] * 60)
    post(server, prompt=[5] * 10, max_tokens=None)
    assert [request.params.max_tokens for request in server.engine.requests] == [16, 4, 54]


def test_generation_config_gives_defaults_and_requests_override_them(launch: Launch) -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 8}
    tuned = launch(model={"override_generation_config": defaults})
    tuned.make_ready()
    tuned.engine.answer_with([5])
    post(tuned)
    post(tuned, temperature=0.0, max_tokens=10)
    first, second = (request.params for request in tuned.engine.requests)
    assert (first.temperature, first.top_k, first.max_tokens) == (0.6, 20, 8)
    assert (second.temperature, second.top_k, second.max_tokens) == (0.0, 20, 10)


def test_characters_cut_by_token_borders_are_sent_whole(server: Running) -> None:
    server.engine.answer_with(server.ids("🦊é"))
    texts = [event["choices"][0]["text"] for event in events(server, max_tokens=40)]
    assert "".join(texts) == "🦊é"
    assert all("�" not in text for text in texts)
