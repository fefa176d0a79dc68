"""How many bytes weights occupy: once they are used, and at most while they arrive. Torch-free.

Weights stored in the dtype they are used in occupy what the files do. Where they are converted, the
bytes as stored and the bytes as used exist side by side for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, TensorRef
from hotstart.loading.arena import Layout
from hotstart.loading.match import Matched
from hotstart.models.spec import DTYPES

_ITEMSIZE = dict(DTYPES.values())


class Footprint(Struct, frozen=True):
    """Bytes."""

    held: int
    """While the model is used."""
    peak: int
    """The most at once while it is loaded."""


def of_images(checkpoint: Checkpoint, matched: Matched) -> Footprint:
    """Of whole files in memory, whose tensors are used where they lie or copied slot by slot.

    Whatever the order of the slots: what copies add to what they replace, and the slot at work.
    """
    held = peak = sum(file.size for file in checkpoint.files)
    at_work = 0
    loads = sorted(matched.loads, key=lambda load: load[0].slot)
    for _, group in groupby(loads, key=lambda load: load[0].slot):
        refs = [ref for _, ref in group]
        if not is_copied(refs, matched.dtype):
            continue
        stored = sum(ref.nbytes for ref in refs)
        copy = sum(ref.nbytes // DTYPES[ref.dtype][1] for ref in refs) * _ITEMSIZE[matched.dtype]
        held += copy - stored
        peak += max(0, copy - stored)
        at_work = max(at_work, stored + copy)
    return Footprint(held, peak + at_work)


def of_arena(layout: Layout) -> Footprint:
    """Of an arena: its slots, and the staging memory of what is cast into them."""
    return Footprint(layout.nbytes, layout.nbytes + layout.staging_bytes)


def of_stream(layout: Layout, largest: int, buffer: int) -> Footprint:
    """Of tensors that come one by one into the slots of a layout, out of a library's buffer.

    ``largest``: bytes of the largest tensor. A library may hold its buffer and a copy of one tensor.
    """
    return Footprint(layout.nbytes, layout.nbytes + largest + buffer)


def is_copied(parts: Sequence[TensorRef], dtype: str) -> bool:
    """Whether a slot of these parts cannot be used where the file has it; ``dtype`` is torch's name.

    Another dtype needs a conversion, and some instructions fault on a misaligned address.
    """
    return any(DTYPES[ref.dtype][0] != dtype or ref.offset % DTYPES[ref.dtype][1] != 0 for ref in parts)
