"""``convert safetensors``: the same tensors in files of another size."""

from __future__ import annotations

from collections.abc import Sequence

from hotstart.checkpoint.layout import SINGLE
from hotstart.convert.job import Plan
from hotstart.convert.planned import Planned, PlannedFile, split

_METADATA = {"format": "pt"}


def plan_shards(tensors: Sequence[Planned], shard_size: int) -> Plan:
    """Files of at most ``shard_size`` bytes of tensors, in their order.

    A larger tensor has a file of its own; what fits into one file needs no index.
    """
    runs = split(tensors, shard_size) or [[]]
    if len(runs) == 1:
        return Plan((PlannedFile((SINGLE,), tuple(runs[0]), _METADATA),))
    names = [f"model-{number:05}-of-{len(runs):05}.safetensors" for number in range(1, len(runs) + 1)]
    files = tuple(PlannedFile((name,), tuple(run), _METADATA) for name, run in zip(names, runs, strict=True))
    return Plan(files, {tensor.name: file.names[0] for file in files for tensor in file.tensors})
