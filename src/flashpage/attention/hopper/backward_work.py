"""Blocks of keys of the backward for Hopper: which one comes next, the tiles of rows it walks, and
how the warps of a thread block tell each other of it.

The producer publishes what the others need to know of a block, as numbers in `block_s`. It has two
slots, so that the next block can be told while this one is still at work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashpage.attention.hopper.forward_work import find_sequence, told

BLOCK_N = gl.constexpr(128)
"""Keys of a block."""
STAGES = gl.constexpr(2)
"""Tiles of Q and of dO in shared memory."""

NUMBERS = gl.constexpr(16)
"""Places of a slot of `block_s`; what is in them:"""
COL_LO = gl.constexpr(0)
"""first key, within its sequence; negative: there is no block any more"""
LO = gl.constexpr(1)
FULL = gl.constexpr(2)
HI = gl.constexpr(3)
"""as from `row_tiles`"""
LEN_Q = gl.constexpr(4)
LEN_K = gl.constexpr(5)
LANE = gl.constexpr(6)
"""as from `find_lane`, of the first of the heads that share the keys"""
SEQUENCE = gl.constexpr(7)
KV_HEAD = gl.constexpr(8)
FIRST_K = gl.constexpr(9)


@gluon.jit
def find_keys(
    number, num_tiles_n, num_heads, group_heads, num_kv_heads, batch, seqlen_q, seqlen_k,
    cu_q_ptr, cu_k_ptr, BLOCK_M: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """`(col_lo, sequence, kv_head, first_q, len_q, first_k, len_k, first_tile)` of this number.

    `group_heads` kv heads run side by side, low keys first: with a causal mask they have the most
    rows. VARLEN: num_heads are the kv heads of one sequence, and blocks of keys of all sequences
    lie end to end, as tiles of rows do (`forward_work.find_tile`); `first_tile` is the sequence's
    first tile of rows. After the last sequence comes one without queries: the keys of none.
    """
    per_group = num_tiles_n * group_heads
    group = number // per_group
    num_here = gl.minimum(group_heads, num_heads - group * group_heads)
    within = number % per_group
    tile_n = within // num_here
    head = group * group_heads + within % num_here
    if VARLEN:
        sequence = find_sequence(cu_k_ptr, tile_n, batch, BLOCK_N)
        is_tail = sequence == batch
        after = gl.minimum(sequence + 1, batch)
        first_k = gl.load(cu_k_ptr + sequence)
        len_k = gl.where(is_tail, seqlen_k, gl.load(cu_k_ptr + after)) - first_k
        first_q = gl.load(cu_q_ptr + sequence)
        len_q = gl.where(is_tail, 0, gl.load(cu_q_ptr + after) - first_q)
        col_lo = (tile_n - (first_k // BLOCK_N + sequence)) * BLOCK_N
        first_tile = first_q // BLOCK_M + sequence
    else:
        sequence = head // num_kv_heads
        head = head % num_kv_heads
        first_q = tile_n * 0
        first_k = tile_n * 0
        len_q = seqlen_q
        len_k = seqlen_k
        col_lo = tile_n * BLOCK_N
        first_tile = tile_n * 0
    return col_lo, sequence, head, first_q, len_q, first_k, len_k, first_tile


@gluon.jit
def row_tiles(
    col_lo, len_q, len_k, window_left, window_right,
    BLOCK_M: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Tiles of rows that see a key of this block, `(lo, full, hi)`: those from `full` on need no
    mask. With a left edge, and at the end of the keys, all are masked. None for a block past the
    end, of which a varlen sequence may have one."""
    diff = len_k - len_q
    hi = gl.where(col_lo < len_k, (len_q + BLOCK_M - 1) // BLOCK_M, 0)
    lo = hi * 0
    full = hi * 0
    if HAS_RIGHT:
        first_seen = col_lo - diff - window_right
        lo = gl.maximum(first_seen, 0) // BLOCK_M
        full = (gl.maximum(first_seen + BLOCK_N - 1, 0) + BLOCK_M - 1) // BLOCK_M
    if HAS_LEFT:
        end = gl.maximum(col_lo + BLOCK_N - diff + window_left, 0)
        hi = gl.minimum(hi, (end + BLOCK_M - 1) // BLOCK_M)
        full = hi
    full = gl.where(col_lo + BLOCK_N > len_k, hi, full)
    lo = gl.minimum(lo, hi)
    full = gl.minimum(gl.maximum(full, lo), hi)
    return lo, full, hi


@gluon.jit
def row_tile(i, lo, hi, ORDERED: gl.constexpr):
    """The tile that comes at place i of lo ... hi - 1. ORDERED: from the last one down, so that
    blocks of keys that began together come to a tile together, and soon have their turn; from the
    first one up, with a causal mask, a short block would wait for nearly all of the longest.
    """
    if ORDERED:
        i = lo + hi - 1 - i
    return i


@gluon.jit
def find_lane(sequence, head, first_tile, num_q_heads, num_tiles_m, VARLEN: gl.constexpr):
    """The number of a sequence's and head's first tile of rows among all: sums of dQ, LSE and delta
    lie in such tiles."""
    if VARLEN:
        lane = head
    else:
        lane = sequence * num_q_heads + head
    return lane * num_tiles_m + first_tile


@gluon.jit
def buffer_of(use, COUNT: gl.constexpr):
    """Which of COUNT buffers, a power of two, this use of them takes, and the phase of its
    barriers. By bits: signed divisions take more instructions."""
    return use & (COUNT - 1), (use & COUNT) // COUNT


@gluon.jit
def next_block(block_s, block_full, block, WARPS: gl.constexpr):
    """The first key of this thread block's block of keys number `block`, once it is told of it;
    negative after the last."""
    slot, phase = buffer_of(block, 2)
    mbarrier.wait(block_full.index(slot), phase)
    return told(block_s, slot * NUMBERS + COL_LO, WARPS)


@gluon.constexpr_function
def boxes(count, rows, head_dim, ragged):
    """Shape of `count` boxes of a descriptor in shared memory."""
    return [count, *([1, 1] if ragged else [1]), rows, 1, head_dim]


@gluon.jit
def keys_in_dq(
    dq_s, number, desc, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, RAGGED: gl.constexpr
):
    """A buffer of dQ, 32 KB, as one for dK or dV."""
    COUNT: gl.constexpr = BLOCK_M * BLOCK_D * 4 // (BLOCK_N * BLOCK_D * 2)
    BOXES: gl.constexpr = boxes(COUNT, BLOCK_N, BLOCK_D, RAGGED)
    return dq_s.index(number)._reinterpret(desc.dtype, BOXES, desc.layout).index(0)
