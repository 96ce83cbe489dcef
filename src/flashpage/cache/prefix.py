"""Which pages hold which tokens: a tree of full, computed blocks; knows nothing of requests.

A node stands for one block of tokens after one particular past, its parent. It is found in the
parent's `children` by the tokens themselves, so a dict compares them in full: two different pasts
can never be taken for each other, whatever their hashes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flashpage.cache.block_pool import BlockPool


class PrefixNode:
    """One cached block: `tokens` after the past that `parent` stands for, held in `block_id`."""

    __slots__ = ("block_id", "children", "parent", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: tuple[int, ...], block_id: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.children: dict[tuple[int, ...], PrefixNode] = {}


class PrefixCache:
    """Finds the longest cached prefix of a token sequence, in whole blocks of `block_size`.

    Whoever holds a node's block also holds those of its ancestors, and frees them after it. So
    an ancestor is never given out before its descendants, and every node stays within reach of
    the root until its own block is evicted.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self.root = PrefixNode(parent=None, tokens=(), block_id=-1)
        self._pool = pool
        self._node_of: dict[int, PrefixNode] = {}
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return len(self._node_of)

    def match(self, token_ids: Sequence[int], max_tokens: int) -> list[PrefixNode]:
        """The nodes of the longest cached prefix of `token_ids[:max_tokens]`, head first.

        Nothing is touched: the caller adds itself as a holder of the blocks that it takes.
        """
        nodes: list[PrefixNode] = []
        node = self.root
        for end in range(self.block_size, max_tokens + 1, self.block_size):
            child = node.children.get(tuple(token_ids[end - self.block_size : end]))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def insert(self, parent: PrefixNode, tokens: Sequence[int], block_id: int) -> PrefixNode | None:
        """Let a used block with computed content be hit as `tokens` after `parent`.

        Returns the node of these tokens. Where they are cached already that node is the older
        one, with another block of the same content; the caller should share that block and free
        its own. Returns None when `parent` has been forgotten: then nothing can be cached after it.
        """
        assert len(tokens) == self.block_size, "only full blocks can be hit"
        if parent is not self.root and self._node_of.get(parent.block_id) is not parent:
            return None
        key = tuple(tokens)
        node = parent.children.get(key)
        if node is None:
            node = PrefixNode(parent, key, block_id)
            parent.children[key] = node
            self._node_of[block_id] = node
            self._pool.set_cached(block_id)
        return node

    def forget(self, block_id: int) -> None:
        """Never again hit this block, nor any that follows it; does nothing if it is not cached."""
        node = self._node_of.get(block_id)
        if node is None:
            return
        assert node.parent is not None
        del node.parent.children[node.tokens]
        doomed = [node]
        while doomed:
            node = doomed.pop()
            doomed.extend(node.children.values())
            node.children.clear()
            del self._node_of[node.block_id]
            self._pool.set_uncached(node.block_id)

    def clear(self) -> None:
        """Forget everything, for example because the weights have changed."""
        for node in list(self.root.children.values()):
            self.forget(node.block_id)

    def check(self, chains: Collection[Sequence[int]] = ()) -> None:
        """Prove the tree's promises; `AssertionError` if broken.

        `chains` are the blocks of every holder, head first: each cached block that a holder has
        must be preceded by its ancestors.
        """
        reached: dict[int, PrefixNode] = {}
        pending = [self.root]
        while pending:
            node = pending.pop()
            for tokens, child in node.children.items():
                assert child.parent is node
                assert child.tokens == tokens
                assert len(tokens) == self.block_size
                assert child.block_id not in reached, f"block {child.block_id} has two nodes"
                reached[child.block_id] = child
                pending.append(child)
        assert reached == self._node_of, "a cached block is out of reach"
        cached = {b for b in range(self._pool.num_blocks) if self._pool.is_cached(b)}
        assert cached == set(reached), "pool and tree disagree on what is cached"
        for blocks in chains:
            parent = self.root
            for block_id in blocks:
                if block_id not in reached:
                    break
                assert reached[block_id].parent is parent, f"block {block_id} lost its past"
                parent = reached[block_id]
