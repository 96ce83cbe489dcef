"""Prefix cache: what can be hit, what is forgotten, and a random walk against a plain dict."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpage.cache.block_pool import BlockPool
from flashpage.cache.prefix import PrefixCache


def hold(cache: PrefixCache, pool: BlockPool, tokens: list[int]) -> list[int]:
    """Take the pages of `tokens` as a scheduler would: hits first, then new ones, then insert."""
    size = cache.block_size
    nodes = cache.match(tokens, len(tokens))
    blocks = [node.block_id for node in nodes]
    num_new = -(-len(tokens) // size) - len(nodes)
    if num_new > pool.num_available - pool.count_unheld(blocks):
        return []
    pool.touch(blocks)
    blocks += pool.allocate(num_new)
    for i in range(len(nodes), len(tokens) // size):
        parent = nodes[-1] if nodes else cache.root
        node = cache.insert(parent, tokens[i * size : (i + 1) * size], blocks[i])
        assert node is not None
        nodes.append(node)
    return blocks


def test_only_whole_blocks_of_the_same_past_are_hit():
    pool = BlockPool(8)
    cache = PrefixCache(pool, block_size=2)
    blocks = hold(cache, pool, [1, 2, 3, 4, 5])
    assert [n.block_id for n in cache.match([1, 2, 3, 4, 5], 5)] == blocks[:2]
    assert [n.block_id for n in cache.match([1, 2, 3, 9], 4)] == blocks[:1]
    assert cache.match([3, 4], 2) == [], "the same tokens after another past"
    assert cache.match([1], 1) == []
    cache.check([blocks])


def test_max_tokens_limits_the_hit():
    pool = BlockPool(8)
    cache = PrefixCache(pool, block_size=2)
    hold(cache, pool, [1, 2, 3, 4])
    assert [len(cache.match([1, 2, 3, 4], limit)) for limit in range(5)] == [0, 0, 1, 1, 2]


def test_cached_blocks_are_hit_until_given_out_anew():
    pool = BlockPool(2)
    cache = PrefixCache(pool, block_size=1)
    blocks = hold(cache, pool, [7, 8])
    pool.free(blocks)
    assert len(cache.match([7, 8], 2)) == 2
    pool.allocate(1)
    assert [n.block_id for n in cache.match([7, 8], 2)] == blocks[:1], "the tail goes first"
    pool.allocate(1)
    assert cache.match([7, 8], 2) == []
    assert len(cache) == 0


def test_a_hash_collision_is_not_a_hit():
    # -1 and -2 have the same hash in CPython, so these keys collide and only equality decides.
    assert hash((-1,)) == hash((-2,))
    pool = BlockPool(2)
    cache = PrefixCache(pool, block_size=1)
    hold(cache, pool, [-1])
    assert cache.match([-2], 1) == []


def test_the_first_of_two_equal_blocks_is_kept():
    pool = BlockPool(2)
    cache = PrefixCache(pool, block_size=1)
    first, second = pool.allocate(2)
    node = cache.insert(cache.root, [5], first)
    assert cache.insert(cache.root, [5], second) is node
    assert not pool.is_cached(second)
    cache.check([[first]])


def test_forgetting_a_block_forgets_what_follows_it():
    pool = BlockPool(6)
    cache = PrefixCache(pool, block_size=1)
    one = hold(cache, pool, [1, 2, 3])
    two = hold(cache, pool, [1, 2, 4])
    other = hold(cache, pool, [9])
    stale = cache.match([1, 2, 3], 3)[-1]
    cache.forget(one[1])
    assert len(cache.match([1, 2, 3], 3)) == len(cache.match([1, 2, 4], 3)) == 1
    assert len(cache.match([9], 1)) == 1
    assert cache.insert(stale, [5], one[2]) is None, "nothing can follow a forgotten past"
    cache.forget(one[1])
    cache.check([one, two, other])
    pool.check([one, two, other])


def test_a_forgotten_block_that_was_cached_anew_has_no_claim_on_its_old_place():
    pool = BlockPool(2)
    cache = PrefixCache(pool, block_size=1)
    (block,) = hold(cache, pool, [1])
    (stale,) = cache.match([1], 1)
    pool.free([block])
    (fresh, _) = pool.allocate(2)
    cache.insert(cache.root, [2], fresh)
    assert cache.insert(stale, [3], block) is None


def test_clear_forgets_everything():
    pool = BlockPool(4)
    cache = PrefixCache(pool, block_size=1)
    blocks = hold(cache, pool, [1, 2]) + hold(cache, pool, [3])
    pool.free(blocks)
    cache.clear()
    assert len(cache) == pool.num_cached == 0
    cache.check()
    pool.check([])


def test_check_notices_a_lost_block():
    pool = BlockPool(2)
    cache = PrefixCache(pool, block_size=1)
    blocks = hold(cache, pool, [1, 2])
    cache.root.children.clear()
    with pytest.raises(AssertionError, match="out of reach"):
        cache.check([blocks])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 10))
def test_hits_always_hold_the_right_tokens(seed, block_size, num_blocks):
    """Random sequences over three tokens, held and freed: a page's content is what is asked for."""
    rng = random.Random(seed)
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, block_size)
    content: dict[int, tuple[int, ...]] = {}  # page -> the whole past it was written for
    held: list[list[int]] = []
    for _ in range(40):
        if held and rng.random() < 0.5:
            pool.free(held.pop(rng.randrange(len(held))))
        else:
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, block_size * num_blocks))]
            ends = range(block_size, len(tokens) + 1, block_size)
            hits = cache.match(tokens, len(tokens))
            for node, end in zip(hits, ends, strict=False):
                assert content[node.block_id] == tuple(tokens[:end])
            blocks = hold(cache, pool, tokens)
            if blocks:
                held.append(blocks)
                for block_id, end in zip(blocks, ends, strict=False):
                    content[block_id] = tuple(tokens[:end])
        pool.check(held)
        cache.check(held)
