"""What ``--model-loader-extra-config`` may hold for our own loader."""

from __future__ import annotations

import pytest

from hotstart.errors import ConfigError, ProblemsFound
from hotstart.loading.options import LoaderOptions, Ring

MIB, GIB = 1 << 20, 1 << 30
DEFAULT = Ring(threads=8, buffers=2, buffer_bytes=8 * MIB)


def test_concurrency_and_limit_together() -> None:
    options = LoaderOptions.parse({"concurrency": 16, "memory_limit": 5368709120})
    assert options.ring(DEFAULT, need=GIB, free=GIB) == Ring(16, 2, 8 * MIB, limit=5368709120)


def test_vllms_thread_keys_mean_concurrency() -> None:
    assert LoaderOptions.parse({"enable_multithread_load": True, "num_threads": 3}).concurrency == 3


@pytest.mark.parametrize("limit", [0, 1, MIB, 5 * MIB, 16 * MIB, 40 * MIB, 1 << 30])
def test_the_ring_keeps_to_the_limit_or_to_the_least_that_works(limit: int) -> None:
    ring = LoaderOptions.parse({"memory_limit": limit}).ring(DEFAULT, need=GIB, free=GIB)
    assert ring.nbytes <= max(limit, MIB)
    assert ring.nbytes <= DEFAULT.nbytes
    assert ring.limit == limit


def test_no_bound_is_minus_one() -> None:
    assert LoaderOptions.parse({"memory_limit": -1}).ring(DEFAULT, need=GIB, free=0) == DEFAULT


@pytest.mark.parametrize("free", [0, 20 * MIB, 512 * MIB, 100 * GIB])
def test_by_default_the_ring_takes_a_quarter_of_what_is_free_at_most(free: int) -> None:
    ring = LoaderOptions.parse({}).ring(DEFAULT, need=GIB, free=free)
    assert ring.nbytes <= max(free // 4, MIB)
    assert ring.limit == free // 4
    assert (ring.nbytes == DEFAULT.nbytes) == (free >= 512 * MIB)


@pytest.mark.parametrize("need", [0, 1, 3 * MIB, 25 * MIB, 100 * MIB, GIB])
def test_a_limit_is_not_filled_by_a_model_that_needs_less(need: int) -> None:
    ring = LoaderOptions.parse({"memory_limit": 2 * GIB}).ring(DEFAULT, need=need, free=GIB)
    assert ring.nbytes <= need + ring.threads * ring.buffer_bytes
    assert ring.nbytes >= min(need, DEFAULT.nbytes)
    assert ring.threads == min(8, max(1, -(-need // (8 * MIB))))


@pytest.mark.parametrize(
    "given",
    [
        {"concurency": 4},
        {"concurrency": 0},
        {"concurrency": "4"},
        {"concurrency": True},
        {"memory_limit": -2},
    ],
)
def test_a_wrong_key_or_value_is_an_error_that_lists_the_right_ones(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        LoaderOptions.parse(given)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ProblemsFound) as error:
        LoaderOptions.parse({"threads": 4, "memory_limit": "5GB"})
    assert len(error.value.problems) == 2
