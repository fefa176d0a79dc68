"""Models, tokenisation, version, metrics."""

from __future__ import annotations

import time

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import hotstart
from hotstart.messages import EngineStats, FinishReason, PhaseEvent, Scheduled
from hotstart.timeline import Phase

from .conftest import CONTEXT, Launch, Running
from .fake_engine import PATIENCE


def test_models_are_listed_by_their_served_names(launch: Launch) -> None:
    server = launch(model={"served_model_name": ("org/tiny", "alias")})
    server.make_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    cards = list(client.models.list())
    assert [card.id for card in cards] == ["org/tiny", "alias"]
    assert cards[0].to_dict()["max_model_len"] == CONTEXT
    assert client.models.retrieve("org/tiny").id == "org/tiny"


def test_an_answer_names_the_model_as_asked_for(launch: Launch) -> None:
    server = launch(model={"served_model_name": ("tiny", "alias")})
    server.make_ready()
    server.engine.answer_with([5])
    asked = [server.ask("/v1/completions", prompt="the", **extra) for extra in ({"model": "alias"}, {})]
    assert [answer.result(PATIENCE).json()["model"] for answer in asked] == ["alias", "tiny"]


def test_tokenize_counts_a_prompt(server: Running) -> None:
    answer = server.ask("/tokenize", model="tiny", prompt="the fox", return_token_strs=True).result(PATIENCE)
    ids = server.text.tokenizer.encode("the fox")
    assert answer.json() == {
        "count": len(ids),
        "max_model_len": CONTEXT,
        "tokens": ids,
        "token_strs": [server.text.tokenizer.piece(token) for token in ids],
    }


def test_tokenize_leaves_special_tokens_out_on_request(server: Running) -> None:
    answer = server.ask("/tokenize", prompt="the fox", add_special_tokens=False).result(PATIENCE)
    assert answer.json()["tokens"] == server.ids("the fox")


def test_tokenize_renders_messages(server: Running) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = server.ask("/tokenize", messages=messages, add_generation_prompt=False).result(PATIENCE)
    assert answer.json()["tokens"] == server.ids("<s><user>hello\n")


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
def test_tokenize_wants_a_prompt_or_messages(server: Running, body: dict[str, object]) -> None:
    assert server.ask("/tokenize", **body).result(PATIENCE).status_code == 400


def test_detokenize_is_the_inverse(server: Running) -> None:
    answer = server.ask("/detokenize", tokens=server.ids("the quick 🦊")).result(PATIENCE)
    assert answer.json() == {"prompt": "the quick 🦊"}


def test_detokenize_refuses_ids_beyond_the_vocabulary(server: Running) -> None:
    assert server.ask("/detokenize", tokens=[400]).result(PATIENCE).status_code == 400


def test_version_is_that_of_the_package(server: Running) -> None:
    with server.client() as client:
        assert client.get("/version").json() == {"version": hotstart.__version__}


def samples(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels, without those that all share."""
    with server.client() as client:
        text = client.get("/metrics").text
    return {
        (s.name, tuple(sorted(p for p in s.labels.items() if p[0] not in ("model_name", "engine")))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_metrics_count_what_requests_did(server: Running) -> None:
    answer = server.ask("/v1/completions", prompt=[5, 6, 7], max_tokens=2)
    request = server.engine.next_request()
    server.engine.step(
        [(request.id, 5, FinishReason.RUNNING)], scheduled=[Scheduled(request.id, time.monotonic(), 1)]
    )
    server.engine.step(
        [(request.id, 6, FinishReason.LENGTH)],
        stats=EngineStats(
            waiting=3, kv_usage=0.5, preemptions=2, prefix_queries=3, prefix_hits=1, step_tokens=1
        ),
    )
    assert answer.result(PATIENCE).status_code == 200
    found = samples(server)
    expected = {
        "vllm:num_requests_waiting": 3,
        "vllm:num_requests_running": 0,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:num_preemptions_total": 2,
        "vllm:prefix_cache_queries_total": 3,
        "vllm:prefix_cache_hits_total": 1,
        "vllm:prompt_tokens_total": 3,
        "vllm:prompt_tokens_cached_total": 1,
        "vllm:generation_tokens_total": 2,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 1,
        "vllm:request_time_per_output_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_inference_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:request_decode_time_seconds_count": 1,
        "vllm:request_prompt_tokens_sum": 3,
        "vllm:request_generation_tokens_sum": 2,
        "vllm:request_params_max_tokens_sum": 2,
        "vllm:request_params_n_sum": 1,
        "vllm:iteration_tokens_total_sum": 1,
    }
    assert {name: found[name, ()] for name in expected} == expected
    assert found["vllm:request_success_total", (("finished_reason", "length"),)] == 1


def test_metrics_name_the_model(launch: Launch) -> None:
    server = launch(model={"served_model_name": ("one", "two")})
    with server.client() as client:
        assert 'vllm:num_requests_running{engine="0",model_name="one"} 0.0' in client.get("/metrics").text


def test_metrics_show_the_cache_and_the_phases_of_the_start(launch: Launch) -> None:
    server = launch()
    start = server.timeline.origin
    server.engine.send(PhaseEvent(Phase(name="import torch", process="engine", start=start, end=start + 1.5)))
    server.make_ready()
    found = samples(server)
    labels = (("phase", "import torch"), ("process", "engine"))
    assert found["hotstart:startup_phase_seconds", labels] == 1.5
    (info,) = [dict(labels) for name, labels in found if name == "vllm:cache_config_info"]
    assert info["block_size"] == "16"


def test_the_prefix_cache_is_reset_between_requests(server: Running) -> None:
    answer = server.ask("/reset_prefix_cache")
    assert server.engine.answer_control(ok=True) == "reset_prefix_cache"
    assert answer.result(PATIENCE).status_code == 200


def test_the_prefix_cache_is_not_reset_while_requests_run(server: Running) -> None:
    answer = server.ask("/reset_prefix_cache")
    server.engine.answer_control(ok=False)
    refused = answer.result(PATIENCE)
    assert refused.status_code == 409
    assert "Requests are running" in refused.json()["error"]["message"]


def test_running_requests_are_not_ended_for_a_reset(server: Running) -> None:
    answer = server.ask("/reset_prefix_cache?reset_running_requests=true").result(PATIENCE)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "reset_running_requests"


def test_what_the_engine_said_of_itself_is_in_the_startup_json(server: Running) -> None:
    with server.client() as client:
        engine = client.get("/startup.json").json()["engine"]
    assert {name: engine[name] for name in ("device", "dtype", "max_num_seqs", "first_step")} == {
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 8,
        "first_step": "probe",
    }
