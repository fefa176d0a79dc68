"""Prefix reuse: what is found, what is shared, copied or taken over, and what is evicted first."""

from __future__ import annotations

import pytest
from fake_executor import Fixture

from hotstart.engine.block_manager import BlockManager, PagedBlockManager, SlabManager, chain_hashes
from hotstart.engine.request import Request, Status
from hotstart.messages import NewRequest, SamplingParams, pack_ids

KINDS = pytest.mark.parametrize("block_size", [None, 16], ids=["slabs", "paged"])


def request(tokens: list[int], **params: object) -> Request:
    return Request(NewRequest(0, pack_ids(tokens), SamplingParams(**params)), ())  # type: ignore[arg-type]


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def running(blocks: BlockManager, tokens: list[int], num_new: int | None = None) -> Request:
    """A request that was admitted and whose tokens are computed."""
    found = request(tokens)
    hit = blocks.admit(found, num_new or len(tokens))
    assert hit is not None
    found.status = Status.RUNNING
    found.num_computed = len(tokens)
    blocks.computed(found)
    return found


def finished(blocks: BlockManager, tokens: list[int]) -> int:
    """The same, released; returns the first entry of its table."""
    done = running(blocks, tokens)
    place = done.table[0]
    blocks.release(done)
    return place


def test_digest_of_a_block_depends_on_every_token_before_it() -> None:
    one = chain_hashes(ids(0, 48), 16, 3, [])
    other = chain_hashes([99, *ids(1, 47)], 16, 3, [])
    assert len({*one, *other}) == 6
    assert chain_hashes(ids(0, 48), 16, 3, one[:1]) == one
    assert chain_hashes(ids(0, 64), 16, 3, []) == one


@KINDS
def test_hit_leaves_at_least_one_token_to_compute(block_size: int | None) -> None:
    fixture = Fixture(block_size=block_size)
    blocks = fixture.blocks
    finished(blocks, ids(0, 32))
    assert blocks.admit(request(ids(0, 32)), 32) == 16
    assert (blocks.queries, blocks.hits) == (64, 16)


@KINDS
def test_prefix_is_found_while_its_first_owner_still_runs(block_size: int | None) -> None:
    blocks = Fixture(block_size=block_size).blocks
    running(blocks, ids(0, 40))
    assert blocks.admit(request([*ids(0, 35), 7, 7, 7]), 38) == 32


@KINDS
def test_only_tokens_noted_as_computed_are_found(block_size: int | None) -> None:
    blocks = Fixture(block_size=block_size).blocks
    first = request(ids(0, 64))
    assert blocks.admit(first, 64) == 0
    assert blocks.admit(request(ids(0, 64)), 64) == 0
    first.num_computed = 20
    blocks.computed(first)
    assert blocks.admit(request(ids(0, 64)), 64) == 16


@KINDS
def test_nothing_is_found_without_prefix_caching(block_size: int | None) -> None:
    blocks = Fixture(block_size=block_size, prefix_caching=False).blocks
    finished(blocks, ids(0, 64))
    assert blocks.admit(request(ids(0, 64)), 64) == 0
    assert (blocks.queries, blocks.hits) == (0, 0)


@KINDS
def test_reset_forgets_prefixes_and_refuses_while_requests_run(block_size: int | None) -> None:
    blocks = Fixture(block_size=block_size).blocks
    runs = running(blocks, ids(0, 64))
    assert not blocks.reset()
    blocks.release(runs)
    assert blocks.reset()
    assert blocks.admit(request(ids(0, 64)), 64) == 0


@KINDS
def test_hit_is_not_counted_twice_against_the_memory(block_size: int | None) -> None:
    # All the memory there is, for a prompt of that length whose beginning is cached.
    blocks = Fixture(block_size=block_size, capacity=64).blocks
    finished(blocks, ids(0, 64))
    assert blocks.admit(request(ids(0, 64)), 64) == 48
    assert blocks.usage == 1


@KINDS
def test_request_that_does_not_fit_costs_no_kept_prefix(block_size: int | None) -> None:
    blocks = Fixture(block_size=block_size, capacity=96).blocks
    runs = running(blocks, ids(500, 48))
    finished(blocks, ids(0, 48))
    assert blocks.admit(request(ids(900, 64)), 64) is None
    assert not blocks.extend(runs, 112)
    assert blocks.admit(request(ids(0, 48)), 48) == 32


@KINDS
def test_least_recently_used_prefix_is_evicted_first(block_size: int | None) -> None:
    blocks = Fixture(block_size=block_size, capacity=96).blocks
    for start in (0, 100, 200):
        finished(blocks, ids(start, 32))
    again = running(blocks, ids(0, 32))
    blocks.release(again)
    finished(blocks, ids(300, 32))
    assert blocks.admit(request(ids(0, 32)), 32) == 16
    assert blocks.admit(request(ids(100, 32)), 32) == 0


def test_blocks_are_shared_and_come_back_when_the_last_owner_ends() -> None:
    blocks = PagedBlockManager(9, 16)
    first = running(blocks, ids(0, 40))
    second = running(blocks, [*ids(0, 32), 7, 7, 7])
    assert second.table[:2] == first.table[:2]
    assert second.table[2] != first.table[2]
    assert blocks.usage == 4 / 8
    blocks.release(first)
    assert blocks.usage == 3 / 8
    third = request([*ids(0, 32), 8])
    assert blocks.admit(third, 33) == 32
    blocks.release(second)
    blocks.release(third)
    assert blocks.usage == 0


def test_blocks_that_two_requests_computed_at_once_are_looked_at_once() -> None:
    class Table(list[int]):
        looks = 0

        def __getitem__(self, index: object) -> int:  # type: ignore[override]
            self.looks += 1
            return super().__getitem__(index)  # type: ignore[call-overload,no-any-return]

    blocks = PagedBlockManager(50, 16)
    first, second = request(ids(0, 320)), request(ids(0, 320))
    for each in (first, second):
        assert blocks.admit(each, 320) == 0
        each.num_computed = 320
    blocks.computed(first)
    blocks.computed(second)
    second.table = table = Table(second.table)
    for token in range(16):
        second.tokens.append(token)
        assert blocks.extend(second, len(second.tokens))
        second.num_computed += 1
        blocks.computed(second)
    assert table.looks <= 2, "one new block"
    blocks.release(first)
    assert blocks.admit(request([*ids(0, 320), *ids(0, 17)]), 337) == 336


def test_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    blocks = PagedBlockManager(5, 16)
    finished(blocks, ids(0, 64))
    blocks.release(running(blocks, ids(500, 16)))
    assert blocks.admit(request([*ids(0, 64), 1]), 1) is not None
    assert blocks.hits == 48


def test_block_zero_is_never_handed_out() -> None:
    blocks = PagedBlockManager(4, 16)
    assert sorted(running(blocks, ids(0, 48)).table) == [1, 2, 3]
    assert blocks.admit(request([1]), 1) is None


def test_donor_that_is_mostly_hit_is_taken_over_without_a_copy() -> None:
    blocks = SlabManager(3, 256)
    place = finished(blocks, ids(0, 48))
    follower = request([*ids(0, 40), 7, 7])
    assert blocks.admit(follower, 42) == 32
    assert follower.table == [place]
    assert blocks.take_copies() == []
    blocks.release(follower)
    assert blocks.admit(request(ids(0, 48)), 48) == 32, "what followed the hit is forgotten"


def test_donor_that_is_mostly_something_else_is_copied_and_kept() -> None:
    blocks = SlabManager(3, 256)
    place = finished(blocks, ids(0, 100))
    follower = request([*ids(0, 20), 7, 7])
    assert blocks.admit(follower, 22) == 16
    assert follower.table != [place]
    assert blocks.take_copies() == [(place, follower.table[0], 16)]
    assert blocks.take_copies() == []
    assert blocks.admit(request(ids(0, 100)), 100) == 96


def test_donor_is_taken_over_when_there_is_no_room_for_a_copy_beside_it() -> None:
    by_memory = SlabManager(3, 112)
    finished(by_memory, ids(0, 100))
    assert by_memory.admit(request([*ids(0, 20), *ids(500, 20)]), 40) == 16
    by_slabs = SlabManager(1, 512)
    finished(by_slabs, ids(0, 100))
    assert by_slabs.admit(request([*ids(0, 20), *ids(500, 20)]), 40) == 16
    assert by_memory.take_copies() == by_slabs.take_copies() == []


def test_source_of_a_copy_is_not_evicted_before_the_copy_was_made() -> None:
    blocks = SlabManager(4, 160)
    place = finished(blocks, ids(0, 100))
    follower = request([*ids(0, 20), 7, 7])
    assert blocks.admit(follower, 22) == 16
    assert blocks.admit(request(ids(500, 48)), 48) is None
    assert blocks.take_copies() == [(place, follower.table[0], 16)]
    assert blocks.admit(request(ids(500, 48)), 48) == 0


def test_pages_are_given_back_when_a_prefix_is_evicted() -> None:
    given: list[int] = []
    blocks = SlabManager(2, 64, free_pages=given.append)
    place = finished(blocks, ids(0, 64))
    assert given == []
    running(blocks, ids(500, 64))
    assert given == [place]


def test_neighbouring_slabs_are_handed_out_first() -> None:
    blocks = SlabManager(4, 256)
    held = [running(blocks, ids(start, 4)) for start in (0, 100, 200)]
    assert [r.table for r in held] == [[0], [1], [2]]
    blocks.release(held[1])
    blocks.release(held[0])
    assert [running(blocks, ids(start, 4)).table for start in (300, 400)] == [[0], [1]]
