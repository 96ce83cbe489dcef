"""The forward kernel for Hopper: one warp that fetches, two or three warpgroups that compute.

A thread block takes tiles of 64 query rows a warpgroup, one head at a time. Its producer warp
(`forward_producer`) finds the tiles, and copies Q, K and V into shared memory by the tensor memory
accelerator; each consumer warpgroup holds the accumulator of its own 64 rows. Keys are walked from
the last visible one down, so that masks come first. S = Q K^T of the next block is on the tensor
cores while the exponentials of this one are computed (Shah et al. 2024, FlashAttention-3), and
named barriers hand the tensor cores from one warpgroup to the next (`PING_PONG`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashpage.attention.hopper.forward_producer import RAGGED_ROWS, producer
from flashpage.attention.hopper.forward_softmax import (
    LOG2E,
    exponentials,
    first_softmax,
    maxima,
    scores,
)
from flashpage.attention.hopper.forward_work import key_range, tile_blocks, told
from flashpage.attention.hopper.instructions import (
    barrier_arrive,
    barrier_sync,
    hold_here,
    hold_rows_here,
    join_rows,
    join_vector,
    pack_pairs,
    partial_sums,
    release,
    rescale_rows,
    scale_partial_sums,
    split_rows,
    split_vector,
    tell,
    unpack_pairs,
)

LN2 = gl.constexpr(0.6931471805599453)
FIRST_BARRIER = gl.constexpr(8)
"""Named barriers below belong to Triton."""


# ---------------------------------------------------------------------------------------------
# The consumers
# ---------------------------------------------------------------------------------------------


@gluon.jit
def _step(
    q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
    row, block, len_q, len_k, scale, softmax_scale, softcap, window_left, window_right,
    WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, PACK: gl.constexpr, MASK: gl.constexpr,
    RAW: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    PING_PONG: gl.constexpr, LAZY: gl.constexpr, IMMEDIATES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """O += P V of the last block, S = Q K^T of `block` and its softmax.

    HALVES: the softmax of rows 0-7 of every 16 comes before that of rows 8-15. The second maxima,
    with their shuffles, then run beside the first exponentials, which queue for the one unit that
    computes them, and P V is waited for between the two, so that the first half of P is rounded
    beside the exponentials of the second. Of the rows together ptxas makes all maxima, then all
    exponentials, then rounds all. It pays where the softmax is long against the products.
    """
    v_stage = blocks_done % V_STAGES
    v_phase = (blocks_done // V_STAGES) & 1
    blocks_done += 1
    k_stage = blocks_done % K_STAGES
    mbarrier.wait(k_full.index(k_stage), (blocks_done // K_STAGES) & 1)
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
    s = scores(
        s, row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
        BLOCK_N, S_LAYOUT, PACK, MASK, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, IMMEDIATES,
    )  # fmt: skip
    if HALVES:
        s_first, s_second = split_rows(s)
        m_first, m_second = split_vector(m, s_first)
        new_first = hold_rows_here(maxima(s_first, m_first, scale, LAZY))
        p_first, alpha_first = exponentials(s_first, m_first, new_first, scale, MASK)
        new_second = maxima(s_second, m_second, scale, LAZY)
        sums_first = partial_sums(p_first)
        acc, left = warpgroup_mma_wait(0, deps=[acc, left])
        release(v_empty.index(v_stage))
        p_second, alpha_second = exponentials(s_second, m_second, new_second, scale, MASK)
        alpha = join_vector(alpha_first, alpha_second, m)
        sums = join_rows(sums_first, partial_sums(p_second), total)
        total = scale_partial_sums(total, alpha) + sums
        m = join_vector(new_first, new_second, m)
        new_p = join_rows(p_first, p_second, s)
    else:
        new_m = maxima(s, m, scale, LAZY)
        new_p, alpha = exponentials(s, m, new_m, scale, MASK)
        m = new_m
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
def _pass_by(
    k_full, k_empty, v_full, v_empty, blocks_done,
    WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """A block of keys that only the other warpgroups' rows see."""
    k_stage = blocks_done % K_STAGES
    mbarrier.wait(k_full.index(k_stage), (blocks_done // K_STAGES) & 1)
    if PING_PONG:
        barrier_sync(FIRST_BARRIER + WARPGROUP, 256)
        barrier_arrive(FIRST_BARRIER + (WARPGROUP + 1) % CONSUMERS, 256)
    release(k_empty.index(k_stage))
    v_stage = blocks_done % V_STAGES
    mbarrier.wait(v_full.index(v_stage), (blocks_done // V_STAGES) & 1)
    release(v_empty.index(v_stage))
    return blocks_done + 1


@gluon.jit
def walk(
    q, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, blocks_done, tiles_done,
    row, lo, full_lo, full_hi, hi, len_q, len_k, softmax_scale, softcap, window_left, window_right,
    WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PACK: gl.constexpr, RAW: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    PING_PONG: gl.constexpr, LAZY: gl.constexpr, OUT_IN_Q: gl.constexpr, IMMEDIATES: gl.constexpr,
    HALVES: gl.constexpr,
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
    scale = 1.0
    if RAW:
        scale = softmax_scale * LOG2E
    mbarrier.wait(q_full.index(WARPGROUP), tiles_done & 1)
    stage = blocks_done % K_STAGES
    mbarrier.wait(k_full.index(stage), (blocks_done // K_STAGES) & 1)
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
    s = scores(
        s, row, hi - 1, len_q, len_k, softmax_scale, softcap, window_left, window_right,
        BLOCK_N, S_LAYOUT, PACK, True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, IMMEDIATES,
    )  # fmt: skip
    new_p, m = first_softmax(s, scale, S_LAYOUT, HALVES)
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
                row, block, len_q, len_k, scale, softmax_scale, softcap, window_left,
                window_right, WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, K_STAGES, V_STAGES, S_LAYOUT,
                O_LAYOUT, P_LAYOUT, PACK, True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG,
                LAZY, IMMEDIATES, HALVES,
            )  # fmt: skip
    else:
        full_hi = hi - 1
    for block in range(full_hi - 1, full_lo - 1, -1):
        blocks_done, p, acc, m, total = _step(
            q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
            row, block, len_q, len_k, scale, softmax_scale, softcap, window_left, window_right,
            WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, K_STAGES, V_STAGES, S_LAYOUT, O_LAYOUT,
            P_LAYOUT, PACK, False, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY,
            IMMEDIATES, HALVES,
        )  # fmt: skip
    if HAS_LEFT:
        for block in range(full_lo - 1, lo - 1, -1):
            blocks_done, p, acc, m, total = _step(
                q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
                row, block, len_q, len_k, scale, softmax_scale, softcap, window_left,
                window_right, WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, K_STAGES, V_STAGES, S_LAYOUT,
                O_LAYOUT, P_LAYOUT, PACK, True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG,
                LAZY, IMMEDIATES, HALVES,
            )  # fmt: skip

    if not OUT_IN_Q:
        release(q_empty.index(WARPGROUP))
    stage = blocks_done % V_STAGES
    mbarrier.wait(v_full.index(stage), (blocks_done // V_STAGES) & 1)
    left = unpack_pairs(p, v_s.dtype, P_LAYOUT)
    acc = warpgroup_mma(left, v_s.index(stage).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
    blocks_done += 1
    row_sum = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, O_LAYOUT))
    nothing_seen = row_sum == 0.0
    row_sum = gl.where(nothing_seen, 1.0, row_sum)
    top = gl.convert_layout(m, gl.SliceLayout(1, O_LAYOUT))
    lse = gl.where(nothing_seen, float("inf"), (top * scale + gl.log2(row_sum)) * LN2)
    acc, left = warpgroup_mma_wait(0, deps=[acc, left])
    release(v_empty.index(stage))
    return blocks_done, acc, row_sum, top, lse


@gluon.jit
def _store(
    o_desc, lse_ptr, out_s, acc, lse, row, sequence, head, first_q, len_q, num_q_heads, seqlen_q,
    O_LAYOUT: gl.constexpr, BLOCK_D: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """64 rows of O, through shared memory, and of the LSE; rows from len_q on are not written."""
    tma.store_wait(0)
    out_s.reshape([64, BLOCK_D]).store(acc.to(o_desc.dtype))
    fence_async_shared()
    if VARLEN:
        tma.async_copy_shared_to_global(
            o_desc, [RAGGED_ROWS, first_q + len_q, RAGGED_ROWS - len_q + row, head, 0], out_s
        )
        lse_row = head.to(gl.int64) * seqlen_q + first_q
    else:
        tma.async_copy_shared_to_global(o_desc, [sequence, row, head, 0], out_s)
        lse_row = (sequence.to(gl.int64) * num_q_heads + head) * seqlen_q
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
    gl.store(lse_ptr + lse_row + rows, lse, mask=rows < len_q)


@gluon.jit
def _consumer(
    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q, num_q_heads,
    q_s, k_s, v_s, o_s, tile_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty,
    WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, VARLEN: gl.constexpr, RAW: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    PING_PONG: gl.constexpr, LAZY: gl.constexpr, OUT_IN_Q: gl.constexpr, SKIP: gl.constexpr,
    IMMEDIATES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """The 64 rows of number WARPGROUP of every tile. One warpgroup.

    SKIP: blocks that none of these rows sees, but rows of later warpgroups do, are passed by.
    OUT_IN_Q: O leaves through the shared memory of Q, which is then given back later.
    """
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q = q_s.index(WARPGROUP).reshape([64, BLOCK_D])
    if PING_PONG and WARPGROUP == CONSUMERS - 1:  # the first turn
        barrier_arrive(FIRST_BARRIER, 256)
    blocks_done = 0
    tiles_done = 0
    mbarrier.wait(tile_full, 0)
    row_lo = told(tile_s, 0)
    while row_lo >= 0:
        sequence = told(tile_s, 1)
        head = told(tile_s, 2)
        first_q = told(tile_s, 3)
        len_q = told(tile_s, 4)
        len_k = told(tile_s, 5)
        tell(tile_empty)
        lo, hi = tile_blocks(
            row_lo, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        row = row_lo + WARPGROUP * 64
        # Of these 64 rows alone, within what all rows of the tile walk.
        _, full_lo, full_hi, my_hi = key_range(
            row, gl.minimum(row + 64, len_q), len_q, len_k, window_left, window_right, BLOCK_N,
            HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        if SKIP:
            my_hi = gl.where(row < len_q, my_hi, lo)
            my_hi = gl.minimum(gl.maximum(my_hi, lo + 1), hi)
            for _ in range(my_hi, hi):
                blocks_done = _pass_by(
                    k_full, k_empty, v_full, v_empty, blocks_done, WARPGROUP, CONSUMERS,
                    K_STAGES, V_STAGES, PING_PONG,
                )  # fmt: skip
            hi = my_hi

        blocks_done, acc, row_sum, _, lse = walk(
            q, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, blocks_done,
            tiles_done, row, lo, full_lo, full_hi, hi, len_q, len_k, softmax_scale, softcap,
            window_left, window_right, WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, K_STAGES,
            V_STAGES, 1, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY, OUT_IN_Q,
            IMMEDIATES, HALVES,
        )  # fmt: skip
        out_s = o_s.index(WARPGROUP)
        if OUT_IN_Q:
            out_s = q_s.index(WARPGROUP)
        _store(
            o_desc, lse_ptr, out_s, acc * (1.0 / row_sum)[:, None], lse, row, sequence, head,
            first_q, len_q, num_q_heads, seqlen_q, O_LAYOUT, BLOCK_D, VARLEN,
        )  # fmt: skip
        if OUT_IN_Q:
            tma.store_wait(0)
            release(q_empty.index(WARPGROUP))
        tiles_done += 1
        mbarrier.wait(tile_full, tiles_done & 1)
        row_lo = told(tile_s, 0)
    if PING_PONG and WARPGROUP == 0:  # the turn that is left over
        barrier_sync(FIRST_BARRIER, 256)
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _shape(count, rows, head_dim, ragged):
    """Of `count` boxes of a descriptor in shared memory."""
    return [count, *([1, 1] if ragged else [1]), rows, 1, head_dim]


_NEVER_SPECIALISED = (
    "window_left",
    "window_right",
    "seqlen_q",
    "seqlen_k",
    "batch",
    "num_q_heads",
    "group_size",
    "num_tiles_m",
    "num_heads",
    "group_heads",
    "num_pages",
    "stride_table",
)


@gluon.jit(do_not_specialize=_NEVER_SPECIALISED)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
    softmax_scale, softcap, window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads,
    group_size, num_tiles_m, num_heads, group_heads, num_pages, stride_table,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CHUNK: gl.constexpr, VARLEN: gl.constexpr,
    PAGE: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, RAW: gl.constexpr, PING_PONG: gl.constexpr, LAZY: gl.constexpr,
    PERSISTENT: gl.constexpr, OUT_IN_Q: gl.constexpr, SKIP: gl.constexpr,
    IMMEDIATES: gl.constexpr, HALVES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: one program a tile, or with PERSISTENT as many as run at a time.

    counter_ptr: int32, 0 (PERSISTENT). CHUNK: rows of K or V that one copy brings, BLOCK_N without
    pages. VARLEN: q and out are flat, seqlen_q is the number of all rows.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = _shape(CONSUMERS, 64, BLOCK_D, VARLEN)
    KV_RAGGED: gl.constexpr = VARLEN or PAGE > 0
    K_SHAPE: gl.constexpr = _shape(K_STAGES, BLOCK_N, BLOCK_D, KV_RAGGED)
    V_SHAPE: gl.constexpr = _shape(V_STAGES, BLOCK_N, BLOCK_D, KV_RAGGED)
    q_s = gl.allocate_shared_memory(DTYPE, TILE, q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, K_SHAPE, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, V_SHAPE, v_desc.layout)
    o_s = q_s
    if not OUT_IN_Q:
        o_s = gl.allocate_shared_memory(DTYPE, TILE, o_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], BARRIER)
    tile_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    tile_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    tile_s = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=128)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=128 * CONSUMERS)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=128 * CONSUMERS)
    mbarrier.init(tile_full, count=32)
    mbarrier.init(tile_empty, count=128 * CONSUMERS)
    fence_async_shared()
    # Arguments are spelled out: in a variable, compile-time values would cease to be such.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 0, CONSUMERS, BLOCK_N, BLOCK_D,
                    K_STAGES, V_STAGES, VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG,
                    LAZY, OUT_IN_Q, SKIP, IMMEDIATES, HALVES,
                )),
                (producer, (
                    q_desc, k_desc, v_desc, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
                    window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, group_size,
                    num_tiles_m, num_heads, group_heads, num_pages, stride_table, q_s, k_s, v_s,
                    tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full,
                    tile_empty, CONSUMERS, BLOCK_N, BLOCK_D, K_STAGES, V_STAGES, CHUNK, VARLEN,
                    PAGE, HAS_LEFT, HAS_RIGHT, PERSISTENT,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 0, CONSUMERS, BLOCK_N, BLOCK_D,
                    K_STAGES, V_STAGES, VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG,
                    LAZY, OUT_IN_Q, SKIP, IMMEDIATES, HALVES,
                )),
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 1, CONSUMERS, BLOCK_N, BLOCK_D,
                    K_STAGES, V_STAGES, VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG,
                    LAZY, OUT_IN_Q, SKIP, IMMEDIATES, HALVES,
                )),
                (producer, (
                    q_desc, k_desc, v_desc, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
                    window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, group_size,
                    num_tiles_m, num_heads, group_heads, num_pages, stride_table, q_s, k_s, v_s,
                    tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full,
                    tile_empty, CONSUMERS, BLOCK_N, BLOCK_D, K_STAGES, V_STAGES, CHUNK, VARLEN,
                    PAGE, HAS_LEFT, HAS_RIGHT, PERSISTENT,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 0, CONSUMERS, BLOCK_N, BLOCK_D,
                    K_STAGES, V_STAGES, VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG,
                    LAZY, OUT_IN_Q, SKIP, IMMEDIATES, HALVES,
                )),
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 1, CONSUMERS, BLOCK_N, BLOCK_D,
                    K_STAGES, V_STAGES, VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG,
                    LAZY, OUT_IN_Q, SKIP, IMMEDIATES, HALVES,
                )),
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 2, CONSUMERS, BLOCK_N, BLOCK_D,
                    K_STAGES, V_STAGES, VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG,
                    LAZY, OUT_IN_Q, SKIP, IMMEDIATES, HALVES,
                )),
                (producer, (
                    q_desc, k_desc, v_desc, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
                    window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, group_size,
                    num_tiles_m, num_heads, group_heads, num_pages, stride_table, q_s, k_s, v_s,
                    tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full,
                    tile_empty, CONSUMERS, BLOCK_N, BLOCK_D, K_STAGES, V_STAGES, CHUNK, VARLEN,
                    PAGE, HAS_LEFT, HAS_RIGHT, PERSISTENT,
                )),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
