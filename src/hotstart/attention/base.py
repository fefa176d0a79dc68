"""The seam between a model's layers and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hotstart.models.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor


# What back ends may take beside the KV cache; the size of the cache is computed from it.
MASK_BYTES = 64 << 20
"""All masks of a step."""
GATHER_BYTES = 256 << 20
"""K and V gathered for one call, unless a single sequence is longer."""


@dataclass
class BatchPlan:
    """The sequences of one step, in batch order; tokens are flattened in that order.

    ``tables[i]`` is what the block manager handed out for sequence i: physical block ids (paged),
    or a list of one slab number (slab).
    """

    query_lens: list[int]
    """Tokens computed in this step."""
    context_lens: list[int]
    """Tokens already in the KV cache before this step."""
    tables: list[list[int]]
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """Prefix hits to copy before the step: (source slab, destination slab, tokens)."""


class AttentionBackend(Protocol):
    """Writes K and V, then attends. One object per engine; owns the KV memory."""

    graph_safe: bool
    shares_prefix: bool
    """True: blocks are shared between sequences; False: a hit is copied."""
    block_size: int

    def refuse(self, specs: list[AttentionSpec]) -> list[str]:
        """Reasons why these layers cannot run here; empty: they can."""
        ...

    def plan(self, batch: BatchPlan) -> Any:
        """Prepare a step, once for all layers, without synchronising with the device."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, meta: Any) -> Tensor:
        """Attend over context and new tokens, causally.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], after rope, in the
        model's dtype. Returns [tokens, heads, head_dim].
        """
        ...
