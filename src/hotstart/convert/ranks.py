"""``convert sharded``: each rank's tensors in files of its own, as vLLM's workers save theirs.

Layout and names are those of ``ShardedStateLoader.save_model`` in vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotstart.checkpoint.base import TensorRef
from hotstart.checkpoint.sharded_names import Pattern, pattern_for
from hotstart.convert.job import Plan
from hotstart.convert.origin import Origin
from hotstart.convert.planned import Columns, Constant, Piece, Planned, PlannedFile, Stretch, split
from hotstart.errors import ConfigError, ModelError
from hotstart.loading.match import match
from hotstart.models.fused_names import (
    FusedTensor,
    fused_tensors,
    indivisible,
    layers_of,
    scale_names,
    sizes_that_divide,
)
from hotstart.models.registry import family_for
from hotstart.models.spec import WeightSpec

_ONE = b"\x00\x00\x80\x3f"
"""1.0 as a float32 in a file."""


def plan_ranks(origin: Origin, tensor_parallel: int, pipeline_parallel: int, part_size: int) -> Plan:
    """Files of at most ``part_size`` bytes of tensors for each of so many ranks.

    Raises ConfigError for sizes that the model cannot be cut into, ModelError for a checkpoint that does
    not fit its configuration or an architecture that is not supported.
    """
    files = []
    pattern = Pattern(pattern_for(pipeline_parallel))
    stages = rank_tensors(origin, tensor_parallel, pipeline_parallel)
    for stage, tensors in enumerate(stages):
        for part, run in enumerate(split(tensors, part_size)):
            names = [pattern.write(rank, stage, part) for rank in range(tensor_parallel)]
            files.append(PlannedFile(tuple(names), tuple(run)))
    return Plan(tuple(files))


def rank_tensors(origin: Origin, tensor_parallel: int, pipeline_parallel: int = 1) -> list[list[Planned]]:
    """By stage, the tensors of its ranks. Raises as :func:`plan_ranks` does."""
    config = origin.config
    family = family_for(config)
    specs = family.specs(family.geometry(config))
    matched = match(specs, origin.checkpoint, "auto")
    _check_sizes(specs, tensor_parallel, pipeline_parallel)
    refs = {(spec.slot, spec.at): ref for spec, ref in matched.loads}
    stages = []
    for stage in range(pipeline_parallel):
        fused = fused_tensors(specs, pipeline_parallel, stage)
        tensors = [_planned(each, refs, tensor_parallel) for each in fused]
        everyone = tuple(range(tensor_parallel))
        tensors += [Planned(name, "F32", (), (Constant(_ONE, 1, everyone),)) for name in scale_names(fused)]
        stages.append(tensors)
    return stages


def _check_sizes(specs: Sequence[WeightSpec], tensor_parallel: int, pipeline_parallel: int) -> None:
    if undivided := indivisible(specs, tensor_parallel):
        possible = ", ".join(map(str, sizes_that_divide(specs)))
        raise ConfigError(
            f"--tensor-parallel-size {tensor_parallel} does not divide {', '.join(undivided)}",
            expected=f"one of {possible}",
        )
    layers = layers_of(specs)
    if pipeline_parallel > layers:
        raise ConfigError(
            f"--pipeline-parallel-size {pipeline_parallel} is more than the model has layers",
            expected=f"at most {layers}",
        )


def _planned(fused: FusedTensor, refs: Mapping[tuple[str, int], TensorRef], size: int) -> Planned:
    parts = [refs[spec.slot, spec.at] for spec in fused.specs]
    dtypes = sorted({ref.dtype for ref in parts})
    if len(dtypes) > 1:
        raise ModelError(
            f"{fused.name} would hold {', '.join(ref.name for ref in parts)}, "
            f"which are stored as {' and '.join(dtypes)}",
            expected="parts of one dtype",
            advice="Save the model in one dtype first",
        )
    pieces: list[Piece] = []
    for place, ref in enumerate(parts):
        pieces += _pieces(fused, place, ref, size)
    return Planned(fused.name, dtypes[0], fused.shape(0, size), tuple(pieces), fused.names[1:])


def _pieces(fused: FusedTensor, place: int, ref: TensorRef, size: int) -> list[Piece]:
    """Where the ranks' shares of one stored tensor lie in it."""
    shares = [fused.slices(rank, size)[place] for rank in range(size)]
    whole = ref.shape[shares[0].dim] if ref.shape else 1
    if all(share.count == whole for share in shares):
        pieces: list[Piece] = [Stretch(ref, 0, ref.nbytes, tuple(range(size)))]
        unit = ref.nbytes // max(1, whole)
    elif shares[0].dim == 1:
        pitch = ref.nbytes // ref.shape[0]
        unit = pitch // ref.shape[1]
        cuts = tuple((share.start * unit, share.count * unit) for share in shares)
        return [Columns(ref, ref.shape[0], pitch, cuts)]
    else:
        unit = ref.nbytes // ref.shape[0]
        rows = dict.fromkeys((share.start, share.count) for share in shares if share.count)
        pieces = []
        for start, count in rows:
            holders = [r for r, share in enumerate(shares) if (share.start, share.count) == (start, count)]
            pieces.append(Stretch(ref, start * unit, count * unit, tuple(holders)))
    for rank, share in enumerate(shares):
        if share.padding:
            pieces.append(Constant(b"\0", share.padding * unit, (rank,)))
    return pieces
