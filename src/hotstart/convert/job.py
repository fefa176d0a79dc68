"""A conversion from beginning to end: plan, room, weights, small files, digests, publication."""

from __future__ import annotations

import json
from collections.abc import Callable

from msgspec import Struct

from hotstart.checkpoint.files import CONFIG, INDEX
from hotstart.convert.header import header, in_order
from hotstart.convert.origin import Origin, SmallFile
from hotstart.convert.planned import PlannedFile
from hotstart.convert.reading import Reader
from hotstart.convert.target import Target, put, put_sums
from hotstart.timeline import Timeline


class Plan(Struct, frozen=True):
    """What a conversion writes, beside the small files."""

    files: tuple[PlannedFile, ...]
    index: dict[str, str] | None = None
    """The file of each tensor, where files need one."""
    named: bool = False
    """Whether a library writes the weight files by their names, all of them before the first is taken in."""

    @property
    def nbytes(self) -> int:
        """Tensor bytes in all files."""
        return sum(file.nbytes for file in self.files)


_ENTRY = 800
"""Bytes that a header has of a tensor beside its name, generously."""
_FRONT = 500
_NAMED_FRONT = 256 << 10
"""Tensorizer's index has room for more tensors than there are."""

Writer = Callable[[Reader, PlannedFile, Target, Callable[[int], None]], None]
"""Writes the weight file of each rank; the function is told of bytes that were written."""


def convert(
    origin: Origin,
    plan: Plan,
    target: Target,
    *,
    writer: Writer,
    timeline: Timeline,
    memory_limit: int,
) -> None:
    """Write a model to a target that was checked; whatever ends it early leaves nothing there.

    ``memory_limit``: bytes that are read ahead. Raises ConfigError where memory is too little for what the
    plan writes, ModelError and StorageError.
    """
    weights = plan.nbytes + _overhead(plan)
    together = [target.together(_largest(file)) for file in plan.files]
    small = sum(file.size for file in origin.small.values())
    try:
        target.reserve(weights + small, named=weights if plan.named else 0)
        with timeline.phase("write weights", total=plan.nbytes) as phase:
            done = 0

            def written(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                timeline.progress(phase, done)

            with Reader(origin.checkpoint, memory_limit, origin.readers) as reader:
                for file, most in zip(plan.files, together, strict=True):
                    # A library writes its files to a disk, which has room for all of them.
                    for group in file.groups(len(file.names) if plan.named else most):
                        writer(reader, group, target, written)
        with timeline.phase("publish"):
            for name, stored in origin.small.items():
                if name != CONFIG:
                    _copy(stored, target, name)
            # A model without these is none, so whoever looks early finds nothing to start from.
            last = {INDEX: _index(plan)} if plan.index is not None else {}
            last[CONFIG] = b"".join(origin.small[CONFIG].read())
            put_sums(target, last)
            target.settle()
            for name, data in last.items():
                put(target, name, data)
            target.publish()
    except BaseException:
        target.discard()
        raise


def write_safetensors(
    reader: Reader, file: PlannedFile, target: Target, written: Callable[[int], None]
) -> None:
    """A :data:`Writer` of ordinary safetensors files."""
    tensors = in_order(file.tensors)
    head = header(tensors, file.metadata)
    size = _largest(file)
    outputs = [target.open(name, size=size, beside=len(file.names)) for name in file.names]
    for output in outputs:
        output.write(head)

    def write(rank: int, data: memoryview | bytes) -> None:
        outputs[rank].write(data)
        written(len(data))

    reader.deliver(tensors, lambda tensor: write)
    for output in outputs:
        output.close()


def _copy(stored: SmallFile, target: Target, name: str) -> None:
    output = target.open(name, size=stored.size)
    for data in stored.read():
        output.write(data)
    output.close()


def _largest(file: PlannedFile) -> int:
    """Bytes of one rank's file, generously."""
    return sum(tensor.nbytes + len(tensor.name.encode()) + _ENTRY for tensor in file.tensors) + _FRONT


def _index(plan: Plan) -> bytes:
    """As the hub's libraries write it."""
    assert plan.index is not None
    content = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(plan.index.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def _overhead(plan: Plan) -> int:
    """Bytes of headers, the index and tensors stored twice, generously."""
    tensors = [(len(file.names), tensor) for file in plan.files for tensor in file.tensors]
    twice = sum(ranks * len(tensor.also) * tensor.nbytes for ranks, tensor in tensors)
    front = _NAMED_FRONT if plan.named else _FRONT
    return twice + sum(ranks * _ENTRY for ranks, _ in tensors) + front * sum(len(f.names) for f in plan.files)
