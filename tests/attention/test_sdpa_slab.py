"""Slab attention against a dense one in float64, over slabs in which earlier sequences left NaN."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from hotstart.attention import sdpa_slab
from hotstart.attention.base import MASK_BYTES, BatchPlan
from hotstart.attention.sdpa_slab import SdpaSlab
from hotstart.errors import DeviceError
from hotstart.models.spec import AttentionSpec

MAX_LEN = 80
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def spec(heads: int = 4, kv_heads: int = 2, window: int = 0, dim: int = 16) -> AttentionSpec:
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, window=window)


class Slabs:
    """Sequences that grow step by step, with the dense answer beside."""

    def __init__(
        self,
        specs: list[AttentionSpec],
        *,
        dtype: torch.dtype = torch.float64,
        slabs: int = 6,
        poison: bool = True,
    ) -> None:
        self.specs, self.dtype = specs, dtype
        self.backend = SdpaSlab(specs, slabs, MAX_LEN, dtype)
        self.generator = torch.Generator().manual_seed(5)
        self.past: dict[int, list[list[Tensor]]] = {}
        if poison:
            self.poison(*range(slabs))

    def poison(self, *slabs: int) -> None:
        """Whole slabs of NaN, as a sequence leaves behind whose values overflowed."""
        new = [MAX_LEN] * len(slabs)
        meta = self.backend.plan(BatchPlan(new, [0] * len(slabs), [[slab] for slab in slabs]))
        for layer, layer_spec in enumerate(self.specs):
            q = torch.zeros(sum(new), layer_spec.heads, layer_spec.head_dim, dtype=self.dtype)
            kv = torch.full((sum(new), layer_spec.kv_heads, layer_spec.head_dim), torch.nan, dtype=self.dtype)
            assert self.backend.attend(q, kv, kv, layer, meta).isnan().all()

    def step(self, new: dict[int, int], copies: list[tuple[int, int, int]] | None = None) -> None:
        """Compute ``new`` tokens of each slab's sequence and compare every layer."""
        for source, target, tokens in copies or []:
            self.past[target] = [[kv[:tokens] for kv in layer] for layer in self.past[source]]
        contexts = [len(self.past[slab][0][0]) if slab in self.past else 0 for slab in new]
        plan = BatchPlan(list(new.values()), contexts, [[slab] for slab in new], copies or [])
        meta = self.backend.plan(plan)
        for layer, layer_spec in enumerate(self.specs):
            heads = (layer_spec.heads, layer_spec.kv_heads, layer_spec.kv_heads)
            # As the model hands them over: views of one tensor, rows apart.
            qkv = torch.randn(
                sum(new.values()),
                sum(heads),
                layer_spec.head_dim,
                dtype=torch.float64,
                generator=self.generator,
            ).to(self.dtype)
            q, k, v = qkv.split_with_sizes(heads, 1)
            found = self.backend.attend(q, k, v, layer, meta)
            parts = zip(new, *(x.double().split(list(new.values())) for x in (q, k, v)), strict=True)
            expected = torch.cat([self.dense(slab, layer, *part) for slab, *part in parts])
            assert found.dtype == self.dtype
            assert found.shape == expected.shape
            error = (found.double() - expected).norm() / expected.norm()
            assert error < TOLERANCE[self.dtype], f"layer {layer}: {error}"

    def dense(self, slab: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers = self.past.setdefault(slab, [])
        if len(layers) <= layer:
            layers.append([k[:0], v[:0]])
        context = len(layers[layer][0])
        k, v = (torch.cat(pair) for pair in zip(layers[layer], (k, v), strict=True))
        layers[layer] = [k, v]
        chosen = self.specs[layer]
        k, v = (x.repeat_interleave(chosen.heads // chosen.kv_heads, 1) for x in (k, v))
        distance = torch.arange(context, len(k))[:, None] - torch.arange(len(k))
        hidden = distance < 0
        if chosen.window:
            hidden |= distance >= chosen.window
        scores = torch.einsum("qhd,khd->hqk", q, k) * chosen.scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def end(self, slab: int) -> None:
        """The sequence ends and its memory is given back."""
        del self.past[slab]
        self.backend.release(slab)


LAYERS = [
    pytest.param([spec()], id="grouped"),
    pytest.param([spec(heads=4, kv_heads=4), spec(heads=4, kv_heads=1)], id="own-and-single-heads"),
    pytest.param([spec(window=5), spec(), spec(window=12, dim=24)], id="windows"),
    pytest.param([spec(heads=6, kv_heads=2, dim=20)], id="odd-sizes"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("specs", LAYERS)
def test_whole_prompt_then_single_tokens(specs: list[AttentionSpec], dtype: torch.dtype) -> None:
    slabs = Slabs(specs, dtype=dtype)
    slabs.step({2: 19})
    for _ in range(6):
        slabs.step({2: 1})


@pytest.mark.parametrize("specs", LAYERS)
@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_prompt_in_chunks(specs: list[AttentionSpec], chunk: int) -> None:
    slabs = Slabs(specs)
    for _ in range(5):
        slabs.step({1: chunk})


@pytest.mark.parametrize("specs", LAYERS)
def test_long_chunks_are_attended_in_tiles_that_share_a_mask(
    specs: list[AttentionSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_slab, "MASK_BYTES", 3 * 60 * 8)
    slabs = Slabs(specs)
    slabs.step({0: 5, 2: 3})
    slabs.step({0: 37, 2: 20, 4: 30})


@pytest.mark.parametrize("window", [0, 1000])
def test_masks_of_a_step_stay_within_bounds(window: int) -> None:
    backend = SdpaSlab([spec(2, 1, window, 8), spec(2, 1)], 4, 131_072, torch.float32)
    meta = backend.plan(BatchPlan([1024, 1024, 512], [128_000, 1003, 6], [[0], [1], [2]]))
    masks = [part.mask for group in meta.groups.values() for part in group.prefills]
    storages = {m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in masks if m is not None}
    assert len(storages) == len(meta.groups)
    assert sum(storages.values()) <= MASK_BYTES


@pytest.mark.parametrize("specs", LAYERS)
def test_single_tokens_of_sequences_of_like_lengths_in_one_padded_call(specs: list[AttentionSpec]) -> None:
    slabs = Slabs(specs)
    slabs.step({0: 20, 1: 17, 2: 24, 3: 21})
    for _ in range(4):
        slabs.step(dict.fromkeys(range(4), 1))


@pytest.mark.parametrize("specs", LAYERS)
def test_single_tokens_of_scattered_slabs_and_very_different_lengths(specs: list[AttentionSpec]) -> None:
    slabs = Slabs(specs)
    slabs.step({0: 3, 1: 60, 2: 2, 4: 30, 5: 31})
    for _ in range(3):
        slabs.step({5: 1, 0: 1, 1: 1, 2: 1, 4: 1})


@pytest.mark.parametrize("specs", LAYERS)
def test_single_tokens_beside_chunks_of_others(specs: list[AttentionSpec]) -> None:
    slabs = Slabs(specs)
    slabs.step({0: 9, 1: 11})
    slabs.step({0: 1, 1: 1, 3: 13})
    slabs.step({0: 1, 1: 1, 3: 5, 4: 2})
    slabs.step({3: 7, 0: 1, 4: 1, 1: 1})


@pytest.mark.parametrize("specs", LAYERS)
def test_copied_prefix_continues_as_its_own_sequence(specs: list[AttentionSpec]) -> None:
    slabs = Slabs(specs)
    slabs.step({0: 40})
    slabs.step({0: 1, 3: 9, 1: 1}, copies=[(0, 3, 16), (3, 1, 16)])
    for _ in range(3):
        slabs.step({0: 1, 1: 1, 3: 1})


def test_slab_taken_over_hides_what_its_former_sequence_left_behind() -> None:
    slabs = Slabs([spec()])
    slabs.step({0: 20, 1: 30})
    slabs.past[0] = [[kv[:16] for kv in layer] for layer in slabs.past[0]]
    slabs.step({0: 8, 1: 1})
    for _ in range(3):
        slabs.step({0: 1, 1: 1})


def test_released_slab_serves_the_next_sequence() -> None:
    slabs = Slabs([spec(), spec(window=5)])
    slabs.step({0: 20, 1: 22, 2: 24})
    slabs.step({0: 1, 1: 1, 2: 1})
    slabs.end(1)
    slabs.step({0: 1, 2: 1, 1: 18})
    slabs.step({0: 1, 1: 1, 2: 1})


def test_padding_behind_a_released_slab_reads_as_zero() -> None:
    slabs = Slabs([spec()])
    slabs.backend.release(3)
    assert not slabs.backend.k[0][3].any()
    assert not slabs.backend.v[0][3].any()
    assert slabs.backend.k[0][2].isnan().all()
    assert slabs.backend.k[0][4].isnan().all()


def test_release_keeps_the_tokens_in_front() -> None:
    slabs = Slabs([spec()])
    slabs.backend.release(3, keep=33)
    assert slabs.backend.k[0][3, :33].isnan().all()
    assert not slabs.backend.k[0][3, 33:].any()


def test_memory_is_committed_by_tokens_and_given_back() -> None:
    # 2 GiB of address space; one layer's K and V of 1024 tokens are 1 MiB each.
    backend = SdpaSlab([spec(heads=4, kv_heads=4, dim=64)], 64, 16384, torch.float32)
    before = resident()
    kv = torch.ones(1024, 4, 64)
    backend.attend(kv, kv, kv, 0, backend.plan(BatchPlan([1024], [0], [[7]])))
    written = sum(backend_pages(pool, 7) for pool in (backend.k[0], backend.v[0]))
    assert written == 2 * 1024 * 4 * 64 * 4 // mmap.PAGESIZE
    assert resident() - before < 64 << 20
    backend.release(7)
    assert sum(backend_pages(pool, 7) for pool in (backend.k[0], backend.v[0])) == 0


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def backend_pages(pool: Tensor, slab: int) -> int:
    """Pages of a slab that are in memory: bit 63 of each entry of /proc/self/pagemap."""
    first = pool[slab].data_ptr() // mmap.PAGESIZE
    count = pool[slab].numel() * pool.element_size() // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(first * 8)
        entries = file.read(count * 8)
    return sum(entries[at] >> 7 for at in range(7, len(entries), 8))


def test_soft_capped_layers_are_refused_with_their_number() -> None:
    capped = AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=0.25, softcap=30.0)
    assert SdpaSlab.refuse([spec(), spec(window=5)]) == []
    (reason,) = SdpaSlab.refuse([spec(), capped])
    assert reason.startswith("layer 1: ")


def test_address_space_that_cannot_be_had_is_an_error_with_advice() -> None:
    with pytest.raises(DeviceError, match="--max-num-seqs or --max-model-len"):
        SdpaSlab([spec()], 4, 1 << 48, torch.float32)
