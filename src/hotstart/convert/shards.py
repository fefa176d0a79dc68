"""``convert safetensors``: the same tensors in files of another size."""

from __future__ import annotations

from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.layout import SINGLE
from hotstart.convert.job import Plan
from hotstart.convert.planned import PlannedFile, split, unchanged

_METADATA = {"format": "pt"}


def plan_shards(checkpoint: Checkpoint, shard_size: int) -> Plan:
    """Files of at most ``shard_size`` bytes of tensors, which follow each other as they are stored.

    A larger tensor has a file of its own; what fits into one file needs no index.
    """
    refs = sorted(checkpoint.tensors.values(), key=lambda ref: (ref.file, ref.offset, ref.name))
    runs = split([unchanged(ref) for ref in refs], shard_size) or [[]]
    if len(runs) == 1:
        return Plan((PlannedFile((SINGLE,), tuple(runs[0]), _METADATA),))
    names = [f"model-{number:05}-of-{len(runs):05}.safetensors" for number in range(1, len(runs) + 1)]
    files = tuple(PlannedFile((name,), tuple(run), _METADATA) for name, run in zip(names, runs, strict=True))
    return Plan(files, {tensor.name: file.names[0] for file in files for tensor in file.tensors})
