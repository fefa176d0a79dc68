"""The forward of the Llama shape. A layer is a pure function of hidden states, weights and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hotstart.layers.activation import gated
from hotstart.layers.linear import Linear, packing, whole
from hotstart.layers.norm import RMSNorm
from hotstart.layers.rope import Rope, rotate

if TYPE_CHECKING:
    from torch import Tensor

    from hotstart.attention.base import AttentionBackend
    from hotstart.models.base import Geometry, Store


@dataclass(slots=True)
class LayerWeights:
    """One layer, bound once. ``split``: heads of q and k together, then of v."""

    index: int
    attn_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(slots=True)
class StepContext:
    """What all layers of a step share. cos, sin: [tokens, 1, head_dim], sin signed for ``rotate``."""

    cos: Tensor
    sin: Tensor
    attend: Callable[[Tensor, Tensor, Tensor, int, Any], Tensor]
    meta: Any


def decoder_layer(hidden: Tensor, w: LayerWeights, step: StepContext) -> Tensor:
    """hidden: [tokens, hidden_size]; returns the same shape."""
    tokens = hidden.shape[0]
    qkv = w.qkv(w.attn_norm(hidden)).view(tokens, -1, w.head_dim)
    qk, v = qkv.split_with_sizes([w.heads + w.kv_heads, w.kv_heads], 1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = qk.split_with_sizes([w.heads, w.kv_heads], 1)
        qk = torch.cat((w.q_norm(q), w.k_norm(k)), 1)
    q, k = rotate(qk, step.cos, step.sin).split_with_sizes([w.heads, w.kv_heads], 1)
    attended = step.attend(q, k, v, w.index, step.meta)
    hidden = w.o.added_to(hidden, attended.reshape(tokens, -1))
    return w.down.added_to(hidden, w.activation(w.gate_up(w.mlp_norm(hidden))))


class LlamaModel:
    """See :class:`hotstart.models.base.Model`. Binds the store's tensors; reads none of them."""

    def __init__(self, geometry: Geometry, store: Store, *, dtype: torch.dtype, device: torch.device) -> None:
        self.embed = whole(store.tensor("embed"))
        self.layers = [_bind(geometry, store, layer) for layer in range(geometry.num_layers)]
        self.norm = RMSNorm(whole(store.tensor("norm")), geometry.norm_eps)
        self.head = Linear(store.tensor("head"))
        self.rope = Rope(geometry.rope, geometry.head_dim, dtype=dtype, device=device)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        meta: Any,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """See :class:`hotstart.models.base.Model`."""
        cos, sin = self.rope(positions, lengths)
        step = StepContext(cos, sin, attention.attend, meta)
        hidden = torch.embedding(self.embed, input_ids)
        for weights in self.layers:
            hidden = decoder_layer(hidden, weights, step)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See :class:`hotstart.models.base.Model`."""
        return self.head(hidden).float()

    def tune(self, may_copy: Callable[[str], bool]) -> Iterator[str]:
        """See :class:`hotstart.models.base.Model`."""
        linears = {"head": self.head}
        for w in self.layers:
            named = {"qkv": w.qkv, "o": w.o, "gate_up": w.gate_up, "down": w.down}
            linears |= {f"layers.{w.index}.{name}": linear for name, linear in named.items()}
        return packing(linears, may_copy)


def _bind(geometry: Geometry, store: Store, layer: int) -> LayerWeights:
    g = geometry
    slot = f"layers.{layer}."

    def linear(name: str, bias: bool) -> Linear:
        return Linear(store.tensor(slot + name), store.tensor(f"{slot}{name}_bias") if bias else None)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(whole(store.tensor(slot + name)), g.norm_eps)

    return LayerWeights(
        index=layer,
        attn_norm=norm("attn_norm"),
        qkv=linear("qkv", g.qkv_bias),
        q_norm=norm("q_norm") if g.qk_norm else None,
        k_norm=norm("k_norm") if g.qk_norm else None,
        o=linear("o", g.out_bias),
        mlp_norm=norm("mlp_norm"),
        gate_up=linear("gate_up", g.mlp_bias),
        activation=gated(g.activation),
        down=linear("down", g.mlp_bias),
        heads=g.heads,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
    )
