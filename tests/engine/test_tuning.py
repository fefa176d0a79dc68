"""What is done to weights after a start: packed for speed, and the stored bytes given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hotstart.config.settings import Config, LoadConfig, ModelConfig
from hotstart.engine.assemble import Built, build, prepare
from hotstart.layers.linear import Linear
from hotstart.messages import NewRequest, SamplingParams, pack_ids

Model = Callable[..., Path]


def started(directory: Path, strategy: str = "auto") -> Built:
    model = ModelConfig(model=str(directory), path=str(directory))
    prepared = prepare(Config(model=model, load=LoadConfig(read_strategy=strategy)))
    weights = prepared.placement.weights(prepared, lambda done: None)
    weights.start()
    built = build(prepared, weights)
    weights.wait()
    return built


def first_logprob(built: Built, request_id: int) -> float:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
    built.engine.add(NewRequest(request_id, pack_ids([5, 6, 7, 8, 9]), params))
    output = None
    while built.engine.has_work:
        output = built.engine.step()
    assert output is not None
    return output.logprobs[request_id].logprobs[0]


@pytest.mark.parametrize("strategy", ["map", "buffered"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "opt", "llama-biases"])
def test_a_tuned_model_answers_as_before(tiny_model: Model, name: str, strategy: str) -> None:
    built = started(tiny_model(name, dtype="bfloat16"), strategy)
    before = first_logprob(built, 1)
    assert built.engine.blocks.reset()
    tuned = sum(1 for _ in built.tune())
    assert tuned > 0
    assert first_logprob(built, 2) == pytest.approx(before, abs=0.15)  # bfloat16 rounds in another order
    assert list(built.tune()) == []


def test_float32_parts_become_one_matrix_with_the_same_answer(tiny_model: Model) -> None:
    built = started(tiny_model("llama"))
    before = first_logprob(built, 1)
    assert built.engine.blocks.reset()
    list(built.tune())
    assert first_logprob(built, 2) == pytest.approx(before, abs=1e-5)


def test_a_tied_head_that_was_read_into_memory_is_left_alone(tiny_model: Model) -> None:
    built = started(tiny_model("llama-tied", dtype="bfloat16"), "buffered")
    assert not built.weights.may_copy("head")
    assert built.weights.may_copy("layers.0.o")


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_packed_product_is_the_product(rows: int, biased: bool, parts: int) -> None:
    torch.manual_seed(rows)
    weight = tuple(torch.randn(48, 32, dtype=torch.bfloat16) for _ in range(parts))
    bias = tuple(torch.randn(48, dtype=torch.bfloat16) for _ in range(parts)) if biased else None
    linear = Linear(weight if parts > 1 else weight[0], bias if bias is None or parts > 1 else bias[0])
    x = torch.randn(rows, 32, dtype=torch.bfloat16)
    residual = torch.randn(rows, 48 * parts, dtype=torch.bfloat16)
    product, sum_ = linear(x), linear.added_to(residual, x)
    assert linear.pack()
    assert not linear.pack()
    torch.testing.assert_close(linear(x), product, atol=0.13, rtol=0.02)
    torch.testing.assert_close(linear.added_to(residual, x), sum_, atol=0.13, rtol=0.02)
