"""Who owns which page: reference counts and a linked free list; knows nothing of tokens or tensors.

Every page (block) is in exactly one of three sets:

- free: held by nobody, its content means nothing;
- cached: held by nobody, but its content may still be asked for (`cache.prefix` said so);
- used: held by at least one sequence; its content may also be cached.

Free and cached blocks lie in one doubly linked list, in the order in which they are given out:
free ones first, then the cached ones from the longest unused to the most recently used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from flashpage.errors import ArgumentError, CacheOverflowError


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`; each operation is O(1) per block.

    `on_evict`, when set, is called with the id of a cached block just before it is given out anew.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ArgumentError(f"num_blocks = {num_blocks}: a pool needs at least one block")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        self._ref_counts = [0] * num_blocks
        self._is_cached = [False] * num_blocks
        self._num_available = num_blocks
        self._num_cached = 0
        # A ring through the sentinel `num_blocks`: its successor is given out first.
        self._head = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        return self._num_available

    @property
    def num_cached(self) -> int:
        """Blocks held by nobody whose content can still be hit."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks held by at least one holder."""
        return self.num_blocks - self._num_available

    def allocate(self, count: int) -> list[int]:
        """Give out `count` blocks with one holder each; all or none (`CacheOverflowError`)."""
        if count > self._num_available:
            raise CacheOverflowError(
                f"{count} blocks asked for, {self._num_available} of {self.num_blocks} available"
            )
        # Those that are not cached come first: all at once, as a long prompt takes many.
        block_ids: list[int] = []
        block_id = self._next[self._head]
        while len(block_ids) < count and not self._is_cached[block_id]:
            block_ids.append(block_id)
            self._ref_counts[block_id] = 1
            block_id = self._next[block_id]
        self._next[self._head], self._prev[block_id] = block_id, self._head
        self._num_available -= len(block_ids)
        while len(block_ids) < count:
            block_ids.append(self._allocate_one())
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block; the blocks must be used or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if not self._is_cached[block_id]:
                    raise ArgumentError(f"block {block_id} is free: its content means nothing")
                self._unlink(block_id)
                self._num_available -= 1
                self._num_cached -= 1
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one holder from each block of a sequence, given head first.

        The tail is released first, so that it is also evicted first: a prefix is worth more than
        what follows it, which can not be hit without it.
        """
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] == 0:
                raise ArgumentError(f"block {block_id} is freed, but nobody holds it")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._num_available += 1
                if self._is_cached[block_id]:
                    self._num_cached += 1
                    self._link_after(self._prev[self._head], block_id)
                else:
                    self._link_after(self._head, block_id)

    def count_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks a `touch` would take out of `num_available`."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def set_cached(self, block_id: int) -> None:
        """Remember that the content of a used block can be hit, now and after it is freed."""
        if self._ref_counts[block_id] == 0:
            raise ArgumentError(f"block {block_id} is free: there is no content to cache")
        self._is_cached[block_id] = True

    def set_uncached(self, block_id: int) -> None:
        """Forget that a block's content can be hit; unheld, it will be the next to be given out."""
        if self._is_cached[block_id] and self._ref_counts[block_id] == 0:
            self._num_cached -= 1
            self._unlink(block_id)
            self._link_after(self._head, block_id)
        self._is_cached[block_id] = False

    def is_cached(self, block_id: int) -> bool:
        """Whether the block's content can be hit."""
        return self._is_cached[block_id]

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Prove the promises above, given the blocks of each holder; `AssertionError` if not."""
        expected = Counter(block_id for blocks in holders for block_id in blocks)
        for block_id, count in enumerate(self._ref_counts):
            assert count == expected[block_id], (
                f"block {block_id} counts {count} holders, has {expected[block_id]}"
            )
        linked = self._walk()
        assert len(linked) == len(set(linked)) == self._num_available, "a block is listed twice"
        assert set(linked) == {b for b in range(self.num_blocks) if self._ref_counts[b] == 0}, (
            "the free list does not hold exactly the blocks that nobody holds"
        )
        cached = [self._is_cached[block_id] for block_id in linked]
        assert cached == sorted(cached), "a cached block is given out before a free one"
        assert sum(cached) == self._num_cached
        num_free = self._num_available - self._num_cached
        assert num_free + self._num_cached + self.num_used == self.num_blocks

    def _allocate_one(self) -> int:
        block_id = self._next[self._head]
        if self._is_cached[block_id]:
            if self.on_evict is not None:
                self.on_evict(block_id)
            # The listener may have uncached others, which now lie ahead; this one is still unheld.
            self.set_uncached(block_id)
        self._unlink(block_id)
        self._num_available -= 1
        self._ref_counts[block_id] = 1
        return block_id

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before

    def _link_after(self, before: int, block_id: int) -> None:
        after = self._next[before]
        self._prev[block_id], self._next[block_id] = before, after
        self._next[before] = self._prev[after] = block_id

    def _walk(self) -> list[int]:
        """The ids in the free list, first to be given out first; proves both directions agree."""
        linked: list[int] = []
        block_id = self._next[self._head]
        while block_id != self._head:
            assert self._prev[self._next[block_id]] == block_id, f"broken link at block {block_id}"
            assert len(linked) < self.num_blocks, "the free list runs in circles"
            linked.append(block_id)
            block_id = self._next[block_id]
        return linked
