"""Weights in one allocation of device memory, found by slot.

The layout follows from specs and headers alone, so the bytes flow before torch is imported; torch
then views them where they lie. Slots begin at multiples of 256 bytes. The rows of a slot (q, k and
v; gate and up) are stacked, so a fused projection is one tensor whatever the order in the files.

Tensors stored in another dtype than the model's go to a second allocation, from which
:meth:`Arena.finish` casts them into their slots; it is freed then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

from msgspec import Struct

from hotstart.checkpoint.base import TensorRef
from hotstart.device.base import Device
from hotstart.errors import ModelError
from hotstart.loading.adopt import adopt
from hotstart.models.spec import DTYPES, WeightSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 256


class Part(Struct, frozen=True):
    """Where one stored tensor goes."""

    ref: TensorRef
    slot: str
    row: int
    """First row inside the slot."""
    staged: bool
    """True: to the staging allocation, to be cast into the slot later."""
    offset: int
    """In bytes, inside its allocation."""


class Slot(Struct, frozen=True):
    """One weight as the model asks for it."""

    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout(Struct, frozen=True):
    """The plan of an arena; torch-free."""

    slots: dict[str, Slot]
    parts: tuple[Part, ...]
    aliases: dict[str, str]
    """Tied slot → the slot whose bytes it shares."""
    nbytes: int
    staging_bytes: int

    @classmethod
    def of(
        cls,
        items: Iterable[tuple[WeightSpec, TensorRef]],
        *,
        dtype: str | None = None,
        tied: Iterable[WeightSpec] = (),
    ) -> Layout:
        """Lay out the stored tensors of a model.

        ``dtype`` is the model's (torch's name; None: as stored); it applies to floating-point
        specs whose ``finish`` is ``cast``. ``tied`` are specs with ``alias_of`` that have no item;
        items with ``alias_of`` are not given memory either.

        Raises ModelError when the rows of a slot leave a hole, overlap or differ in shape or dtype.
        """
        aliases = {spec.slot: spec.alias_of for spec in tied if spec.alias_of is not None}
        groups: dict[str, list[tuple[WeightSpec, TensorRef]]] = defaultdict(list)
        for spec, ref in items:
            if spec.alias_of is not None:
                aliases[spec.slot] = spec.alias_of
            else:
                groups[spec.slot].append((spec, ref))
        slots: dict[str, Slot] = {}
        parts: list[Part] = []
        offset = staging = 0
        for name, rows in groups.items():
            if len(rows) > 1:
                rows.sort(key=lambda row: row[0].at)
            slot = _slot(name, rows, dtype, offset)
            slots[name] = slot
            offset = _aligned(offset + slot.nbytes)
            row_bytes = slot.nbytes // slot.shape[0] if slot.shape and slot.shape[0] else 0
            for spec, ref in rows:
                staged = DTYPES[ref.dtype][0] != slot.dtype and ref.nbytes > 0
                where = staging if staged else slot.offset + spec.at * row_bytes
                parts.append(Part(ref, name, spec.at, staged, where))
                if staged:
                    staging = _aligned(staging + ref.nbytes)
        return cls(slots, tuple(parts), aliases, offset, staging)


class Arena:
    """A layout with memory behind it: the weight store of CUDA, and of converted weights.

    Readers write to :meth:`address`; the model asks :meth:`tensor`, before or after they are done.
    """

    def __init__(self, layout: Layout, device: Device) -> None:
        self.layout = layout
        self.device = device
        device.attach()
        # The spare bytes keep one copy from spanning two allocations that happen to be neighbours.
        self._base = device.allocate(layout.nbytes + ALIGNMENT)
        staging = layout.staging_bytes
        self._staging = device.allocate(staging + ALIGNMENT) if staging else None
        self._bytes: Tensor | None = None

    def address(self, part: Part) -> int:
        """Where the part's first byte goes."""
        base = self._staging if part.staged else self._base
        if base is None:
            raise RuntimeError("the arena has been finished; its staging memory is gone")
        return base + part.offset

    def tensor(self, slot: str) -> Tensor:
        """The slot as a view of the arena; imports torch. Raises KeyError for an unknown slot."""
        if self._bytes is None:
            self._bytes = self._adopt(self._base, self.layout.nbytes)
        found = self.layout.slots[self.layout.aliases.get(slot, slot)]
        return _typed(self._bytes, found.offset, found.nbytes, found.dtype, found.shape)

    def finish(self) -> None:
        """Cast what was staged into its slots; call it once all parts have arrived."""
        if self._staging is None:
            return
        staged = self._adopt(self._staging, self.layout.staging_bytes)
        for part in self.layout.parts:
            if part.staged:
                dtype = DTYPES[part.ref.dtype][0]
                source = _typed(staged, part.offset, part.ref.nbytes, dtype, part.ref.shape)
                target = self.tensor(part.slot)
                if part.ref.shape:
                    target = target.narrow(0, part.row, part.ref.shape[0])
                target.copy_(source)
        if not self.device.host_memory:
            import torch

            torch.cuda.synchronize(self.device.info.index)
        self.device.free(self._staging)
        self._staging = None

    def close(self) -> None:
        """Free the memory; tensors taken from the arena must no longer be used."""
        self._bytes = None
        if self._staging is not None:
            self.device.free(self._staging)
        self.device.free(self._base)

    def _adopt(self, address: int, nbytes: int) -> Tensor:
        return adopt(address, nbytes, None if self.device.host_memory else self.device.info.index)


def _slot(name: str, rows: list[tuple[WeightSpec, TensorRef]], dtype: str | None, offset: int) -> Slot:
    first, first_ref = rows[0]
    if len(rows) == 1 and first.at == 0 and first.shape == first_ref.shape:  # most of them, of many
        dtype = _final(first, first_ref, dtype)
        return Slot(dtype, first.shape, offset, prod(first.shape) * _ITEMSIZE[dtype])
    for spec, ref in rows:
        if tuple(spec.shape) != tuple(ref.shape):
            raise ModelError(
                f"{ref.name} has shape {list(ref.shape)}",
                expected=f"{list(spec.shape)}",
                advice="config.json and the weights belong to different models",
            )
    kept = {_final(spec, ref, dtype) for spec, ref in rows}
    if len(kept) > 1:
        names = ", ".join(f"{ref.name} {ref.dtype}" for _, ref in rows)
        raise ModelError(f"the parts of {name} differ in dtype: {names}", expected="one dtype")
    final = kept.pop()
    row = 0
    for spec, ref in rows:
        if spec.at != row or ref.shape[1:] != first_ref.shape[1:]:
            raise ModelError(
                f"{ref.name} should begin at row {spec.at} of {name}, whose rows so far end at {row}",
                expected="the parts of a fused weight to follow each other without holes",
            )
        row += ref.shape[0] if ref.shape else 0
    shape = (row, *first_ref.shape[1:]) if first.shape else ()
    return Slot(final, shape, offset, prod(shape) * _ITEMSIZE[final])


def _final(spec: WeightSpec, ref: TensorRef, dtype: str | None) -> str:
    stored = DTYPES[ref.dtype][0]
    if dtype is None or spec.finish != "cast":
        return stored
    return dtype if stored in ("float64", "float32", "float16", "bfloat16") else stored


_ITEMSIZE = dict(DTYPES.values())


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _typed(raw: Tensor, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return raw[offset : offset + nbytes].view(kind).view(shape)
