"""The backward kernel for Hopper: dK and dV of blocks of keys, and their shares of dQ.

A thread block takes blocks of 128 keys of one kv head until none is left, and walks the query rows
of all heads that share them. One warp (`backward_producer`) finds blocks of keys and fetches K, V,
and tiles of Q and dO; two warpgroups compute, 64 keys each:

    S^T = K Q^T, dP^T = V dO^T, P^T = exp2(S^T - LSE), dS^T = P^T (dP^T - delta),
    dV += P^T dO, dK += dS^T Q, dQ = dS K,

with P^T and dS^T on the left from registers, and dS through shared memory. Up to three more warps
(`backward_writers`) have the tensor memory accelerator write dK and dV, and add dQ to float32 sums
in global memory: in whatever order blocks of keys come, so that dQ is not bitwise repeatable (dK
and dV are), or ORDERED. So between two blocks of keys nothing is set up, the next one's rows are
there, and dK and dV leave beside its first products. `backward_rows` prepares LSE, delta and the
sums before, and rounds dQ after. RAGGED descriptors: see `forward_producer`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashpage.attention.hopper.backward_producer import producer
from flashpage.attention.hopper.backward_work import (
    BLOCK_N,
    FULL,
    HI,
    LEN_K,
    LEN_Q,
    LO,
    NUMBERS,
    STAGES,
    boxes,
    buffer_of,
    keys_in_dq,
    next_block,
    row_tile,
)
from flashpage.attention.hopper.backward_writers import adder, sender
from flashpage.attention.hopper.forward_softmax import LOG2E, tanh
from flashpage.attention.hopper.forward_work import told
from flashpage.attention.hopper.instructions import keep_where, release, tell

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
    done, outputs, end, row, dk, dv, k, v, q_s, do_s, lse_s, delta_s, ds_s, dq_s,
    q_full, do_full, rows_empty, v_empty, dq_full, dq_empty,
    col_lo, len_q, len_k, softmax_scale, softcap, window_left, window_right,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, S_LAYOUT: gl.constexpr, Q_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr, MASK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, ADDERS: gl.constexpr, V_BUFFERS: gl.constexpr,
):  # fmt: skip
    """One tile of rows: step `done` of this thread block, step `end - 1` the last of these keys."""
    # With 128 rows LSE takes twice the registers, so that it is not there while S^T is computed.
    EARLY_LSE: gl.constexpr = BLOCK_M == 64
    # P was there long before, but dQ's product waits for all warps to have stored dS: dV's, issued
    # just before, fills that gap, and leaves the tensor cores to the other warpgroup's S^T and dP^T
    # until then (likely, not profiled). 1.14 and 1.07 of issuing it with P at head_dim 64, full and
    # causal; 1.01 at 128. With a softcap P for dV and P for dS differ, and both beside dP^T
    # of 128 rows spill.
    LATE_DV: gl.constexpr = not (HAS_SOFTCAP and BLOCK_M == 128)
    stage, phase = buffer_of(done, STAGES)
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
    if V_BUFFERS == 1 and done + 1 == end:  # the next block's V may come
        release(v_empty.index(0))
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
    buffer, dq_phase = buffer_of(done + outputs, ADDERS)
    mbarrier.wait(dq_empty.index(buffer), dq_phase ^ 1)
    sums = _in_register_order(dq, BLOCK_M, BLOCK_D)
    dq_s.index(buffer).reshape([BLOCK_M * BLOCK_D // 128, 128]).store(sums)
    fence_async_shared()
    release(dq_full.index(buffer))
    dk, low_ds = warpgroup_mma_wait(0, deps=[dk, low_ds])
    release(rows_empty.index(stage))
    return done + 1, dk, dv


@gluon.jit
def _leave_by_dq(
    x, desc, use, dq_s, dq_full, dq_empty,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, RAGGED: gl.constexpr, ADDERS: gl.constexpr,
):  # fmt: skip
    """Give dK or dV to an adder, in the buffer of dQ that this use of them takes."""
    buffer, phase = buffer_of(use, ADDERS)
    mbarrier.wait(dq_empty.index(buffer), phase ^ 1)
    smem = keys_in_dq(dq_s, buffer, desc, BLOCK_M, BLOCK_D, RAGGED)
    smem.reshape([BLOCK_N, BLOCK_D]).store(x)
    fence_async_shared()
    release(dq_full.index(buffer))


@gluon.jit
def _consumer(
    dk_desc, dv_desc, seqlen_q, seqlen_k, group_size, softmax_scale, softcap, window_left,
    window_right, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, dq_s, block_s,
    q_full, do_full, rows_empty, v_empty, dq_full, dq_empty, out_full, block_full, block_empty,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, ORDERED: gl.constexpr,
    ADDERS: gl.constexpr, K_BUFFERS: gl.constexpr, V_BUFFERS: gl.constexpr,
):  # fmt: skip
    """All products. Two warpgroups, of 64 keys each; dQ of 64 rows they share by columns.

    Where dK and dV leave: see `backward_writers`. Neither warpgroup stores over K or V that the
    other's products still read: Triton has both meet before such a store.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_D, 16])
    Q_LAYOUT: gl.constexpr = (
        gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_D // 2, 16])
        if BLOCK_M == 64
        else D_LAYOUT
    )  # fmt: skip
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    block = 0
    done = 0  # steps, of all blocks of keys
    outputs = 0  # times that dK or dV took a buffer of dQ
    col_lo = next_block(block_s, block_full, 0, 8)
    while col_lo >= 0:
        slot = block & 1
        lo = told(block_s, slot * NUMBERS + LO, 8)
        full = told(block_s, slot * NUMBERS + FULL, 8)
        hi = told(block_s, slot * NUMBERS + HI, 8)
        len_q = seqlen_q
        len_k = seqlen_k
        if VARLEN:
            len_q = told(block_s, slot * NUMBERS + LEN_Q, 8)
            len_k = told(block_s, slot * NUMBERS + LEN_K, 8)
        tell(block_empty.index(slot))
        k = k_s.index(block & (K_BUFFERS - 1)).reshape([BLOCK_N, BLOCK_D])
        v = v_s.index(block & (V_BUFFERS - 1)).reshape([BLOCK_N, BLOCK_D])
        dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, D_LAYOUT)
        dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, D_LAYOUT)
        end = done + (hi - lo) * group_size
        for _ in range(group_size):
            if not ORDERED:
                for m in range(lo, full):
                    done, dk, dv = _step(
                        done, outputs, end, m * BLOCK_M, dk, dv, k, v, q_s, do_s, lse_s, delta_s,
                        ds_s, dq_s, q_full, do_full, rows_empty, v_empty, dq_full, dq_empty,
                        col_lo, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                        BLOCK_M, BLOCK_D, S_LAYOUT, Q_LAYOUT, P_LAYOUT, True, HAS_LEFT,
                        HAS_RIGHT, HAS_SOFTCAP, ADDERS, V_BUFFERS,
                    )  # fmt: skip
            if not HAS_LEFT:
                for i in range(full, hi):
                    m = row_tile(i, full, hi, ORDERED)
                    done, dk, dv = _step(
                        done, outputs, end, m * BLOCK_M, dk, dv, k, v, q_s, do_s, lse_s, delta_s,
                        ds_s, dq_s, q_full, do_full, rows_empty, v_empty, dq_full, dq_empty,
                        col_lo, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                        BLOCK_M, BLOCK_D, S_LAYOUT, Q_LAYOUT, P_LAYOUT, False, HAS_LEFT,
                        HAS_RIGHT, HAS_SOFTCAP, ADDERS, V_BUFFERS,
                    )  # fmt: skip
            if ORDERED:
                for i in range(lo, full):
                    m = row_tile(i, lo, full, ORDERED)
                    done, dk, dv = _step(
                        done, outputs, end, m * BLOCK_M, dk, dv, k, v, q_s, do_s, lse_s, delta_s,
                        ds_s, dq_s, q_full, do_full, rows_empty, v_empty, dq_full, dq_empty,
                        col_lo, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                        BLOCK_M, BLOCK_D, S_LAYOUT, Q_LAYOUT, P_LAYOUT, True, HAS_LEFT,
                        HAS_RIGHT, HAS_SOFTCAP, ADDERS, V_BUFFERS,
                    )  # fmt: skip
        if V_BUFFERS == 1 and lo == hi:
            release(v_empty.index(0))
        low_dv = dv.to(dv_desc.dtype)
        low_dk = (dk * softmax_scale).to(dk_desc.dtype)
        if K_BUFFERS == 2:
            if V_BUFFERS == 2:
                v.store(low_dv)
                k.store(low_dk)
            else:
                k.store(low_dv)
            fence_async_shared()
            release(out_full.index(slot))
        else:
            _leave_by_dq(
                low_dv, dv_desc, done + outputs, dq_s, dq_full, dq_empty, BLOCK_M, BLOCK_D, VARLEN,
                ADDERS,
            )  # fmt: skip
            outputs += 1
        if V_BUFFERS == 1:
            _leave_by_dq(
                low_dk, dk_desc, done + outputs, dq_s, dq_full, dq_empty, BLOCK_M, BLOCK_D, VARLEN,
                ADDERS,
            )  # fmt: skip
            outputs += 1
        block += 1
        col_lo = next_block(block_s, block_full, block, 8)


# ---------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------


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
    counter_ptr, cu_q_ptr, cu_k_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
    seqlen_k, batch, num_q_heads, num_kv_heads, group_size, num_tiles_m, num_tiles_n, num_heads,
    group_heads, num_tiles, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, VARLEN: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    ORDERED: gl.constexpr, ADDERS: gl.constexpr, K_BUFFERS: gl.constexpr, V_BUFFERS: gl.constexpr,
):  # fmt: skip
    """Grid: a program a multiprocessor, or fewer; counter_ptr: int32, 0, the next block of keys.

    stats_desc (float32, LSE of all tiles, then delta) and dq_desc (float32 sums) come in num_tiles
    tiles of BLOCK_M rows: num_tiles_m of each sequence and head, or VARLEN: of each head for all
    sequences, `cu_q[i] // BLOCK_M + i` being the first of sequence i. ORDERED: dQ is summed in the
    order of the keys; turns_ptr is then int32, 0, one of each such tile. ADDERS: 1 or 2 warps that
    add dQ, each with a buffer of its own. K_BUFFERS and V_BUFFERS: 2 and 2, 2 and 1, or 1 and 1.
    All but lengths, turns and the counter goes through descriptors: a box beyond its tensor is cut
    off.

    Each barrier goes through its phases from one block of keys to the next without being set up
    again: of those with several buffers, use u of all that a thread block makes takes buffer
    u & (count - 1), in phase u // count & 1 (`buffer_of`). Who arrives:

    - q_full, do_full: the copies of a tile of rows (the first ones with K and V). Waited for by the
      consumers, who all arrive at rows_empty, for the producer.
    - dq_full: all consumers, a tile of dQ, or dK or dV where it leaves as one. Waited for by the
      adder of that buffer, who arrives at dq_empty, for the consumers.
    - k_empty, v_empty: once a block of keys, for the producer. With two buffers the sender, when dK
      and dV have been read from there; with one of K the adder that sees the last dQ, which comes
      after all of K's products; with one of V all consumers, after the last dP^T. Blocks without
      rows arrive as well.
    - out_full, with two buffers of K: all consumers, for the sender.
    - block_full: the producer, for all others; block_empty: all others, for the producer. Adders
      keep a slot to the end of its block, so that the block after the next is not told before.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = boxes(STAGES, BLOCK_M, BLOCK_D, VARLEN)
    q_s = gl.allocate_shared_memory(DTYPE, ROWS, q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, ROWS, dout_desc.layout)
    K: gl.constexpr = boxes(K_BUFFERS, BLOCK_N, BLOCK_D, VARLEN)
    V: gl.constexpr = boxes(V_BUFFERS, BLOCK_N, BLOCK_D, VARLEN)
    k_s = gl.allocate_shared_memory(DTYPE, K, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, V, v_desc.layout)
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
    k_empty = gl.allocate_shared_memory(gl.int64, [K_BUFFERS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_BUFFERS, 1], BARRIER)
    block_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    block_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    NUMBERS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    block_s = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], NUMBERS_LAYOUT)
    dq_full = gl.allocate_shared_memory(gl.int64, [ADDERS, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [ADDERS, 1], BARRIER)
    out_full = block_full  # of no use, and a barrier that nobody waits for must not be set up
    if K_BUFFERS == 2:
        out_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        for i in gl.static_range(2):
            mbarrier.init(out_full.index(i), count=256)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(rows_empty.index(i), count=256)
    for i in gl.static_range(K_BUFFERS):
        mbarrier.init(k_empty.index(i), count=1)
    for i in gl.static_range(V_BUFFERS):
        mbarrier.init(v_empty.index(i), count=1 if V_BUFFERS == 2 else 256)
    for i in gl.static_range(2):
        mbarrier.init(block_full.index(i), count=32)
        mbarrier.init(block_empty.index(i), count=256 + 32 * ADDERS + (32 if K_BUFFERS == 2 else 0))
    for i in gl.static_range(ADDERS):
        mbarrier.init(dq_full.index(i), count=256)
        mbarrier.init(dq_empty.index(i), count=1)
    fence_async_shared()
    # Arguments are spelled out: in a variable, compile-time values would cease to be such.
    gl.warp_specialize(
        [
            (_consumer, (
                dk_desc, dv_desc, seqlen_q, seqlen_k, group_size, softmax_scale, softcap,
                window_left, window_right, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, dq_s, block_s,
                q_full, do_full, rows_empty, v_empty, dq_full, dq_empty, out_full, block_full,
                block_empty, BLOCK_M, BLOCK_D, VARLEN, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, ORDERED,
                ADDERS, K_BUFFERS, V_BUFFERS,
            )),
            (producer, (
                q_desc, k_desc, v_desc, dout_desc, stats_desc, counter_ptr, cu_q_ptr, cu_k_ptr,
                window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, num_kv_heads,
                group_size, num_tiles_m, num_tiles_n, num_heads, group_heads, num_tiles, q_s, k_s,
                v_s, do_s, lse_s, delta_s, block_s, q_full, do_full, rows_empty, k_empty, v_empty,
                block_full, block_empty, BLOCK_M, BLOCK_D, VARLEN, HAS_LEFT, HAS_RIGHT, ORDERED,
                K_BUFFERS, V_BUFFERS,
            )),
            (adder, (
                dq_desc, dk_desc, dv_desc, turns_ptr, window_left, group_size, num_tiles_m, dq_s,
                block_s, dq_full, dq_empty, k_empty, block_full, block_empty, BLOCK_M, BLOCK_D,
                VARLEN, HAS_LEFT, ORDERED, ADDERS, K_BUFFERS, V_BUFFERS, 0,
            )),
            (adder, (
                dq_desc, dk_desc, dv_desc, turns_ptr, window_left, group_size, num_tiles_m, dq_s,
                block_s, dq_full, dq_empty, k_empty, block_full, block_empty, BLOCK_M, BLOCK_D,
                VARLEN, HAS_LEFT, ORDERED, ADDERS, K_BUFFERS, V_BUFFERS, 1,
            )),
            (sender, (
                dk_desc, dv_desc, k_s, v_s, block_s, out_full, k_empty, v_empty, block_full,
                block_empty, VARLEN, K_BUFFERS, V_BUFFERS,
            )),
        ],
        [1, 1, 1, 1],
        [24, 24, 24, 24],
    )  # fmt: skip
