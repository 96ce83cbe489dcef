"""The two backward kernels: one owns query rows (dQ), one owns keys (dK, dV).

No atomics, so every gradient is bitwise repeatable: the first walks over keys, the second over
the query rows of all heads that share its keys (grouped heads are never expanded). Both compute P
again from the LSE (Dao 2023, algorithm 2). The first also leaves what the second needs of each
row, the LSE in base 2 and `delta = rowsum(dO * O) - dLSE`, in `row_stats`.

Inside, every tensor has four dimensions: a varlen one is a batch of one entry, in which a
sequence begins at row `first`, and the rows after the last sequence are a sequence of their own
that sees nothing. What a program keeps for its whole loop comes through pointers, what it walks
over through tensor descriptors where the machine has them (DESC). Loops do without hoisting
(disable_licm): what LLVM would move out of them takes registers that the tiles need, and spills.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashpage.attention.triton.score import (
    LOG2E,
    keep_mask,
    key_range,
    logits2,
    row_range,
    tanh,
    visible,
)

# ---------------------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------------------


@triton.jit
def _place(num_blocks, num_lanes, BLOCKS_OUTER: tl.constexpr):
    """`(block, lane)` of this program; the grid has one dimension, which may be long.

    BLOCKS_OUTER starts the same block of every lane together, for blocks of unequal work.
    """
    pid = tl.program_id(0)
    if BLOCKS_OUTER:
        return pid // num_lanes, pid % num_lanes
    return pid % num_blocks, pid // num_blocks


@triton.jit
def find_sequence(cu_seqlens, block, num_sequences, BLOCK: tl.constexpr):
    """`(sequence, block within it)` of a varlen block.

    Sequence i has the blocks from `cu_seqlens[i] // BLOCK + i` on, which hold its rows and are at
    most one too many: how many there are, and which is whose, needs no bound of the lengths.
    """
    low = block * 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        begun = tl.load(cu_seqlens + middle) // BLOCK + middle <= block
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low, block - (tl.load(cu_seqlens + low) // BLOCK + low)


@triton.jit
def rows_of(cu_seqlens, sequence, num_sequences, total):
    """`(first, length)` of a varlen sequence; the last one is the tail, up to `total`."""
    first = tl.load(cu_seqlens + sequence)
    is_tail = sequence == num_sequences - 1
    return first, tl.load(cu_seqlens + sequence + 1, mask=not is_tail, other=total) - first


@triton.jit
def _stats_start(
    entry, sequence, head, first, seqlen_q, num_pads, PAD: tl.constexpr, VARLEN: tl.constexpr
):
    """Where the rows of one sequence and query head begin in each half of `row_stats`.

    A half is `[num_q_heads, num_pads, PAD]`; each sequence has whole pads to itself, so that
    neither kernel needs a mask for them.
    """
    if VARLEN:
        pad = first // PAD + sequence
    else:
        pad = entry * tl.cdiv(seqlen_q, PAD)
    return (head * num_pads + pad).to(tl.int64) * PAD


@triton.jit
def _contiguous(seqlen, num_heads, HEAD_DIM: tl.constexpr):
    """Strides of batch entry, row and head of a contiguous tensor."""
    row = num_heads * HEAD_DIM
    return seqlen.to(tl.int64) * row, row, HEAD_DIM


# ---------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------


@triton.jit
def _offsets(strides, entry, row, head, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets `[ROWS, BLOCK_D]` of a tile's elements."""
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    start = entry.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    return start + rows[:, None] * strides[1] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _load_tile(
    x, strides, entry, row, head, limit,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DESC: tl.constexpr,
    CHECK: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Rows `row ... row + ROWS - 1`, as `[ROWS, BLOCK_D]`; features past HEAD_DIM are 0.

    CHECK: rows may lie at or past `limit`, the end of the sequence. Pointers then give 0;
    descriptors give 0 past the end of the tensor, but before it the next sequence, unless CLEAR.
    """
    exists = (row + tl.arange(0, ROWS) < limit)[:, None]
    if DESC:
        tile = x.load([entry, row, head, 0]).reshape(ROWS, BLOCK_D)
        if CHECK and CLEAR:
            tile = tl.where(exists, tile, 0.0)
    else:
        pointers = x + _offsets(strides, entry, row, head, ROWS, BLOCK_D)
        mask = tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM
        if CHECK:
            tile = tl.load(pointers, mask=mask & exists, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            tile = tl.load(pointers, mask=mask, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _store_tile(
    x, tile, strides, entry, row, head, limit,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the rows before `limit`, rounded to the dtype of x."""
    mask = (row + tl.arange(0, ROWS) < limit)[:, None] & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM)
    pointers = x + _offsets(strides, entry, row, head, ROWS, BLOCK_D)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------


@triton.jit
def _probabilities(
    scores, lse2, rows, cols, len_q, len_k, window_left, window_right,
    softmax_scale, softcap, slope,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """P before dropout; 0 where masked, and in rows that see no key (their LSE is +inf)."""
    if HAS_SOFTCAP or HAS_ALIBI:
        logits = logits2(
            scores, rows, cols, len_k - len_q, softmax_scale, softcap, slope,
            HAS_SOFTCAP, HAS_ALIBI,
        )  # fmt: skip
    else:
        logits = scores * (softmax_scale * LOG2E)
    p = tl.exp2(logits - lse2)
    if MASKED:
        mask = visible(rows, cols, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        p = tl.where(mask, p, 0.0)
    return p


@triton.jit
def _probability_gradients(
    a, b, delta, keep, dropout_p,
    M: tl.constexpr, N: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """`dP - delta` as `[M, N]`, dP being the gradient of P before dropout.

    The product a @ b, of dO and V, starts at -delta: no register has to hold delta meanwhile.
    """
    start = tl.broadcast_to(-delta, [M, N])
    if HAS_DROPOUT:
        dp = tl.dot(a, b, start * (1.0 - dropout_p), input_precision="ieee")
        return tl.where(keep, dp / (1.0 - dropout_p), start)
    return tl.dot(a, b, start, input_precision="ieee")


@triton.jit
def _score_gradients(
    p, dp, scores, softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr
):
    """Gradients of the scaled scores, from P and what `_probability_gradients` gave."""
    ds = p * dp
    if HAS_SOFTCAP:
        t = tanh(scores * softmax_scale / softcap)
        ds *= 1.0 - t * t
    if MASKED:  # v or delta of what is not there may be NaN, and 0 * NaN is not 0
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds


_COUNTS = (
    "num_blocks", "num_lanes", "num_q_heads", "group_size", "num_sequences", "seqlen_q",
    "seqlen_k", "num_pads", "slopes_stride", "window_left", "window_right",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# dQ: a program owns query rows of one head
# ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_COUNTS)
def dq_kernel(
    q, k, v, dout, out, softmax_lse, dlse, dq, row_stats,
    cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state,
    q_strides, k_strides, v_strides, dout_strides, out_strides,
    num_blocks, num_lanes, slopes_stride, num_q_heads, group_size, num_sequences, seqlen_q,
    seqlen_k, num_pads, window_left, window_right, softmax_scale, softcap, dropout_p,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAD: tl.constexpr, DESC: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Grid: num_blocks of query rows x num_lanes (batch entries x heads; heads if VARLEN).

    `seqlen_q`, `seqlen_k`: rows of a batch entry; all tokens if VARLEN. `num_sequences`: with the
    tail if VARLEN.
    """
    BLOCKS_OUTER: tl.constexpr = HAS_RIGHT and not HAS_LEFT
    block, lane = _place(num_blocks, num_lanes, BLOCKS_OUTER)
    if BLOCKS_OUTER:  # the last rows see the most keys: begin with them
        block = num_blocks - 1 - block
    head = lane % num_q_heads
    if VARLEN:
        sequence, block = find_sequence(cu_seqlens_q, block, num_sequences, BLOCK_M)
        first, len_q = rows_of(cu_seqlens_q, sequence, num_sequences, seqlen_q)
        first_k, len_k = rows_of(cu_seqlens_k, sequence, num_sequences, seqlen_k)
        len_k = tl.where(sequence == num_sequences - 1, 0, len_k)
        entry = sequence * 0
        if block * BLOCK_M >= len_q:
            return
    else:
        sequence = lane // num_q_heads
        entry, first, first_k, len_q, len_k = sequence, 0, 0, seqlen_q, seqlen_k
    row = block * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    kv_head = head // group_size
    stop, stop_k = first + len_q, first_k + len_k

    do = _load_tile(
        dout, dout_strides, entry, first + row, head, stop,
        BLOCK_M, HEAD_DIM, BLOCK_D, False, True, False,
    )  # fmt: skip
    o = _load_tile(
        out, out_strides, entry, first + row, head, stop,
        BLOCK_M, HEAD_DIM, BLOCK_D, False, True, False,
    )  # fmt: skip
    place = (entry.to(tl.int64) * num_q_heads + head) * seqlen_q + first + rows
    row_lse2 = tl.load(softmax_lse + place, mask=rows < len_q, other=float("inf")) * LOG2E
    row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    if dlse is not None:
        row_delta -= tl.load(dlse + place, mask=rows < len_q, other=0.0)
    stats = row_stats + _stats_start(entry, sequence, head, first, seqlen_q, num_pads, PAD, VARLEN)
    tl.store(stats + rows, row_lse2)
    tl.store(stats + (num_q_heads * num_pads).to(tl.int64) * PAD + rows, row_delta)

    q_tile = _load_tile(
        q, q_strides, entry, first + row, head, stop,
        BLOCK_M, HEAD_DIM, BLOCK_D, False, True, False,
    )  # fmt: skip
    slope = 0.0
    if HAS_ALIBI:  # the tail has none
        slopes = alibi_slopes + sequence.to(tl.int64) * slopes_stride
        slope = tl.load(slopes + head, mask=len_k > 0, other=0.0)
    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lo, full_lo, full_hi, hi = key_range(
        row, tl.minimum(row + BLOCK_M, len_q), len_q, len_k, window_left, window_right,
        BLOCK_N, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    # First the keys on both sides of the full blocks, which need a mask, then those blocks.
    for unmasked in tl.static_range(2):
        begin, end = (full_lo, full_hi) if unmasked else (lo, hi - (full_hi - full_lo))
        for step in tl.range(begin, end, BLOCK_N, disable_licm=True):
            col = step
            if not unmasked:
                col = tl.where(step < full_lo, step, step + (full_hi - full_lo))
            cols = col + tl.arange(0, BLOCK_N)
            k_tile = _load_tile(
                k, k_strides, entry, first_k + col, kv_head, stop_k,
                BLOCK_N, HEAD_DIM, BLOCK_D, DESC, not unmasked, VARLEN,
            )  # fmt: skip
            scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            p = _probabilities(
                scores, row_lse2[:, None], rows[:, None], cols[None, :], len_q, len_k,
                window_left, window_right, softmax_scale, softcap, slope,
                HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, not unmasked,
            )  # fmt: skip
            v_tile = _load_tile(
                v, v_strides, entry, first_k + col, kv_head, stop_k,
                BLOCK_N, HEAD_DIM, BLOCK_D, DESC, not unmasked, False,
            )  # fmt: skip
            keep = None
            if HAS_DROPOUT:
                stream = sequence * num_q_heads + head
                keep = keep_mask(rng_state, stream, rows[:, None], cols[None, :], dropout_p)
            dp = _probability_gradients(
                do, v_tile.T, row_delta[:, None], keep, dropout_p, BLOCK_M, BLOCK_N, HAS_DROPOUT
            )
            ds = _score_gradients(p, dp, scores, softmax_scale, softcap, HAS_SOFTCAP, not unmasked)
            dq_acc = tl.dot(ds.to(k_tile.dtype), k_tile, dq_acc, input_precision="ieee")
    # Not by out_strides: the offsets of `out` would then stay in registers until here.
    own_strides = _contiguous(seqlen_q, num_q_heads, HEAD_DIM)
    _store_tile(
        dq, dq_acc * softmax_scale, own_strides, entry, first + row, head, stop,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# dK, dV: a program owns keys of one kv head
# ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(
    q, k, v, dout, dk, dv, row_stats,
    cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state,
    q_strides, k_strides, v_strides, dout_strides,
    num_blocks, num_lanes, slopes_stride, num_q_heads, group_size, num_sequences, seqlen_q,
    seqlen_k, num_pads, window_left, window_right, softmax_scale, softcap, dropout_p,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAD: tl.constexpr, DESC: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """As `dq_kernel`, over blocks of keys and kv heads. Runs after it: reads `row_stats`."""
    # The first keys are seen by the most rows, and come first.
    block, lane = _place(num_blocks, num_lanes, HAS_RIGHT and not HAS_LEFT)
    num_kv_heads = num_q_heads // group_size
    kv_head = lane % num_kv_heads
    if VARLEN:
        sequence, block = find_sequence(cu_seqlens_k, block, num_sequences, BLOCK_N)
        first, len_q = rows_of(cu_seqlens_q, sequence, num_sequences, seqlen_q)
        first_k, len_k = rows_of(cu_seqlens_k, sequence, num_sequences, seqlen_k)
        len_q = tl.where(sequence == num_sequences - 1, 0, len_q)
        entry = sequence * 0
        if block * BLOCK_N >= len_k:
            return
    else:
        sequence = lane // num_kv_heads
        entry, first, first_k, len_q, len_k = sequence, 0, 0, seqlen_q, seqlen_k
    col = block * BLOCK_N
    cols = col + tl.arange(0, BLOCK_N)
    stop, stop_k = first + len_q, first_k + len_k
    # Keys past the end only reach their own rows of dK and dV, which are not stored.
    k_tile = _load_tile(
        k, k_strides, entry, first_k + col, kv_head, stop_k,
        BLOCK_N, HEAD_DIM, BLOCK_D, False, True, False,
    )  # fmt: skip
    v_tile = _load_tile(
        v, v_strides, entry, first_k + col, kv_head, stop_k,
        BLOCK_N, HEAD_DIM, BLOCK_D, False, True, False,
    )  # fmt: skip
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    lo, full_lo, full_hi, hi = row_range(
        col, tl.minimum(col + BLOCK_N, len_k), len_q, len_k, window_left, window_right,
        BLOCK_M, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    delta_apart = (num_q_heads * num_pads).to(tl.int64) * PAD
    for member in tl.range(group_size, disable_licm=True):
        head = kv_head * group_size + member
        stats = row_stats + _stats_start(
            entry, sequence, head, first, seqlen_q, num_pads, PAD, VARLEN
        )  # fmt: skip
        slope = 0.0
        if HAS_ALIBI:  # the tail has none
            slope = tl.load(
                alibi_slopes + sequence * slopes_stride + head, mask=len_q > 0, other=0.0
            )
        # First the rows on both sides of the full blocks, which need a mask, then those blocks.
        for unmasked in tl.static_range(2):
            begin, end = (full_lo, full_hi) if unmasked else (lo, hi - (full_hi - full_lo))
            for step in tl.range(begin, end, BLOCK_M, disable_licm=True):
                row = step
                if not unmasked:
                    row = tl.where(step < full_lo, step, step + (full_hi - full_lo))
                rows = row + tl.arange(0, BLOCK_M)
                q_tile = _load_tile(
                    q, q_strides, entry, first + row, head, stop,
                    BLOCK_M, HEAD_DIM, BLOCK_D, DESC, not unmasked, VARLEN,
                )  # fmt: skip
                row_lse2 = tl.load(stats + rows)
                scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")
                p = _probabilities(
                    scores, row_lse2[None, :], rows[None, :], cols[:, None], len_q, len_k,
                    window_left, window_right, softmax_scale, softcap, slope,
                    HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, not unmasked,
                )  # fmt: skip
                do = _load_tile(
                    dout, dout_strides, entry, first + row, head, stop,
                    BLOCK_M, HEAD_DIM, BLOCK_D, DESC, not unmasked, VARLEN,
                )  # fmt: skip
                keep = None
                kept = p
                if HAS_DROPOUT:
                    stream = sequence * num_q_heads + head
                    keep = keep_mask(rng_state, stream, rows[None, :], cols[:, None], dropout_p)
                    kept = tl.where(keep, p / (1.0 - dropout_p), 0.0)
                dv_acc = tl.dot(kept.to(do.dtype), do, dv_acc, input_precision="ieee")
                row_delta = tl.load(stats + delta_apart + rows)
                dp = _probability_gradients(
                    v_tile, do.T, row_delta[None, :], keep, dropout_p, BLOCK_N, BLOCK_M,
                    HAS_DROPOUT,
                )  # fmt: skip
                ds = _score_gradients(
                    p, dp, scores, softmax_scale, softcap, HAS_SOFTCAP, not unmasked
                )
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    own_strides = _contiguous(seqlen_k, num_kv_heads, HEAD_DIM)
    _store_tile(
        dv, dv_acc, own_strides, entry, first_k + col, kv_head, stop_k,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    _store_tile(
        dk, dk_acc * softmax_scale, own_strides, entry, first_k + col, kv_head, stop_k,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
