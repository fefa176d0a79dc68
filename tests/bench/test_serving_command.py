"""``hotstart bench serve`` as a whole, against a server with scripted streams."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotstart.cli.main import main
from stub_streams import DONE, Script, Stub, delta, text, usage, words

Bench = Callable[..., int]
METRICS = """\
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="stub"} %d.0
vllm:prefix_cache_queries_total{engine="0",model_name="other"} 5000.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="stub"} %d.0
vllm:prefix_cache_hits_total{engine="0",model_name="other"} 4000.0
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Ten prompts of four words, each sent once, in their order."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"a b c {number}"}) for number in range(10)]
    prompts.write_text("\n".join(lines))

    def run(stub: Stub, *flags: str, number: int = 3) -> int:
        dataset = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"]
        fixed = ["--num-prompts", str(number), "--disable-shuffle", "--custom-output-len", "5"]
        return main(["bench", "serve", "--base-url", stub.url, *dataset, *fixed, *flags])

    return run


def saved(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_figures_are_those_of_the_times_that_were_recorded(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = [words(3), Script(status=500), words(4, tokens=7)]
    out = tmp_path / "result.json"
    with Stub(scripts) as stub:
        flags = ["--max-concurrency", "1", "--save-result", "--save-detailed", "--result-filename", str(out)]
        assert bench(stub, *flags, "--percentile-metrics", "ttft,tpot,itl,e2el,client_queue_time") == 0
    result, printed = saved(out), capsys.readouterr()
    assert (result["completed"], result["failed"], result["output_lens"]) == (2, 1, [3, 0, 7])
    first, third = (
        {name: result[name][place] for name in ("ttfts", "itls", "latencies", "queue_times")}
        for place in (0, 2)
    )
    assert (len(first["itls"]), len(third["itls"])) == (2, 3)
    tpots = [1000 * (one["latencies"] - one["ttfts"]) / others for one, others in ((first, 2), (third, 6))]
    gaps = first["itls"] + third["itls"]
    by_hand = {
        "mean_ttft_ms": 500 * (first["ttfts"] + third["ttfts"]),
        "mean_tpot_ms": sum(tpots) / 2,
        "p99_tpot_ms": min(tpots) + 0.99 * (max(tpots) - min(tpots)),
        "median_itl_ms": 1000 * sorted(gaps)[2],
        "mean_e2el_ms": 500 * (first["latencies"] + third["latencies"]),
        "mean_client_queue_time_ms": 500 * (first["queue_times"] + third["queue_times"]),
        "request_throughput": 2 / result["duration"],
        "output_throughput": 10 / result["duration"],
        "total_token_throughput": 24 / result["duration"],
    }
    assert {key: result[key] for key in by_hand} == pytest.approx(by_hand)
    assert f"{'Mean TTFT (ms):':<40} {result['mean_ttft_ms']:<10.2f}\n" in printed.out
    assert "1 request of 3 failed and counted as such, none was sent again: HTTP 500" in printed.err


def test_block_has_vllms_lines_in_vllms_order(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub() as stub:
        load = ["--request-rate", "1000", "--max-concurrency", "2", "--goodput", "ttft:9000", "tpot:9000"]
        assert bench(stub, *load, "--metric-percentiles", "50,99.9") == 0
    out = capsys.readouterr().out
    block = out[out.index("=" * 12) : out.index("Tokens counted by")]
    assert re.sub(r" +[\d.]+ *$", "", block, flags=re.M).splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:",
        "Failed requests:",
        "Maximum request concurrency:",
        "Request rate configured (RPS):",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Request goodput (req/s):",
        "Output token throughput (tok/s):",
        "Peak output token throughput (tok/s):",
        "Peak concurrent requests:",
        "Total token throughput (tok/s):",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):",
        "Median TTFT (ms):",
        "P50 TTFT (ms):",
        "P99.9 TTFT (ms):",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):",
        "Median TPOT (ms):",
        "P50 TPOT (ms):",
        "P99.9 TPOT (ms):",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):",
        "Median ITL (ms):",
        "P50 ITL (ms):",
        "P99.9 ITL (ms):",
        "==================================================",
    ]
    assert f"{'Successful requests:':<40} {3:<10}\n" in block
    assert f"{'Request rate configured (RPS):':<40} {'1000.00':<10}\n" in block


def test_result_has_vllms_keys_and_what_was_asked_for(bench: Bench, tmp_path: Path) -> None:
    with Stub(models=[{"id": "stub", "root": "/models/stub"}]) as stub:
        where = ["--result-dir", str(tmp_path / "new"), "--label", "mine", "--metadata", "tp=2", "gpu=none"]
        assert bench(stub, "--save-result", *where) == 0
        assert bench(stub, "--append-result", *where, "--result-filename", "all.json", "--seed", "4") == 0
        assert bench(stub, "--append-result", *where, "--result-filename", "all.json") == 0
    [path] = (tmp_path / "new").glob("mine-infqps-stub-*.json")
    result = saved(path)
    figures = {
        f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "std", "p99")
    }
    assert set(result) == figures | {
        "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "tp", "gpu",
        "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
        "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
        "output_throughput", "total_token_throughput", "latencies", "queue_times",
        "max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "hotstart",
    }  # fmt: skip
    assert (result["request_rate"], result["tp"], result["model_id"]) == ("inf", "2", "/models/stub")
    both = [json.loads(line) for line in (tmp_path / "new" / "all.json").read_text().splitlines()]
    assert both[0]["hotstart"]["seed"] == 4
    assert both[1]["hotstart"]["seed"] != result["hotstart"]["seed"]


def test_requests_are_as_vllms_client_sends_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with Stub() as stub:
        flags = [
            "--header",
            "X-Team=blue",
            "--request-id-prefix",
            "r-",
            "--temperature",
            "0",
            "--top-k",
            "-1",
        ]
        assert (
            bench(stub, *flags, "--ignore-eos", "--extra-body", '{"min_tokens": 5}', "--logprobs", "2") == 0
        )
    headers, body = stub.requests[1]
    assert headers["authorization"] == "Bearer secret"
    assert (headers["x-team"], headers["x-request-id"]) == ("blue", "r-1")
    assert body == {
        "model": "stub", "prompt": "a b c 1", "max_tokens": 5, "repetition_penalty": 1.0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "logprobs": 2, "min_tokens": 5,
        "temperature": 0.0, "top_k": -1,
    }  # fmt: skip


def test_chats_are_asked_at_their_endpoint(bench: Bench) -> None:
    steps = [delta(role="assistant"), delta(content="a"), delta(finish="stop"), usage(1), DONE]
    with Stub([Script(tuple((0.0, step) for step in steps))]) as stub:
        assert bench(stub, "--backend", "openai-chat") == 0
    _, body = stub.requests[0]
    assert body["messages"] == [{"role": "user", "content": "a b c 0"}]
    assert body["max_completion_tokens"] == 5
    assert "prompt" not in body


def test_first_chunk_of_any_kind_is_kept_beside_ttft(bench: Bench, tmp_path: Path) -> None:
    steps = ((0.0, delta(role="assistant")), (0.05, delta(content="a", finish="stop")), (0.0, DONE))
    out = tmp_path / "r.json"
    with Stub([Script(steps)]) as stub:
        flags = [
            "--backend",
            "openai-chat",
            "--save-result",
            "--save-detailed",
            "--result-filename",
            str(out),
        ]
        assert bench(stub, *flags, number=1) == 0
    result = saved(out)
    assert 0 < result["hotstart"]["first_chunks"][0] < result["ttfts"][0]


def test_warm_ups_and_the_test_request_have_other_prompts_and_do_not_count(bench: Bench) -> None:
    with Stub() as stub:
        assert bench(stub, "--num-warmups", "4", "--ready-check-timeout-sec", "5") == 0
    prompts = [body["prompt"] for _, body in stub.requests]
    assert len(prompts) == 1 + 4 + 3
    measured = {f"a b c {number}" for number in range(3)}
    assert set(prompts[5:]) == measured
    assert not set(prompts[:5]) & measured
    assert all(sorted(prompt)[-3:] == ["a", "b", "c"] for prompt in prompts)


def counted(printed: str) -> str:
    return next(line for line in printed.splitlines() if line.startswith("Tokens counted by: "))


def test_tokens_are_counted_by_the_server_and_it_is_said(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with Stub([words(3), words(2, tokens=0)]) as stub:
        assert bench(stub) == 0
    out = capsys.readouterr().out
    assert counted(out) == "Tokens counted by: the server's usage; of 2 answers the server's /tokenize"
    assert f"{'Total generated tokens:':<40} 7  " in out
    assert f"{'Total input tokens:':<40} {7 + 4 + 4}  " in out


def test_tokens_without_usage_are_those_of_the_tokenizer(
    bench: Bench, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny_model("llama")
    with Stub([words(3, tokens=0)], tokenizes=False) as stub:
        assert bench(stub, "--tokenizer", str(directory)) == 0
    assert counted(capsys.readouterr().out) == f"Tokens counted by: the tokenizer in {directory}"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (900, "of 3 answers the server counts more tokens than were asked for"),
        (1, "of 3 answers the server counts fewer tokens than there were chunks with content"),
    ],
)
def test_usage_that_cannot_be_right_is_warned_about(
    bench: Bench, tokens: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Stub([words(3, tokens=tokens)]) as stub:
        assert bench(stub) == 0
    assert message in capsys.readouterr().err


def test_reuse_of_the_prefix_cache_is_that_of_this_run_and_this_model(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    with Stub(metrics=[METRICS % (1000, 600), METRICS % (1021, 605)]) as stub:
        assert bench(stub, "--save-result", "--result-filename", str(out)) == 0
    printed = capsys.readouterr()
    assert "From the prefix cache: 23.8% of 21 prompt tokens, by the server's metrics" in printed.out
    assert "warning: 23.8% of the prompts came from the server's prefix cache" in printed.err
    assert saved(out)["hotstart"]["prefix_cache"] == {
        "queries": 21, "hits": 5, "source": "the server's metrics"
    }  # fmt: skip


def test_reuse_below_a_percent_is_no_warning(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(metrics=[METRICS % (0, 0), METRICS % (21, 0)]) as stub:
        assert bench(stub) == 0
    printed = capsys.readouterr()
    assert "From the prefix cache: 0.0% of 21 prompt tokens" in printed.out
    assert "came from the server's prefix cache" not in printed.err


def test_without_metrics_reuse_is_what_the_answers_say(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    told = usage(1, prompt=40, prompt_tokens_details={"cached_tokens": 20})
    with Stub([Script(((0.0, text("a", finish="length")), (0.0, told), (0.0, DONE)))]) as stub:
        assert bench(stub) == 0
    assert "50.0% of 120 prompt tokens, by the usage in its answers" in capsys.readouterr().out


def test_somebody_else_at_the_server_is_noticed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(metrics=[METRICS % (0, 0), METRICS % (5000, 0)]) as stub:
        assert bench(stub) == 0
    assert "asked about 5000 prompt tokens while these were 21" in capsys.readouterr().err


def test_no_success_is_exit_code_1_and_no_figures(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    busy = Script(((0.0, b"busy"),), status=429, headers="Retry-After: 9\r\n")
    with Stub([busy]) as stub:
        assert bench(stub, "--save-result", "--result-filename", str(out)) == 1
        assert len(stub.requests) == 3
    printed = capsys.readouterr()
    assert "Serving Benchmark Result" not in printed.out
    assert (
        "3 requests of 3 failed and counted as such, none was sent again: HTTP 429 (Retry-After: 9): busy"
        in printed.err
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("models", "flags", "message"),
    [
        (["a", "b"], ["--model", "c"], "c is not served at http://localhost:{port}/v1/models; expected a, b"),
        (["a"], ["--model", "/m/a", "--served-model-name", "x"], "x is not served"),
        (["a"], ["--model", "/models/a"], "Call it by its name: --served-model-name a"),
        ([], [], "lists no model"),
    ],
)
def test_model_that_is_not_served_is_an_error_before_anything_is_sent(
    bench: Bench, models: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Stub(models=[{"id": name, "root": f"/models/{name}"} for name in models]) as stub:
        assert bench(stub, *flags) == 2
        assert stub.requests == []
    assert message.format(port=stub.port) in capsys.readouterr().err


def test_first_model_is_used_where_none_is_named(bench: Bench) -> None:
    with Stub(models=[{"id": "a"}, {"id": "b"}]) as stub:
        assert bench(stub) == 0
    assert stub.requests[0][1]["model"] == "a"


def test_server_without_a_list_is_asked_for_the_model_that_is_named(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with Stub(models_status=404) as stub:
        assert bench(stub) == 4
        assert "Name the model: --model NAME" in capsys.readouterr().err
        assert bench(stub, "--model", "any") == 0
    assert stub.requests[0][1]["model"] == "any"


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [(401, 2, "Give the key: OPENAI_API_KEY"), (503, 4, "--ready-check-timeout-sec 600")],
)
def test_server_that_lists_nothing_yet_or_not_for_us_says_what_to_do(
    bench: Bench, status: int, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Stub(models_status=status) as stub:
        assert bench(stub, "--model", "any") == code
    assert message in capsys.readouterr().err


def test_nobody_at_the_address_is_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub() as stub:
        pass
    assert bench(stub) == 4
    assert f"no server answers at {stub.url}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--backend", "openai-chat", "--endpoint", "/v1/completions"],
            "does not go with --backend openai-chat",
        ),
        (["--endpoint", "/v1/responses"], "does not go with --backend openai"),
        (["--backend", "tgi"], "--backend tgi is refused"),
        (["--request-rate", "0"], "--request-rate is 0; expected a number above 0, or inf"),
        (["--goodput", "itl:5"], "expected one or more values, each a limit in milliseconds"),
        (["--percentile-metrics", "ttft,speed"], "names with commas between them, of ttft, tpot"),
        (["--metric-percentiles", "101"], "percentiles from 0 to 100"),
        (["--metadata", "tp"], "--metadata is tp"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps is None"),
        (
            ["--ramp-up-strategy", "linear", "--request-rate", "3"],
            "--request-rate 3.0 and --ramp-up-strategy are given; expected one",
        ),
        (["--header", "X=é"], "--header X cannot be sent"),
        (["--plot", "no/such/place.png"], "--plot no/such/place.png cannot be written"),
        (["--profile"], "--profile is refused"),
    ],
)
def test_flags_that_cannot_be_followed_are_errors_before_anything_is_sent(
    bench: Bench, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Stub() as stub:
        assert bench(stub, *flags) in (2, 4)
        assert stub.requests == []
    assert message in capsys.readouterr().err


def test_key_in_a_header_is_never_printed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(models_status=401) as stub:
        assert bench(stub, "--header", "Authorization=Bearer s3cret", "X") == 2
    assert "s3cret" not in "".join(capsys.readouterr())


def test_run_is_drawn(bench: Bench, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    with Stub() as stub:
        assert bench(stub, "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_base_url_may_have_the_v1_that_other_clients_want(bench: Bench) -> None:
    with Stub() as stub:
        assert bench(stub, "--base-url", f"{stub.url}/v1/") == 0
    assert len(stub.requests) == 3
