"""Tensors as views of a file image: the CPU's weight store."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from hotstart.checkpoint.base import TensorRef
from hotstart.loading.footprint import is_copied
from hotstart.loading.image import Image
from hotstart.models.spec import DTYPES, WeightSpec


class ImageStore:
    """:class:`~hotstart.models.base.Store` over an :class:`~hotstart.loading.image.Image`.

    Parts of a slot that are neighbours in their file become one tensor, others a tuple: views, bound
    before their bytes have arrived. What is stored in another dtype than ``dtype``, or misaligned, is
    copied into memory of its own, fused, and the stored bytes are given back at once: that waits for
    the readers, and raises what they raise.
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
        # Slots whose stored bytes are gone. A tied weight asks for its slot a second time; of the
        # others no copy is kept here (None), or it would outlive one that is packed later.
        self._copies: dict[str, Tensor | None] = {}
        self._slots: dict[str, list[tuple[WeightSpec, TensorRef]]] = {}
        for spec, ref in weights:
            self._slots.setdefault(spec.slot, []).append((spec, ref))
        for rows in self._slots.values():
            rows.sort(key=lambda row: row[0].at)

    def tensor(self, slot: str) -> Tensor | tuple[Tensor, ...]:
        """See :class:`~hotstart.models.base.Store`."""
        name = self._aliases.get(slot, slot)
        if name in self._copies:
            copied = self._copies[name]
            assert copied is not None, f"{name} was copied and given out before"
            return copied
        refs = [ref for _, ref in self._slots[name]]
        if is_copied(refs, str(self._dtype).removeprefix("torch.")):
            self._image.wait()
            copy = self._copy(refs)
            self._copies[name] = copy if name in self._aliases.values() else None
            self._release(refs)
            return copy
        if all(_adjacent(left, right) for left, right in pairwise(refs)):
            return self._view(refs)
        return tuple(self._view([ref]) for ref in refs)

    def may_release(self, slot: str) -> bool:
        """Whether nobody needs the slot's bytes once it is copied, or its file still has them.

        A tied embedding is read on, a few rows at a time: where it is mapped, released pages come back.
        """
        name = self._aliases.get(slot, slot)
        shared = name != slot or name in self._aliases.values()
        mapped = name not in self._copies and all(self._image.is_mapped(r.file) for _, r in self._slots[name])
        return mapped or not shared

    def release(self, slot: str) -> None:
        """Give back the memory behind a slot whose tensors are not used any more."""
        self._release([ref for _, ref in self._slots[self._aliases.get(slot, slot)]])

    def _release(self, refs: list[TensorRef]) -> None:
        for ref in refs:
            self._image.release(ref.file, ref.offset, ref.nbytes)

    def _copy(self, refs: list[TensorRef]) -> Tensor:
        """The parts in the model's dtype, stacked along dimension 0."""
        copy = torch.empty(_shape(refs), dtype=self._dtype)
        rows = [ref.shape[0] for ref in refs] if copy.dim() else []
        for target, ref in zip(copy.split_with_sizes(rows) if rows else (copy,), refs, strict=True):
            target.copy_(self._view([ref]))
        return copy

    def _view(self, run: list[TensorRef]) -> Tensor:
        """One tensor over neighbouring parts, stacked along dimension 0; one that is misaligned, a copy."""
        first, shape = run[0], _shape(run)
        dtype = getattr(torch, DTYPES[first.dtype][0])
        memory, count = self._image.memory(first.file), prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)  # frombuffer takes no less than one
        if first.offset % dtype.itemsize:
            nbytes = count * dtype.itemsize
            raw = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=first.offset)
            return raw.clone().view(dtype).view(shape)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=first.offset).view(shape)


def _shape(parts: list[TensorRef]) -> tuple[int, ...]:
    """Of the parts stacked along dimension 0."""
    first = parts[0]
    return (sum(ref.shape[0] for ref in parts), *first.shape[1:]) if first.shape else ()


def _adjacent(left: TensorRef, right: TensorRef) -> bool:
    return (
        left.file == right.file
        and left.offset + left.nbytes == right.offset
        and left.dtype == right.dtype
        and left.shape[1:] == right.shape[1:]
    )
