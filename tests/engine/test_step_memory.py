"""What a step may hold, term by term, against what torch really allocates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch.profiler import ProfilerActivity, profile

from hotstart.attention import sdpa_paged, sdpa_slab
from hotstart.attention.base import MASK_BYTES, BatchPlan
from hotstart.attention.sdpa_paged import SdpaPaged
from hotstart.attention.sdpa_slab import SdpaSlab
from hotstart.config.settings import Config, DeviceConfig, ModelConfig, SchedulerConfig
from hotstart.engine import sampler, step_memory
from hotstart.engine.assemble import prepare, step_shape
from hotstart.engine.request import Request
from hotstart.engine.sampler import Sampler
from hotstart.engine.step_memory import StepShape
from hotstart.messages import NewRequest, SamplingParams, pack_ids
from hotstart.models.spec import AttentionSpec
from tiny_models import CONFIGS

SHAPE = StepShape(
    tokens=2048,
    seqs=256,
    context=131_072,
    hidden=4096,
    intermediate=14_336,
    q=4096,
    kv=1024,
    vocab=128_256,
    dtype_bytes=2,
    gathers=True,
)


def peak(work: Callable[[], object]) -> int:
    """The most bytes of torch's allocator that ``work`` holds at once, scratch of kernels included."""
    work()  # what a first call keeps
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_bound_of_a_large_model_is_the_sum_of_its_terms() -> None:
    assert SHAPE.layer == 2 * 2048 * 2 * (3 * 4096 + 2 * (4096 + 2 * 1024) + 4096 + 3 * 14_336)
    assert SHAPE.masks == 2 * MASK_BYTES
    assert SHAPE.gathered == 2 * 131_072 * 1024 * 2, "one long sequence is more than the bound of a call"
    assert SHAPE.logits == 7 * 256 * 128_256 * 4 + 12 * (16 << 20)
    assert SHAPE.bytes == SHAPE.layer + SHAPE.masks + SHAPE.gathered + SHAPE.logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "opt-post-norm"])
def test_layers_hold_no_more_than_their_term(
    name: str, dtype: torch.dtype, tiny_model: Callable[..., Path]
) -> None:
    directory = str(tiny_model(name))
    config = Config(
        model=ModelConfig(model=directory, path=directory, dtype=str(dtype).removeprefix("torch.")),
        scheduler=SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=4),
        device=DeviceConfig(device="cpu", threads=1),
    )
    prepared = prepare(config)
    weights = prepared.placement.weights(prepared, lambda done: None)
    weights.start()
    model = prepared.family.build(
        prepared.geometry, weights.store(), dtype=dtype, device=torch.device("cpu"), max_positions=512
    )
    weights.wait()
    attention = SdpaSlab(prepared.geometry.attention(), 1, 512, dtype)
    ids = torch.arange(512)
    with torch.inference_mode():
        held = peak(lambda: model.forward(ids, ids, attention, attention.plan(BatchPlan([512], [0], [[0]]))))
    assert held <= step_shape(prepared).layer
    assert CONFIGS[name]["hidden_size"] == step_shape(prepared).hidden


@pytest.mark.parametrize("paged", [False, True], ids=["slabs", "paged"])
@pytest.mark.parametrize("window", [0, 300])
def test_attention_holds_no_more_than_masks_and_gathered_keys(
    window: int, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sdpa_slab, sdpa_paged, step_memory):
        monkeypatch.setattr(module, "MASK_BYTES", 1 << 20)
    for module in (sdpa_paged, step_memory):
        monkeypatch.setattr(module, "GATHER_BYTES", 4 << 20)
    heads, kv_heads, dim, longest, singles = 8, 4, 64, 6000, 12
    specs = [AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=dim, scale=0.1, window=window)]
    tables: list[list[int]] = [[slab] for slab in range(singles + 2)]
    attention: SdpaPaged | SdpaSlab = SdpaSlab(specs, len(tables), longest, torch.bfloat16)
    if paged:
        attention = SdpaPaged(specs, longest // 16, 16, torch.bfloat16, torch.device("cpu"))
        tables = [list(range(longest // 16))] * len(tables)
    new = [1] * singles + [400, 37]
    batch = BatchPlan(new, [1000 + 90 * n for n in range(singles)] + [longest - 400, 3], tables)
    shape = structs.replace(
        SHAPE,
        tokens=sum(new),
        context=longest,
        hidden=0,
        intermediate=0,
        q=heads * dim,
        kv=kv_heads * dim,
        gathers=paged,
    )
    q = torch.randn(sum(new), heads, dim, dtype=torch.bfloat16)
    k = torch.randn(sum(new), kv_heads, dim, dtype=torch.bfloat16)
    held = peak(lambda: attention.attend(q, k, k, 0, attention.plan(batch)))
    assert held <= shape.masks + shape.gathered + shape.layer


@pytest.mark.parametrize("extra", [{"logprobs": 5}, {}])
def test_sampling_holds_no_more_than_its_term(extra: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab = 96, 32_000
    for module in (sampler, step_memory):
        monkeypatch.setattr(module, "CUT_BYTES", 8 * vocab * 4)
    shape = StepShape(
        tokens=1,
        seqs=rows,
        context=1,
        hidden=1,
        intermediate=1,
        q=1,
        kv=1,
        vocab=vocab,
        dtype_bytes=2,
        gathers=False,
    )
    hidden, head = torch.randn(rows, 8), torch.randn(8, vocab) * 0.01
    choose = Sampler(torch.device("cpu"), 0)
    # One greedy row and one without a cut: every other row is copied on its way. Flat
    # distributions: the nucleus is most of the vocabulary, which is sorted whole.
    requests = []
    for row in range(rows):
        params = SamplingParams(
            temperature=0.0 if row == 0 else 0.9,
            top_p=1.0 if row == 1 else 0.99,
            min_p=1e-6,
            **extra,
        )
        requests.append(Request(NewRequest(row, pack_ids([1]), params), []))

    def sample() -> object:
        return choose.sample((hidden @ head).float(), requests)

    with torch.inference_mode():
        held = peak(sample)
    assert 4 * rows * vocab * 4 < held <= shape.logits
