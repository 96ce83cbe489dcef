"""What forward, backward and decode share about one tile of scores: which keys are visible, the
logits, dropout.

Kernels compute with logits in base 2 (`logit * log2(e)`), because `exp2` is one instruction.
`rows` are query indices and `cols` key indices within their sequence; `diff = len_k - len_q`
moves a row onto the bottom-right diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def key_range(
    row_lo,
    row_hi,
    len_q,
    len_k,
    window_left,
    window_right,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Keys that rows `row_lo ... row_hi - 1` see: `(lo, full_lo, full_hi, hi)`.

    Keys `lo ... hi - 1` are visible to at least one row (lo is rounded down to a block); blocks
    from full_lo to full_hi are visible to every row and need no mask. Always
    `lo <= full_lo <= full_hi`, all three multiples of BLOCK_N; nothing is visible if `lo >= hi`.
    """
    diff = len_k - len_q
    lo = 0
    full_lo = 0
    hi = len_k
    full_hi = len_k // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        hi = tl.minimum(hi, tl.maximum(row_hi + diff + window_right, 0))
        full_hi = tl.minimum(
            full_hi, tl.maximum(row_lo + diff + window_right + 1, 0) // BLOCK_N * BLOCK_N
        )
    if HAS_LEFT:
        lo = tl.maximum(row_lo + diff - window_left, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(row_hi - 1 + diff - window_left, 0), BLOCK_N) * BLOCK_N
        full_lo = tl.maximum(lo, tl.minimum(full_lo, tl.cdiv(hi, BLOCK_N) * BLOCK_N))
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def row_range(
    col_lo,
    col_hi,
    len_q,
    len_k,
    window_left,
    window_right,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Rows that see keys `col_lo ... col_hi - 1`: the transpose of `key_range`, blocks of BLOCK_M.

    `col_hi <= len_k`. Blocks from full_lo to full_hi hold rows that see every one of the keys.
    """
    diff = len_k - len_q
    lo = 0
    full_lo = 0
    hi = len_q
    full_hi = len_q // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        hi = tl.minimum(hi, tl.maximum(col_hi - diff + window_left, 0))
        full_hi = tl.minimum(
            full_hi, tl.maximum(col_lo - diff + window_left + 1, 0) // BLOCK_M * BLOCK_M
        )
    if HAS_RIGHT:
        lo = tl.maximum(col_lo - diff - window_right, 0) // BLOCK_M * BLOCK_M
        full_lo = tl.cdiv(tl.maximum(col_hi - 1 - diff - window_right, 0), BLOCK_M) * BLOCK_M
        full_lo = tl.maximum(lo, tl.minimum(full_lo, tl.cdiv(hi, BLOCK_M) * BLOCK_M))
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def visible(
    rows,
    cols,
    len_q,
    len_k,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Which keys each row sees; rows and cols broadcast against each other."""
    mask = (cols < len_k) & (rows < len_q)
    if HAS_RIGHT:
        mask &= cols <= rows + (len_k - len_q + window_right)
    if HAS_LEFT:
        mask &= cols >= rows + (len_k - len_q - window_left)
    return mask


@triton.jit
def tanh(x):
    """Accurate relative to the result also near 0, where 1 - exp(-2|x|) cancels."""
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def logits2(
    scores,
    rows,
    cols,
    diff,
    softmax_scale,
    softcap,
    slope,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Logits in base 2 from raw scores q . k: scale, softcap, then ALiBi."""
    t = scores * softmax_scale
    if HAS_SOFTCAP:
        t = softcap * tanh(t / softcap)
    if HAS_ALIBI:
        t -= slope * tl.abs(rows + diff - cols).to(tl.float32)
    return t * LOG2E


@triton.jit
def keep_mask(rng_state_ptr, sequence_head, rows, cols, dropout_p):
    """Entries of P that dropout keeps, a function of the state and of the entry's place alone.

    `sequence_head` numbers (sequence, query head); rows and cols broadcast.
    """
    seed = tl.load(rng_state_ptr)
    offset = tl.load(rng_state_ptr + 1)
    place = (rows + cols * 0).to(tl.uint32)
    zero = place * 0
    random, _, _, _ = tl.philox(
        seed,
        place,
        (cols + rows * 0).to(tl.uint32),
        zero + sequence_head.to(tl.uint32),
        zero + offset.to(tl.uint32),
    )
    # 24 bits fit a float32 exactly.
    return (random >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout_p
