"""What is to be written, as data: tensors for ranks, made of stretches of stored ones.

All ranks' files of a stage have the same tensors of the same sizes, so one pass over the stored ones
writes as many side by side as memory allows, and each stored byte is read once for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from hotstart.checkpoint.base import TensorRef
from hotstart.checkpoint.safetensors import DTYPE_BITS


class Stretch(Struct, frozen=True):
    """Bytes of a stored tensor, for one rank or several. ``offset`` counts from the tensor's first."""

    ref: TensorRef
    offset: int
    nbytes: int
    ranks: tuple[int, ...]


class Columns(Struct, frozen=True):
    """A stored matrix cut along its rows: each rank has the same number of bytes of every row."""

    ref: TensorRef
    rows: int
    pitch: int
    """Bytes of a stored row."""
    cuts: tuple[tuple[int, int], ...]
    """Of each rank, first byte and number of bytes within a row."""


class Constant(Struct, frozen=True):
    """A value that is not stored, ``times`` over: zeros behind a vocabulary, scales of 1.0."""

    value: bytes
    times: int
    ranks: tuple[int, ...]


class Interleaved(Struct, frozen=True):
    """A matrix for one rank, of which each of several stored ones has some columns: row by row."""

    refs: tuple[TensorRef, ...]
    rows: int


Piece: TypeAlias = "Stretch | Columns | Constant | Interleaved"


class Planned(Struct, frozen=True):
    """A tensor as it will be stored, of the same shape for every rank."""

    name: str
    dtype: str
    """safetensors' name."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Each rank's bytes are those of its pieces, in this order."""
    also: tuple[str, ...] = ()
    """Names that are tied to it, for formats that store a tensor under each of its names."""

    @property
    def nbytes(self) -> int:
        """Of one rank's."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class PlannedFile(Struct, frozen=True):
    """One weight file for each rank, written side by side. ``names``: by rank."""

    names: tuple[str, ...]
    tensors: tuple[Planned, ...]
    metadata: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Tensor bytes of all ranks."""
        return len(self.names) * sum(tensor.nbytes for tensor in self.tensors)

    def groups(self, most: int) -> Iterator[PlannedFile]:
        """The files of at most so many ranks at a time."""
        for first in range(0, len(self.names), most):
            ranks = range(first, min(first + most, len(self.names)))
            tensors = (replace(tensor, pieces=_pieces_of(tensor, ranks)) for tensor in self.tensors)
            yield replace(self, names=self.names[first : ranks.stop], tensors=tuple(tensors))


class Chunk(Struct, frozen=True):
    """What is read at once. ``piece`` is what it belongs to; ``offset`` is absolute in the file."""

    piece: Stretch | Columns | Interleaved
    file: int
    offset: int
    nbytes: int


def chunks(piece: Piece, most: int) -> Iterator[Chunk]:
    """The reads of a piece, of at most ``most`` bytes; of columns whole rows, at least one.

    Of interleaved matrices the same rows of all of them follow each other, together of as many bytes.
    """
    if isinstance(piece, Constant):
        return
    if isinstance(piece, Interleaved):
        pitches = [ref.nbytes // piece.rows for ref in piece.refs]
        block = max(1, most // sum(pitches))
        for row in range(0, piece.rows, block):
            for ref, pitch in zip(piece.refs, pitches, strict=True):
                rows = min(block, piece.rows - row)
                yield Chunk(piece, ref.file, ref.offset + row * pitch, rows * pitch)
        return
    start, total, step = piece.ref.offset, 0, most
    if isinstance(piece, Columns):
        total, step = piece.rows * piece.pitch, max(1, most // max(1, piece.pitch)) * piece.pitch
    else:
        start, total = start + piece.offset, piece.nbytes
    for done in range(0, total, max(1, step)):
        yield Chunk(piece, piece.ref.file, start + done, min(step, total - done))


def _pieces_of(tensor: Planned, ranks: range) -> tuple[Piece, ...]:
    """What a run of ranks has of a tensor; they count from 0."""
    found: list[Piece] = []
    for piece in tensor.pieces:
        if isinstance(piece, Columns):
            found.append(replace(piece, cuts=piece.cuts[ranks.start : ranks.stop]))
        elif isinstance(piece, Interleaved):
            found.append(piece)
        elif own := tuple(rank - ranks.start for rank in piece.ranks if rank in ranks):
            found.append(replace(piece, ranks=own))
    return tuple(found)


def unchanged(ref: TensorRef) -> Planned:
    """A stored tensor as it is, for one rank."""
    return Planned(ref.name, ref.dtype, ref.shape, (Stretch(ref, 0, ref.nbytes, (0,)),))


def split(tensors: Sequence[Planned], most: int) -> list[list[Planned]]:
    """Runs of tensors of at most ``most`` bytes, in order; a larger tensor is a run of its own."""
    runs: list[list[Planned]] = []
    size = 0
    for tensor in tensors:
        if not runs or size + tensor.nbytes > most:
            runs.append([])
            size = 0
        runs[-1].append(tensor)
        size += tensor.nbytes
    return runs
