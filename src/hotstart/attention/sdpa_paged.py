"""Attention over a paged KV cache: pages are gathered, then torch's SDPA attends.

The back end of a CUDA start, since it compiles nothing, and the oracle of faster ones; it also runs
on CPU. Everything that depends on lengths is planned on the host from plain integers and goes to
the device in one pinned copy, so a step never waits for the device.

Grouped heads never expand K and V: for single tokens, the query heads that share a KV head are laid
out as query positions of that head; in a prefill the shared head is a stride of zero.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hotstart.attention.base import GATHER_BYTES, MASK_BYTES, BatchPlan
from hotstart.models.spec import AttentionSpec

# Kernels read masks 16 bytes at a time; a row that starts elsewhere is copied on every call.
_MASK_ALIGNMENT = 8

Rows = slice | Tensor


@dataclass
class _Decode:
    """Sequences with one new token each, attended in one padded call."""

    rows: Rows
    """Their places among the step's tokens."""
    slots: Tensor
    """int64 [sequences, longest]: where their K and V lie; padding repeats the last token."""
    mask: Tensor
    """[sequences, 1, 1, longest], 0 or -inf."""


@dataclass
class _Tile:
    """Some new tokens of one sequence, and the keys they see."""

    rows: slice
    """Among the step's tokens."""
    keys: slice
    """Among the keys gathered for the sequence."""
    mask: Tensor | None = None
    """[rows, keys], 0 or -inf; None: plain causal, no key before the first row."""

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.keys.stop - self.keys.start  # type: ignore[no-any-return]

    @property
    def height(self) -> int:
        """Number of new tokens."""
        return self.rows.stop - self.rows.start  # type: ignore[no-any-return]


@dataclass
class _Prefill:
    """One sequence with several new tokens."""

    rows: slice
    slots: Tensor | None
    """int64 [keys]: where K and V lie; None: they are the step's own."""
    tiles: list[_Tile]


@dataclass
class _Group:
    """The calls of all layers that share a window."""

    decodes: list[_Decode]
    prefills: list[_Prefill]


@dataclass
class PagedMeta:
    """A planned step."""

    slots: Tensor
    """int64 [tokens]: block × block_size + offset, where each new K and V goes."""
    groups: dict[int, _Group]
    """By window."""


@dataclass
class _Sequence:
    """One entry of the batch."""

    row: int
    new: int
    context: int
    table: list[int]
    blocks: Tensor | None = None
    """The table on the device, int64, where a prefill has context."""

    @property
    def length(self) -> int:
        return self.context + self.new


class SdpaPaged:
    """:class:`~hotstart.attention.base.AttentionBackend` over blocks.

    K and V of a layer are [blocks, block_size, kv_heads, head_dim], uninitialised: nothing is read
    that was not written. Raises torch.OutOfMemoryError when the pool does not fit.
    """

    graph_safe = False
    shares_prefix = True

    def __init__(
        self,
        specs: list[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.specs = specs
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._windows = sorted({spec.window for spec in specs})
        # Tokens whose K and V one call of single tokens may gather.
        self._gather_tokens = GATHER_BYTES // max(block_bytes([spec], 1, dtype.itemsize) for spec in specs)
        self._pool = [
            torch.empty((2, num_blocks, block_size, spec.kv_heads, spec.head_dim), dtype=dtype, device=device)
            for spec in specs
        ]
        self._flat = [layer.flatten(1, 2).unbind(0) for layer in self._pool]
        if device.type == "cuda":
            # cuDNN plans a kernel for each new shape, tens of milliseconds at a time.
            torch.backends.cuda.enable_cudnn_sdp(False)

    @staticmethod
    def refuse(specs: list[AttentionSpec]) -> list[str]:
        """Reasons why these layers cannot run here."""
        reasons = []
        for layer, spec in enumerate(specs):
            if spec.softcap:
                reasons.append(f"layer {layer}: attention logit soft-capping is not something SDPA can do")
            if spec.heads % spec.kv_heads:
                reasons.append(
                    f"layer {layer}: {spec.heads} heads do not share {spec.kv_heads} KV heads evenly"
                )
        return reasons

    def plan(self, batch: BatchPlan) -> PagedMeta:
        """Lay out the step's writes and calls; one copy to the device."""
        slots, sequences = self._upload(batch)
        return PagedMeta(slots, {window: self._group(sequences, window) for window in self._windows})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, meta: PagedMeta) -> Tensor:
        """See :class:`~hotstart.attention.base.AttentionBackend`."""
        spec = self.specs[layer]
        keys, values = self._flat[layer]
        keys.index_copy_(0, meta.slots, k)
        values.index_copy_(0, meta.slots, v)
        group = meta.groups[spec.window]
        out = torch.empty((q.shape[0], spec.heads, spec.head_dim), dtype=q.dtype, device=q.device)
        for decode in group.decodes:
            out[decode.rows] = _decode(q[decode.rows], keys[decode.slots], values[decode.slots], decode, spec)
        for prefill in group.prefills:
            if prefill.slots is None:
                own_k, own_v = k[prefill.rows], v[prefill.rows]
            else:
                own_k, own_v = keys[prefill.slots], values[prefill.slots]
            for tile in prefill.tiles:
                _prefill(q[tile.rows], own_k[tile.keys], own_v[tile.keys], out[tile.rows], tile, spec)
        return out

    def _upload(self, batch: BatchPlan) -> tuple[Tensor, list[_Sequence]]:
        """The slot of every new token, and the tables that prefills gather by, in one transfer."""
        size = self.block_size
        values = array("q")
        sequences: list[_Sequence] = []
        row = 0
        for new, context, table in zip(batch.query_lens, batch.context_lens, batch.tables, strict=True):
            values.extend(table[at // size] * size + at % size for at in range(context, context + new))
            sequences.append(_Sequence(row, new, context, table[: -(-(context + new) // size)]))
            row += new
        gathering = [s for s in sequences if s.new > 1 and s.context]
        for sequence in gathering:
            values.extend(sequence.table)
        everything = self._to_device(values)
        offset = row
        for sequence in gathering:
            sequence.blocks = everything[offset : offset + len(sequence.table)]
            offset += len(sequence.table)
        return everything[:row], sequences

    def _group(self, sequences: list[_Sequence], window: int) -> _Group:
        single = [s for s in sequences if s.new == 1]
        several = [s for s in sequences if s.new > 1]
        batches = _batches(single, window, self._gather_tokens)
        decodes = [self._decode_part(part, window) for part in batches]
        return _Group(decodes, self._prefill_parts(several, window))

    def _decode_part(self, part: list[_Sequence], window: int) -> _Decode:
        blocks = max(len(s.table) for s in part)
        values = array("q")
        for s in part:
            values.extend((s.row, s.length, _first_key(s.length - 1, window)))
            values.extend(s.table)
            values.extend([0] * (blocks - len(s.table)))
        matrix = self._to_device(values).view(len(part), 3 + blocks)
        row, length, start = matrix[:, :1], matrix[:, 1:2], matrix[:, 2:3]
        width = max(s.length - _first_key(s.length - 1, window) for s in part)
        position = start + torch.arange(width, device=self.device)
        hidden = position >= length
        # Padding reads a token that exists: a weight of zero does not hide a NaN.
        position = torch.minimum(position, length - 1)
        block = matrix[:, 3:].gather(1, position // self.block_size)
        first = part[0].row
        together = all(s.row == first + n for n, s in enumerate(part))
        return _Decode(
            slice(first, first + len(part)) if together else row.flatten(),
            block * self.block_size + position % self.block_size,
            self._mask(hidden[:, None, None, :]),
        )

    def _prefill_parts(self, several: list[_Sequence], window: int) -> list[_Prefill]:
        parts: list[_Prefill] = []
        masked: list[_Tile] = []
        height = self._tile_height(several)
        for s in several:
            rows = slice(s.row, s.row + s.new)
            if s.context == 0 and (not window or s.new <= window):
                parts.append(_Prefill(rows, None, [_Tile(rows, slice(0, s.new))]))
                continue
            first = _aligned(_first_key(s.context, window))
            tiles: list[_Tile] = []
            begin = s.context
            while begin < s.length:
                # Aligned ends and beginnings: tiles differ in width by whole vectors and share a mask.
                end = min(_aligned(begin + height), s.length)
                keys = slice(_aligned(_first_key(begin, window)) - first, end - first)
                tiles.append(_Tile(slice(s.row + begin - s.context, s.row + end - s.context), keys))
                begin = end
            masked += tiles
            parts.append(_Prefill(rows, self._slots(s, first), tiles))
        self._set_masks(masked, window)
        return parts

    def _tile_height(self, several: list[_Sequence]) -> int:
        """Rows whose masks, one for each remainder of a width in each group, stay within bounds."""
        longest = max((s.length for s in several), default=1)
        masks = len(self._windows) * len({0, *(s.length % _MASK_ALIGNMENT for s in several)})
        elements = MASK_BYTES // self.dtype.itemsize // masks
        return max(elements // (longest + _MASK_ALIGNMENT), _MASK_ALIGNMENT)

    def _slots(self, sequence: _Sequence, first: int) -> Tensor | None:
        """Where the keys of positions ``first`` on lie."""
        if sequence.blocks is None:
            return None
        position = torch.arange(first, sequence.length, device=self.device)
        block = sequence.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _set_masks(self, tiles: list[_Tile], window: int) -> None:
        """Tiles share a mask: theirs is the lower right corner of a larger one.

        One for each remainder of the width, so that every corner begins at an aligned address.
        """
        for remainder in {tile.width % _MASK_ALIGNMENT for tile in tiles}:
            alike = [tile for tile in tiles if tile.width % _MASK_ALIGNMENT == remainder]
            height, width = max(tile.height for tile in alike), max(tile.width for tile in alike)
            key = torch.arange(width, device=self.device)
            query = torch.arange(width - height, width, device=self.device)[:, None]
            hidden = key > query
            if window:
                hidden |= key <= query - window
            mask = self._mask(hidden)
            for tile in alike:
                tile.mask = mask[height - tile.height :, width - tile.width :]

    def _mask(self, hidden: Tensor) -> Tensor:
        """0 or -inf in the model's dtype, rows at aligned addresses."""
        *rows, width = hidden.shape
        padded = -(-width // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
        mask = torch.zeros((*rows, padded), dtype=self.dtype, device=self.device)[..., :width]
        return mask.masked_fill_(hidden, float("-inf"))

    def _to_device(self, values: array[int]) -> Tensor:
        """int64, asynchronously."""
        host = torch.frombuffer(values, dtype=torch.int64)
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


def block_bytes(specs: list[AttentionSpec], block_size: int, itemsize: int) -> int:
    """Bytes of one block: K and V of all layers."""
    return sum(2 * block_size * spec.kv_heads * spec.head_dim * itemsize for spec in specs)


def _first_key(position: int, window: int) -> int:
    """The first key that a query at ``position`` sees."""
    return max(0, position + 1 - window) if window else 0


def _aligned(position: int) -> int:
    """The last multiple of the masks' alignment up to ``position``."""
    return position // _MASK_ALIGNMENT * _MASK_ALIGNMENT


def _batches(single: list[_Sequence], window: int, limit: int) -> list[list[_Sequence]]:
    """Single tokens in calls of bounded size; sorted by length when there is more than one call."""

    def width(sequence: _Sequence) -> int:
        return sequence.length - _first_key(sequence.length - 1, window)

    if not single or len(single) * max(map(width, single)) <= limit:
        return [single] if single else []
    batches: list[list[_Sequence]] = [[]]
    for sequence in sorted(single, key=width):
        if batches[-1] and (len(batches[-1]) + 1) * width(sequence) > limit:
            batches.append([])
        batches[-1].append(sequence)
    return batches


def _decode(q: Tensor, k: Tensor, v: Tensor, part: _Decode, spec: AttentionSpec) -> Tensor:
    """q [rows, heads, head_dim]; k, v [rows, keys, kv_heads, head_dim]."""
    shared = q.reshape(q.shape[0], spec.kv_heads, -1, spec.head_dim)
    out = scaled_dot_product_attention(
        shared, k.transpose(1, 2), v.transpose(1, 2), attn_mask=part.mask, scale=spec.scale
    )
    return out.reshape(q.shape[0], spec.heads, spec.head_dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, out: Tensor, tile: _Tile, spec: AttentionSpec) -> None:
    """q, out [rows, heads, head_dim]; k, v [keys, kv_heads, head_dim]."""
    query = _by_kv_head(q, spec)
    shape = (*query.shape[:2], tile.width, spec.head_dim)
    found = scaled_dot_product_attention(
        query,
        k.transpose(0, 1).unsqueeze(1).expand(shape),
        v.transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=tile.mask,
        is_causal=tile.mask is None,
        scale=spec.scale,
    )
    _by_kv_head(out, spec).copy_(found)


def _by_kv_head(x: Tensor, spec: AttentionSpec) -> Tensor:
    """[tokens, heads, head_dim] as a view [kv_heads, shared, tokens, head_dim]."""
    shared = spec.heads // spec.kv_heads
    return x.view(x.shape[0], spec.kv_heads, shared, spec.head_dim).permute(1, 2, 0, 3)
