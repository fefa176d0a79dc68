"""Attention on CPU: one contiguous slab of K and V per sequence, attended by SDPA.

A decode step copies nothing: K and V are views of the slab. Slabs are reserved, not committed: the
pool is an anonymous mapping whose pages appear when tokens are written, so a slab as long as the
longest context costs address space only. The block manager counts committed tokens and asks
:meth:`SdpaSlab.release` to give pages back.

Grouped heads never expand K and V: with a single new token, the query heads that share a KV head
are laid out as query positions of that head; in a prefill the shared head is a stride of zero.
"""

from __future__ import annotations

import contextlib
import mmap
from array import array
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hotstart.attention.base import MASK_BYTES, BatchPlan
from hotstart.errors import DeviceError
from hotstart.models.spec import AttentionSpec

_MADV_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)
_MADV_NOHUGEPAGE = getattr(mmap, "MADV_NOHUGEPAGE", 15)
_MAP_NORESERVE = 0x4000  # mman.h on Linux; the mmap module names it from Python 3.13 only
# A padded batch of single-token queries is one call instead of many, as long as not too much of
# what it reads is padding.
_MAX_PADDING = 1.5


@dataclass
class _Decode:
    """Neighbouring slabs whose sequences each have one new token."""

    rows: slice
    """Their places among the step's tokens."""
    slabs: slice
    start: int
    """First position attended (windows)."""
    length: int
    """One past the last position of the longest."""
    mask: Tensor | None


@dataclass
class _Prefill:
    """Several new tokens of one sequence, and the keys they see."""

    rows: slice
    slab: int
    start: int
    length: int
    """One past the last key."""
    mask: Tensor | None = None
    """[rows, keys], 0 or -inf; None: plain causal, no key before the first row."""

    @property
    def height(self) -> int:
        """Number of new tokens."""
        return self.rows.stop - self.rows.start  # type: ignore[no-any-return]

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.length - self.start


@dataclass
class _Group:
    """The work of all layers that share a window."""

    decodes: list[_Decode]
    prefills: list[_Prefill]


@dataclass
class SlabMeta:
    """A planned step."""

    slots: Tensor
    """int64 [tokens]: slab × max_len + position, where each new K and V goes."""
    groups: dict[int, _Group]
    """By window."""


class SdpaSlab:
    """:class:`~hotstart.attention.base.AttentionBackend` for CPU.

    ``max_len`` is the longest context in tokens; ``num_slabs`` bounds sequences plus kept prefixes.
    Raises DeviceError when the address space cannot be reserved.
    """

    graph_safe = False
    shares_prefix = False
    block_size = 16

    def __init__(self, specs: list[AttentionSpec], num_slabs: int, max_len: int, dtype: torch.dtype) -> None:
        self.specs = specs
        self.num_slabs = num_slabs
        self.max_len = max_len
        self._windows = sorted({spec.window for spec in specs})
        self._dtype = dtype
        # Tokens of each slab that may have been written: behind them there are zeros. Padded calls read
        # there, and a weight of zero does not hide a NaN that an earlier sequence left behind.
        self._written = [0] * num_slabs
        self._row_bytes = [spec.kv_heads * spec.head_dim * dtype.itemsize for spec in specs]
        sizes = [num_slabs * max_len * row for row in self._row_bytes]
        # One mapping per layer and side keeps every pool contiguous and page-aligned.
        self._maps = [[_reserve(size) for _ in range(2)] for size in sizes]
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        for spec, pair in zip(specs, self._maps, strict=True):
            shape = (num_slabs, max_len, spec.kv_heads, spec.head_dim)
            for pool, memory in zip((self.k, self.v), pair, strict=True):
                pool.append(torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape))
        self._flat = [
            (k.view(-1, *k.shape[2:]), v.view(-1, *v.shape[2:])) for k, v in zip(self.k, self.v, strict=True)
        ]

    @staticmethod
    def refuse(specs: list[AttentionSpec]) -> list[str]:
        """Reasons why these layers cannot run here."""
        return [
            f"layer {layer}: attention logit soft-capping is not something SDPA can do"
            for layer, spec in enumerate(specs)
            if spec.softcap
        ]

    def plan(self, batch: BatchPlan) -> SlabMeta:
        """Copy prefix hits, then lay out the step's writes and calls."""
        for source, target, tokens in batch.copies:
            for k, v in zip(self.k, self.v, strict=True):
                k[target, :tokens] = k[source, :tokens]
                v[target, :tokens] = v[source, :tokens]
            self._written[target] = max(self._written[target], tokens)
        slots = array("q")
        for (slab,), context, new in zip(batch.tables, batch.context_lens, batch.query_lens, strict=True):
            if self._written[slab] > context + new:
                self.release(slab, context + new)
            self._written[slab] = context + new
            first = slab * self.max_len + context
            slots.extend(range(first, first + new))
        return SlabMeta(
            slots=torch.frombuffer(slots, dtype=torch.int64),
            groups={window: self._group(batch, window) for window in self._windows},
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, meta: SlabMeta) -> Tensor:
        """See :class:`~hotstart.attention.base.AttentionBackend`."""
        flat_k, flat_v = self._flat[layer]
        flat_k.index_copy_(0, meta.slots, k)
        flat_v.index_copy_(0, meta.slots, v)
        spec = self.specs[layer]
        group = meta.groups[spec.window]
        if len(group.decodes) == 1 and not group.prefills:
            return self._decode(q, spec, layer, group.decodes[0])
        out = torch.empty_like(q)
        for decode in group.decodes:
            out[decode.rows] = self._decode(q[decode.rows], spec, layer, decode)
        for prefill in group.prefills:
            out[prefill.rows] = self._prefill(q[prefill.rows], spec, layer, prefill)
        return out

    def release(self, slab: int, keep: int = 0) -> None:
        """Give back the pages of a slab behind its first ``keep`` tokens; what was there reads as zero."""
        written, self._written[slab] = self._written[slab], min(keep, self._written[slab])
        for row, pair in zip(self._row_bytes, self._maps, strict=True):
            begin, end = (slab * self.max_len + tokens for tokens in (keep, max(keep, written)))
            for memory in pair:
                _discard(memory, begin * row, end * row)

    def _decode(self, q: Tensor, spec: AttentionSpec, layer: int, part: _Decode) -> Tensor:
        """Query [rows, heads, head_dim] of single tokens, all slabs of the part in one call."""
        rows, heads, dim = q.shape
        shared = q.view(rows, spec.kv_heads, heads // spec.kv_heads, dim)
        k = self.k[layer][part.slabs, part.start : part.length].transpose(1, 2)
        v = self.v[layer][part.slabs, part.start : part.length].transpose(1, 2)
        out = scaled_dot_product_attention(shared, k, v, attn_mask=part.mask, scale=spec.scale)
        return out.reshape(rows, heads, dim)

    def _prefill(self, q: Tensor, spec: AttentionSpec, layer: int, part: _Prefill) -> Tensor:
        """Query [new, heads, head_dim] of some new tokens of one sequence."""
        new, heads, dim = q.shape
        shared = heads // spec.kv_heads
        query = q.view(new, spec.kv_heads, shared, dim).permute(1, 2, 0, 3)
        shape = (spec.kv_heads, shared, part.length - part.start, dim)
        k = self.k[layer][part.slab, part.start : part.length].transpose(0, 1).unsqueeze(1).expand(shape)
        v = self.v[layer][part.slab, part.start : part.length].transpose(0, 1).unsqueeze(1).expand(shape)
        out = scaled_dot_product_attention(
            query, k, v, attn_mask=part.mask, is_causal=part.mask is None, scale=spec.scale
        )
        return out.permute(2, 0, 1, 3).reshape(new, heads, dim)

    def _group(self, batch: BatchPlan, window: int) -> _Group:
        """Split a step into calls, for layers of one window."""
        group = _Group([], [])
        chunks: list[tuple[int, int, int, int]] = []  # (row, slab, context, new) of the others
        row = 0
        run: list[tuple[int, int, int]] = []  # (row, slab, context) of single tokens, in batch order
        for (slab,), context, new in zip(batch.tables, batch.context_lens, batch.query_lens, strict=True):
            if new == 1:
                if run and (slab != run[-1][1] + 1 or row != run[-1][0] + 1 or _wasteful(run, context)):
                    group.decodes.append(self._decode_part(run, window))
                    run = []
                run.append((row, slab, context))
            else:
                chunks.append((row, slab, context, new))
            row += new
        if run:
            group.decodes.append(self._decode_part(run, window))
        group.prefills = self._prefill_parts(chunks, window)
        return group

    def _decode_part(self, run: list[tuple[int, int, int]], window: int) -> _Decode:
        lengths = [context + 1 for _, _, context in run]
        length = max(lengths)
        starts = [max(0, own - window) if window else 0 for own in lengths]
        start = min(starts)
        mask = None
        if any(own != length for own in lengths) or any(own != start for own in starts):
            position = torch.arange(start, length)
            visible = position < torch.tensor(lengths)[:, None]
            visible &= position >= torch.tensor(starts)[:, None]
            mask = torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, float("-inf"))
            mask = mask[:, None, None, :]
        first_row, first_slab, _ = run[0]
        count = len(run)
        return _Decode(
            slice(first_row, first_row + count), slice(first_slab, first_slab + count), start, length, mask
        )

    def _prefill_parts(self, chunks: list[tuple[int, int, int, int]], window: int) -> list[_Prefill]:
        """Tiles of rows, so that the one mask they share stays within bounds."""
        parts: list[_Prefill] = []
        masked: list[_Prefill] = []
        width = max((context + new for _, _, context, new in chunks), default=1)
        if window:
            width = min(width, window + max((new for *_, new in chunks), default=0))
        height = max(1, MASK_BYTES // len(self._windows) // self._dtype.itemsize // width)
        for row, slab, context, new in chunks:
            if context == 0 and (not window or new <= window):
                parts.append(_Prefill(slice(row, row + new), slab, 0, new))
                continue
            for begin in range(0, new, height):
                end = min(begin + height, new)
                start = max(0, context + begin + 1 - window) if window else 0
                masked.append(_Prefill(slice(row + begin, row + end), slab, start, context + end))
        self._set_masks(masked, window)
        return parts + masked

    def _set_masks(self, parts: list[_Prefill], window: int) -> None:
        """Each part's mask is the lower right corner of one that suits the largest."""
        if not parts:
            return
        height, width = max(part.height for part in parts), max(part.width for part in parts)
        key = torch.arange(width)
        query = torch.arange(width - height, width)[:, None]
        hidden = key > query
        if window:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        for part in parts:
            part.mask = mask[height - part.height :, width - part.width :]


def _wasteful(run: list[tuple[int, int, int]], context: int) -> bool:
    """Whether adding a sequence of this context would make padding too large a share."""
    contexts = [entry[2] + 1 for entry in run] + [context + 1]
    return max(contexts) * len(contexts) > _MAX_PADDING * sum(contexts)


def _reserve(size: int) -> mmap.mmap:
    """Anonymous memory that is committed page by page when it is written."""
    try:
        memory = mmap.mmap(
            -1, max(size, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        )
    except OSError as error:
        raise DeviceError(
            f"{size} bytes of address space for the KV cache could not be reserved ({error.strerror})",
            advice="Lower --max-num-seqs or --max-model-len, or allow overcommit (vm.overcommit_memory=0)",
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        # Huge pages would commit 2 MiB for a single token.
        memory.madvise(_MADV_NOHUGEPAGE)
    return memory


def _discard(memory: mmap.mmap, begin: int, end: int) -> None:
    """Zero bytes ``begin`` to ``end``: whole pages go back to the system, the edges are overwritten."""
    first_page = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last_page = end // mmap.PAGESIZE * mmap.PAGESIZE
    if first_page >= last_page:
        memory[begin:end] = bytes(end - begin)
        return
    memory[begin:first_page] = bytes(first_page - begin)
    memory.madvise(_MADV_DONTNEED, first_page, last_page - first_page)
    memory[last_page:end] = bytes(end - last_page)
