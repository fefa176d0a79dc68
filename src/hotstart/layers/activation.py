"""Activations by the names that configurations use."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function called ``name`` in ``hidden_act``. It may overwrite its argument."""
    return _FUNCTIONS[name]


def gated(name: str) -> Callable[[Tensor], Tensor]:
    """``act(gate) · up`` for [tokens, 2 · size] holding gate, then up; overwrites its argument."""
    act = _FUNCTIONS[name]

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, 1)
        return act(gate) * up

    return apply


def _silu(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": torch.relu_,
    "silu": _silu,
    "swish": _silu,
}
