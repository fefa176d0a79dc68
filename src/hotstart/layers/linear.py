"""Linear layers over weights that may lie in several parts."""

from __future__ import annotations

import torch
from torch import Tensor

Weight = Tensor | tuple[Tensor, ...]
"""One tensor, or its parts along dimension 0, in order."""


class Linear:
    """``y = x Wᵀ + b``. Keeps views of the given tensors and reads nothing when it is made.

    weight: [out, in], or parts of it; bias: [out], or parts of it, of any partition.
    """

    __slots__ = ("biases", "parts", "weight")

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        parts = weight if isinstance(weight, tuple) else (weight,)
        # torch.mm with a bound transpose spares the dispatches that F.linear adds to each call.
        self.parts = tuple(part.t() for part in parts)
        self.weight = self.parts[0] if len(parts) == 1 else None
        self.biases = () if bias is None else _partition(bias, [part.shape[0] for part in parts])

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        if self.biases:
            outputs = [torch.addmm(b, x, w) for b, w in zip(self.biases, self.parts, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if self.weight is not None:
            return torch.mm(x, self.weight)
        return torch.cat([torch.mm(x, part) for part in self.parts], 1)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + y`` in one kernel where the weight is whole. residual: [tokens, out]."""
        if self.weight is None:
            return residual + self(x)
        if self.biases:
            residual = residual + self.biases[0]
        return torch.addmm(residual, x, self.weight)

    def join(self) -> bool:
        """Copy the parts into one matrix; False when it is one already.

        One product in place of three: less to dispatch, fewer barriers between threads.
        """
        if self.weight is not None:
            return False
        self.weight = torch.cat([part.t() for part in self.parts]).t()
        self.parts = (self.weight,)
        if self.biases:
            self.biases = (torch.cat(self.biases),)
        return True


def whole(weight: Weight) -> Tensor:
    """One tensor; parts are joined by a copy."""
    return torch.cat(weight) if isinstance(weight, tuple) else weight


def _partition(bias: Weight, sizes: list[int]) -> tuple[Tensor, ...]:
    """The bias cut as the weight is cut; a copy (of vectors) only where its own parts differ."""
    if isinstance(bias, tuple) and [part.shape[0] for part in bias] == sizes:
        return bias
    return tuple(whole(bias).split_with_sizes(sizes))
