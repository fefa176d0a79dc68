"""Weights that come as whole tensors by name: the store that a :class:`TensorStream` fills."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotstart.checkpoint.wording import count, few
from hotstart.errors import ModelError
from hotstart.loading.arena import Layout, Part, Slot
from hotstart.models.spec import DTYPES

if TYPE_CHECKING:
    from hotstart.checkpoint.base import TensorRef


class StreamStore:
    """:class:`~hotstart.models.base.Store` over a layout, whose slots are allocated at once.

    On a CPU each slot has memory of its own, which the system gives page by page as it is filled, and
    which goes when the model has packed it; on a GPU all lie in one allocation, as in an arena. A tensor
    that was put is copied into its slots, converted on the way, and forgotten: beyond the weights no
    more exists than the one tensor at hand.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        stored: dict[str, TensorRef],
        library: str,
    ) -> None:
        """``stored``: every tensor of the files by name; ``library`` is what errors call the stream."""
        self._layout = layout
        self._stored = stored
        self._library = library
        self._device = device
        self._parts: dict[str, list[Part]] = defaultdict(list)
        for part in layout.parts:
            self._parts[part.ref.name].append(part)
        self._seen: set[str] = set()
        self._slots = _allocate(layout, device)

    @property
    def on_gpu(self) -> bool:
        """Whether the slots lie on a GPU."""
        return self._device.type == "cuda"

    def tensor(self, slot: str) -> Tensor:
        """See :class:`~hotstart.models.base.Store`; it may be asked before the bytes have arrived."""
        return self._slots[self._layout.aliases.get(slot, slot)]

    def put(self, name: str, whole: Tensor) -> int:
        """Copy a tensor to where the model wants it; returns its bytes, 0 for one that it does not use.

        Raises ModelError for a name that no file has, one that came before, another shape or dtype.
        """
        ref = self._stored.get(name)
        if ref is None:
            raise ModelError(
                f"{self._library} gave a tensor {name!a}, which no weight file has",
                expected="the tensors of the files",
                advice="The files may have changed while they were read: start again",
            )
        if name in self._seen:
            raise ModelError(f"{self._library} gave the tensor {name!a} twice", expected="each tensor once")
        self._seen.add(name)
        self._check(ref, whole)
        parts = self._parts.get(name, ())
        for part in parts:
            target = self._slots[part.slot]
            if ref.shape:
                rows = part.ref.shape[0]  # fewer than are stored where some only pad
                target, wanted = target.narrow(0, part.row, rows), whole.narrow(0, 0, rows)
            else:
                wanted = whole
            target.copy_(wanted)
        if whole.is_cuda and parts:
            torch.cuda.current_stream(self._device).synchronize()  # its memory is reused after this
        return ref.nbytes if parts else 0

    def finish(self) -> None:
        """Raise ModelError when a tensor that the model needs has not come."""
        missing = [name for name in self._parts if name not in self._seen]
        if missing:
            raise ModelError(
                f"{self._library} ended without {count(len(missing), 'tensor')}: {few(missing)}",
                expected="every tensor of the files",
                advice="Copy or convert the files again; hotstart check tells what their headers hold",
            )

    def may_release(self, slot: str) -> bool:
        """Whether the slot's memory goes when nobody uses it: not on a GPU, nor where a weight is tied."""
        name = self._layout.aliases.get(slot, slot)
        shared = name != slot or name in self._layout.aliases.values()
        return self._device.type == "cpu" and not shared

    def release(self, slot: str) -> None:
        """Forget a slot whose tensor the model uses no more."""
        del self._slots[slot]

    def _check(self, ref: TensorRef, whole: Tensor) -> None:
        kind = str(whole.dtype).removeprefix("torch.")
        if tuple(whole.shape) == ref.shape and kind == DTYPES.get(ref.dtype, (kind,))[0]:
            return
        raise ModelError(
            f"{self._library} gave {ref.name} as {kind} {list(whole.shape)}",
            expected=f"{DTYPES[ref.dtype][0]} {list(ref.shape)}, as its file's header has it",
            advice="The files may have changed while they were read: start again",
        )


def _allocate(layout: Layout, device: torch.device) -> dict[str, Tensor]:
    if device.type == "cpu":
        return {
            name: torch.empty(slot.shape, dtype=getattr(torch, slot.dtype))
            for name, slot in layout.slots.items()
        }
    whole = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    return {name: _view(whole, slot) for name, slot in layout.slots.items()}


def _view(whole: Tensor, slot: Slot) -> Tensor:
    raw = whole[slot.offset : slot.offset + slot.nbytes]
    return raw.view(getattr(torch, slot.dtype)).view(slot.shape)
