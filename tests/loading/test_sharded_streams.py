"""Pre-sharded files through the Run:ai library: the same weights, and the options that vLLM refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotstart.errors import HotstartError
from loaded_weights import checksums, loaded
from sharded_files import write_sharded

Model = Callable[..., Path]
RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_sharded_checkpoint_gives_the_weights_of_the_plain_one(
    load_format: str, name: str, tiny_model: Model, tmp_path: Path
) -> None:
    plain = tiny_model(name)
    sharded = write_sharded(plain, tmp_path / "sharded", parts=2)
    assert checksums(loaded(sharded, load_format).slots) == checksums(loaded(plain).slots)


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
def test_files_that_vllm_padded_give_the_plain_weights(load_format: str) -> None:
    """See recorded/README.md."""
    theirs = loaded(RECORDED / "vocab-70-parts", load_format)
    assert checksums(theirs.slots) == checksums(loaded(RECORDED / "vocab-70").slots)


def test_the_library_is_handed_concurrency_and_limit_for_sharded_files_too() -> None:
    _, weights, _ = loaded(
        RECORDED / "vocab-70-parts", "runai_streamer_sharded", concurrency=3, memory_limit=1 << 20
    )
    assert weights.describe().startswith("runai-model-streamer ")
    assert "concurrency 3, memory limit 1.05 MB" in weights.describe()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"patern": "x"}, "has no key 'patern' for --load-format runai_streamer_sharded"),
        ({"pattern": 3}, "pattern is 3"),
        ({"pattern": "m-{rank}.bin"}, "the pattern 'm-{rank}.bin' cannot be used"),
    ],
)
def test_a_wrong_key_or_pattern_is_refused_before_anything_is_read(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """There is nothing to read."""
    with pytest.raises(HotstartError, match=message):
        loaded(tmp_path / "none", "runai_streamer_sharded", **extra)


def test_a_plain_checkpoint_takes_no_pattern() -> None:
    with pytest.raises(HotstartError, match="has no key 'pattern'"):
        loaded(RECORDED / "vocab-70", "auto", pattern="m-{rank}-{part}.safetensors")


@pytest.mark.parametrize(
    ("load_format", "extra", "message"),
    [
        ("sharded_state", {"pattern": "m-{rank}.bin"}, "the pattern 'm-{rank}.bin' cannot be used"),
        ("runai_streamer_sharded", {"pattern": "m-{rnk}-{part}.safetensors"}, "it has the field {rnk}"),
        ("tensorizer", {"num_readers": 2, "concurrency": 3}, "which differ"),
    ],
)
def test_keys_that_cannot_work_are_refused_before_the_model_is_looked_for(
    load_format: str, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(HotstartError) as caught:
        loaded(tmp_path / "no model", load_format, **extra)
    assert message in str(caught.value)
