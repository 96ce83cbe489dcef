"""How a consumer warpgroup of the kernels for Hopper walks the keys that its 64 rows see.

Keys are walked from the last visible one down, so that masks come first. S = Q K^T of the next
block is on the tensor cores while the exponentials of this one are computed (Shah et al. 2024,
FlashAttention-3), and named barriers hand the tensor cores from one warpgroup to the next
(`PING_PONG`). Forward and decode share this loop.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashpage.attention.hopper.forward_softmax import LOG2E, softmax
from flashpage.attention.hopper.instructions import (
    barrier_arrive,
    barrier_sync,
    hold_here,
    pack_pairs,
    partial_sums,
    release,
    rescale_rows,
    scale_partial_sums,
    unpack_pairs,
)

LN2 = gl.constexpr(0.6931471805599453)
FIRST_BARRIER = gl.constexpr(8)
"""Named barriers below belong to Triton."""


@gluon.jit
def told(tile_s, index: gl.constexpr):
    """A number that the producer published."""
    return gl.max(tile_s.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _step(
    q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
    row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
    WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    PACK: gl.constexpr, MASK: gl.constexpr, RAW: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, PING_PONG: gl.constexpr,
    LAZY: gl.constexpr, IMMEDIATES: gl.constexpr,
):  # fmt: skip
    """O += P V of the last block, S = Q K^T of `block` and its softmax."""
    v_stage = blocks_done % STAGES
    v_phase = (blocks_done // STAGES) & 1
    blocks_done += 1
    k_stage = blocks_done % STAGES
    mbarrier.wait(k_full.index(k_stage), (blocks_done // STAGES) & 1)
    if PING_PONG:
        barrier_sync(FIRST_BARRIER + WARPGROUP, 256)
    s = warpgroup_mma(
        q, k_s.index(k_stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)),
        gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT), use_acc=False, is_async=True,
    )  # fmt: skip
    mbarrier.wait(v_full.index(v_stage), v_phase)
    left = unpack_pairs(p, v_s.dtype, P_LAYOUT)
    acc = warpgroup_mma(left, v_s.index(v_stage).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
    if PING_PONG:
        barrier_arrive(FIRST_BARRIER + (WARPGROUP + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(1, deps=[s])
    release(k_empty.index(k_stage))
    new_p, m, alpha = softmax(
        s, m, row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
        BLOCK_N, S_LAYOUT, PACK, MASK, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, LAZY, IMMEDIATES,
    )  # fmt: skip
    total = scale_partial_sums(total, alpha) + partial_sums(new_p)
    if LAZY:
        total = hold_here(total)
    acc, left = warpgroup_mma_wait(0, deps=[acc, left])
    release(v_empty.index(v_stage))
    p = pack_pairs(new_p, v_s.dtype)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))
    if LAZY:
        acc = rescale_rows(acc, alpha)
    else:
        acc = acc * alpha[:, None]
    return blocks_done, p, acc, m, total


@gluon.jit
def walk(
    q, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, blocks_done, tiles_done,
    row, lo, full_lo, full_hi, hi, len_q, len_k, softmax_scale, softcap, window_left, window_right,
    WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, PACK: gl.constexpr, RAW: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, PING_PONG: gl.constexpr,
    LAZY: gl.constexpr, OUT_IN_Q: gl.constexpr, IMMEDIATES: gl.constexpr,
):  # fmt: skip
    """Attention of 64 rows over the blocks of keys lo ... hi - 1, of which full_lo ...
    full_hi - 1 need no mask: `(blocks_done, acc, row_sum, top, lse)`.

    acc is not normalised; row_sum is 1 where no key was seen; top are maxima, of raw scores with
    RAW. PACK: rows of one token, which are query heads that share a kv head. Unless OUT_IN_Q the
    memory of Q is given back.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    mbarrier.wait(q_full.index(WARPGROUP), tiles_done & 1)
    stage = blocks_done % STAGES
    mbarrier.wait(k_full.index(stage), (blocks_done // STAGES) & 1)
    if PING_PONG:
        barrier_sync(FIRST_BARRIER + WARPGROUP, 256)
    s = warpgroup_mma(
        q, k_s.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)),
        gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT), use_acc=False, is_async=True,
    )  # fmt: skip
    if PING_PONG:
        barrier_arrive(FIRST_BARRIER + (WARPGROUP + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(0, deps=[s])
    release(k_empty.index(stage))
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    new_p, m, _ = softmax(
        s, m, row, hi - 1, len_q, len_k, softmax_scale, softcap, window_left, window_right,
        BLOCK_N, S_LAYOUT, PACK, True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, False, IMMEDIATES,
    )  # fmt: skip
    total = partial_sums(new_p)
    p = pack_pairs(new_p, v_s.dtype)
    acc = gl.zeros([64, BLOCK_D], gl.float32, O_LAYOUT)

    # The right edge, what every row sees, the left edge.
    full_hi = gl.minimum(gl.maximum(full_hi, lo), hi - 1)
    full_lo = gl.minimum(gl.maximum(full_lo, lo), full_hi)
    if HAS_RIGHT:
        for block in range(hi - 2, full_hi - 1, -1):
            blocks_done, p, acc, m, total = _step(
                q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
                row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                PACK, True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY,
                IMMEDIATES,
            )  # fmt: skip
    else:
        full_hi = hi - 1
    for block in range(full_hi - 1, full_lo - 1, -1):
        blocks_done, p, acc, m, total = _step(
            q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
            row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
            WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            PACK, False, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY,
            IMMEDIATES,
        )  # fmt: skip
    if HAS_LEFT:
        for block in range(full_lo - 1, lo - 1, -1):
            blocks_done, p, acc, m, total = _step(
                q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
                row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                PACK, True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY,
                IMMEDIATES,
            )  # fmt: skip

    if not OUT_IN_Q:
        release(q_empty.index(WARPGROUP))
    stage = blocks_done % STAGES
    mbarrier.wait(v_full.index(stage), (blocks_done // STAGES) & 1)
    left = unpack_pairs(p, v_s.dtype, P_LAYOUT)
    acc = warpgroup_mma(left, v_s.index(stage).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
    blocks_done += 1
    row_sum = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, O_LAYOUT))
    nothing_seen = row_sum == 0.0
    row_sum = gl.where(nothing_seen, 1.0, row_sum)
    top = gl.convert_layout(m, gl.SliceLayout(1, O_LAYOUT))
    top2 = top
    if RAW:
        top2 = top * (softmax_scale * LOG2E)
    lse = gl.where(nothing_seen, float("inf"), (top2 + gl.log2(row_sum)) * LN2)
    acc, left = warpgroup_mma_wait(0, deps=[acc, left])
    release(v_empty.index(stage))
    return blocks_done, acc, row_sum, top, lse
