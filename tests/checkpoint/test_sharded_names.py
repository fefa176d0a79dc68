"""Names of pre-sharded files: what a pattern writes, it reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotstart.checkpoint.sharded_names import PP_PATTERN, TP_PATTERN, Pattern, find_shards

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
