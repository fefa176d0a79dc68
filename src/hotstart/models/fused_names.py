"""vLLM's names for a model's weights, and how its ranks share them; torch-free, from specs alone.

vLLM stacks q, k and v (``qkv_proj``) and gate and up (``gate_up_proj``) before it saves a worker's
state, and pads the vocabulary to whole 64s. Pre-sharded and Tensorizer checkpoints hold its tensors
under its names. What is written here is ``QKVParallelLinear``, ``MergedColumnParallelLinear``,
``RowParallelLinear``, ``VocabParallelEmbedding`` and ``get_pp_indices`` of vLLM 0.32. Those who read such
files and those who write them have it from here; how the files are called is for
:mod:`hotstart.checkpoint.sharded_names` and :mod:`hotstart.checkpoint.tensorizer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import gcd

from msgspec import Struct

from hotstart.models.spec import WeightSpec

VOCABULARY = ("embed", "head")
"""Slots whose rows are tokens."""

_PADDED_TO = 64
"""Rows of the vocabulary come in multiples of it."""
_SCALES = tuple(f"attn.{kind}_scale" for kind in ("_k", "_prob", "_q", "_v"))
"""Buffers of each attention layer in vLLM's state, float32 and 1.0 where nothing is quantised."""
_FUSED = (
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ATTENTION = re.compile(r"(.+\.self_attn\.)qkv_proj\.weight")


class Slice(Struct, frozen=True):
    """What a rank holds of one stored tensor: ``count`` of dimension ``dim`` from ``start`` on.

    Behind them come ``padding`` zeros along the same dimension.
    """

    spec: WeightSpec
    dim: int
    start: int
    count: int
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """With the padding."""
        whole = self.spec.shape
        return (*whole[: self.dim], self.count + self.padding, *whole[self.dim + 1 :])


class FusedTensor(Struct, frozen=True):
    """A tensor of vLLM's state: stored tensors, stacked along dimension 0 in this order."""

    names: tuple[str, ...]
    """The first is the one that a file has; further ones are tied to it."""
    specs: tuple[WeightSpec, ...]

    @property
    def name(self) -> str:
        """In a file."""
        return self.names[0]

    @property
    def accepted(self) -> tuple[str, ...]:
        """What a file may call it: also by other names that its family has for a plain checkpoint's."""
        return tuple(dict.fromkeys([*self.names, *map(fused_name, self.specs[0].stored)]))

    def slices(self, rank: int, size: int) -> tuple[Slice, ...]:
        """What one of ``size`` ranks holds of each stored tensor; ask :func:`indivisible` first."""
        return tuple(_slice(spec, rank, size) for spec in self.specs)

    def shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Of the tensor that a rank holds."""
        shapes = [each.shape for each in self.slices(rank, size)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()

    def used_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """The same without rows that only pad."""
        shape = self.shape(rank, size)
        padding = sum(each.padding for each in self.slices(rank, size))
        return (shape[0] - padding, *shape[1:]) if padding else shape


def fused_tensors(specs: Sequence[WeightSpec], stages: int = 1, stage: int = 0) -> list[FusedTensor]:
    """The tensors of one of ``stages``, in the order of the model."""
    layers = stage_layers(layers_of(specs), stages, stage)
    first, last = stage == 0, stage == stages - 1
    inside = [layer_of(spec.slot) is not None for spec in specs]
    behind = len(inside) - inside[::-1].index(True) if True in inside else 0
    tied = {spec.alias_of: fused_name(spec.stored[0]) for spec in specs if spec.alias_of}

    slots: dict[str, list[WeightSpec]] = {}
    for place, spec in enumerate(specs):
        layer = layer_of(spec.slot)
        here = layer in layers if layer is not None else last if place >= behind else first
        # A tied head needs the embedding in the last stage too.
        if spec.alias_of is None and (here or (last and spec.slot in tied)):
            slots.setdefault(spec.slot, []).append(spec)
    fused = []
    for slot, parts in slots.items():
        parts.sort(key=lambda spec: spec.at)
        name = fused_name(parts[0].stored[0])
        # Of tensors that share their memory, vLLM saves the one whose name sorts first.
        names = sorted({name, tied[slot]}) if slot in tied and last else [name]
        fused.append(FusedTensor(tuple(names), tuple(parts)))
    return fused


def scale_names(tensors: Sequence[FusedTensor]) -> list[str]:
    """The scales of all attention layers among ``tensors``, which :func:`is_scale` knows again."""
    found = [match for tensor in tensors if (match := _ATTENTION.fullmatch(tensor.name))]
    return [match[1] + scale for match in found for scale in _SCALES]


def is_scale(name: str) -> bool:
    """Whether it is a buffer of attention layers in vLLM's state, and no weight."""
    return name.endswith(tuple(f".{scale}" for scale in _SCALES))


def indivisible(specs: Sequence[WeightSpec], size: int) -> list[str]:
    """What ``size`` ranks cannot share: ``9 heads of …``; empty: they can share everything."""
    found: dict[int, str] = {}
    for spec in specs:
        if spec.shard is None or spec.alias_of is not None:
            continue
        units = _padded(spec) if spec.slot in VOCABULARY else spec.shard.units
        replicated = spec.slot.endswith(("qkv", "qkv_bias")) and units < size and size % units == 0
        if units % size and not replicated:
            found.setdefault(units, f"{units} {_unit(spec)} of {spec.stored[0]}")
    return list(found.values())


def _unit(spec: WeightSpec) -> str:
    """What is never cut, for people: a head is several rows or columns."""
    assert spec.shard is not None
    if spec.slot in VOCABULARY:
        return "padded rows"
    if spec.shard.units < spec.shape[spec.shard.dim]:
        return "heads"
    return "columns" if spec.shard.dim else "rows"


def sizes_that_divide(specs: Sequence[WeightSpec]) -> list[int]:
    """The numbers of ranks, up to 64, that can share the model."""
    return [size for size in range(1, 65) if not indivisible(specs, size)]


def fused_name(name: str) -> str:
    """vLLM's name of the tensor that a stored one is part of."""
    for part, whole in _FUSED:
        name = part.sub(whole, name)
    return name


def is_fused(name: str) -> bool:
    """Whether only vLLM has a tensor of that name: several stored ones, stacked."""
    return any(whole in name for _, whole in _FUSED)


def layers_of(specs: Sequence[WeightSpec]) -> int:
    """How many layers a model has, one at least."""
    return 1 + max((layer_of(spec.slot) or 0 for spec in specs), default=0)


def layer_of(name: str) -> int | None:
    """The number of the layer that a slot or a tensor belongs to; None: to none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of a stage.

    What does not divide goes to the stages before the last, from the back: the last has the head.
    """
    sizes = [layers // stages] * stages
    for place in range(2, layers % stages + 2):
        sizes[-place] += 1
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def _slice(spec: WeightSpec, rank: int, size: int) -> Slice:
    if spec.shard is None:
        return Slice(spec, 0, 0, spec.shape[0] if spec.shape else 1)
    dim, total = spec.shard.dim, spec.shape[spec.shard.dim]
    if spec.slot in VOCABULARY:
        share = _padded(spec) // size
        start = min(rank * share, total)
        count = min(total - start, share)
        return Slice(spec, dim, start, count, share - count)
    # Of fewer heads than ranks, neighbours hold the same one.
    shares = gcd(spec.shard.units, size)
    share = total // shares
    return Slice(spec, dim, rank * shares // size * share, share)


def _padded(spec: WeightSpec) -> int:
    return -(-spec.shape[0] // _PADDED_TO) * _PADDED_TO
