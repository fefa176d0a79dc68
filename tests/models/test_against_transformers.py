"""Every family and variant against transformers: logits, greedy text, and all ways to schedule it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_model import Runner

from tiny_models import CONFIGS, VOCAB

# Longer than every sliding window (12) and every rope length before scaling (32).
PROMPT = [(17 + 37 * i) % (VOCAB - 5) + 5 for i in range(40)]
TOKENS = 64


@pytest.fixture(scope="module")
def oracle(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """``oracle(name, dtype)``: the same directory in transformers, every stored tensor used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
        from transformers import AutoModelForCausalLM
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models: dict[tuple[str, str], Any] = {}

    def get(name: str, dtype: str = "float32") -> Any:
        if (name, dtype) not in models:
            model, info = AutoModelForCausalLM.from_pretrained(
                tiny_model(name), dtype=getattr(torch, dtype), output_loading_info=True
            )
            assert not any(info.values()), info
            model.generation_config.eos_token_id = None
            models[name, dtype] = model
        return models[name, dtype]

    yield get
    models.clear()


@pytest.fixture(scope="module")
def greedy(oracle: Callable[..., Any]) -> Callable[[str, list[int]], list[int]]:
    """What transformers generates for one prompt alone."""
    texts: dict[tuple[str, int], list[int]] = {}

    def get(name: str, prompt: list[int]) -> list[int]:
        key = (name, len(prompt))
        if key not in texts:
            ids = torch.tensor([prompt])
            output = oracle(name).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            texts[key] = output[0, len(prompt) :].tolist()
        return texts[key]

    return get


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_logits_equal_at_every_position_before_and_after_tuning(
    name: str, dtype: str, tolerance: float, tiny_model: Callable[..., Path], oracle: Callable[..., Any]
) -> None:
    with torch.inference_mode():
        expected = oracle(name, dtype)(torch.tensor([PROMPT])).logits[0].float()
    runner = Runner(tiny_model(name), dtype=getattr(torch, dtype))
    for _ in range(2):
        got = runner.prompt_logits(PROMPT)
        assert got.dtype == torch.float32
        assert (got - expected).abs().max() / expected.abs().max() < tolerance
        for _ in runner.model.tune(lambda slot: True):
            pass


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_equals_beyond_windows_and_original_contexts(
    name: str, tiny_model: Callable[..., Path], greedy: Callable[[str, list[int]], list[int]]
) -> None:
    expected = greedy(name, PROMPT)
    assert len(set(expected)) >= 20, "the text collapsed: a wrong model could pass"
    assert Runner(tiny_model(name)).greedy([PROMPT], TOKENS) == [expected]


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_batch_in_chunks_gives_the_text_of_each_alone(
    name: str, tiny_model: Callable[..., Path], greedy: Callable[[str, list[int]], list[int]]
) -> None:
    prompts = [PROMPT, PROMPT[:3], PROMPT[:21]]
    expected = [greedy(name, prompt) for prompt in prompts]
    assert Runner(tiny_model(name)).greedy(prompts, TOKENS, chunk=7) == expected


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "opt"])
def test_parts_that_are_not_adjacent_give_the_same_logits(name: str, tiny_model: Callable[..., Path]) -> None:
    joined = Runner(tiny_model(name)).prompt_logits(PROMPT)
    apart = Runner(tiny_model(name), parts=True).prompt_logits(PROMPT)
    torch.testing.assert_close(apart, joined, rtol=1e-5, atol=1e-5)
