"""What one step holds at once beside weights and KV cache: an upper bound by arithmetic. Torch-free.

Each term has a bound of its own that some module keeps: the tokens and sequences of a step are the
scheduler's, masks and gathers the attention back end's, tiles of the vocabulary the sampler's. Lists
of where keys lie, 8 bytes a token and window, disappear in the rounding of the cache they describe.
"""

from __future__ import annotations

from msgspec import Struct

from hotstart.attention.base import GATHER_BYTES, MASK_BYTES

FLOAT = 4
CUT_BYTES = 16 << 20
"""float32 logits of the rows that top_k and top_p sort in one go; at least one row."""
PROMPT_ROWS = 64
"""Positions whose prompt log probabilities are computed in one go."""


class StepShape(Struct, frozen=True, kw_only=True):
    """The largest step, and the model's widths."""

    tokens: int
    seqs: int
    context: int
    """Tokens of the longest sequence."""
    hidden: int
    intermediate: int
    q: int
    """Elements of a token's query: heads x head_dim."""
    kv: int
    """Elements of a token's key, or of its value."""
    vocab: int
    dtype_bytes: int
    gathers: bool
    """The attention back end copies K and V together before it attends."""

    @property
    def layer(self) -> int:
        """Bytes of one layer at work, of which no two are at once.

        Residual and normed; q, k, v, twice while they are rotated, and the attention's output; gate,
        up and their product. All of it doubled, for kernels that widen to float32 and parts that are
        joined.
        """
        per_token = 3 * self.hidden + 2 * (self.q + 2 * self.kv) + self.q + 3 * self.intermediate
        return 2 * self.tokens * per_token * self.dtype_bytes

    @property
    def masks(self) -> int:
        """Bytes of the masks, and of the truth values that they are made from."""
        return 2 * MASK_BYTES

    @property
    def gathered(self) -> int:
        """Bytes of K and V of one layer, gathered for one call."""
        longest = 2 * self.context * self.kv * self.dtype_bytes
        return max(GATHER_BYTES, longest) if self.gathers else 0

    @property
    def logits(self) -> int:
        """Bytes of sampling, in float32.

        Of all rows: the logits, as log probabilities, a selection, divided by the temperature, without
        what min_p hides, their noise, the race between them. Of the rows that are cut at a time:
        a dozen intermediate results, the ids among them int64.
        """
        rows = max(self.seqs, PROMPT_ROWS)
        cut = max(CUT_BYTES, self.vocab * FLOAT)
        return 7 * rows * self.vocab * FLOAT + 12 * min(cut, rows * self.vocab * FLOAT)

    @property
    def bytes(self) -> int:
        """The bound: layers are done when sampling begins, but allocators keep what they had."""
        return self.layer + self.masks + self.gathered + self.logits
