"""Names of pre-sharded files: what a pattern writes, it reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotstart.checkpoint.sharded import choose_shards
from hotstart.checkpoint.sharded_names import PP_PATTERN, TP_PATTERN, Pattern, Rank, find_shards
from hotstart.errors import ModelError

NUMBER = st.integers(0, 10**6)
PATTERNS = [
    TP_PATTERN,
    PP_PATTERN,
    "w{{0}}-{pp_rank}.{rank:03d}.{part:05}.safetensors",
    "{rank}-{tp_rank}-{part}.safetensors",
    "a.b(c)*-{tp_rank}-{part}.safetensors",
]


@given(st.sampled_from(PATTERNS), NUMBER, NUMBER, NUMBER)
def test_a_name_says_what_it_was_written_for(text: str, tp: int, pp: int, part: int) -> None:
    pattern = Pattern(text)
    found = pattern.read(pattern.write(tp, pp, part))
    assert found is not None
    assert (found.tp, found.part) == (tp, part)
    assert found.pp == (pp if "pp_rank" in text else 0)


@given(st.sampled_from(PATTERNS), st.text())
def test_another_name_says_nothing(text: str, name: str) -> None:
    found = Pattern(text).read(name)
    assert found is None or Pattern(text).write(found.tp, found.pp, found.part) == name


def test_the_two_patterns_of_vllm_are_told_apart() -> None:
    names = [
        TP_PATTERN.format(rank=0, part=0),
        PP_PATTERN.format(pp_rank=1, tp_rank=0, part=2),
        "model.safetensors",
    ]
    assert [(found.pattern, found.tp_size, found.pp_size) for found in find_shards(names)] == [
        (TP_PATTERN, 1, 1),
        (PP_PATTERN, 1, 2),
    ]


@given(st.sets(st.integers(0, 12), min_size=1))
def test_what_is_absent_is_counted_and_the_first_named(parts: set[int]) -> None:
    (shards,) = find_shards(TP_PATTERN.format(rank=0, part=part) for part in parts)
    absent = sorted(set(range(max(parts))) - parts)
    found = shards.absent_parts(Rank())
    assert found.number == len(absent)
    assert list(found.names) == [TP_PATTERN.format(rank=0, part=part) for part in absent[:3]]


@pytest.mark.parametrize(("tp", "part"), [(999_999_999, 0), (0, 999_999_999)])
def test_a_number_in_a_name_takes_no_memory(tp: int, part: int) -> None:
    names = [TP_PATTERN.format(rank=0, part=0), TP_PATTERN.format(rank=tp, part=part)]
    (shards,) = find_shards(names)
    assert shards.absent_ranks(shards.tp_size, 1).number == max(0, tp - 1)
    assert shards.absent_parts(Rank()).number == max(0, part - 1)
    with pytest.raises(ModelError, match="a number that no checkpoint comes to"):
        choose_shards("/m", names, Rank())
