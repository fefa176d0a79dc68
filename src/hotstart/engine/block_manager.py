"""Who owns which part of the KV cache, and what of it can be used again.

The scheduler speaks of hits, tokens and tables; whether a hit shares memory (paged blocks) or is
copied (slabs) is decided here and carried out by the attention back end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from hotstart.engine.request import Request
from hotstart.messages import pack_ids

HASH_BLOCK = 16
"""Tokens per hash on slabs; paged managers hash whole blocks."""


class BlockManager(Protocol):
    """KV memory of all sequences."""

    queries: int
    hits: int

    def admit(self, request: Request, num_new: int) -> int | None:
        """Give a waiting request its first memory, for the hit and ``num_new`` of its tokens beyond it.

        Returns the number of prompt tokens found computed (at most all but one), or None when
        there is no memory now.
        """
        ...

    def cached(self, request: Request) -> int:
        """How many tokens of a waiting request :meth:`admit` would find computed now."""
        ...

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Make room for the first ``num_tokens`` tokens of a running request; False: no memory."""
        ...

    def computed(self, request: Request) -> None:
        """Note that the request's first ``num_computed`` known tokens may be found by others."""
        ...

    def release(self, request: Request) -> None:
        """Take the memory back; what was computed stays findable until it is needed."""
        ...

    def take_copies(self) -> list[tuple[int, int, int]]:
        """Copies (source, target, tokens) to perform before the next step."""
        ...

    def reset(self) -> bool:
        """Forget all kept prefixes; False while requests run."""
        ...

    @property
    def usage(self) -> float:
        """Share of the memory that running requests hold, 0 to 1."""
        ...


def chain_hashes(tokens: Sequence[int], block: int, count: int, known: list[bytes]) -> list[bytes]:
    """Extend ``known`` to ``count`` chained digests; digest i covers tokens 0 to (i+1)·block.

    A cryptographic hash: no prompt can be made to collide with another user's.
    """
    previous = known[-1] if known else b""
    for index in range(len(known), count):
        part = pack_ids(list(tokens[index * block : (index + 1) * block]))
        previous = blake2b(previous + part, digest_size=16).digest()
        known.append(previous)
    return known


class PagedBlockManager:
    """Fixed blocks, shared by reference count; the free list is the LRU of kept prefixes."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.queries = 0
        self.hits = 0
        # Block 0 is where padding rows of captured graphs write; it is never handed out.
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._refs = [0] * num_blocks
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def admit(self, request: Request, num_new: int) -> int | None:
        """See :class:`BlockManager`."""
        shared = self._lookup(request)
        hit = len(shared) * self.block_size
        wanted = min(hit + num_new, len(request.tokens))
        fresh = sum(1 for block in shared if self._refs[block] == 0)
        need = self._blocks(wanted) - len(shared)
        if need + fresh > len(self._free):
            return None
        for block in shared:
            self._take(block)
        request.table = list(shared)
        request.noted = len(shared)
        self._grow(request, wanted)
        self.queries += request.num_prompt if self._counts(request) else 0
        self.hits += hit if self._counts(request) else 0
        return hit

    def cached(self, request: Request) -> int:
        """See :class:`BlockManager`."""
        return len(self._lookup(request)) * self.block_size

    def extend(self, request: Request, num_tokens: int) -> bool:
        """See :class:`BlockManager`."""
        if self._blocks(num_tokens) - len(request.table) > len(self._free):
            return False
        self._grow(request, num_tokens)
        return True

    def computed(self, request: Request) -> None:
        """See :class:`BlockManager`."""
        if not self.prefix_caching:
            return
        full = min(request.num_computed, len(request.tokens)) // self.block_size
        digests = chain_hashes(request.tokens, self.block_size, full, request.digests)
        for index in range(request.noted, full):
            # Another request may have computed the same block at the same time: one of them is enough.
            if digests[index] not in self._block_of:
                self._block_of[digests[index]] = request.table[index]
                self._digest_of[request.table[index]] = digests[index]
        request.noted = max(request.noted, full)

    def release(self, request: Request) -> None:
        """See :class:`BlockManager`."""
        # Last blocks first, so that the beginning of a prompt is the last to be evicted.
        for block in reversed(request.table):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)
        request.table = []

    def take_copies(self) -> list[tuple[int, int, int]]:
        """Blocks are shared: nothing is copied."""
        return []

    def reset(self) -> bool:
        """See :class:`BlockManager`."""
        if any(self._refs):
            return False
        self._digest_of.clear()
        self._block_of.clear()
        return True

    @property
    def usage(self) -> float:
        """See :class:`BlockManager`."""
        return 1 - len(self._free) / max(1, self.num_blocks - 1)

    def _counts(self, request: Request) -> bool:
        return self.prefix_caching and request.preemptions == 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _lookup(self, request: Request) -> list[int]:
        if not self.prefix_caching or request.params.prompt_logprobs is not None:
            return []
        usable = (len(request.tokens) - 1) // self.block_size
        digests = chain_hashes(request.tokens, self.block_size, usable, request.digests)
        found: list[int] = []
        for digest in digests[:usable]:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def _take(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def _grow(self, request: Request, num_tokens: int) -> None:
        while len(request.table) < self._blocks(num_tokens):
            block = next(iter(self._free))
            self._take(block)
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
            request.table.append(block)


@dataclass
class _Slab:
    """One slab: what of it is computed and findable, and how much memory it commits."""

    number: int
    digests: list[bytes] = field(default_factory=list)
    committed: int = 0
    """Tokens, rounded up to HASH_BLOCK."""
    owner: Request | None = None


class SlabManager:
    """One contiguous slab per sequence; finished ones are donors of prefixes, in LRU order.

    ``capacity`` is the number of tokens whose K and V may be committed at once. ``free_pages`` is
    called with a slab when its tokens are given back.
    """

    def __init__(
        self,
        num_slabs: int,
        capacity: int,
        *,
        prefix_caching: bool = True,
        free_pages: Callable[[int], None] = lambda slab: None,
    ) -> None:
        self.capacity = capacity
        self.prefix_caching = prefix_caching
        self.queries = 0
        self.hits = 0
        self._slabs = [_Slab(number) for number in range(num_slabs)]
        # Lowest number first: running sequences stay neighbours, which the back end batches.
        self._empty = list(range(num_slabs - 1, -1, -1))
        self._donors: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[bytes, dict[int, None]] = {}
        self._copies: list[tuple[int, int, int]] = []
        self._pinned: set[int] = set()
        """Sources of copies that were not performed yet: not to be evicted."""
        self._free_pages = free_pages
        self._committed = 0

    def admit(self, request: Request, num_new: int) -> int | None:
        """See :class:`BlockManager`."""
        source, hit = self._lookup(request)
        wanted = _round(min(hit + num_new, len(request.tokens)))
        slab = self._place(source, hit, wanted)
        if slab is None:
            return None
        self._commit(slab, wanted)
        slab.owner = request
        request.table = [slab.number]
        if self.prefix_caching and request.preemptions == 0:
            self.queries += request.num_prompt
            self.hits += hit
        return hit

    def cached(self, request: Request) -> int:
        """See :class:`BlockManager`."""
        return self._lookup(request)[1]

    def extend(self, request: Request, num_tokens: int) -> bool:
        """See :class:`BlockManager`."""
        slab = self._slabs[request.table[0]]
        wanted = _round(num_tokens)
        if wanted > slab.committed:
            if not self._has_room(wanted - slab.committed, slabs=0):
                return False
            self._make_room(wanted - slab.committed)
            self._commit(slab, wanted)
        return True

    def computed(self, request: Request) -> None:
        """See :class:`BlockManager`."""
        slab = self._slabs[request.table[0]]
        full = min(request.num_computed, len(request.tokens)) // HASH_BLOCK
        before = len(slab.digests)
        if self.prefix_caching and full > before:
            slab.digests += chain_hashes(request.tokens, HASH_BLOCK, full, request.digests)[before:full]
            self._hold(slab, before)

    def release(self, request: Request) -> None:
        """See :class:`BlockManager`."""
        slab = self._slabs[request.table[0]]
        request.table = []
        slab.owner = None
        if slab.digests:
            self._donors[slab.number] = None
        else:
            self._drop(slab)

    def take_copies(self) -> list[tuple[int, int, int]]:
        """See :class:`BlockManager`."""
        copies, self._copies = self._copies, []
        self._pinned.clear()
        return copies

    def reset(self) -> bool:
        """See :class:`BlockManager`."""
        if any(slab.owner for slab in self._slabs):
            return False
        while self._donors:
            self._evict(next(iter(self._donors)))
        return True

    @property
    def usage(self) -> float:
        """See :class:`BlockManager`."""
        donors = sum(self._slabs[number].committed for number in self._donors)
        return (self._committed - donors) / max(1, self.capacity)

    def _lookup(self, request: Request) -> tuple[_Slab | None, int]:
        """The slab that holds the longest prefix of the request, and how many tokens of it."""
        if not self.prefix_caching or request.params.prompt_logprobs is not None:
            return None, 0
        usable = (len(request.tokens) - 1) // HASH_BLOCK
        digests = chain_hashes(request.tokens, HASH_BLOCK, usable, request.digests)
        for count in range(usable, 0, -1):
            holders = self._holders.get(digests[count - 1])
            if holders:
                slab = self._slabs[next(reversed(holders))]
                if slab.owner is None:
                    self._donors.move_to_end(slab.number)
                return slab, count * HASH_BLOCK
        return None, 0

    def _place(self, source: _Slab | None, hit: int, wanted: int) -> _Slab | None:
        """A slab for ``wanted`` tokens that begins with the source's first ``hit``; None: no memory."""
        fresh = self._has_room(wanted, beside=source)
        if source is not None and source.owner is None and (hit * 2 >= source.committed or not fresh):
            # Most of the donor is the hit, or there is no room for both: take the slab itself.
            if not self._has_room(wanted - source.committed, beside=source, slabs=0):
                return None
            del self._donors[source.number]
            self._make_room(wanted - source.committed)
            self._cut(source, hit)
            return source
        if not fresh:
            return None
        if source is not None:
            self._pinned.add(source.number)
        self._make_room(wanted)
        if not self._empty:
            self._evict_one()
        slab = self._slabs[self._empty.pop()]
        if source is not None:
            self._copies.append((source.number, slab.number, hit))
            slab.digests = source.digests[: hit // HASH_BLOCK]
            self._hold(slab, 0)
        return slab

    def _has_room(self, tokens: int, *, beside: _Slab | None = None, slabs: int = 1) -> bool:
        """Whether evicting donors other than ``beside`` makes room; asked first, to evict none in vain."""
        spared = self._pinned if beside is None else self._pinned | {beside.number}
        evictable = [number for number in self._donors if number not in spared]
        freed = sum(self._slabs[number].committed for number in evictable)
        return (
            len(self._empty) + len(evictable) >= slabs and self._committed - freed + tokens <= self.capacity
        )

    def _make_room(self, tokens: int) -> None:
        """Evict donors until ``tokens`` more may be committed."""
        while self._committed + tokens > self.capacity:
            self._evict_one()

    def _evict_one(self) -> None:
        """The donor that was of no use for longest."""
        self._evict(next(number for number in self._donors if number not in self._pinned))

    def _evict(self, number: int) -> None:
        del self._donors[number]
        self._drop(self._slabs[number])

    def _drop(self, slab: _Slab) -> None:
        self._cut(slab, 0)
        self._committed -= slab.committed
        slab.committed = 0
        self._free_pages(slab.number)
        self._empty.append(slab.number)
        self._empty.sort(reverse=True)

    def _cut(self, slab: _Slab, tokens: int) -> None:
        """Forget what lies behind the first ``tokens`` tokens (a multiple of HASH_BLOCK)."""
        for digest in slab.digests[tokens // HASH_BLOCK :]:
            holders = self._holders[digest]
            del holders[slab.number]
            if not holders:
                del self._holders[digest]
        del slab.digests[tokens // HASH_BLOCK :]

    def _hold(self, slab: _Slab, start: int) -> None:
        for digest in slab.digests[start:]:
            self._holders.setdefault(digest, {})[slab.number] = None

    def _commit(self, slab: _Slab, tokens: int) -> None:
        if tokens > slab.committed:
            self._committed += tokens - slab.committed
            slab.committed = tokens


def _round(tokens: int) -> int:
    return -(-tokens // HASH_BLOCK) * HASH_BLOCK
