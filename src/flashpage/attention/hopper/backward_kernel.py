"""The backward kernel for Hopper: dK and dV of a block of keys, and its share of dQ.

A thread block owns 128 keys of one kv head and walks the query rows of all heads that share them.
One warp fetches tiles of Q and dO, two warpgroups compute, 64 keys each:

    S^T = K Q^T, dP^T = V dO^T, P^T = exp2(S^T - LSE), dS^T = P^T (dP^T - delta),
    dV += P^T dO, dK += dS^T Q, dQ = dS K,

with P^T and dS^T on the left from registers, and dS through shared memory. One or two more warps
have the tensor memory accelerator add dQ to float32 sums in global memory: in whatever order blocks
of keys come, so that dQ is not bitwise repeatable (dK and dV are), or ORDERED. `backward_rows`
prepares LSE, delta and the sums before, and rounds dQ after. RAGGED descriptors: see
`forward_producer`.
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

from flashpage.attention.hopper.forward_producer import RAGGED_ROWS, fetch
from flashpage.attention.hopper.forward_softmax import LOG2E, tanh
from flashpage.attention.hopper.instructions import (
    copies_done,
    keep_where,
    next_turn,
    release,
    tma_add,
    wait_for_turn,
)

BLOCK_N = gl.constexpr(128)
"""Keys of a thread block."""


# ---------------------------------------------------------------------------------------------
# Which keys, which rows
# ---------------------------------------------------------------------------------------------


@gluon.jit
def _find_keys(
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
        sequence = tile_n * 0
        last = batch
        while sequence < last:
            middle = (sequence + last + 1) // 2
            if gl.load(cu_k_ptr + middle) // BLOCK_N + middle <= tile_n:
                sequence = middle
            else:
                last = middle - 1
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
def _row_tiles(
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
def _row_tile(i, lo, hi, ORDERED: gl.constexpr):
    """The tile that comes at place i of lo ... hi - 1. ORDERED: from the last one down, so that
    blocks of keys that began together come to a tile together, and soon have their turn; from the
    first one up, with a causal mask, a short block would wait for nearly all of the longest.
    """
    if ORDERED:
        i = lo + hi - 1 - i
    return i


@gluon.jit
def _lane(sequence, head, first_tile, num_q_heads, num_tiles_m, VARLEN: gl.constexpr):
    """The number of a sequence's and head's first tile of rows among all: sums of dQ, LSE and delta
    lie in such tiles."""
    if VARLEN:
        lane = head
    else:
        lane = sequence * num_q_heads + head
    return lane * num_tiles_m + first_tile


@gluon.jit
def _buffer(use, COUNT: gl.constexpr):
    """Which of COUNT buffers, a power of two, this use of them takes, and the phase of its
    barriers. By bits: signed divisions take more instructions."""
    return use & (COUNT - 1), (use & COUNT) // COUNT


# ---------------------------------------------------------------------------------------------
# The warps that fetch and add
# ---------------------------------------------------------------------------------------------


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, dout_desc, stats_desc,
    col_lo, sequence, kv_head, first_q, len_q, first_k, len_k, first_tile, lo, hi,
    num_q_heads, group_size, num_tiles_m, num_tiles, q_s, k_s, v_s, do_s, lse_s, delta_s,
    k_full, v_full, q_full, do_full, rows_empty,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, VARLEN: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Keep Q, dO, LSE and delta coming: they come apart, and are freed together. One warp."""
    TILE_BYTES: gl.constexpr = BLOCK_M * BLOCK_D * 2 + BLOCK_M * 4
    mbarrier.expect(k_full, BLOCK_N * BLOCK_D * 2)
    fetch(k_desc, sequence, first_k, len_k, col_lo, kv_head, k_full, k_s, VARLEN)
    done = 0
    for member in range(group_size):
        head = kv_head * group_size + member
        tile = _lane(sequence, head, first_tile, num_q_heads, num_tiles_m, VARLEN)
        for i in range(lo, hi):
            m = _row_tile(i, lo, hi, ORDERED)
            stage, phase = _buffer(done, STAGES)
            mbarrier.wait(rows_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), TILE_BYTES)
            fetch(
                q_desc, sequence, first_q, len_q, m * BLOCK_M, head, q_full.index(stage),
                q_s.index(stage), VARLEN,
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                stats_desc, [tile + m, 0], q_full.index(stage), lse_s.index(stage)
            )
            if done == 0:
                mbarrier.expect(v_full, BLOCK_N * BLOCK_D * 2)
                fetch(v_desc, sequence, first_k, len_k, col_lo, kv_head, v_full, v_s, VARLEN)
            mbarrier.expect(do_full.index(stage), TILE_BYTES)
            fetch(
                dout_desc, sequence, first_q, len_q, m * BLOCK_M, head, do_full.index(stage),
                do_s.index(stage), VARLEN,
            )  # fmt: skip
            tma.async_copy_global_to_shared(
                stats_desc, [num_tiles + tile + m, 0], do_full.index(stage), delta_s.index(stage)
            )
            done += 1


@gluon.jit
def _first_block(m, len_q, len_k, window_left, BLOCK_M: gl.constexpr, HAS_LEFT: gl.constexpr):
    """The first block of keys that sees a row of tile m."""
    first = m * 0
    if HAS_LEFT:
        first = gl.maximum(m * BLOCK_M + (len_k - len_q - window_left), 0) // BLOCK_N
    return first


@gluon.jit
def _adder(
    dq_desc, turns_ptr, sequence, kv_head, first_tile, col_lo, len_q, len_k, lo, hi, window_left,
    num_q_heads, group_size, num_tiles_m, dq_s, dq_full, dq_empty,
    BLOCK_M: gl.constexpr, VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, ORDERED: gl.constexpr,
    ADDERS: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """Have finished tiles of dQ added to the sums in global memory: every ADDERS-th, from NUMBER
    on, which come in buffer NUMBER. One warp; idle where there are fewer.

    ORDERED: in the order of the blocks of keys, told by a counter of each tile; the first one
    writes. Blocks before this one have been started before it, so that none waits for one that can
    not run. From asking for a turn to passing it on takes, as calculated from times, about 4,950
    cycles, a step at head_dim 128 3,900. Two warps (and turns as in `instructions.py`) brought the
    time over that of any order from 1.27 to 1.02 there.

    The accelerator reads and writes sums asynchronously, and not in the proxy of the counter.
    `copies_done` waits until they are written (`store_wait`: until dQ was read from shared memory),
    so that `next_turn`, a release, comes after them; `wait_for_turn` is an acquire, and a fence of
    the proxies after it keeps this block's copies behind. The next one adds to what this one wrote.
    """
    if NUMBER < ADDERS:
        count = hi - lo
        for step in range(NUMBER, count * group_size, ADDERS):
            head = kv_head * group_size + step // count
            m = _row_tile(lo + step % count, lo, hi, ORDERED)
            tile = m + _lane(sequence, head, first_tile, num_q_heads, num_tiles_m, VARLEN)
            turn = 0
            if ORDERED:  # asked before dQ is there, which mostly comes later
                before = _first_block(m, len_q, len_k, window_left, BLOCK_M, HAS_LEFT)
                turn = col_lo // BLOCK_N - before
                wait_for_turn(turns_ptr + tile, turn)
            _, phase = _buffer(step, ADDERS)
            mbarrier.wait(dq_full.index(NUMBER), phase)
            if ORDERED:
                if turn == 0:
                    tma.async_copy_shared_to_global(dq_desc, [tile, 0, 0], dq_s.index(NUMBER))
                else:
                    tma_add(dq_desc, [tile, 0, 0], dq_s.index(NUMBER))
            else:
                tma_add(dq_desc, [tile, 0, 0], dq_s.index(NUMBER))
            tma.store_wait(0)
            mbarrier.arrive(dq_empty.index(NUMBER), count=1)
            if ORDERED:
                copies_done()
                next_turn(turns_ptr + tile)


# ---------------------------------------------------------------------------------------------
# The warpgroups that compute
# ---------------------------------------------------------------------------------------------


@gluon.jit
def _in_register_order(dq, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """dQ as a tile `[BLOCK_M * BLOCK_D / 128, 128]` in which each thread's registers lie side by
    side: nothing is moved, and stores to shared memory have no bank conflicts. `backward_rows` has
    the way back."""
    ROWS: gl.constexpr = BLOCK_M // 16
    COLUMNS: gl.constexpr = 8 // ROWS
    parts = dq.reshape([ROWS, 2, 8, COLUMNS, BLOCK_D // 8 // COLUMNS, 4, 2])
    return parts.permute((3, 0, 4, 2, 5, 1, 6)).reshape([BLOCK_M * BLOCK_D // 128, 128])


@gluon.jit
def _hide(
    p, row, col_lo, len_q, len_k, window_left, window_right,
    BLOCK_M: gl.constexpr, S_LAYOUT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """p `[keys, rows]`, zero where the row does not see the key."""
    diff = len_k - len_q
    cols = col_lo + gl.arange(0, BLOCK_N, gl.SliceLayout(1, S_LAYOUT))
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, S_LAYOUT))
    exists = cols < len_k
    if HAS_RIGHT:
        first = gl.where(exists, cols - (diff + window_right), 2**30)
        p = keep_where(p, rows[None, :] - first[:, None], 1, 0.0)
    else:
        kept = gl.where(exists, 0, -1)
        p = keep_where(p, kept[:, None].broadcast_to(p.shape), 0, 0.0)
    if HAS_LEFT:
        last = cols + (window_left - diff)
        p = keep_where(p, last[:, None] - rows[None, :], -1, 0.0)
    return p


@gluon.jit
def _step(
    done, row, dk, dv, k, v, q_s, do_s, lse_s, delta_s, ds_s, dq_s,
    q_full, do_full, rows_empty, dq_full, dq_empty,
    col_lo, len_q, len_k, softmax_scale, softcap, window_left, window_right,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr,
    Q_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, MASK: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, ADDERS: gl.constexpr,
):  # fmt: skip
    """One tile of rows."""
    # With 128 rows LSE takes twice the registers, so that it is not there while S^T is computed.
    EARLY_LSE: gl.constexpr = BLOCK_M == 64
    # P was there long before, but dQ's product waits for all warps to have stored dS: dV's, issued
    # just before, fills that gap, and leaves the tensor cores to the other warpgroup's S^T and dP^T
    # until then (likely, not profiled). 1.14 and 1.07 of issuing it with P at head_dim 64, full and
    # causal; 1.01 at 128. With a softcap P for dV and P for dS differ, and both beside dP^T
    # of 128 rows spill.
    LATE_DV: gl.constexpr = not (HAS_SOFTCAP and BLOCK_M == 128)
    stage, phase = _buffer(done, STAGES)
    q = q_s.index(stage).reshape([BLOCK_M, BLOCK_D])
    do = do_s.index(stage).reshape([BLOCK_M, BLOCK_D])
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(stage), phase)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if EARLY_LSE:
        lse = lse_s.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, S_LAYOUT))
    s = warpgroup_mma_wait(1, deps=[s])
    if not EARLY_LSE:
        lse = lse_s.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, S_LAYOUT))
    if HAS_SOFTCAP:
        t = tanh(s * (softmax_scale / softcap))
        p = gl.exp2(t * (softcap * LOG2E) - lse[None, :])
    else:
        p = gl.exp2(s * (softmax_scale * LOG2E) - lse[None, :])
    if MASK:
        p = _hide(
            p, row, col_lo, len_q, len_k, window_left, window_right, BLOCK_M, S_LAYOUT, HAS_LEFT,
            HAS_RIGHT,
        )  # fmt: skip
    low_p = gl.convert_layout(p.to(k.dtype), P_LAYOUT)
    if HAS_SOFTCAP:
        p = p * (1.0 - t * t)
    if LATE_DV:
        dp = warpgroup_mma_wait(0, deps=[dp])
    else:
        dv = warpgroup_mma(low_p, do, dv, is_async=True)
        dp, dv, low_p = warpgroup_mma_wait(0, deps=[dp, dv, low_p])
    delta = delta_s.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, S_LAYOUT))
    ds = (p * (dp - delta[None, :])).to(k.dtype)
    low_ds = gl.convert_layout(ds, P_LAYOUT)
    ds_s.store(ds)
    if LATE_DV:
        dv = warpgroup_mma(low_p, do, dv, is_async=True)
    fence_async_shared()
    no_dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, Q_LAYOUT)
    dq = warpgroup_mma(ds_s.permute((1, 0)), k, no_dq, use_acc=False, is_async=True)
    if LATE_DV:
        dv, low_p = warpgroup_mma_wait(1, deps=[dv, low_p])
    dk = warpgroup_mma(low_ds, q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    buffer, dq_phase = _buffer(done, ADDERS)
    mbarrier.wait(dq_empty.index(buffer), dq_phase ^ 1)
    sums = _in_register_order(dq, BLOCK_M, BLOCK_D)
    dq_s.index(buffer).reshape([BLOCK_M * BLOCK_D // 128, 128]).store(sums)
    fence_async_shared()
    release(dq_full.index(buffer))
    dk, low_ds = warpgroup_mma_wait(0, deps=[dk, low_ds])
    release(rows_empty.index(stage))
    return done + 1, dk, dv


@gluon.jit
def _send(
    desc, smem, x, entry, first, length, row, head, BLOCK_D: gl.constexpr, RAGGED: gl.constexpr
):
    """Rows of dK or dV, through shared memory; those from `length` on are not written."""
    smem.reshape([BLOCK_N, BLOCK_D]).store(x.to(desc.dtype))
    fence_async_shared()
    if RAGGED:
        tma.async_copy_shared_to_global(
            desc, [RAGGED_ROWS, first + length, RAGGED_ROWS - length + row, head, 0], smem
        )
    else:
        tma.async_copy_shared_to_global(desc, [entry, row, head, 0], smem)


@gluon.jit
def _consumer(
    dk_desc, dv_desc, col_lo, sequence, kv_head, len_q, first_k, len_k, lo, full, hi, group_size,
    softmax_scale, softcap, window_left, window_right,
    q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, dq_s,
    k_full, v_full, q_full, do_full, rows_empty, dq_full, dq_empty,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, VARLEN: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    ORDERED: gl.constexpr, ADDERS: gl.constexpr,
):  # fmt: skip
    """All products. Two warpgroups, of 64 keys each; dQ of 64 rows they share by columns."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_D, 16])
    Q_LAYOUT: gl.constexpr = (
        gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_D // 2, 16])
        if BLOCK_M == 64
        else D_LAYOUT
    )  # fmt: skip
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    k = k_s.reshape([BLOCK_N, BLOCK_D])
    v = v_s.reshape([BLOCK_N, BLOCK_D])
    dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, D_LAYOUT)
    dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, D_LAYOUT)
    mbarrier.wait(k_full, 0)
    if lo < hi:
        mbarrier.wait(v_full, 0)
    done = 0
    for _ in range(group_size):
        if not ORDERED:
            for m in range(lo, full):
                done, dk, dv = _step(
                    done, m * BLOCK_M, dk, dv, k, v, q_s, do_s, lse_s, delta_s, ds_s, dq_s,
                    q_full, do_full, rows_empty, dq_full, dq_empty,
                    col_lo, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                    BLOCK_M, BLOCK_D, STAGES, S_LAYOUT, Q_LAYOUT, P_LAYOUT, True, HAS_LEFT,
                    HAS_RIGHT, HAS_SOFTCAP, ADDERS,
                )  # fmt: skip
        if not HAS_LEFT:
            for i in range(full, hi):
                m = _row_tile(i, full, hi, ORDERED)
                done, dk, dv = _step(
                    done, m * BLOCK_M, dk, dv, k, v, q_s, do_s, lse_s, delta_s, ds_s, dq_s,
                    q_full, do_full, rows_empty, dq_full, dq_empty,
                    col_lo, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                    BLOCK_M, BLOCK_D, STAGES, S_LAYOUT, Q_LAYOUT, P_LAYOUT, False, HAS_LEFT,
                    HAS_RIGHT, HAS_SOFTCAP, ADDERS,
                )  # fmt: skip
        if ORDERED:
            for i in range(lo, full):
                m = _row_tile(i, lo, full, ORDERED)
                done, dk, dv = _step(
                    done, m * BLOCK_M, dk, dv, k, v, q_s, do_s, lse_s, delta_s, ds_s, dq_s,
                    q_full, do_full, rows_empty, dq_full, dq_empty,
                    col_lo, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                    BLOCK_M, BLOCK_D, STAGES, S_LAYOUT, Q_LAYOUT, P_LAYOUT, True, HAS_LEFT,
                    HAS_RIGHT, HAS_SOFTCAP, ADDERS,
                )  # fmt: skip
    _send(dv_desc, v_s, dv, sequence, first_k, len_k, col_lo, kv_head, BLOCK_D, VARLEN)
    _send(
        dk_desc, k_s, dk * softmax_scale, sequence, first_k, len_k, col_lo, kv_head, BLOCK_D,
        VARLEN,
    )  # fmt: skip
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _shape(count, rows, head_dim, ragged):
    """Of `count` boxes of a descriptor in shared memory, or of one if it is None."""
    return [*([] if count is None else [count]), *([1, 1] if ragged else [1]), rows, 1, head_dim]


_NEVER_SPECIALISED = (
    "window_left",
    "window_right",
    "seqlen_q",
    "seqlen_k",
    "batch",
    "num_q_heads",
    "num_kv_heads",
    "group_size",
    "num_tiles_m",
    "num_tiles_n",
    "num_heads",
    "group_heads",
    "num_tiles",
)


@gluon.jit(do_not_specialize=_NEVER_SPECIALISED)
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, dq_desc, stats_desc, turns_ptr,
    cu_q_ptr, cu_k_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q, seqlen_k,
    batch, num_q_heads, num_kv_heads, group_size, num_tiles_m, num_tiles_n, num_heads, group_heads,
    num_tiles, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, ORDERED: gl.constexpr, ADDERS: gl.constexpr,
):  # fmt: skip
    """Grid: one program a block of keys and kv head.

    stats_desc (float32, LSE of all tiles, then delta) and dq_desc (float32 sums) come in num_tiles
    tiles of BLOCK_M rows: num_tiles_m of each sequence and head, or VARLEN: of each head for all
    sequences, `cu_q[i] // BLOCK_M + i` being the first of sequence i. ORDERED: dQ is summed in the
    order of the keys; turns_ptr is then int32, 0, one of each such tile and one more. ADDERS: 1 or
    2 warps that add dQ, each with a buffer of its own. All but lengths and turns goes through
    descriptors: a box beyond its tensor is cut off.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    KEYS: gl.constexpr = _shape(None, BLOCK_N, BLOCK_D, VARLEN)
    ROWS: gl.constexpr = _shape(STAGES, BLOCK_M, BLOCK_D, VARLEN)
    q_s = gl.allocate_shared_memory(DTYPE, ROWS, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, ROWS, dout_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, KEYS, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, KEYS, v_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], stats_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], stats_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], DTYPE)
    ds_s = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], DS_LAYOUT)
    DQ: gl.constexpr = [ADDERS, 1, BLOCK_M * BLOCK_D // 128, 128]
    dq_s = gl.allocate_shared_memory(gl.float32, DQ, dq_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    rows_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    dq_full = gl.allocate_shared_memory(gl.int64, [ADDERS, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [ADDERS, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(rows_empty.index(i), count=256)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(ADDERS):
        mbarrier.init(dq_full.index(i), count=256)
        mbarrier.init(dq_empty.index(i), count=1)
    fence_async_shared()
    number = gl.program_id(0)
    if ORDERED:  # as started, which programs need not be in the order of their numbers
        number = gl.atomic_add(turns_ptr + num_tiles, 1)
    col_lo, sequence, kv_head, first_q, len_q, first_k, len_k, first_tile = _find_keys(
        number, num_tiles_n, num_heads, group_heads, num_kv_heads, batch, seqlen_q, seqlen_k,
        cu_q_ptr, cu_k_ptr, BLOCK_M, VARLEN,
    )  # fmt: skip
    lo, full, hi = _row_tiles(
        col_lo, len_q, len_k, window_left, window_right, BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    # Arguments are spelled out: in a variable, compile-time values would cease to be such.
    gl.warp_specialize(
        [
            (_consumer, (
                dk_desc, dv_desc, col_lo, sequence, kv_head, len_q, first_k, len_k, lo, full,
                hi, group_size, softmax_scale, softcap, window_left, window_right, q_s, k_s,
                v_s, do_s, lse_s, delta_s, ds_s, dq_s, k_full, v_full, q_full, do_full,
                rows_empty, dq_full, dq_empty, BLOCK_M, BLOCK_D, STAGES, VARLEN, HAS_LEFT,
                HAS_RIGHT, HAS_SOFTCAP, ORDERED, ADDERS,
            )),
            (_producer, (
                q_desc, k_desc, v_desc, dout_desc, stats_desc, col_lo, sequence,
                kv_head, first_q, len_q, first_k, len_k, first_tile, lo, hi, num_q_heads,
                group_size, num_tiles_m, num_tiles, q_s, k_s, v_s, do_s, lse_s, delta_s,
                k_full, v_full, q_full, do_full, rows_empty, BLOCK_M, BLOCK_D, STAGES,
                VARLEN, ORDERED,
            )),
            (_adder, (
                dq_desc, turns_ptr, sequence, kv_head, first_tile, col_lo, len_q, len_k, lo, hi,
                window_left, num_q_heads, group_size, num_tiles_m, dq_s, dq_full, dq_empty,
                BLOCK_M, VARLEN, HAS_LEFT, ORDERED, ADDERS, 0,
            )),
            (_adder, (
                dq_desc, turns_ptr, sequence, kv_head, first_tile, col_lo, len_q, len_k, lo, hi,
                window_left, num_q_heads, group_size, num_tiles_m, dq_s, dq_full, dq_empty,
                BLOCK_M, VARLEN, HAS_LEFT, ORDERED, ADDERS, 1,
            )),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )  # fmt: skip
