"""A rank's share of a pre-sharded checkpoint: what it must hold, and whether its files do. Torch-free.

vLLM stores its parameters as a rank has them: q, k and v in one tensor, gate and up in one, each rank's
rows or columns cut out, the vocabulary padded to whole 64s. For hotstart such a tensor is one slot, used
where it lies; rows that only pad are left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from hotstart.checkpoint.base import Checkpoint, TensorRef
from hotstart.checkpoint.folder import Folder
from hotstart.checkpoint.sharded import open_sharded, wrong_sizes
from hotstart.checkpoint.sharded_names import Rank
from hotstart.checkpoint.wording import count, few
from hotstart.errors import ModelError
from hotstart.loading.match import Matched, match
from hotstart.models.fused_names import (
    VOCABULARY,
    fused_tensors,
    indivisible,
    is_fused,
    is_scale,
    layer_of,
    sizes_that_divide,
)
from hotstart.models.spec import WeightSpec


class RankPlan(Struct, frozen=True):
    """What a rank reads, and where it goes."""

    checkpoint: Checkpoint
    matched: Matched


def plan_rank(
    place: Folder | str,
    specs: Sequence[WeightSpec],
    rank: Rank,
    *,
    pattern: str | None = None,
    dtype: str = "auto",
) -> RankPlan:
    """Open the files of one rank of a pre-sharded checkpoint, and no others; reads headers only.

    ``specs`` are those of the whole model. Raises what :func:`~hotstart.checkpoint.sharded.open_sharded`
    and :func:`match_rank` raise.
    """
    checkpoint = open_sharded(place, rank, pattern)
    return RankPlan(checkpoint, match_rank(specs, checkpoint, rank, dtype))


def match_rank(
    specs: Sequence[WeightSpec], checkpoint: Checkpoint, rank: Rank, dtype: str = "auto"
) -> Matched:
    """As :func:`hotstart.loading.match.match`, of one rank's files.

    Raises ModelError when they are for other sizes, not all there, or another rank's.
    """
    own = rank_specs(specs, rank)
    _check_stage(checkpoint, own, rank)
    _check_sizes(checkpoint, specs, rank)
    _check_complete(checkpoint, own, rank)
    padded = {
        tensor.specs[0].slot: tensor.shape(rank.tp_rank, rank.tp_size)[0]
        for tensor in fused_tensors(specs, rank.pp_size, rank.pp_rank)
        if tensor.specs[0].slot in VOCABULARY
    }
    return match(own, _used(checkpoint, own, padded), dtype)


def match_named(
    specs: Sequence[WeightSpec], checkpoint: Checkpoint, dtype: str, *, compared: bool = True
) -> Matched:
    """As :func:`hotstart.loading.match.match`, of a whole model under vLLM's names or under its own.

    Without ``compared`` a stored copy of a tied weight is passed over. Raises ModelError.
    """
    if not compared:
        tensors = dict(checkpoint.tensors)
        stored = {spec.slot: spec.stored for spec in specs if any(name in tensors for name in spec.stored)}
        for spec in specs:
            for name in spec.stored if spec.alias_of in stored else ():
                tensors.pop(name, None)
        checkpoint = replace(checkpoint, tensors=tensors)
    if any(map(is_fused, checkpoint.tensors)):
        return match_rank(specs, checkpoint, Rank(), dtype)
    return match(specs, checkpoint, dtype)


def rank_specs(specs: Sequence[WeightSpec], rank: Rank) -> list[WeightSpec]:
    """What a rank holds of a model, under vLLM's names: a spec for every slot, without padding."""
    if unshared := indivisible(specs, rank.tp_size):
        raise ModelError(
            f"{rank.tp_size} ranks cannot share {few(unshared)}",
            expected="a --tensor-parallel-size of " + ", ".join(map(str, sizes_that_divide(specs))),
        )
    own = []
    for tensor in fused_tensors(specs, rank.pp_size, rank.pp_rank):
        shape = tensor.used_shape(rank.tp_rank, rank.tp_size)
        own.append(replace(tensor.specs[0], stored=tensor.accepted, shape=shape, at=0, shard=None))
    slots = {spec.slot for spec in own}
    last = rank.pp_rank == rank.pp_size - 1
    return own + [spec for spec in specs if spec.alias_of in slots and last]


def _check_stage(checkpoint: Checkpoint, own: Sequence[WeightSpec], rank: Rank) -> None:
    """Raise for layers of another stage."""
    layers = {layer for spec in own if (layer := layer_of(spec.slot)) is not None}
    stored = [(layer_of(ref.name), ref) for ref in checkpoint.tensors.values()]
    foreign = [ref for layer, ref in stored if layer is not None and layer not in layers]
    if foreign and layers and rank.pp_size > 1:
        raise ModelError(
            f"{_file(foreign[0], checkpoint)} holds {foreign[0].name}, a layer of another stage",
            expected=f"layers {min(layers)} to {max(layers)}, which are those of {rank}",
            advice="Copy the file again from where the others came from",
        )


def _check_sizes(checkpoint: Checkpoint, specs: Sequence[WeightSpec], rank: Rank) -> None:
    """Raise where tensors that are cut by columns have those of another number of ranks."""
    found: dict[int, TensorRef] = {}
    for spec in specs:
        if spec.shard is None or spec.shard.dim != 1:
            continue
        ref = next((checkpoint.tensors[name] for name in spec.stored if name in checkpoint.tensors), None)
        if ref is None or len(ref.shape) != 2 or ref.shape[0] != spec.shape[0]:
            continue
        if ref.shape[1] and spec.shape[1] % ref.shape[1] == 0:
            found.setdefault(spec.shape[1] // ref.shape[1], ref)
    if len(found) > 1:
        foreign = next(ref for size, ref in found.items() if size != rank.tp_size)
        sizes = ", ".join(map(str, sorted(found)))
        raise ModelError(
            f"the files of {rank} in {checkpoint.path} are for different numbers of ranks ({sizes}): "
            f"{foreign.name} in {_file(foreign, checkpoint)} is {list(foreign.shape)}",
            expected=f"files for {rank.tp_size}",
            advice="Copy all files again from one checkpoint into an empty directory",
        )
    for size in found:
        if size != rank.tp_size:
            raise wrong_sizes(checkpoint.path, size, rank.pp_size, rank)


def _check_complete(checkpoint: Checkpoint, own: Sequence[WeightSpec], rank: Rank) -> None:
    """Raise where tensors are missing, as they are when the last part is."""
    needed = [spec for spec in own if spec.alias_of is None and spec.slot not in VOCABULARY]
    missing = [
        spec.stored[0] for spec in needed if not any(name in checkpoint.tensors for name in spec.stored)
    ]
    if missing:
        last = os.path.basename(checkpoint.files[-1].path)
        raise ModelError(
            f"{count(len(missing), 'tensor')} of {rank} missing from the "
            f"{count(len(checkpoint.files), 'file')} that it has in {checkpoint.path}: {few(missing)}",
            expected="every weight of this rank, under vLLM's names",
            advice=f"If {last} is not the last part, copy those after it; otherwise config.json or a file "
            "belongs to another model: copy all of them again",
        )


def _used(checkpoint: Checkpoint, own: Sequence[WeightSpec], padded: dict[str, int]) -> Checkpoint:
    """Without rows that stand for no token, and without the scales of a cache that is not quantised.

    ``padded``: rows by slot, as they are stored.
    """
    tensors = {name: ref for name, ref in checkpoint.tensors.items() if not is_scale(name)}
    for spec in own:
        for name in spec.stored if spec.slot in padded else ():
            ref = tensors.get(name)
            if ref is not None and ref.shape == (padded[spec.slot], *spec.shape[1:]):
                nbytes = ref.nbytes // ref.shape[0] * spec.shape[0]
                tensors[name] = replace(ref, shape=spec.shape, nbytes=nbytes)
    return replace(checkpoint, tensors=tensors)


def _file(ref: TensorRef, checkpoint: Checkpoint) -> str:
    return checkpoint.files[ref.file].path
