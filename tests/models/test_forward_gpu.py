"""The same forwards on a CUDA device: same numbers, same text, and nothing waits inside a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_model import Runner

from tiny_models import CONFIGS, VOCAB

pytestmark = pytest.mark.gpu

PROMPT = [(17 + 37 * i) % (VOCAB - 5) + 5 for i in range(40)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)]
)
def test_logits_equal_those_of_the_cpu_in_float32(
    name: str, dtype: torch.dtype, tolerance: float, tiny_model: Callable[..., Path]
) -> None:
    expected = Runner(tiny_model(name)).prompt_logits(PROMPT)
    got = Runner(tiny_model(name), dtype=dtype, device="cuda").prompt_logits(PROMPT).cpu()
    assert (got - expected).abs().max() / expected.abs().max() < tolerance


@pytest.mark.parametrize("name", ["llama-dynamic", "qwen3", "opt"])
def test_greedy_text_equals_that_of_the_cpu(name: str, tiny_model: Callable[..., Path]) -> None:
    prompts = [PROMPT, PROMPT[:3]]
    expected = Runner(tiny_model(name)).greedy(prompts, 32)
    assert Runner(tiny_model(name), device="cuda").greedy(prompts, 32, chunk=7) == expected
