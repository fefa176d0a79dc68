"""Paged attention against a dense one in float64, over a pool and outputs filled with NaN."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hotstart.attention import sdpa_paged
from hotstart.attention.base import GATHER_BYTES, MASK_BYTES, BatchPlan
from hotstart.attention.sdpa_paged import SdpaPaged, block_bytes
from hotstart.models.spec import AttentionSpec

BLOCKS = 64


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """New memory holds NaN, so whatever is read before it was written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def spec(heads: int = 4, kv_heads: int = 2, window: int = 0, dim: int = 16) -> AttentionSpec:
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, window=window)


class Sequences:
    """Sequences that grow step by step, in scattered blocks, with the dense answer beside."""

    def __init__(
        self, specs: list[AttentionSpec], *, dtype: torch.dtype = torch.float64, block_size: int = 4
    ) -> None:
        self.specs, self.dtype, self.block_size = specs, dtype, block_size
        self.backend = SdpaPaged(specs, BLOCKS, block_size, dtype, torch.device("cpu"))
        self.free = random.Random(3).sample(range(BLOCKS), BLOCKS)
        self.generator = torch.Generator().manual_seed(5)
        self.tables: dict[str, list[int]] = {}
        self.past: dict[str, list[list[Tensor]]] = {}

    def share(self, name: str, source: str, tokens: int) -> None:
        """``name`` begins with whole blocks of ``source``."""
        self.tables[name] = self.tables[source][: tokens // self.block_size]
        self.past[name] = [[kv[:tokens] for kv in layer] for layer in self.past[source]]

    def step(self, **new: int) -> None:
        """Compute that many new tokens of each sequence and compare every layer."""
        contexts = [self.past[name][0][0].shape[0] if name in self.past else 0 for name in new]
        for name, context in zip(new, contexts, strict=True):
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < context + new[name]:
                table.append(self.free.pop())
        plan = BatchPlan(list(new.values()), contexts, [self.tables[name] for name in new])
        meta = self.backend.plan(plan)
        for layer, layer_spec in enumerate(self.specs):
            tokens, dim = sum(new.values()), layer_spec.head_dim
            heads = (layer_spec.heads, layer_spec.kv_heads, layer_spec.kv_heads)
            q, k, v = (
                torch.randn(tokens, n, dim, dtype=torch.float64, generator=self.generator).to(self.dtype)
                for n in heads
            )
            found = self.backend.attend(q, k, v, layer, meta)
            expected = torch.cat(
                [
                    self.dense(name, layer, *part)
                    for name, *part in zip(
                        new, *(x.double().split(list(new.values())) for x in (q, k, v)), strict=True
                    )
                ]
            )
            assert found.dtype == self.dtype
            error = (found.double() - expected).norm() / expected.norm()
            assert error < {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[self.dtype]

    def dense(self, name: str, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers = self.past.setdefault(name, [])
        if len(layers) <= layer:
            layers.append([k[:0], v[:0]])
        context = layers[layer][0].shape[0]
        k, v = (torch.cat(pair) for pair in zip(layers[layer], (k, v), strict=True))
        layers[layer] = [k, v]
        chosen = self.specs[layer]
        k, v = (x.repeat_interleave(chosen.heads // chosen.kv_heads, 1) for x in (k, v))
        distance = torch.arange(context, k.shape[0])[:, None] - torch.arange(k.shape[0])
        hidden = distance < 0
        if chosen.window:
            hidden |= distance >= chosen.window
        scores = torch.einsum("qhd,khd->hqk", q, k) * chosen.scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [0, 1, 3, 7, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_prompts_then_tokens_then_both(heads: int, kv_heads: int, window: int) -> None:
    sequences = Sequences([spec(heads, kv_heads, window)])
    sequences.step(a=9, b=4, c=1)
    sequences.step(a=1, b=1, c=1)
    sequences.step(a=1, d=6, b=1)
    sequences.step(c=1, d=1, a=1, b=1)


@pytest.mark.parametrize("window", [0, 5])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(window: int) -> None:
    sequences = Sequences([spec(window=window)])
    for chunk in (1, 7, 2, 11, 4, 5):
        sequences.step(a=chunk)


@pytest.mark.parametrize("window", [0, 5])
def test_chunks_of_several_sequences_and_tokens_of_others_share_a_step(window: int) -> None:
    sequences = Sequences([spec(window=window)])
    sequences.step(a=8, b=3, c=5, d=2)
    sequences.step(b=1, a=9, d=1, c=4)
    sequences.step(a=1, b=6, c=1, d=13)


@pytest.mark.parametrize("window", [0, 6])
def test_a_shared_prefix_is_read_where_it_lies(window: int) -> None:
    sequences = Sequences([spec(window=window)])
    sequences.step(a=14)
    sequences.share("b", "a", 12)
    sequences.share("c", "a", 8)
    sequences.step(b=5, c=1, a=1)
    sequences.step(a=1, b=1, c=1)


def test_layers_of_different_shapes_and_windows_share_a_step() -> None:
    sequences = Sequences([spec(4, 2), spec(8, 1, 3, 8), spec(4, 2, 5), spec(2, 2, 3)])
    sequences.step(a=9, b=2)
    sequences.step(b=4, a=1)
    sequences.step(a=1, b=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_s_dtype_is_kept(dtype: torch.dtype) -> None:
    sequences = Sequences([spec(8, 2, dim=64)], dtype=dtype, block_size=16)
    sequences.step(a=40, b=7)
    sequences.step(a=1, b=9)
    sequences.step(a=1, b=1)


def test_a_long_chunk_is_attended_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_paged, "MASK_BYTES", 8 * 60 * 8)
    for window in (0, 11):
        sequences = Sequences([spec(window=window)])
        sequences.step(a=5, b=2)
        sequences.step(a=37, b=30)


def test_many_single_tokens_are_attended_in_calls_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_paged, "GATHER_BYTES", 20 * block_bytes([spec()], 1, 8))
    sequences = Sequences([spec(), spec(window=4)])
    sequences.step(a=25, b=2, c=9, d=3, e=2)
    sequences.step(a=1, b=1, c=1, d=1, e=1)
    sequences.step(a=1, f=3, b=1, c=1, d=1, e=1)


def test_queries_may_be_slices_of_a_fused_projection() -> None:
    attention = SdpaPaged([spec()], BLOCKS, 4, torch.float32, torch.device("cpu"))
    fused = torch.randn(6, 8 * 16)
    parts = [part.view(6, -1, 16) for part in fused.split([64, 32, 32], dim=1)]
    batch = BatchPlan([6], [0], [[3, 1]])
    sliced = attention.attend(*parts, 0, attention.plan(batch))
    whole = attention.attend(*[part.contiguous() for part in parts], 0, attention.plan(batch))
    assert torch.equal(sliced, whole)


def test_masks_begin_at_addresses_that_kernels_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_paged, "MASK_BYTES", 8 * 60 * 4)
    attention = SdpaPaged([spec(), spec(window=7)], BLOCKS, 4, torch.float32, torch.device("cpu"))
    tables = [list(range(16)), list(range(16, 32)), list(range(32, 48))]
    meta = attention.plan(BatchPlan([37, 13, 1], [5, 10, 21], tables))
    masks = [
        mask
        for group in meta.groups.values()
        for mask in [
            *(decode.mask for decode in group.decodes),
            *(tile.mask for prefill in group.prefills for tile in prefill.tiles),
        ]
    ]
    assert len(masks) > 8
    for mask in masks:
        assert mask is not None
        assert mask.storage_offset() % 8 == 0
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


def test_what_sdpa_cannot_do_is_refused() -> None:
    capped = AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=1.0, softcap=30.0)
    uneven = AttentionSpec(heads=5, kv_heads=2, head_dim=16, scale=1.0)
    assert SdpaPaged.refuse([spec()]) == []
    assert [reason.split(":")[0] for reason in SdpaPaged.refuse([spec(), capped, uneven])] == [
        "layer 1",
        "layer 2",
    ]


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    assert block_bytes([spec(4, 2), spec(8, 1, 0, 8)], 4, 2) == 4 * 2 * 2 * (2 * 16 + 8)


@pytest.mark.parametrize("window", [0, 1000])
def test_masks_and_gathered_keys_stay_within_bounds(window: int) -> None:
    layers = [spec(2, 1, window, 8), spec(2, 1)]
    attention = SdpaPaged(layers, 40_000, 4, torch.bfloat16, torch.device("cpu"))
    table = list(range(33_000))
    chunks = attention.plan(BatchPlan([2049, 2050, 515], [128_000, 1003, 6], [table, table, table]))
    masks = [t.mask for g in chunks.groups.values() for p in g.prefills for t in p.tiles]
    assert len(masks) > 20
    storages = {m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in masks if m is not None}
    assert sum(storages.values()) <= MASK_BYTES
    singles = attention.plan(BatchPlan([1] * 64, [120_000] * 64, [table] * 64))
    for decode in singles.groups[0].decodes:
        assert decode.slots.numel() * block_bytes([spec(2, 1)], 1, 2) <= GATHER_BYTES
