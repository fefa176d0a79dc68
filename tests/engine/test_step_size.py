"""How many tokens and requests a step may hold, by flag and by default."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from hotstart.config.settings import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from hotstart.device import host
from hotstart.engine.assemble import Prepared, prepare, size_kv
from hotstart.errors import ConfigError, DeviceError


@pytest.fixture
def prepared(tiny_model: Callable[..., Path]) -> Callable[..., Prepared]:
    def prepare_with(max_model_len: int | None = None, **scheduler: int | bool) -> Prepared:
        path = str(tiny_model("llama"))
        return prepare(
            Config(
                model=ModelConfig(model=path, path=path, max_model_len=max_model_len),
                cache=CacheConfig(kv_cache_memory_bytes=1 << 20),
                device=DeviceConfig(device="cpu", threads=1),
                scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
            )
        )

    return prepare_with


@pytest.mark.parametrize("max_model_len", [None, -1, 64], ids=["the model's", "auto", "given"])
def test_uncut_prompts_need_a_step_as_long_as_the_context(
    prepared: Callable[..., Prepared], max_model_len: int | None
) -> None:
    found = prepared(max_model_len, enable_chunked_prefill=False, max_num_batched_tokens=32)
    with pytest.raises(ConfigError) as caught:
        size_kv(found)
    context = 64 if max_model_len == 64 else found.geometry.max_position_embeddings
    assert f"--max-num-batched-tokens 32 is less than the context of {context} tokens" in caught.value.found
    assert f"Pass --max-num-batched-tokens {context}, or --max-model-len 32" in caught.value.advice


def test_a_step_that_holds_the_longest_prompt_will_do(prepared: Callable[..., Prepared]) -> None:
    found = prepared(64, enable_chunked_prefill=False, max_num_batched_tokens=64)
    assert size_kv(found).max_model_len == 64


def test_cut_prompts_need_no_long_step(prepared: Callable[..., Prepared]) -> None:
    assert size_kv(prepared(64, max_num_batched_tokens=8)).max_model_len == 64


def test_by_default_the_step_grows_with_the_prompt_that_may_not_be_cut(
    prepared: Callable[..., Prepared],
) -> None:
    found = prepared(enable_chunked_prefill=False)
    found.geometry = structs.replace(found.geometry, max_position_embeddings=32_768)
    assert found.max_num_batched_tokens == 32_768
    assert prepared(enable_chunked_prefill=False).max_num_batched_tokens == 2048
    assert prepared().max_num_batched_tokens == 2048


def test_by_default_a_step_has_a_token_for_each_running_request(prepared: Callable[..., Prepared]) -> None:
    few = prepared(max_num_batched_tokens=32)
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (32, 32)
    many = prepared(max_num_seqs=4096)
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (4096, 4096)


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        ({"max_num_seqs": 10**7}, ["--max-num-seqs"]),
        ({"max_num_batched_tokens": 10**9}, ["--max-num-batched-tokens"]),
        (
            {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9},
            ["--max-num-seqs", "--max-num-batched-tokens"],
        ),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 10**9}, ["--max-num-batched-tokens"]),
        ({"max_num_batched_tokens": 10**9, "enable_chunked_prefill": False}, ["--max-num-batched-tokens"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", [None, 1 << 20], ids=["computed", "given"])
def test_step_too_large_for_memory_names_its_flag_and_the_largest_value_that_fits(
    given: dict[str, int],
    advised: list[str],
    cache: int | None,
    prepared: Callable[..., Prepared],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(4 << 30, "machine", 4 << 30))

    def start(**scheduler: int | bool) -> None:
        found = prepared(**scheduler)
        config = structs.replace(found.config, cache=CacheConfig(kv_cache_memory_bytes=cache))
        found.config = config
        size_kv(found)

    with pytest.raises(DeviceError) as caught:
        start(**given)
    assert "give the server" not in caught.value.advice
    values = {
        flag: int(value)
        for flag, value in re.findall(r"(--max-num-[a-z-]+) to (?:at most )?(\d+)", caught.value.advice)
    }
    assert list(values) == advised
    followed = {flag[2:].replace("-", "_"): value for flag, value in values.items()}
    start(**(given | followed))
    last = advised[-1][2:].replace("-", "_")
    with pytest.raises(DeviceError):  # what is free later may be a little less, so the edge lies beyond
        start(**(given | followed | {last: followed[last] * 11 // 10}))
