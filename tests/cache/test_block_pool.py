"""Block pool: order of reuse, reference counts, and a random walk against a plain model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpage.cache.block_pool import BlockPool
from flashpage.errors import ArgumentError, CacheOverflowError


def test_a_new_pool_gives_out_all_blocks_in_order():
    pool = BlockPool(5)
    assert pool.allocate(5) == [0, 1, 2, 3, 4]
    assert (pool.num_available, pool.num_cached, pool.num_used) == (0, 0, 5)
    pool.check([[0, 1, 2, 3, 4]])


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_needs_a_block(num_blocks):
    with pytest.raises(ArgumentError, match="at least one block"):
        BlockPool(num_blocks)


def test_allocating_too_many_gives_out_none():
    pool = BlockPool(3)
    held = pool.allocate(1)
    with pytest.raises(CacheOverflowError, match="3 blocks asked for, 2 of 3 available"):
        pool.allocate(3)
    pool.check([held])
    assert pool.allocate(0) == []


def test_tails_are_evicted_before_heads():
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block_id in blocks:
        pool.set_cached(block_id)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pool.free(blocks)
    assert pool.num_cached == 4
    assert pool.allocate(3) == evicted == [3, 2, 1]
    pool.check([evicted])


def test_free_blocks_are_given_out_before_cached_ones():
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.set_cached(blocks[0])
    pool.free(blocks[:2])
    pool.free(blocks[2:])
    assert pool.num_cached == 1
    assert pool.allocate(4)[-1] == blocks[0]


def test_a_cached_block_can_be_taken_back_by_touch():
    pool = BlockPool(2)
    (block, other) = pool.allocate(2)
    pool.set_cached(block)
    pool.free([block])
    assert pool.count_unheld([block, other]) == 1
    pool.touch([block])
    pool.check([[block], [other]])
    assert pool.num_available == 0
    pool.touch([block])
    pool.free([block])
    pool.check([[block], [other]])


def test_a_touched_block_becomes_the_last_to_be_evicted():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block_id in blocks:
        pool.set_cached(block_id)
        pool.free([block_id])
    pool.touch([0])
    pool.free([0])
    assert pool.allocate(3) == [1, 2, 0]


def test_a_free_block_can_not_be_touched_or_cached():
    pool = BlockPool(2)
    with pytest.raises(ArgumentError, match="block 1 is free"):
        pool.touch([1])
    with pytest.raises(ArgumentError, match="block 1 is free"):
        pool.set_cached(1)


def test_a_double_free_raises():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ArgumentError, match=f"block {block} is freed, but nobody holds it"):
        pool.free([block])
    pool.check([])


def test_an_uncached_block_is_the_next_to_be_given_out():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block_id in blocks:
        pool.set_cached(block_id)
    pool.free(blocks)
    pool.set_uncached(0)
    assert pool.num_cached == 2
    pool.check([])
    assert pool.allocate(1) == [0]


def test_a_listener_may_uncache_others_while_one_is_evicted():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block_id in blocks:
        pool.set_cached(block_id)
    pool.free(blocks)
    pool.on_evict = lambda block_id: [pool.set_uncached(b) for b in (0, 1, 2)]
    (block,) = pool.allocate(1)
    pool.check([[block]])
    assert pool.num_cached == 0


@pytest.mark.parametrize("damage", ["count", "link", "cached"])
def test_check_notices_damage(damage):
    pool = BlockPool(4)
    held = pool.allocate(2)
    if damage == "count":
        pool._ref_counts[0] = 2
    elif damage == "link":
        pool._prev[3] = 0
    else:
        pool._num_cached = 1
    with pytest.raises(AssertionError):
        pool.check([held])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_random_walk_keeps_every_promise(data):
    """Random allocate, touch, free, cache and uncache, against counters kept by hand."""
    num_blocks = data.draw(st.integers(1, 12))
    pool = BlockPool(num_blocks)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    holders: list[list[int]] = []
    cached: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "touch", "free", "cache", "uncache"]))
        counts = Counter(b for blocks in holders for b in blocks)
        if action == "allocate":
            count = data.draw(st.integers(0, num_blocks))
            available = num_blocks - len(counts)
            if count > available:
                with pytest.raises(CacheOverflowError):
                    pool.allocate(count)
            else:
                blocks = pool.allocate(count)
                assert not set(blocks) & set(counts), "a block in use was given out"
                assert set(evicted) <= set(blocks)
                assert len(evicted) == max(0, count - (available - len(cached - set(counts))))
                cached -= set(blocks)
                holders.append(blocks)
            evicted.clear()
        elif action == "touch" and (alive := sorted(cached | set(counts))):
            blocks = data.draw(st.lists(st.sampled_from(alive), unique=True))
            pool.touch(blocks)
            holders.append(blocks)
        elif action == "free" and holders:
            pool.free(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        elif action == "cache" and counts:
            block_id = data.draw(st.sampled_from(sorted(counts)))
            pool.set_cached(block_id)
            cached.add(block_id)
        elif action == "uncache":
            block_id = data.draw(st.integers(0, num_blocks - 1))
            pool.set_uncached(block_id)
            cached.discard(block_id)
        pool.check(holders)
        held = {b for blocks in holders for b in blocks}
        assert pool.num_used == len(held)
        assert pool.num_cached == len(cached - held)
