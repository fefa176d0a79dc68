"""Pre-sharded files through the Run:ai library: the same weights, and the options that vLLM refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.engine.assemble import prepare
from hotstart.engine.placement import Weights
from hotstart.errors import HotstartError
from object_servers import S3Server
from sharded_files import write_sharded

Model = Callable[..., Path]
RECORDED = Path(__file__).parents[1] / "recorded"


def loaded(
    path: Path, load_format: str, location: str = "", **extra: Any
) -> tuple[dict[str, Tensor], Weights]:
    load = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
    model = ModelConfig(model=location or str(path), path=str(path), location=location)
    start = prepare(Config(model=model, load=load, device=DeviceConfig(device="cpu")))
    weights = start.placement.weights(start, lambda done: None)
    weights.start()
    store = weights.store()
    weights.wait()
    slots = {}
    for slot in dict.fromkeys(spec.slot for spec in start.family.specs(start.geometry)):
        tensor = store.tensor(slot)
        slots[slot] = tensor if isinstance(tensor, Tensor) else torch.cat(tensor)
    return slots, weights


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for slot, tensor in one.items():
        assert torch.equal(tensor, other[slot]), slot


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_sharded_checkpoint_gives_the_weights_of_the_plain_one(
    load_format: str, name: str, tiny_model: Model, tmp_path: Path
) -> None:
    plain = tiny_model(name)
    sharded = write_sharded(plain, tmp_path / "sharded", parts=2)
    assert_same(loaded(sharded, load_format)[0], loaded(plain, "auto")[0])


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
def test_files_that_vllm_padded_give_the_plain_weights(load_format: str) -> None:
    """See recorded/README.md."""
    assert_same(loaded(RECORDED / "vocab-70-parts", load_format)[0], loaded(RECORDED / "vocab-70", "auto")[0])


def test_the_library_is_handed_concurrency_and_limit_for_sharded_files_too() -> None:
    _, weights = loaded(
        RECORDED / "vocab-70-parts", "runai_streamer_sharded", concurrency=3, memory_limit=1 << 20
    )
    assert weights.describe().startswith("runai-model-streamer ")
    assert "concurrency 3, memory limit 1.05 MB" in weights.describe()


def test_the_library_streams_from_a_store(
    tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_model("llama")
    sharded = write_sharded(plain, tmp_path / "models" / "sharded", parts=2)
    with S3Server(tmp_path) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        slots, _ = loaded(sharded, "runai_streamer_sharded", "s3://models/sharded")
    assert_same(slots, loaded(plain, "auto")[0])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"patern": "x"}, "has no key 'patern' for --load-format runai_streamer_sharded"),
        ({"pattern": 3}, "pattern is 3"),
        ({"pattern": "m-{rank}.bin"}, "the pattern 'm-{rank}.bin' cannot be used"),
    ],
)
def test_a_wrong_key_or_pattern_is_refused_before_anything_is_read(
    extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(HotstartError, match=message):
        loaded(RECORDED / "vocab-70-parts", "runai_streamer_sharded", **extra)


def test_a_plain_checkpoint_takes_no_pattern() -> None:
    with pytest.raises(HotstartError, match="has no key 'pattern'"):
        loaded(RECORDED / "vocab-70", "auto", pattern="m-{rank}-{part}.safetensors")
