"""A plain checkpoint out of one that was cut for ranks: the rules by which ranks are cut, the other way.

What several ranks hold alike is compared before it is taken from one of them: a join that is not exact is
refused with the tensor's name.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from hotstart.checkpoint.base import Checkpoint, ShardFile, TensorRef
from hotstart.checkpoint.folder import Folder
from hotstart.checkpoint.sharded_names import Rank
from hotstart.convert.planned import Interleaved, Piece, Planned, Stretch
from hotstart.errors import ModelError
from hotstart.loading.match import FLOATS
from hotstart.loading.rank import match_rank
from hotstart.models.fused_names import fused_name, fused_tensors
from hotstart.models.registry import family_for
from hotstart.models.spec import WeightSpec

log = logging.getLogger("hotstart.storage")

_STEP = 1 << 20


class Joined(Struct, frozen=True):
    """``checkpoint`` has the files of all ranks; ``tensors`` are made of stretches of them."""

    checkpoint: Checkpoint
    tensors: tuple[Planned, ...]


class _Share(Struct, frozen=True):
    """``count`` of a stored tensor's dimension ``dim`` from ``start`` on, and where a rank has them."""

    dim: int
    start: int
    count: int
    ref: TensorRef
    """Of the rank's tensor."""
    offset: int
    nbytes: int
    """Within the rank's tensor."""


class _Files:
    """The weight files of all ranks, and bytes of them."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files: list[ShardFile] = []

    def add(self, checkpoint: Checkpoint) -> int:
        """The number that its first file has here."""
        first = len(self.files)
        self.files += checkpoint.files
        return first

    def digest(self, ref: TensorRef, offset: int, nbytes: int) -> bytes:
        """Of a stretch of a tensor. Raises StorageError."""
        source = self.folder.source(self.files[ref.file])
        found, stop = hashlib.sha256(), threading.Event()
        try:
            for done in range(0, nbytes, _STEP):
                data = bytearray(min(_STEP, nbytes - done))
                source.read_into(memoryview(data), ref.offset + offset + done, stop)
                found.update(data)
        finally:
            source.close()
        return found.digest()


def join(
    folder: Folder, config: dict[str, object], ranks: Sequence[tuple[Rank, Checkpoint]], shown: str
) -> Joined:
    """Plan the plain checkpoint, under the family's own names.

    ``ranks``: all of them, each with its files. Raises ModelError for an architecture that is not supported,
    for files that do not fit it, and for what cannot be joined exactly; StorageError.
    """
    family = family_for(config)
    specs = family.specs(family.geometry(config))
    files = _Files(folder)
    shares: dict[tuple[str, int], list[_Share]] = {}
    for rank, checkpoint in ranks:
        first = files.add(checkpoint)
        stored = {n: replace(ref, file=ref.file + first) for n, ref in checkpoint.tensors.items()}
        tied = _without_copies(specs, stored, files, shown)
        matched = match_rank(specs, replace(checkpoint, tensors=tied, files=tuple(files.files)), rank)
        for warning in matched.warnings:
            log.warning("%s", warning)
        refs = {spec.slot: ref for spec, ref in matched.loads}
        for fused in fused_tensors(specs, rank.pp_size, rank.pp_rank):
            ref, offset = refs[fused.specs[0].slot], 0
            for part in fused.slices(rank.tp_rank, rank.tp_size):
                unit = prod(part.spec.shape) // (part.spec.shape[part.dim] if part.spec.shape else 1)
                nbytes = part.count * unit * _itemsize(ref)
                share = _Share(part.dim, part.start, part.count, ref, offset, nbytes)
                shares.setdefault((part.spec.slot, part.spec.at), []).append(share)
                offset += nbytes
    plain = [spec for spec in specs if spec.alias_of is None]
    tensors = tuple(_joined(spec, shares[spec.slot, spec.at], files, shown) for spec in plain)
    return Joined(Checkpoint(shown, tuple(files.files), {}, folder=folder), tensors)


def _itemsize(ref: TensorRef) -> int:
    return ref.nbytes // max(1, prod(ref.shape))


def _without_copies(
    specs: Sequence[WeightSpec], stored: Mapping[str, TensorRef], files: _Files, shown: str
) -> dict[str, TensorRef]:
    """What a rank has, without a second copy of tied tensors."""
    found = dict(stored)
    slots = {spec.slot: fused_name(spec.stored[0]) for spec in specs}
    for spec in specs:
        copy, original = fused_name(spec.stored[0]), slots.get(spec.alias_of or "")
        if original in found and copy in found:
            one, other = found[original], found.pop(copy)
            if one.nbytes != other.nbytes or (
                files.digest(one, 0, one.nbytes) != files.digest(other, 0, other.nbytes)
            ):
                raise ModelError(
                    f"tie_word_embeddings is true in {shown}/config.json, but {copy} differs from {original}",
                    expected="no output head, or one that equals the embedding",
                    advice="config.json and the weights belong to different models: copy both again",
                )
    return found


def _joined(spec: WeightSpec, shares: Sequence[_Share], files: _Files, shown: str) -> Planned:
    name = spec.stored[0]
    dtypes = sorted({share.ref.dtype for share in shares})
    if len(dtypes) > 1 or dtypes[0] not in FLOATS:
        raise ModelError(
            f"{name} cannot be joined: ranks of {shown} have it as {' and '.join(dtypes)}",
            expected="one dtype in all ranks",
            advice="Copy all files again from one checkpoint",
        )
    by_start: dict[int, list[_Share]] = {}
    for share in shares:
        if share.count:
            by_start.setdefault(share.start, []).append(share)
    for alike in by_start.values():
        digests = {files.digest(each.ref, each.offset, each.nbytes) for each in alike} if alike[1:] else set()
        if len(digests) > 1:
            where = ", ".join(sorted({files.files[each.ref.file].path for each in alike}))
            raise ModelError(
                f"{name} cannot be joined: what ranks must hold alike of it differs ({where})",
                expected="files of one checkpoint",
                advice="Copy all files again from where they were written",
            )
    parts = [by_start[start][0] for start in sorted(by_start)]
    pieces: tuple[Piece, ...]
    if spec.shard is not None and spec.shard.dim == 1 and len(parts) > 1:
        pieces = (Interleaved(tuple(part.ref for part in parts), spec.shape[0]),)
    else:
        pieces = tuple(Stretch(part.ref, part.offset, part.nbytes, (0,)) for part in parts)
    return Planned(name, dtypes[0], spec.shape, pieces)
