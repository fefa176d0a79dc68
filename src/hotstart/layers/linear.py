"""Linear layers over weights that may lie in several parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

Weight = Tensor | tuple[Tensor, ...]
"""One tensor, or its parts along dimension 0, in order."""


class Linear:
    """``y = x Wᵀ + b``. Keeps views of the given tensors and reads nothing when it is made.

    weight: [out, in], or parts of it; bias: [out], or parts of it, of any partition.
    """

    __slots__ = ("biases", "packed", "parts", "weight")

    def __init__(self, weight: Weight, bias: Weight | None = None) -> None:
        parts = weight if isinstance(weight, tuple) else (weight,)
        self.biases: tuple[Tensor, ...] = ()
        if bias is not None:
            self.biases = bias if isinstance(bias, tuple) else (bias,)
            if _ends(parts) != _ends(self.biases):
                ends = sorted({*_ends(parts), *_ends(self.biases)})
                parts, self.biases = _cut(parts, ends), _cut(self.biases, ends)
        # torch.mm with a bound transpose spares the dispatches that F.linear adds to each call.
        self.parts = tuple(part.t() for part in parts)
        self.packed: Tensor | None = None
        self.weight = self.parts[0] if len(parts) == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        if self.packed is not None:
            return _packed_linear(x, self.packed, self.biases[0] if self.biases else None)
        if self.biases:
            outputs = [torch.addmm(b, x, w) for b, w in zip(self.biases, self.parts, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if self.weight is not None:
            return torch.mm(x, self.weight)
        return torch.cat([torch.mm(x, part) for part in self.parts], 1)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + y`` in one kernel where the weight is whole. residual: [tokens, out]."""
        if self.packed is not None:
            bias = self.biases[0] if self.biases else None
            return cast("Tensor", _mkldnn().binary(x, residual, self.packed, bias, "add"))
        if self.weight is None:
            return residual + self(x)
        if self.biases:
            residual = residual + self.biases[0]
        return torch.addmm(residual, x, self.weight)

    def pack(self) -> bool:
        """Copy the weight into the form that is fastest here; False when it is in it already.

        On CPU in bfloat16 that is oneDNN's blocked layout, which halves the time of a product with
        few tokens; elsewhere one matrix in place of several parts, which saves dispatches and
        barriers between threads.
        """
        if self.packed is not None:
            return False
        whole = torch.cat([part.t() for part in self.parts]) if self.weight is None else self.weight.t()
        if _can_pack(whole):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(whole, None)
            self.weight, self.parts = None, ()
        elif self.weight is None:
            self.weight = whole.t()
            self.parts = (self.weight,)
        else:
            return False
        if len(self.biases) > 1:
            self.biases = (torch.cat(self.biases),)
        return True


def packing(linears: dict[str, Linear], may_copy: Callable[[str], bool]) -> Iterator[str]:
    """Pack one after another; yields the slots that were copied."""
    for slot, linear in linears.items():
        if may_copy(slot) and linear.pack():
            yield slot


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@cache
def _mkldnn() -> Any:
    """The operator's overloads, looked up once: each access through ``torch.ops`` costs a microsecond."""
    return torch.ops.mkldnn._linear_pointwise


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return cast("Tensor", _mkldnn().default(x, packed, bias, "none", [], ""))


def whole(weight: Weight) -> Tensor:
    """One tensor; parts are joined by a copy."""
    return torch.cat(weight) if isinstance(weight, tuple) else weight


def _cut(parts: tuple[Tensor, ...], ends: list[int]) -> tuple[Tensor, ...]:
    """Views of the parts that end at ``ends``, in rows counted over all of them."""
    pieces: list[Tensor] = []
    begin = 0
    for part in parts:
        end = begin + part.shape[0]
        inside = [at - begin for at in ends if begin < at <= end]
        sizes = [right - left for left, right in pairwise([0, *inside])]
        pieces += part.split_with_sizes(sizes) if len(sizes) > 1 else [part]
        begin = end
    return tuple(pieces)


def _ends(parts: tuple[Tensor, ...]) -> list[int]:
    return list(accumulate(part.shape[0] for part in parts))
