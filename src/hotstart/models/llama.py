"""The Llama shape: pre-norm, rotary positions, gated MLP. Each family is a row; torch-free.

Slots: ``embed``, per layer ``attn_norm``, ``qkv``, ``qkv_bias``, ``q_norm``, ``k_norm``, ``o``,
``o_bias``, ``mlp_norm``, ``gate_up``, ``gate_up_bias``, ``down``, ``down_bias`` (each as
``layers.N.…``), then ``norm`` and ``head``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hotstart.models.base import Geometry, Model, Store
from hotstart.models.fields import MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields
from hotstart.models.rope import longest_context, rope_parameters
from hotstart.models.spec import Shard, WeightSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LlamaFamily:
    """What tells one family of this shape from another. Defaults are transformers' for absent keys."""

    architectures: tuple[str, ...]
    biases: Literal["configured", "qkv", "none"]
    """``configured``: ``attention_bias`` and ``mlp_bias``; ``qkv``: always on q, k and v only."""
    sliding: Literal["none", "all", "late"]
    """Which layers slide by default; ``late``: from ``max_window_layers`` on, if ``use_sliding_window``."""
    qk_norm: bool = False
    head_dim: int | None = None
    """None: hidden size over heads."""
    kv_heads: int | None = None
    """None: as many as heads."""

    def geometry(self, config: dict[str, Any]) -> Geometry:
        """See :class:`hotstart.models.base.Family`."""
        fields = Fields(config)
        layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
        hidden = fields.integer("hidden_size", high=MAX_WIDTH)
        intermediate = fields.integer("intermediate_size", high=MAX_WIDTH)
        heads = fields.integer("num_attention_heads", high=MAX_HEADS)
        kv_heads = fields.integer("num_key_value_heads", high=MAX_HEADS, default=self.kv_heads or heads)
        vocab = fields.integer("vocab_size", high=MAX_VOCAB)
        positions = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
        eps = fields.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6)
        activation = fields.activation("hidden_act", "silu")
        tied = fields.flag("tie_word_embeddings", False)
        configured = self.biases == "configured"
        attention_bias = configured and fields.flag("attention_bias", False)
        mlp_bias = configured and not self.qk_norm and fields.flag("mlp_bias", False)
        fields.check()

        head_dim = self._head_dim(fields, hidden, heads)
        if heads % kv_heads:
            fields.problem(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}",
                expected="a whole number of query heads for each key/value head",
            )
        windows = self._windows(fields, layers)
        rope = rope_parameters(fields, head_dim, positions)
        fields.check()
        return Geometry(
            architecture=self.architectures[0],
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=intermediate,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            max_position_embeddings=longest_context(rope, positions),
            norm_eps=eps,
            activation=activation,
            tie_word_embeddings=tied,
            rope=rope,
            windows=windows if any(windows) else (),
            qkv_bias=attention_bias or self.biases == "qkv",
            out_bias=attention_bias,
            mlp_bias=mlp_bias,
            qk_norm=self.qk_norm,
        )

    def specs(self, geometry: Geometry) -> list[WeightSpec]:
        """See :class:`hotstart.models.base.Family`."""
        g = geometry
        vocab = Shard(0, g.vocab_size)
        embedding = (g.vocab_size, g.hidden_size)
        rows = [_weight("embed", "embed_tokens.weight", embedding, shard=vocab)]
        for layer in range(g.num_layers):
            rows += _layer(g, layer)
        rows.append(_weight("norm", "norm.weight", (g.hidden_size,)))
        rows.append(
            WeightSpec(
                slot="head",
                stored=("lm_head.weight",),
                shape=embedding,
                shard=vocab,
                alias_of="embed" if g.tie_word_embeddings else None,
            )
        )
        return rows

    def build(
        self,
        geometry: Geometry,
        store: Store,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> Model:
        """See :class:`hotstart.models.base.Family`."""
        from hotstart.models.llama_forward import LlamaModel

        return LlamaModel(geometry, store, dtype=dtype, device=device)

    def _head_dim(self, fields: Fields, hidden: int, heads: int) -> int:
        head_dim = fields.optional_integer("head_dim", high=MAX_WIDTH) or self.head_dim
        if head_dim is not None:
            return head_dim
        if hidden % heads:
            fields.problem(
                f"hidden_size {hidden} is no multiple of num_attention_heads {heads}",
                expected="a multiple, or an explicit head_dim",
            )
        return hidden // heads

    def _windows(self, fields: Fields, layers: int) -> tuple[int, ...]:
        """The window of each layer; 0 where attention is full."""
        window = fields.optional_integer("sliding_window", high=MAX_CONTEXT)
        if self.sliding == "all":
            if "sliding_window" not in fields.values:
                window = 4096
            kinds = ["sliding_attention" if window else "full_attention"] * layers
        elif self.sliding == "late":
            if "sliding_window" not in fields.values:
                window = 4096
            if not fields.flag("use_sliding_window", False):
                window = None
            full = fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
            kinds = [
                "sliding_attention" if window and layer >= full else "full_attention"
                for layer in range(layers)
            ]
        else:
            window = None
            kinds = ["full_attention"] * layers
        kinds = self._layer_types(fields, kinds)
        if window is None and "sliding_attention" in kinds:
            fields.problem(
                "layer_types names sliding_attention, and no sliding window is in use",
                expected="sliding_window (and use_sliding_window where the family has it)",
            )
        return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds)

    def _layer_types(self, fields: Fields, default: list[str]) -> list[str]:
        named = fields.values.get("layer_types")
        if named is None:
            return default
        known = ("full_attention", "sliding_attention")
        if not isinstance(named, list) or len(named) != len(default):
            fields.problem(
                "layer_types does not fit", expected=f"a list of {len(default)} names, one a layer"
            )
            return default
        for kind in dict.fromkeys(str(kind) for kind in named):
            if kind not in known:
                fields.problem(f"layer type {kind!r} is not supported", expected=f"one of {', '.join(known)}")
        if self.sliding != "late" and named != default and not fields.problems:
            fields.problem(
                f"layer_types mixes kinds, and all layers of {self.architectures[0]} are alike",
                expected=f"{default[0]} for every layer",
            )
        return default if fields.problems else named


def _weight(
    slot: str, name: str, shape: tuple[int, ...], *, shard: Shard | None = None, at: int = 0
) -> WeightSpec:
    # Checkpoints of the bare decoder, without its head, lack the prefix.
    return WeightSpec(slot=slot, stored=("model." + name, name), shape=shape, shard=shard, at=at)


def _layer(g: Geometry, layer: int) -> list[WeightSpec]:
    slot = f"layers.{layer}."
    attention = slot + "self_attn."
    mlp = slot + "mlp."
    width, q, kv, inner = g.hidden_size, g.heads * g.head_dim, g.kv_heads * g.head_dim, g.intermediate_size
    projections = (("q", q, 0, g.heads), ("k", kv, q, g.kv_heads), ("v", kv, q + kv, g.kv_heads))
    halves = (("gate", 0), ("up", inner))

    rows = [_weight(slot + "attn_norm", slot + "input_layernorm.weight", (width,))]
    for name, size, at, heads in projections:
        shard = Shard(0, heads)
        rows.append(
            _weight(slot + "qkv", f"{attention}{name}_proj.weight", (size, width), shard=shard, at=at)
        )
        if g.qkv_bias:
            rows.append(
                _weight(slot + "qkv_bias", f"{attention}{name}_proj.bias", (size,), shard=shard, at=at)
            )
    if g.qk_norm:
        rows.append(_weight(slot + "q_norm", attention + "q_norm.weight", (g.head_dim,)))
        rows.append(_weight(slot + "k_norm", attention + "k_norm.weight", (g.head_dim,)))
    rows.append(_weight(slot + "o", attention + "o_proj.weight", (width, q), shard=Shard(1, g.heads)))
    if g.out_bias:
        rows.append(_weight(slot + "o_bias", attention + "o_proj.bias", (width,)))

    rows.append(_weight(slot + "mlp_norm", slot + "post_attention_layernorm.weight", (width,)))
    for name, at in halves:
        shard = Shard(0, inner)
        rows.append(_weight(slot + "gate_up", f"{mlp}{name}_proj.weight", (inner, width), shard=shard, at=at))
        if g.mlp_bias:
            rows.append(
                _weight(slot + "gate_up_bias", f"{mlp}{name}_proj.bias", (inner,), shard=shard, at=at)
            )
    rows.append(_weight(slot + "down", mlp + "down_proj.weight", (width, inner), shard=Shard(1, inner)))
    if g.mlp_bias:
        rows.append(_weight(slot + "down_bias", mlp + "down_proj.bias", (width,)))
    return rows


LLAMA = LlamaFamily(("LlamaForCausalLM",), biases="configured", sliding="none")
MISTRAL = LlamaFamily(("MistralForCausalLM",), biases="none", sliding="all", kv_heads=8)
QWEN2 = LlamaFamily(("Qwen2ForCausalLM",), biases="qkv", sliding="late")
QWEN3 = LlamaFamily(("Qwen3ForCausalLM",), biases="configured", sliding="late", qk_norm=True, head_dim=128)
