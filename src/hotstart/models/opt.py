"""OPT: learned positions, LayerNorm, a plain MLP, biases throughout; torch-free.

Slots: ``embed``, ``positions``, ``project_in`` and ``project_out`` where embeddings are narrower than
the decoder, per layer ``attn_norm``, ``qkv``, ``o``, ``mlp_norm``, ``fc1``, ``fc2`` and their
``…_bias``, then ``norm``, ``norm_bias`` and ``head``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotstart.errors import ModelError
from hotstart.models.base import Geometry, Model, Store
from hotstart.models.fields import MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields
from hotstart.models.spec import Shard, WeightSpec

if TYPE_CHECKING:
    import torch

POSITION_OFFSET = 2
"""Rows before the first position's; the table has this many more than there are positions."""


@dataclass(frozen=True)
class OptFamily:
    """See :class:`hotstart.models.base.Family`."""

    architectures: tuple[str, ...] = ("OPTForCausalLM",)

    def geometry(self, config: dict[str, Any]) -> Geometry:
        """See :class:`hotstart.models.base.Family`."""
        fields = Fields(config)
        layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
        hidden = fields.integer("hidden_size", high=MAX_WIDTH)
        intermediate = fields.integer("ffn_dim", high=MAX_WIDTH)
        heads = fields.integer("num_attention_heads", high=MAX_HEADS)
        vocab = fields.integer("vocab_size", high=MAX_VOCAB)
        positions = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
        embedding = fields.integer("word_embed_proj_dim", high=MAX_WIDTH, default=hidden)
        activation = fields.activation("activation_function", "relu")
        biases = fields.flag("enable_bias", True)
        affine = fields.flag("layer_norm_elementwise_affine", True)
        pre_norm = fields.flag("do_layer_norm_before", True)
        final_norm = pre_norm and not fields.flag("_remove_final_layer_norm", False)
        tied = fields.flag("tie_word_embeddings", True)
        fields.check()
        if hidden % heads:
            fields.problem(
                f"hidden_size {hidden} is no multiple of num_attention_heads {heads}", expected="a multiple"
            )
        fields.check()
        return Geometry(
            architecture=self.architectures[0],
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=intermediate,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            vocab_size=vocab,
            max_position_embeddings=positions,
            norm_eps=1e-5,
            activation=activation,
            tie_word_embeddings=tied,
            qkv_bias=biases,
            out_bias=biases,
            mlp_bias=biases,
            extra={"embedding": embedding, "affine": affine, "pre_norm": pre_norm, "final_norm": final_norm},
        )

    def specs(self, geometry: Geometry) -> list[WeightSpec]:
        """See :class:`hotstart.models.base.Family`."""
        g = geometry
        width, embedding = g.hidden_size, g.extra["embedding"]
        vocab = Shard(0, g.vocab_size)
        rows = [
            _weight("embed", "embed_tokens.weight", (g.vocab_size, embedding), shard=vocab),
            _weight(
                "positions", "embed_positions.weight", (g.max_position_embeddings + POSITION_OFFSET, width)
            ),
        ]
        if embedding != width:
            rows.append(_weight("project_in", "project_in.weight", (width, embedding)))
            rows.append(_weight("project_out", "project_out.weight", (embedding, width)))
        for layer in range(g.num_layers):
            rows += _layer(g, layer)
        if g.extra["final_norm"]:
            rows += _norm(g, "norm", "final_layer_norm")
        rows.append(
            WeightSpec(
                slot="head",
                stored=("lm_head.weight",),
                shape=(g.vocab_size, embedding),
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
        if max_positions > geometry.max_position_embeddings:
            raise ModelError(
                f"a context of {max_positions} tokens exceeds the model's learned positions",
                expected=f"at most {geometry.max_position_embeddings}",
                advice=f"Pass --max-model-len {geometry.max_position_embeddings} or less",
            )
        from hotstart.models.opt_forward import OptModel

        return OptModel(geometry, store)


def _weight(
    slot: str, name: str, shape: tuple[int, ...], *, shard: Shard | None = None, at: int = 0
) -> WeightSpec:
    # Older checkpoints carry the bare decoder's names.
    return WeightSpec(
        slot=slot, stored=(f"model.decoder.{name}", f"decoder.{name}"), shape=shape, shard=shard, at=at
    )


def _norm(g: Geometry, slot: str, name: str) -> list[WeightSpec]:
    if not g.extra["affine"]:
        return []
    shape = (g.hidden_size,)
    return [_weight(slot, name + ".weight", shape), _weight(slot + "_bias", name + ".bias", shape)]


def _layer(g: Geometry, layer: int) -> list[WeightSpec]:
    prefix = f"layers.{layer}."
    width, inner = g.hidden_size, g.intermediate_size

    def linear(slot: str, name: str, shape: tuple[int, int], shard: Shard, at: int = 0) -> list[WeightSpec]:
        rows = [_weight(prefix + slot, f"{prefix}{name}.weight", shape, shard=shard, at=at)]
        if g.qkv_bias:
            # A layer cut along its inputs adds its bias once, on one rank.
            cut = shard if shard.dim == 0 else None
            rows.append(_weight(f"{prefix}{slot}_bias", f"{prefix}{name}.bias", shape[:1], shard=cut, at=at))
        return rows

    rows = _norm(g, prefix + "attn_norm", prefix + "self_attn_layer_norm")
    for place, name in enumerate("qkv"):
        rows += linear("qkv", f"self_attn.{name}_proj", (width, width), Shard(0, g.heads), at=place * width)
    rows += linear("o", "self_attn.out_proj", (width, width), Shard(1, g.heads))
    rows += _norm(g, prefix + "mlp_norm", prefix + "final_layer_norm")
    rows += linear("fc1", "fc1", (inner, width), Shard(0, inner))
    rows += linear("fc2", "fc2", (width, inner), Shard(1, inner))
    return rows


OPT = OptFamily()
