"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """``x / sqrt(mean(x²) + eps) · w`` over the last dimension, computed in float32.

    Half-precision on the CPU goes through LayerNorm, which is one kernel there where torch's
    rms_norm is eight: beside its mirror image, x has mean 0 and variance mean(x²). Measured for
    bfloat16, width 576: 7 µs against 13 for one token, 0.3 ms against 0.7 for 1024. In float32 there
    is nothing to convert, and rms_norm wins.
    """

    __slots__ = ("eps", "mirrored", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.weight = weight
        self.eps = eps
        self.mirrored = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
        self.shape = [2 * size if self.mirrored else size]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size]; returns the same shape and dtype."""
        if not self.mirrored:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)
        both = torch.layer_norm(torch.cat((x, x.neg()), -1), self.shape, None, None, self.eps)
        return both.narrow(-1, 0, x.shape[-1]) * self.weight


class LayerNorm:
    """``(x - mean) / sqrt(var + eps) · w + b`` over the last dimension; w and b may be absent."""

    __slots__ = ("bias", "eps", "shape", "weight")

    def __init__(self, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.shape = [size]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size]; returns the same shape and dtype."""
        return torch.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
