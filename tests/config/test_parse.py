"""The manners of the command line, through the parser of ``serve``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotstart.config import settings
from hotstart.config.command import HelpWanted
from hotstart.config.parse import Parsed, parse_serve
from hotstart.errors import ConfigError, HotstartError, ProblemsFound

HF = "model.hf_overrides"


def parse(*words: str, environ: Mapping[str, str] | None = None) -> Parsed:
    return parse_serve(["/models/llama", *words], environ or {})


def values(*words: str) -> dict[str, Any]:
    parsed = parse(*words)
    return {name: value for name, value in parsed.values.items() if not name.startswith("model.model")}


def refusal(*words: str) -> str:
    with pytest.raises(HotstartError) as caught:
        parse(*words)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_model_alone_gives_every_default() -> None:
    config = parse().config
    assert config.model.model == "/models/llama"
    assert config.http == settings.HttpConfig()
    assert config.cache == settings.CacheConfig()


def test_the_served_name_is_the_argument_as_given() -> None:
    assert parse_serve(["./models/../llama/"], {}).config.model.served_model_name == ("./models/../llama/",)


def test_settings_survive_the_way_to_the_engine() -> None:
    config = parse("--served-model-name", "a", "b", "--hf-overrides.x", "[1, 2]", "--api-key", "k").config
    assert settings.decode(settings.encode(config)) == config


@pytest.mark.parametrize(
    ("word", "near"),
    [("bf16", "bfloat16"), ("FP16", "float16"), ("fp32", "float32"), ("bflaot16", "bfloat16")],
)
def test_a_word_that_is_none_of_the_choices_names_the_nearest(word: str, near: str) -> None:
    assert refusal("--dtype", word).endswith(f"Did you mean {near}?")


def test_a_word_that_is_like_none_of_the_choices_names_no_other() -> None:
    assert "Did you mean" not in refusal("--dtype", "q4_k_m")


def test_secrets_stay_out_of_what_is_printed() -> None:
    config = parse("--api-key", "k-secret", "--hf-token", "t-secret").config
    assert "secret" not in repr(config)
    assert "secret" not in refusal("--api-key=[1", "--hf-token", "t-secret", "--port", "x")


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--max_model_len", "2048"], "model.max_model_len", 2048),
        (["--max-model-len=4k"], "model.max_model_len", 4000),
        (["--max-model-len", "4K"], "model.max_model_len", 4096),
        (["--max-model-len", "auto"], "model.max_model_len", -1),
        (["--max-model-len", "-1"], "model.max_model_len", -1),
        (["--kv-cache-memory", "5GiB"], "cache.kv_cache_memory_bytes", 5 * 2**30),
        (["--kv-cache-memory-bytes", "5GB"], "cache.kv_cache_memory_bytes", 5 * 10**9),
        (["--gpu-mem", "0.5"], "cache.gpu_memory_utilization", 0.5),
        (["--no-enable-prefix-caching"], "cache.enable_prefix_caching", False),
        (["--enable-prefix-caching=false"], "cache.enable_prefix_caching", False),
        (["--no-enable-prefix-caching=false"], "cache.enable_prefix_caching", True),
        (["--dtype", "half"], "model.dtype", "float16"),
        (["--dtype", "float"], "model.dtype", "float32"),
        (["--served-model-name", "a", "b"], "model.served_model_name", ("a", "b")),
        (["--allowed-origins", '["http://a", "http://b"]'], "http.allowed_origins", ("http://a", "http://b")),
        (["--hf-overrides", '{"rope_theta": 1e6}'], HF, {"rope_theta": 1e6}),
        (["--hf-overrides.rope_theta", "1e6"], HF, {"rope_theta": 1e6}),
        (["--hf_overrides.rope_theta=1e6"], HF, {"rope_theta": 1e6}),
        (["--hf-overrides.a.b", "x", "--hf-overrides.a.c", "true"], HF, {"a": {"b": "x", "c": True}}),
        (["--hf-overrides.a+", "1", "--hf-overrides.a+", "2"], HF, {"a": [1, 2]}),
        (["--hf-overrides", '{"a": 1, "b": 2}', "--hf-overrides.b", "3"], HF, {"a": 1, "b": 3}),
        (["--hf-overrides", '{"a": 1K, "b": "1K"}'], HF, {"a": 1024, "b": "1K"}),
        (["--hf-overrides.a", "4k"], HF, {"a": 4000}),
        (["-cc.cudagraph_mode=NONE"], "optimization.compilation_config", {"cudagraph_mode": "NONE"}),
        (["-O.cudagraph_mode=NONE"], "optimization.compilation_config", {"cudagraph_mode": "NONE"}),
        (["-O3"], "optimization.optimization_level", 3),
        (["-O", "1"], "optimization.optimization_level", 1),
        (["-O=0"], "optimization.optimization_level", 0),
        (["-tp", "1"], "parallel.tensor_parallel_size", 1),
        (["-tp=1"], "parallel.tensor_parallel_size", 1),
        (["--api-key=-starts-with-a-dash"], "http.api_key", ("-starts-with-a-dash",)),
        (["--root-path", ""], "http.root_path", ""),
        (["--shutdown-timeout", "0"], "http.shutdown_timeout", 0.0),
        (["--max-num-queued-reqs", "9"], "scheduler.max_queued_requests", 9),
    ],
)  # fmt: skip
def test_one_value_can_be_written_in_many_ways(words: list[str], field: str, value: object) -> None:
    given_values = values(*words)
    assert given_values[field] == value
    assert type(given_values[field]) is type(value)


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "-1"], ["--port", "65536"], ["--port", "http"], ["--port"], ["--port="],
        ["--gpu-memory-utilization", "0"], ["--gpu-memory-utilization", "1.01"],
        ["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "inf"],
        ["--max-model-len", "0"], ["--max-model-len", "-2"], ["--max-model-len", "1.5"],
        ["--max-model-len", "1"],
        ["--max-num-seqs", "0"], ["--max-num-batched-tokens", "-5"], ["--block-size", "0"],
        ["--kv-cache-memory-bytes", "0"], ["--kv-cache-memory-bytes", "5 apples"],
        ["--shutdown-timeout", "-1"], ["--shutdown-timeout", "inf"], ["--dtype", "int8"],
        ["--seed", "-1"], ["--max-num-seqs", "9" * 400 + ".5"], ["--hf-overrides", "[" * 100_000],
        ["--hf-overrides", "[1]"], ["--hf-overrides", "{"], ["--hf-overrides", '{"a": NaN}'],
        ["--served-model-name"], ["--served-model-name", ""], ["--enforce-eager=maybe"], ["-O4"], ["-Ofast"],
        ["--load-format", "zip"], ["--allowed-origins", "[]"], ["--cudagraph-capture-sizes", "1", "0"],
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_with_what_was_expected(words: list[str]) -> None:
    message = refusal(*words)
    assert words[0].partition("=")[0][:2] in message
    assert "expected" in message


FRAGMENTS = (
    "-- - --model --port --port=1 --no- --no-port -O -O2 -O. -tp -cc. --= -= --hf-overrides 1k {} --config "
    "--hf-overrides.a.b --hf-overrides.a+ --served-model-name"
)
WORDS = st.text(max_size=12) | st.sampled_from(FRAGMENTS.split(" "))


@given(st.lists(WORDS, max_size=6))
def test_any_words_parse_or_end_in_an_error_of_ours(words: list[str]) -> None:
    try:
        parsed = parse_serve(words, {})
    except (HotstartError, HelpWanted):
        return
    assert parsed.config.model.model in " ".join(words)


@given(st.integers(1, 10**12))
def test_a_printed_kv_size_is_read_back_as_it_is(size: int) -> None:
    assert parse(f"--kv-cache-memory-bytes={size}").values["cache.kv_cache_memory_bytes"] == size


def test_an_unknown_flag_names_the_nearest() -> None:
    message = refusal("--max-mdel-len", "5")
    assert "no flag --max-mdel-len" in message
    assert "--max-model-len" in message


def test_an_unknown_flag_is_the_only_problem_reported_for_its_value() -> None:
    assert "MODEL" not in refusal("--no-such-thing-at-all", "value")


def test_a_beginning_of_several_flags_names_them_all() -> None:
    message = refusal("--max-num-s")
    assert "max-num-seqs has no value" in message
    assert "--max-num-batched-tokens" in refusal("--max-num", "1")
    assert "--max-num-seqs" in refusal("--max-num", "1")


def test_a_flag_without_keys_refuses_a_dotted_one() -> None:
    assert "has no keys" in refusal("--port.x", "1")


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ProblemsFound) as caught:
        parse("--port", "0x1", "--dtype", "int8", "-tp", "2", "--bogus")
    assert [type(problem) for problem in caught.value.problems] == [ConfigError] * 4


def test_the_last_of_a_repeated_flag_counts_and_is_noted() -> None:
    parsed = parse("--port", "1", "--port", "2")
    assert parsed.values["http.port"] == 2
    assert "--port is given 2 times" in parsed.notes[0]


def test_two_models_are_an_error() -> None:
    message = refusal("/models/other")
    assert "/models/llama and /models/other" in message
    assert "one server serves one model" in message
    assert "one server serves one model" in refusal("--model", "/models/other")


def test_no_model_says_where_it_goes() -> None:
    with pytest.raises(ConfigError, match=r"no MODEL is given.*hotstart serve MODEL"):
        parse_serve(["--served-model-name", "a", "/models/llama"], {})


def test_the_flag_model_is_read_as_the_argument() -> None:
    parsed = parse_serve(["--model", "/models/llama"], {})
    assert parsed.model == "/models/llama"
    assert "hotstart serve /models/llama" in parsed.notes[0]
    assert parse("--model=/models/llama").model == "/models/llama"


def test_words_after_two_dashes_are_no_flags() -> None:
    assert parse_serve(["--", "-odd-name"], {}).model == "-odd-name"


@pytest.mark.parametrize("node", ["/dev/nvme0n1", "/dev/sda1"])
def test_a_device_node_is_refused_with_the_way_out(node: str) -> None:
    with pytest.raises(ConfigError, match=r"address such as s3://.* Mount it and pass the directory"):
        parse_serve([node], {})


def test_shared_memory_is_a_directory_like_any_other() -> None:
    assert parse_serve(["/dev/shm/model"], {}).model == "/dev/shm/model"


@pytest.mark.parametrize("medium", ["nvme", "block", "s3", "nfs"])
def test_a_medium_is_no_load_format(medium: str) -> None:
    assert "Mount it and pass the directory" in refusal("--load-format", medium)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--uds", "/tmp/s", "--port", "80"], "--uds is given and --port too"),
        (["--ssl-certfile", "a.pem"], "both --ssl-certfile and --ssl-keyfile"),
        (
            ["--ssl-certfile", "a", "--ssl-keyfile", "b", "--ssl-cert-reqs", "2"],
            "--ssl-cert-reqs 2 is given without authorities",
        ),
        (
            ["--ssl-certfile", "a", "--ssl-keyfile", "b", "--ssl-ca-certs", "c"],
            "--ssl-ca-certs is given, and clients are not asked",
        ),
        (
            ["--ssl-ca-certs", "c", "--ssl-cert-reqs", "2"],
            "--ssl-ca-certs is given without a certificate",
        ),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "is less than --max-num-seqs 64"),
        (
            ["--no-enable-chunked-prefill", "--long-prefill-token-threshold", "32"],
            "32 cuts prompts, and --no-enable-chunked-prefill forbids it",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(words: list[str], reason: str) -> None:
    assert reason in refusal(*words)


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"VLLM_API_KEY": "v"}, ("v",)),
        ({"HOTSTART_API_KEY": "h", "VLLM_API_KEY": "v"}, ("h",)),
        ({"HOTSTART_API_KEY": ""}, ()),
    ],
)
def test_the_key_comes_from_the_environment(environ: dict[str, str], key: tuple[str, ...]) -> None:
    assert parse(environ=environ).config.http.api_key == key


def test_the_flag_wins_over_the_environment() -> None:
    assert parse("--api-key", "a", "b", environ={"VLLM_API_KEY": "v"}).config.http.api_key == ("a", "b")


INJECTED = {
    "HOTSTART_SERVICE_HOST": "10.0.0.1",
    "HOTSTART_SERVICE_PORT": "8000",
    "HOTSTART_SERVICE_PORT_HTTP": "8000",
    "HOTSTART_PORT": "tcp://10.0.0.1:8000",
    "HOTSTART_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "HOTSTART_PORT_8000_TCP_PROTO": "tcp",
    "HOTSTART_PORT_8000_TCP_PORT": "8000",
    "HOTSTART_PORT_8000_TCP_ADDR": "10.0.0.1",
}


def test_variables_that_a_cluster_injects_are_ignored_with_one_line() -> None:
    parsed = parse(environ={**INJECTED, "HOTSTART_CACHE_ROOT": "/c"})
    assert parsed.config == parse().config
    assert len(parsed.notes) == 1
    assert "a service named hotstart" in parsed.notes[0]
    assert "CACHE_ROOT" not in parsed.notes[0]


def test_help_is_a_wish_and_no_error() -> None:
    with pytest.raises(HelpWanted) as caught:
        parse("--port", "x", "--help=lora")
    assert caught.value.topic == "lora"


def test_a_secret_without_a_value_is_not_shown_as_if_it_had_one() -> None:
    assert "--api-key has no value" in refusal("--api-key")


def test_a_beginning_of_very_many_flags_names_a_few() -> None:
    assert "more; expected more letters" in refusal("--no-")


@pytest.mark.parametrize(
    "words",
    [
        ["--max-model-len", "99999999999999999999999"],
        ["--kv-cache-memory-bytes", "99999999999999999999999g"],
        ["--max-queued-requests", "99999999999999999999"],
        ["--max-body-bytes", "99999999999t"],
        ["--served-model-name", "a\udcff"],
    ],
    ids=lambda words: words[0],
)
def test_values_beyond_64_bits_or_utf8_are_errors_of_the_command_line(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_serve(["/model", *words], {})


@pytest.mark.parametrize(
    "words",
    [
        ("--hf-overrides", '{"a": 1, "a": 2}'),
        ("--hf-overrides", '{"a": {"b": 1k, "b": 1k}}'),
        ("--hf-overrides.a", '{"b": 1, "b": 2}'),
        ("--model-loader-extra-config", '{"concurrency": 1, "concurrency": 2}'),
        ("--compilation-config", '{"mode": 0, "mode": 1}'),
    ],
)
def test_a_key_that_stands_twice_is_refused(words: tuple[str, str]) -> None:
    assert "each key once" in refusal(*words)


@pytest.mark.parametrize("end", ["", ', "s3_access_key_id": "hush", "s3_access_key_id": "hush"}'])
def test_keys_of_a_store_are_not_shown_where_their_object_is_none(end: str) -> None:
    assert "hush" not in refusal("--model-loader-extra-config", '{"s3_secret_access_key": "hush"' + end)
