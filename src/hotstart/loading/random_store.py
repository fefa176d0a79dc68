"""Random weights (``--load-format dummy``): the shapes of a model without its files' bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from hotstart.device.generator import new_generator
from hotstart.models.spec import WeightSpec


class RandomStore:
    """:class:`~hotstart.models.base.Store` that makes a tensor when it is asked for.

    Matrices are normal with a variance of 1 / inputs, vectors are ones: values stay finite.
    """

    def __init__(self, specs: list[WeightSpec], dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype = dtype
        self._device = device
        self._slots: dict[str, list[WeightSpec]] = {}
        self._aliases = {spec.slot: spec.alias_of for spec in specs if spec.alias_of}
        self._made: dict[str, Tensor] = {}
        for spec in specs:
            if not spec.alias_of:
                self._slots.setdefault(spec.slot, []).append(spec)
        self._generator = new_generator(device).manual_seed(seed)

    def tensor(self, slot: str) -> Tensor:
        """See :class:`~hotstart.models.base.Store`."""
        name = self._aliases.get(slot, slot)
        if name not in self._made:
            specs = self._slots[name]
            shape = (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:])
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
            if len(shape) == 1:
                self._made[name] = tensor.fill_(1.0)
            else:
                self._made[name] = tensor.normal_(0, shape[-1] ** -0.5, generator=self._generator)
        return self._made[name]
