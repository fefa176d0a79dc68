"""The seam between a model family and everything that uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from hotstart.models.spec import AttentionSpec, WeightSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor

    from hotstart.attention.base import AttentionBackend


class Geometry(Struct, frozen=True, kw_only=True):
    """A decoder's shape, normalised from ``config.json``; torch-free."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    """Longest context the configuration allows, rope scaling included."""
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    rope: dict[str, Any] = {}
    """transformers' ``rope_parameters`` form: ``rope_type``, ``rope_theta``, … Empty: no rope."""
    windows: tuple[int, ...] = ()
    """Sliding window of each layer; 0: full attention."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    extra: dict[str, Any] = {}
    """What only one family needs."""

    def attention(self) -> list[AttentionSpec]:
        """One entry per layer."""
        return [
            AttentionSpec(
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                window=self.windows[layer] if self.windows else 0,
            )
            for layer in range(self.num_layers)
        ]

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether a key depends on its sequence's prompt length, beside its own position.

        Then keys of prompts longer than ``rope["original_max_position_embeddings"]`` serve as a
        cached prefix only for prompts of the same length.
        """
        return self.rope.get("rope_type") == "dynamic"

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """K and V of all layers for one token."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * dtype_bytes


class Store(Protocol):
    """Where weights are found by slot once the readers have filled them."""

    def tensor(self, slot: str) -> Tensor | tuple[Tensor, ...]:
        """The slot's weight; a tuple of parts, in order, where they are not adjacent in memory."""
        ...


class Model(Protocol):
    """A decoder ready to run."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        meta: Any,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        input_ids, positions: int64 [tokens]; returns [tokens, hidden]. lengths: int64 [tokens], each
        token's ``max(prompt length, position + 1)``; only where
        :attr:`Geometry.rope_depends_on_length`, and then by default position + 1.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] from hidden [rows, hidden]."""
        ...

    def tune(self, may_copy: Callable[[str], bool]) -> Iterator[str]:
        """What makes steps faster but no start should wait for, in pieces of some milliseconds.

        Run between steps. Yields slots whose stored bytes the model has copied and uses no more;
        slots that ``may_copy`` denies stay as they are.
        """
        ...


class Family(Protocol):
    """One row of the registry. The first two methods never import torch."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names in ``config.json`` that this family serves."""
        ...

    def geometry(self, config: dict[str, Any]) -> Geometry:
        """Normalise ``config.json``; raises ModelError for what this family cannot do."""
        ...

    def specs(self, geometry: Geometry) -> list[WeightSpec]:
        """Every weight of the model."""
        ...

    def build(
        self,
        geometry: Geometry,
        store: Store,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> Model:
        """Bind the store's tensors into a model; copies nothing that need not be copied."""
        ...
