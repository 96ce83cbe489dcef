"""From layouts to dense pieces: what the torch kernels of this backend work on.

A segment is a run of sequences of equal lengths, seen as a dense batch through views. Also the
value checks that a CPU can do for free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from flashpage.errors import ArgumentError


@dataclass(frozen=True)
class Segment:
    """Sequences `first ... first + count` of the batch, all of lengths seqlen_q and seqlen_k."""

    first: int
    count: int
    seqlen_q: int
    seqlen_k: int
    start_q: int
    """first row in flat q"""
    start_k: int
    """first row in flat k (meaningless when paged)"""

    def q_rows(self, flat: Tensor) -> Tensor:
        """`[total_q, ...]` to `[count, seqlen_q, ...]`, a view"""
        stop = self.start_q + self.count * self.seqlen_q
        return _rows(flat[self.start_q : stop], self.count, self.seqlen_q)

    def k_rows(self, flat: Tensor) -> Tensor:
        """`[total_k, ...]` to `[count, seqlen_k, ...]`, a view"""
        stop = self.start_k + self.count * self.seqlen_k
        return _rows(flat[self.start_k : stop], self.count, self.seqlen_k)

    def lse_rows(self, flat: Tensor) -> Tensor:
        """`[heads, total_q]` to `[count, heads, seqlen_q]`, a view"""
        stop = self.start_q + self.count * self.seqlen_q
        rows = flat[:, self.start_q : stop]
        return rows.unflatten(1, (self.count, self.seqlen_q)).transpose(0, 1)

    def slopes(self, alibi_slopes: Tensor | None) -> Tensor | None:
        """This segment's slopes, `[count or 1, heads]`"""
        return segment_slopes(alibi_slopes, self.first, self.count)


def segment_slopes(alibi_slopes: Tensor | None, first: int, count: int) -> Tensor | None:
    if alibi_slopes is None:
        return None
    if alibi_slopes.dim() == 1:
        return alibi_slopes[None]
    return alibi_slopes[first : first + count]


def _rows(flat: Tensor, count: int, seqlen: int) -> Tensor:
    return flat[None] if count == 1 else flat.unflatten(0, (count, seqlen))


def varlen_segments(
    cu_seqlens_q: list[int], cu_seqlens_k: list[int], max_count: int | None = None
) -> Iterator[Segment]:
    """Runs of (at most max_count) neighbouring sequences of equal lengths, in order.

    Sequences without queries or without keys are left out: they have nothing to compute.
    """
    lengths = [
        (cu_seqlens_q[i + 1] - cu_seqlens_q[i], cu_seqlens_k[i + 1] - cu_seqlens_k[i])
        for i in range(len(cu_seqlens_q) - 1)
    ]
    first = 0
    for (seqlen_q, seqlen_k), run in groupby(lengths):
        count = len(list(run))
        stop = first + count
        if seqlen_q > 0 and seqlen_k > 0:
            for i in range(first, stop, max_count or count):
                n = min(max_count or count, stop - i)
                yield Segment(i, n, seqlen_q, seqlen_k, cu_seqlens_q[i], cu_seqlens_k[i])
        first = stop


def checked_cu_seqlens(name: str, cu_seqlens: Tensor, total: int | None) -> list[int]:
    """The values, after checking them against the rules (total: rows there are, if flat)."""
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ArgumentError(f"{name} must begin with 0, got {values[0]}")
    for i in range(len(values) - 1):
        if values[i + 1] < values[i]:
            raise ArgumentError(
                f"{name} must be nondecreasing, got {values[i]} then {values[i + 1]} at index {i}"
            )
    if total is not None and values[-1] > total:
        raise ArgumentError(
            f"{name} must end at or before the number of tokens ({total}), got {values[-1]}"
        )
    return values


def check_page_ids(
    block_table: Tensor, lengths: list[int], num_blocks: int, block_size: int
) -> None:
    """Every entry of block_table that a length makes use of names an existing page."""
    max_blocks = block_table.shape[1]
    longest = max(lengths, default=0)
    if longest > max_blocks * block_size:
        raise ArgumentError(
            f"block_table holds {max_blocks} pages of {block_size} tokens per sequence, too few "
            f"for a sequence of {longest}"
        )
    table = block_table.numpy()
    for i, length in enumerate(lengths):
        row = table[i, : -(-length // block_size)]
        if len(row) and not (row.min() >= 0 and row.max() < num_blocks):
            bad = row[(row < 0) | (row >= num_blocks)][0]
            raise ArgumentError(
                f"block_table must hold page ids from 0 to {num_blocks - 1} where they are used, "
                f"got {bad} for sequence {i} of {length} tokens"
            )


def gather_pages(pages: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of each sequence: `[count, length, num_kv_heads, head_dim]`.

    pages: `[num_blocks, block_size, num_kv_heads, head_dim]`, block_table: `[count, max_blocks]`.
    """
    used = -(-length // pages.shape[1])
    return pages[block_table[:, :used].long()].flatten(1, 2)[:, :length]


# ---------------------------------------------------------------------------------------------
# Values of the cache arguments
# ---------------------------------------------------------------------------------------------


def checked_lengths(k_cache: Tensor, seqlens: Tensor, block_table: Tensor | None) -> list[int]:
    """Keys per sequence, new ones included."""
    lengths = seqlens.tolist()
    capacity = k_cache.shape[1]
    if min(lengths) < 0:
        raise ArgumentError(f"cache_seqlens must not be negative, got {min(lengths)}")
    if block_table is not None:
        check_page_ids(block_table, lengths, k_cache.shape[0], k_cache.shape[1])
    elif max(lengths) > capacity:
        raise ArgumentError(
            f"cache_seqlens must be at most the capacity of the cache ({capacity}), got "
            f"{max(lengths)}"
        )
    return lengths


def checked_rows(batch: int, k_cache: Tensor, cache_batch_idx: Tensor | None) -> list[int]:
    """Row of the (not paged) cache that each sequence uses."""
    if cache_batch_idx is None:
        return list(range(batch))
    rows = cache_batch_idx.tolist()
    if min(rows) < 0 or max(rows) >= k_cache.shape[0]:
        raise ArgumentError(
            f"cache_batch_idx must be between 0 and {k_cache.shape[0] - 1} (rows of the cache), "
            f"got values from {min(rows)} to {max(rows)}"
        )
    return rows


def checked_leftpad(cache_leftpad: Tensor | None, batch: int) -> list[int]:
    """First valid position of each sequence."""
    if cache_leftpad is None:
        return [0] * batch
    starts = cache_leftpad.tolist()
    if min(starts) < 0:
        raise ArgumentError(f"cache_leftpad must not be negative, got {min(starts)}")
    return starts
