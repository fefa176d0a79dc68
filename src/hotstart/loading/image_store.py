"""Tensors as views of a file image: the CPU's weight store."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from hotstart.checkpoint.base import TensorRef
from hotstart.loading.image import Image
from hotstart.models.spec import DTYPES, WeightSpec


class ImageStore:
    """:class:`~hotstart.models.base.Store` over an :class:`~hotstart.loading.image.Image`.

    Parts of a slot that are neighbours in their file become one tensor, others a tuple: views, bound
    before their bytes have arrived. What is stored in another dtype than ``dtype`` is converted into
    memory of its own, fused, and what is misaligned is copied: that waits for the readers, and raises
    what they raise.
    """

    def __init__(
        self,
        image: Image,
        weights: list[tuple[WeightSpec, TensorRef]],
        aliases: dict[str, str],
        dtype: torch.dtype,
    ) -> None:
        self._image = image
        self._aliases = aliases
        self._dtype = dtype
        self._slots: dict[str, list[tuple[WeightSpec, TensorRef]]] = {}
        for spec, ref in weights:
            self._slots.setdefault(spec.slot, []).append((spec, ref))
        for rows in self._slots.values():
            rows.sort(key=lambda row: row[0].at)

    def has(self, slot: str) -> bool:
        """See :class:`~hotstart.models.base.Store`."""
        return self._aliases.get(slot, slot) in self._slots

    def tensor(self, slot: str) -> Tensor | tuple[Tensor, ...]:
        """See :class:`~hotstart.models.base.Store`."""
        refs = [ref for _, ref in self._slots[self._aliases.get(slot, slot)]]
        if any(self._must_convert(ref) for ref in refs):
            self._image.wait()
            parts = [self._view([ref]).to(self._dtype) for ref in refs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if all(_adjacent(left, right) for left, right in pairwise(refs)):
            return self._view(refs)
        return tuple(self._view([ref]) for ref in refs)

    def release(self, slot: str) -> None:
        """Give back the memory behind a slot whose tensors are not used any more."""
        for _, ref in self._slots[slot]:
            self._image.release(ref.file, ref.offset, ref.nbytes)

    def _must_convert(self, ref: TensorRef) -> bool:
        return bool(getattr(torch, DTYPES[ref.dtype][0]) != self._dtype)

    def _view(self, run: list[TensorRef]) -> Tensor:
        """One tensor over neighbouring parts, stacked along dimension 0."""
        first = run[0]
        dtype = getattr(torch, DTYPES[first.dtype][0])
        shape = (sum(ref.shape[0] for ref in run), *first.shape[1:]) if first.shape else ()
        memory = self._image.memory(first.file)
        if first.offset % dtype.itemsize:
            # Misaligned for its type: some instructions fault on it, so it is copied.
            self._image.wait()
            data = bytearray(memory[first.offset : first.offset + sum(ref.nbytes for ref in run)])
            return torch.frombuffer(data, dtype=dtype).view(shape)
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=first.offset).view(shape)


def _adjacent(left: TensorRef, right: TensorRef) -> bool:
    return (
        left.file == right.file
        and left.offset + left.nbytes == right.offset
        and left.dtype == right.dtype
        and left.shape[1:] == right.shape[1:]
    )
