"""What a model's weights and its attention are, before torch exists.

A family lists :class:`WeightSpec` rows; the read plan, the checks and the stores are driven by
them alone. A *slot* is one name under which the forward asks for a weight; several rows of a slot
are stacked along dimension 0 in the order of ``at`` (q, k and v; gate and up).
"""

from __future__ import annotations

from math import prod

from msgspec import Struct

# safetensors' name → (torch's name, bytes per element)
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}


class Shard(Struct, frozen=True):
    """How ranks share a tensor: along ``dim``, in ``units`` that are never cut."""

    dim: int
    units: int


class WeightSpec(Struct, frozen=True, kw_only=True):
    """One tensor of the checkpoint and its place in the model."""

    slot: str
    stored: tuple[str, ...]
    """Accepted checkpoint names, preferred first."""
    shape: tuple[int, ...]
    """As stored."""
    shard: Shard | None = None
    """None: replicated."""
    at: int = 0
    """First row inside the slot."""
    finish: str | None = None
    """None: bytes are final; ``cast``: to the model's dtype."""
    alias_of: str | None = None
    """A tied weight: the slot whose bytes it shares. Not stored, or stored as a copy."""

    @property
    def elements(self) -> int:
        """Number of elements as stored."""
        return prod(self.shape)


class AttentionSpec(Struct, frozen=True):
    """One layer's attention. ``window`` counts the current token; 0: none."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
