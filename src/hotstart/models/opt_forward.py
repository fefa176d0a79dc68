"""OPT's forward. A layer is a pure function of hidden states, weights and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hotstart.layers.activation import activation
from hotstart.layers.linear import Linear, packing, whole
from hotstart.layers.norm import LayerNorm
from hotstart.models.opt import POSITION_OFFSET

if TYPE_CHECKING:
    from torch import Tensor

    from hotstart.attention.base import AttentionBackend
    from hotstart.models.base import Geometry, Store


@dataclass(slots=True)
class LayerWeights:
    """One layer, bound once."""

    index: int
    attn_norm: LayerNorm
    qkv: Linear
    o: Linear
    mlp_norm: LayerNorm
    fc1: Linear
    activation: Callable[[Tensor], Tensor]
    fc2: Linear
    heads: int


@dataclass(slots=True)
class StepContext:
    """What all layers of a step share."""

    attend: Callable[[Tensor, Tensor, Tensor, int, Any], Tensor]
    meta: Any


def pre_norm_layer(hidden: Tensor, w: LayerWeights, step: StepContext) -> Tensor:
    """hidden: [tokens, hidden_size]; returns the same shape."""
    hidden = w.o.added_to(hidden, _attention(w.attn_norm(hidden), w, step))
    return w.fc2.added_to(hidden, w.activation(w.fc1(w.mlp_norm(hidden))))


def post_norm_layer(hidden: Tensor, w: LayerWeights, step: StepContext) -> Tensor:
    """The order of models with ``do_layer_norm_before: false``."""
    hidden = w.attn_norm(w.o.added_to(hidden, _attention(hidden, w, step)))
    return w.mlp_norm(w.fc2.added_to(hidden, w.activation(w.fc1(hidden))))


def _attention(x: Tensor, w: LayerWeights, step: StepContext) -> Tensor:
    tokens = x.shape[0]
    q, k, v = w.qkv(x).view(tokens, 3, w.heads, -1).unbind(1)
    return step.attend(q, k, v, w.index, step.meta).reshape(tokens, -1)


class OptModel:
    """See :class:`hotstart.models.base.Model`. Binds the store's tensors; reads none of them."""

    def __init__(self, geometry: Geometry, store: Store) -> None:
        g = geometry
        self.embed = whole(store.tensor("embed"))
        # Position p's row, without an addition in every step.
        self.positions = whole(store.tensor("positions"))[POSITION_OFFSET:]
        narrow = g.extra["embedding"] != g.hidden_size
        self.project_in = Linear(store.tensor("project_in")) if narrow else None
        self.project_out = Linear(store.tensor("project_out")) if narrow else None
        self.layers = [_bind(g, store, layer) for layer in range(g.num_layers)]
        self.layer = pre_norm_layer if g.extra["pre_norm"] else post_norm_layer
        self.norm = _norm(g, store, "norm") if g.extra["final_norm"] else None
        self.head = Linear(store.tensor("head"))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        meta: Any,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """See :class:`hotstart.models.base.Model`."""
        hidden = torch.embedding(self.embed, input_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + torch.embedding(self.positions, positions)
        step = StepContext(attention.attend, meta)
        for weights in self.layers:
            hidden = self.layer(hidden, weights, step)
        return hidden if self.norm is None else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See :class:`hotstart.models.base.Model`."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return self.head(hidden).float()

    def tune(self, may_copy: Callable[[str], bool]) -> Iterator[str]:
        """See :class:`hotstart.models.base.Model`."""
        linears = {"head": self.head}
        for w in self.layers:
            named = {"qkv": w.qkv, "o": w.o, "fc1": w.fc1, "fc2": w.fc2}
            linears |= {f"layers.{w.index}.{name}": linear for name, linear in named.items()}
        return packing(linears, may_copy)


def _norm(geometry: Geometry, store: Store, slot: str) -> LayerNorm:
    affine = geometry.extra["affine"]
    weight = whole(store.tensor(slot)) if affine else None
    bias = whole(store.tensor(slot + "_bias")) if affine else None
    return LayerNorm(geometry.hidden_size, weight, bias, geometry.norm_eps)


def _bind(geometry: Geometry, store: Store, layer: int) -> LayerWeights:
    g = geometry
    slot = f"layers.{layer}."

    def linear(name: str) -> Linear:
        bias = store.tensor(f"{slot}{name}_bias") if g.qkv_bias else None
        return Linear(store.tensor(slot + name), bias)

    return LayerWeights(
        index=layer,
        attn_norm=_norm(g, store, slot + "attn_norm"),
        qkv=linear("qkv"),
        o=linear("o"),
        mlp_norm=_norm(g, store, slot + "mlp_norm"),
        fc1=linear("fc1"),
        activation=activation(g.activation),
        fc2=linear("fc2"),
        heads=g.heads,
    )
