"""Which tile comes next in the forward for Hopper, which blocks of keys it walks, and how producers
tell consumers of it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def key_range(
    row_lo, row_hi, len_q, len_k, window_left, window_right,
    BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Blocks of keys that rows `row_lo ... row_hi - 1` see: `(lo, full_lo, full_hi, hi)`.

    Blocks lo ... hi - 1 hold a key that a row sees; full_lo ... full_hi - 1 need no mask. Always
    `0 <= lo <= full_lo <= full_hi`.
    """
    diff = len_k - len_q
    lo = 0
    full_lo = 0
    hi_key = len_k
    full_hi = len_k // BLOCK_N
    if HAS_RIGHT:
        hi_key = gl.minimum(hi_key, gl.maximum(row_hi + diff + window_right, 0))
        full_hi = gl.minimum(full_hi, gl.maximum(row_lo + diff + window_right + 1, 0) // BLOCK_N)
    hi = (hi_key + BLOCK_N - 1) // BLOCK_N
    if HAS_LEFT:
        lo = gl.maximum(row_lo + diff - window_left, 0) // BLOCK_N
        full_lo = (gl.maximum(row_hi - 1 + diff - window_left, 0) + BLOCK_N - 1) // BLOCK_N
        full_lo = gl.maximum(lo, gl.minimum(full_lo, hi))
    full_hi = gl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@gluon.jit
def tile_blocks(
    row_lo, len_q, len_k, window_left, window_right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Blocks of keys that the tile walks, `(lo, hi)`: at least one, which may be masked wholly."""
    row_hi = gl.minimum(row_lo + BLOCK_M, len_q)
    lo, _, _, hi = key_range(
        row_lo, row_hi, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    hi = gl.maximum(hi, 1)
    return gl.minimum(lo, hi - 1), hi


@gluon.jit
def find_sequence(cu_ptr, tile, batch, BLOCK: gl.constexpr):
    """The sequence that this tile of BLOCK tokens belongs to, where those of sequence i begin at
    `cu[i] // BLOCK + i`; `batch` after the last."""
    sequence = tile * 0
    last = batch
    while sequence < last:
        middle = (sequence + last + 1) // 2
        if gl.load(cu_ptr + middle) // BLOCK + middle <= tile:
            sequence = middle
        else:
            last = middle - 1
    return sequence


@gluon.jit
def find_tile(
    tile, num_tiles_m, num_heads, group_heads, num_q_heads, batch, seqlen_q, seqlen_k,
    cu_q_ptr, cu_k_ptr, BLOCK_M: gl.constexpr, VARLEN: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """`(row_lo, sequence, head, first_q, len_q, first_k, len_k)` of the tile of this number.

    `group_heads` heads run side by side, the tiles with the most keys first. VARLEN: num_heads
    are the heads of one sequence, and the tiles of all sequences lie end to end, those of sequence
    i from `cu_q[i] // BLOCK_M + i` on, so that nothing depends on the longest length. After the
    last sequence there is one more without keys: the rows that belong to none.
    """
    per_group = num_tiles_m * group_heads
    group = tile // per_group
    num_here = gl.minimum(group_heads, num_heads - group * group_heads)
    within = tile % per_group
    tile_m = num_tiles_m - 1 - within // num_here
    head = group * group_heads + within % num_here
    if VARLEN:
        sequence = find_sequence(cu_q_ptr, tile_m, batch, BLOCK_M)
        first_q = gl.load(cu_q_ptr + sequence)
        is_tail = sequence == batch
        after = gl.minimum(sequence + 1, batch)
        len_q = gl.where(is_tail, seqlen_q, gl.load(cu_q_ptr + after)) - first_q
        first_k = gl.load(cu_k_ptr + sequence)
        len_k = gl.where(is_tail, 0, gl.load(cu_k_ptr + after) - first_k)
        if PAGED:
            first_k = first_k * 0
        row_lo = (tile_m - (first_q // BLOCK_M + sequence)) * BLOCK_M
    else:
        sequence = head // num_q_heads
        head = head % num_q_heads
        first_q = tile * 0
        first_k = tile * 0
        len_q = seqlen_q
        len_k = seqlen_k
        row_lo = tile_m * BLOCK_M
    return row_lo, sequence, head, first_q, len_q, first_k, len_k


@gluon.jit
def publish(numbers_s, index, value):
    """Leave a number for the other warps; by one warp, whose lanes all store it, then `tell`."""
    numbers_s.index(index).store(
        gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    )


@gluon.jit
def told(numbers_s, index, WARPS: gl.constexpr = 4):
    """A number that the producer published, for WARPS warps."""
    return gl.max(numbers_s.index(index).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
