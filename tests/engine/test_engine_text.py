"""The engine's text against transformers' ``generate``: every family, and every way to schedule it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from hotstart.attention.base import AttentionBackend
from hotstart.attention.sdpa_paged import SdpaPaged
from hotstart.config.settings import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from hotstart.engine.assemble import Prepared, build, prepare
from hotstart.engine.block_manager import BlockManager, PagedBlockManager
from hotstart.engine.core import Engine
from hotstart.engine.kv_size import KVSize
from hotstart.engine.placement import CpuPlacement
from hotstart.messages import NewRequest, PromptLogprobs, SamplingParams, TokenLogprobs, pack_ids
from tiny_models import CONFIGS, EOS, VOCAB

# Longer than every sliding window (12) and every rope length before scaling (32).
PROMPT = [(17 + 37 * i) % (VOCAB - 5) + 5 for i in range(40)]
PROMPTS = [PROMPT, PROMPT[:3], PROMPT[:21], PROMPT[:1], PROMPT[:33]]
TOKENS = 64
KV_TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of K and V for one token of the llama variants."""
BOTH = pytest.mark.parametrize("paged", [False, True], ids=["slabs-depth-1", "paged-depth-2"])


class PagedPlacement(CpuPlacement):
    """What a GPU has, on the CPU: blocks that are shared, and two steps in flight."""

    depth = 2

    def kv_cache(self, prepared: Prepared, kv: KVSize) -> tuple[AttentionBackend, BlockManager]:
        size = self.block_size(prepared)
        count = kv.tokens // size + 1
        dtype = getattr(torch, prepared.matched.dtype)
        attention = SdpaPaged(prepared.geometry.attention(), count, size, dtype, torch.device("cpu"))
        return attention, PagedBlockManager(count, size, prefix_caching=prepared.prefix_caching)


class Running:
    """An engine over a model directory."""

    def __init__(
        self,
        directory: Path,
        *,
        paged: bool = False,
        kv_tokens: int = 1024,
        max_model_len: int | None = None,
        budget: int = 2048,
        seqs: int = 8,
        prefix_caching: bool = True,
    ) -> None:
        config = Config(
            model=ModelConfig(model=str(directory), path=str(directory), max_model_len=max_model_len),
            cache=CacheConfig(
                kv_cache_memory_bytes=kv_tokens * KV_TOKEN * 2, enable_prefix_caching=prefix_caching
            ),
            scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget),
            device=DeviceConfig(device="cpu", threads=1),
        )
        prepared = prepare(config)
        if paged:
            prepared.placement = PagedPlacement(prepared.placement.choice)
        per_token = prepared.geometry.kv_bytes_per_token(4)
        cache = structs.replace(config.cache, kv_cache_memory_bytes=kv_tokens * per_token)
        prepared.config = structs.replace(config, cache=cache)
        weights = prepared.placement.weights(prepared, lambda done: None)
        weights.start()
        self.engine: Engine = build(prepared, weights).engine
        weights.wait()
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.cached: dict[int, int] = {}
        self._numbers = itertools.count()

    def generate(self, *requests: tuple[list[int], SamplingParams]) -> list[list[int]]:
        """The tokens of each request, all of them in the engine at once."""
        answers: dict[int, list[int]] = {}
        for prompt, params in requests:
            number = next(self._numbers)
            answers[number] = []
            self.engine.add(NewRequest(number, pack_ids(prompt), params))
        while self.engine.has_work:
            step = self.engine.step()
            assert step is not None
            for request, token, _ in step.unpack():
                answers[request].append(token)
                if request in step.logprobs:
                    self.logprobs.setdefault(request, []).append(step.logprobs[request])
            self.prompt_logprobs |= {found.id: found for found in step.prompt_logprobs}
            self.cached |= {event.id: event.cached_tokens for event in step.scheduled}
        return list(answers.values())

    def greedy(self, *prompts: list[int], tokens: int = TOKENS) -> list[list[int]]:
        """The likeliest tokens of each prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return self.generate(*((prompt, params) for prompt in prompts))


@pytest.fixture(scope="module")
def oracle(tiny_model: Callable[..., Path]) -> Iterator[Callable[[str], Any]]:
    """The same directory in transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
        from transformers import AutoModelForCausalLM
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models: dict[str, Any] = {}
    torch.set_num_threads(1)  # as the engine: tiny models only wait for a second one

    def get(name: str) -> Any:
        if name not in models:
            models[name] = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
            models[name].generation_config.eos_token_id = None
        return models[name]

    yield get
    models.clear()


@pytest.fixture(scope="module")
def expected(oracle: Callable[[str], Any]) -> Callable[[str, list[int]], list[int]]:
    """What transformers generates for one prompt alone."""
    texts: dict[tuple[str, int], list[int]] = {}

    def get(name: str, prompt: list[int]) -> list[int]:
        if (name, len(prompt)) not in texts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            output = oracle(name).generate(
                ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )
            texts[name, len(prompt)] = output[0, len(prompt) :].tolist()
        return texts[name, len(prompt)]

    return get


Expected = Callable[[str, list[int]], list[int]]
Directory = Callable[..., Path]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_alone_and_then_in_a_batch(name: str, tiny_model: Directory, expected: Expected) -> None:
    # Every layer's window and every kind of rope, first without and then with something cached.
    running = Running(tiny_model(name))
    assert running.greedy(PROMPT) == [expected(name, PROMPT)]
    prompts = [PROMPT, PROMPT[:3], PROMPT[:21]]
    assert running.greedy(*prompts) == [expected(name, prompt) for prompt in prompts]


@BOTH
@pytest.mark.parametrize("budget", [1, 7, 16, 50])
def test_prompts_in_chunks_of_any_size(
    paged: bool, budget: int, tiny_model: Directory, expected: Expected
) -> None:
    running = Running(tiny_model("llama"), paged=paged, budget=budget)
    assert running.greedy(*PROMPTS) == [expected("llama", prompt) for prompt in PROMPTS]


@BOTH
@pytest.mark.parametrize("name", ["mistral", "qwen2-sliding", "llama-dynamic", "opt"])
def test_families_in_chunks_and_mixed_batches(
    paged: bool, name: str, tiny_model: Directory, expected: Expected
) -> None:
    running = Running(tiny_model(name), paged=paged, budget=13, seqs=3)
    prompts = [PROMPT, PROMPT[:3], PROMPT[:21], PROMPT]
    assert running.greedy(*prompts) == [expected(name, prompt) for prompt in prompts]


@BOTH
def test_cached_prefixes_taken_over_copied_and_shared(
    paged: bool, tiny_model: Directory, expected: Expected
) -> None:
    running = Running(tiny_model("llama"), paged=paged)
    text = running.greedy(PROMPT)[0]
    assert text == expected("llama", PROMPT)
    # Taken over: nearly all of it is the donor's. Copied: a short beginning. Shared while it runs.
    longer = PROMPT + text[:40]
    assert running.greedy(longer, tokens=24) == [text[40:]]
    assert running.greedy(PROMPT[:21], PROMPT[:33], PROMPT[:33]) == [
        expected("llama", prompt) for prompt in (PROMPT[:21], PROMPT[:33], PROMPT[:33])
    ]
    assert running.cached == {0: 0, 1: 64, 2: 16, 3: 32, 4: 32}


@BOTH
def test_requests_that_run_out_of_memory_start_over(
    paged: bool, tiny_model: Directory, expected: Expected
) -> None:
    running = Running(tiny_model("llama"), paged=paged, kv_tokens=144, max_model_len=120, budget=24)
    prompts = [PROMPT, PROMPT[:21], PROMPT[:33], PROMPT[:3]]
    assert running.greedy(*prompts) == [expected("llama", prompt) for prompt in prompts]
    assert running.engine.scheduler.preemptions > 0


@BOTH
def test_seeded_text_is_the_same_alone_and_in_a_batch(paged: bool, tiny_model: Directory) -> None:
    running = Running(tiny_model("qwen3"), paged=paged, budget=20, prefix_caching=False)
    requests = [
        (PROMPT, SamplingParams(seed=1, temperature=0.8, max_tokens=24, ignore_eos=True)),
        (PROMPT[:3], SamplingParams(seed=2, top_p=0.9, top_k=30, max_tokens=24, ignore_eos=True)),
        (PROMPT[:21], SamplingParams(seed=1, min_p=0.05, max_tokens=24, ignore_eos=True)),
        (PROMPT[:9], SamplingParams(seed=3, repetition_penalty=1.2, max_tokens=24, ignore_eos=True)),
        (PROMPT[:9], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)),
    ]
    alone = [running.generate(request)[0] for request in requests]
    assert running.generate(*requests) == alone
    assert running.generate(*reversed(requests)) == alone[::-1]
    assert len({tuple(text) for text in alone}) == len(alone)


@BOTH
def test_log_probabilities_of_prompt_and_answer_are_those_of_transformers(
    paged: bool, tiny_model: Directory, oracle: Callable[[str], Any], expected: Expected
) -> None:
    running = Running(tiny_model("llama"), paged=paged, budget=11)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (text,) = running.generate((PROMPT, params))
    assert text == expected("llama", PROMPT)[:6]
    whole = PROMPT + text
    with torch.inference_mode():
        wanted = oracle("llama")(torch.tensor([whole])).logits[0].log_softmax(-1)
    prompt = running.prompt_logprobs[0].positions
    assert prompt[0] is None
    assert len(prompt) == len(PROMPT)
    found = [*prompt[1:], *running.logprobs[0]]
    for at, entry in enumerate(found):
        assert entry is not None
        count = 2 if at < len(PROMPT) - 1 else 3
        top = wanted[at].topk(count)
        assert entry.ids == [whole[at + 1], *top.indices.tolist()]
        torch.testing.assert_close(torch.tensor(entry.logprobs), wanted[at][entry.ids], atol=1e-4, rtol=1e-4)
        assert entry.ranks == [int((wanted[at] > wanted[at][whole[at + 1]]).sum()) + 1, *range(1, count + 1)]


@BOTH
def test_text_ends_at_the_models_end_unless_told_otherwise(
    paged: bool, tiny_model: Directory, expected: Expected
) -> None:
    text = expected("llama", PROMPT)
    at = 9
    force = SamplingParams(temperature=0.0, max_tokens=30, logit_bias={EOS: 100.0})
    running = Running(tiny_model("llama"), paged=paged)
    assert running.generate((PROMPT, force)) == [[EOS]]
    assert running.generate((PROMPT, structs.replace(force, ignore_eos=True))) == [[EOS] * 30]
    held = running.generate((PROMPT, structs.replace(force, min_tokens=at)))[0]
    assert held == [*text[:at], EOS]
    stop = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[text[at]])
    assert running.generate((PROMPT, stop)) == [text[: text.index(text[at]) + 1]]
