"""How large the KV cache is, and advice that holds: whoever follows it starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from hotstart.engine.kv_size import KVSize, Memory, Need, SizeFlag, kv_size
from hotstart.errors import DeviceError
from hotstart.units import parse_size

MB, GB = 10**6, 10**9
NEED = Need(weights=2 * GB, activations=200 * MB, fixed=300 * MB, kv_per_token=100_000)


def size(
    *,
    limit: int = 10 * GB,
    free: int | None = None,
    utilization: float = 0.9,
    requested: int | None = None,
    max_model_len: int | None = None,
    model_max_len: int = 4096,
    need: Need = NEED,
    block_size: int = 16,
    given_by: SizeFlag = SizeFlag(),  # noqa: B008 - frozen
    smaller_step: Callable[[int], list[str]] = lambda room: [],
) -> KVSize:
    memory = Memory("the GPU", limit, "machine", limit if free is None else free)
    return kv_size(
        memory,
        need,
        utilization=utilization,
        requested=requested,
        max_model_len=max_model_len,
        model_max_len=model_max_len,
        block_size=block_size,
        given_by=given_by,
        smaller_step=smaller_step,
    )


@pytest.mark.parametrize(
    ("case", "expected_bytes"),
    [
        ({}, 6500 * MB),
        ({"utilization": 1.0}, 7500 * MB),
        ({"free": 6 * GB}, 3500 * MB),
        ({"free": 9500 * MB}, 6500 * MB),
        ({"limit": 4 * GB}, 1100 * MB),
        ({"requested": 700 * MB}, 700 * MB),
        ({"requested": 7500 * MB}, 7500 * MB),
    ],
    ids=str,
)
def test_what_is_left_beside_everything_else_is_the_cache(case: dict[str, int], expected_bytes: int) -> None:
    found = size(**case)  # type: ignore[arg-type]
    assert found.bytes == expected_bytes
    assert found.tokens == expected_bytes // 1_600_000 * 16
    assert found.max_model_len == 4096


def test_arithmetic_is_the_reason_and_a_given_size_is_not_measured() -> None:
    assert size().reason == (
        "10.0 GB (machine) x 0.9 = 9.00 GB, 10.0 GB free (others hold 0 B); "
        "weights 2.00 GB, activations 200 MB, processes 300 MB"
    )
    assert size(requested=GB).reason == "as given by --kv-cache-memory-bytes; nothing was measured"


def test_context_is_the_models_or_what_was_asked_never_less() -> None:
    assert size(max_model_len=100).max_model_len == 100
    assert size(limit=10 * GB, model_max_len=60_000).max_model_len == 60_000
    with pytest.raises(DeviceError):
        size(model_max_len=70_000)


def test_longest_context_that_fits_is_taken_when_asked_for() -> None:
    assert size(max_model_len=-1, model_max_len=4096).max_model_len == 4096
    assert size(max_model_len=-1, model_max_len=1_000_000).max_model_len == 64_992
    with pytest.raises(DeviceError, match="one request of 16 tokens needs"):
        size(max_model_len=-1, limit=2 * GB)


def test_given_size_larger_than_free_memory_names_the_largest() -> None:
    with pytest.raises(DeviceError, match="--kv-cache-memory-bytes=9000000000") as error:
        size(requested=9 * GB)
    assert "others hold 0 B" in str(error.value)
    largest = int(error.value.expected.removeprefix("at most "))
    assert size(requested=largest).bytes == largest
    assert size(requested=largest, free=9_850 * MB).bytes == largest, "free memory moves meanwhile"
    with pytest.raises(DeviceError):
        size(requested=largest + 201 * MB)


def test_given_size_too_small_for_the_context_names_the_smallest() -> None:
    with pytest.raises(DeviceError) as error:
        size(requested=100 * MB, model_max_len=4095)
    smallest = int(found(r"raise --kv-cache-memory-bytes to at least (\d+)", error.value))
    assert size(requested=smallest, model_max_len=4095).max_model_len == 4095
    with pytest.raises(DeviceError):
        size(requested=smallest - 1, model_max_len=4095)
    assert "--gpu-memory-utilization" not in error.value.advice, "it has no effect beside a given size"


def test_number_of_blocks_is_reported_as_it_was_given() -> None:
    flag = SizeFlag("--num-gpu-blocks-override", 1_600_000)
    assert size(requested=500 * flag.unit, given_by=flag).tokens == 8000
    with pytest.raises(DeviceError, match="--num-gpu-blocks-override=9000 ") as error:
        size(requested=9000 * flag.unit, given_by=flag)
    assert "--kv-cache-memory-bytes" not in str(error.value)
    largest = int(error.value.expected.removeprefix("at most "))
    assert size(requested=largest * flag.unit, given_by=flag).bytes == largest * flag.unit
    with pytest.raises(DeviceError, match="raise --num-gpu-blocks-override to at least 256"):
        size(requested=100 * flag.unit, given_by=flag)


def test_weights_that_are_converted_must_fit_twice() -> None:
    need = structs.replace(NEED, loading=5 * GB)
    assert size(limit=6 * GB, need=need, utilization=1.0) == size(limit=6 * GB, utilization=1.0)
    with pytest.raises(DeviceError, match=r"occupy 5\.00 GB while they are converted") as error:
        size(limit=5 * GB, need=need, utilization=1.0)
    enough = parse_size(found(r"give the server ([\d.]+ \w+)", error.value).replace(" ", ""))
    assert size(limit=enough, need=need, utilization=1.0).tokens


def test_error_carries_arithmetic_and_exit_code() -> None:
    with pytest.raises(DeviceError) as error:
        size(limit=3 * GB)
    assert error.value.exit_code == 5
    assert str(error.value).startswith(
        "one request of the model's whole context needs 410 MB of KV cache (4096 tokens x 100000 bytes), and "
        "200 MB are left on the GPU: 3.00 GB (machine) x 0.9 = 2.70 GB"
    )


def test_error_names_the_flag_only_where_it_was_given() -> None:
    with pytest.raises(DeviceError, match=r"^one request of --max-model-len 4095 needs"):
        size(limit=3 * GB, max_model_len=4095)


def test_memory_that_others_hold_is_not_had_by_a_higher_share() -> None:
    with pytest.raises(DeviceError) as error:
        size(limit=10 * GB, free=2600 * MB)
    assert "--gpu-memory-utilization" not in error.value.advice


@pytest.mark.parametrize("utilization", [0.01, 1e-300])
def test_smallest_share_that_works_is_advised_and_no_larger_machine(utilization: float) -> None:
    with pytest.raises(DeviceError) as error:
        size(utilization=utilization)
    assert error.value.advice == "To start, raise --gpu-memory-utilization to 0.30"
    assert size(utilization=0.3).max_model_len == 4096
    with pytest.raises(DeviceError):
        size(utilization=0.29)


@pytest.mark.parametrize("utilization", [0.01, 1e-300])
def test_small_share_of_a_small_machine_asks_for_neither_alone(utilization: float) -> None:
    with pytest.raises(DeviceError) as error:
        size(utilization=utilization, limit=2 * GB)
    assert error.value.advice == (
        "To start, give the server 3.25 GB and raise --gpu-memory-utilization to 0.9"
    )


def test_step_may_take_what_weights_and_one_request_leave() -> None:
    asked: list[int] = []

    def smaller_step(room: int) -> list[str]:
        asked.append(room)
        return ["shrink it"]

    huge = structs.replace(NEED, activations=1000 * GB)
    with pytest.raises(DeviceError, match="To start, shrink it") as error:
        size(need=huge, smaller_step=smaller_step)
    assert "give the server" not in error.value.advice
    with pytest.raises(DeviceError, match=r"expected at most 0\. To start, shrink it"):
        size(need=huge, smaller_step=smaller_step, requested=GB)
    for room, requested in zip(asked, (None, GB), strict=True):
        assert size(need=structs.replace(NEED, activations=room), requested=requested).tokens >= 4096
        with pytest.raises(DeviceError):
            size(need=structs.replace(NEED, activations=room + 201 * MB), requested=requested)


@pytest.mark.parametrize("utilization", [0.9, 1.0])
def test_advice_still_holds_when_a_little_less_is_free(utilization: float) -> None:
    def fit(free: int, **changed: Any) -> KVSize:
        case = {"utilization": utilization, "model_max_len": 100_000, **changed}
        return size(free=free, **case)

    with pytest.raises(DeviceError) as error:
        fit(8 * GB)
    longest = int(found(r"lower --max-model-len to at most (\d+)", error.value))
    assert fit(7_880 * MB, max_model_len=longest).max_model_len == longest
    server = parse_size(found(r"give the server ([\d.]+ \w+)", error.value).replace(" ", ""))
    assert fit(int((server - 2 * GB) * 0.985), limit=server).max_model_len == 100_000
    with pytest.raises(DeviceError) as error:
        fit(8 * GB, requested=9 * GB)
    largest = int(error.value.expected.removeprefix("at most "))
    assert fit(7_880 * MB, requested=largest, max_model_len=4096).bytes == largest


@given(
    limit=st.integers(1, 200).map(lambda g: g * GB // 4),
    held=st.floats(0, 0.9),
    utilization=st.one_of(st.floats(0.1, 1.0), st.sampled_from([1e-300, 0.001, 0.01])),
    weights=st.integers(1, 100 * GB),
    kv_per_token=st.integers(1, 10**6),
    block_size=st.sampled_from([16, 32, 128]),
    context=st.integers(1, 200_000),
    requested=st.one_of(st.none(), st.integers(0, 10 * GB)),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_every_advice_starts_the_server(
    limit: int,
    held: float,
    utilization: float,
    weights: int,
    kv_per_token: int,
    block_size: int,
    context: int,
    requested: int | None,
) -> None:
    used = int(limit * held)
    case = {
        "need": Need(weights=weights, activations=100 * MB, fixed=300 * MB, kv_per_token=kv_per_token),
        "block_size": block_size,
        "model_max_len": context,
        "utilization": utilization,
        "requested": requested,
        "limit": limit,
        "free": limit - used,
    }
    try:
        fits = size(**case)  # type: ignore[arg-type]
    except DeviceError as error:
        assume("is more than is free" not in error.found)
        message = error
    else:
        assert fits.max_model_len == context <= fits.tokens
        assert fits.tokens * kv_per_token <= fits.bytes
        return
    assert message.advice
    share = re.search(r"and raise --gpu-memory-utilization to ([\d.]+)", message.advice)
    changes: dict[str, Callable[[str], dict[str, Any]]] = {
        r"--max-model-len to at most (\d+)": lambda value: {"max_model_len": int(value)},
        r"(?<!and )raise --gpu-memory-utilization to ([\d.]+)": lambda value: {"utilization": float(value)},
        r"--kv-cache-memory-bytes to at least (\d+)": lambda value: {
            "requested": int(value),
            "limit": 1000 * GB,
            "free": 1000 * GB,
        },
        r"give the server ([\d.]+ \w+)": lambda value: {
            "utilization": utilization if share is None else float(share[1]),
            "limit": parse_size(value.replace(" ", "")),
            "free": parse_size(value.replace(" ", "")) - used,
            "requested": None
            if requested is None
            else int(context * kv_per_token + block_size * kv_per_token),
        },
    }
    tried = 0
    for pattern, apply in changes.items():
        match = re.search(pattern, message.advice)
        if match is not None:
            tried += 1
            assert size(**{**case, **apply(match[1])}).max_model_len > 0
    assert tried


def found(pattern: str, error: DeviceError) -> str:
    match = re.search(pattern, str(error))
    assert match is not None, str(error)
    return match[1]
