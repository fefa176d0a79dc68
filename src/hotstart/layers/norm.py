"""Normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """``x / sqrt(mean(x²) + eps) · w`` over the last dimension, computed in float32."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.shape = [weight.shape[0]]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size]; returns the same shape and dtype."""
        return torch.rms_norm(x, self.shape, self.weight, self.eps)


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
