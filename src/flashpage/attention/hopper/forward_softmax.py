"""P of one tile of scores in the forward for Hopper: scale, softcap, mask, the running maximum.

Scores are RAW where a positive scale keeps them in order; they are then scaled to base 2 in the
exponent only. Otherwise they are logits in base 2, and their `scale` is 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashpage.attention.hopper.instructions import (
    hold_rows_here,
    join_rows,
    join_vector,
    keep_where,
    split_rows,
    split_vector,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def tanh(x):
    """Accurate relative to the result also near 0, where 1 - exp(-2|x|) cancels."""
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    e = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    return gl.where(gl.abs(x) < 0.25, near, gl.where(x < 0, -far, far))


@gluon.jit
def scores(
    s, row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
    BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr, PACK: gl.constexpr, MASK: gl.constexpr,
    RAW: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    IMMEDIATES: gl.constexpr,
):  # fmt: skip
    """A tile of raw scores, without RAW as logits in base 2, and with MASK masked.

    IMMEDIATES: masks compare with constants, one for each column of a thread. PACK: rows of one
    token.
    """
    if not RAW:
        s = s * softmax_scale
        if HAS_SOFTCAP:
            s = softcap * tanh(s / softcap)
        s = s * LOG2E
    if MASK:
        diff = len_k - len_q
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        if PACK > 1:
            rows = rows // PACK
        cols = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        last = rows * 0 + (len_k - 1)
        if HAS_RIGHT:
            last = gl.minimum(rows + (diff + window_right), last)
        first = rows + (diff - window_left)
        if IMMEDIATES:
            s = keep_where(s, last[:, None] - cols[None, :], -1, float("-inf"), True)
            if HAS_LEFT:
                s = keep_where(s, cols[None, :] - first[:, None], 1, float("-inf"), True)
        else:
            seen = cols[None, :] <= last[:, None]
            if HAS_LEFT:
                seen = seen & (cols[None, :] >= first[:, None])
            s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def maxima(s, m, scale, LAZY: gl.constexpr):
    """The new maxima of rows whose maxima were m.

    LAZY: a maximum that grew by less than 8 in base 2 is not moved: P is then at most 2^8.
    """
    new_m = gl.maximum(m, gl.max(s, 1))
    if LAZY:
        new_m = gl.where((new_m - m) * scale > 8.0, new_m, m)
    return new_m


@gluon.jit
def exponentials(s, m, new_m, scale, MASK: gl.constexpr):
    """`(p, alpha)`: P of a tile of scores, and the factor that older sums and accumulators take."""
    shift = new_m
    if MASK:  # rows that have seen no key yet
        shift = gl.where(new_m == float("-inf"), 0.0, new_m)
    return gl.exp2(s * scale - (shift * scale)[:, None]), gl.exp2((m - shift) * scale)


@gluon.jit
def first_softmax(s, scale, S_LAYOUT: gl.constexpr, HALVES: gl.constexpr):
    """`(p, m)` of the first block that rows walk, masked. HALVES: as in `forward_kernel`."""
    unseen = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if HALVES:
        first, second = split_rows(s)
        unseen_first, unseen_second = split_vector(unseen, first)
        m_first = hold_rows_here(maxima(first, unseen_first, scale, False))
        p_first, _ = exponentials(first, unseen_first, m_first, scale, True)
        m_second = maxima(second, unseen_second, scale, False)
        p_second, _ = exponentials(second, unseen_second, m_second, scale, True)
        m = join_vector(m_first, m_second, unseen)
        p = join_rows(p_first, p_second, s)
    else:
        m = maxima(s, unseen, scale, False)
        p, _ = exponentials(s, unseen, m, scale, True)
    return p, m
