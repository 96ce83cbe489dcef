"""The backward kernels of dense and varlen attention: dQ, dK and dV from what the forward kept.

Two kernels and no atomics, so every gradient is bitwise repeatable: one owns query rows and
walks over keys (dQ), one owns keys and walks over the query rows of all heads that share them
(dK, dV; grouped heads are never expanded). Both compute P again from the LSE (Dao 2023,
algorithm 2). The first also leaves `delta = rowsum(dO * O) - dLSE` and the LSE in base 2 for the
second, in buffers padded to whole tiles.

Inside, every tensor has four dimensions: a varlen one is a batch of one, in which a sequence
begins at row `first`. A tile is fetched through a tensor descriptor where the machine has them
(DESC), else through pointers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
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
# Tiles
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Rows (block_m) and keys (block_n) of one step, and how it runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    stay_shared: bool = False
    """What stays for the whole loop (q and dout, or k and v) is read from shared memory by the
    tensor cores of capability 9.0, and leaves the registers to larger tiles. Triton 3.6 does so
    with tiles that came through pointers; those that came through descriptors of more than two
    dimensions it holds in registers."""


# 227 KB of shared memory, descriptors.
_HOPPER = {
    64: (Tile(128, 64, 8, 3, True), Tile(64, 128, 8, 2, True)),
    128: (Tile(128, 64, 8, 3, True), Tile(64, 128, 8, 2, True)),
    256: (Tile(64, 64, 8, 2, True), Tile(32, 64, 8, 2, True)),
}
_AMPERE = {  # 164 KB
    64: (Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    128: (Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
_SMALL = {  # 64 KB: fits every machine with tensor cores
    64: (Tile(64, 64, 4, 2, True), Tile(64, 64, 4, 2, True)),
    128: (Tile(64, 32, 4, 2, True), Tile(32, 64, 4, 2, True)),
    256: (Tile(32, 32, 4, 1, True), Tile(16, 32, 4, 1, True)),
}
_NO_TENSOR_CORES = {  # products from registers: small tiles, many warps
    64: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    128: (Tile(16, 16, 8, 1), Tile(16, 32, 8, 1)),
    256: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


def choose_tiles(capability: int, head_dim: int, itemsize: int) -> tuple[Tile, Tile]:
    """Tiles of the dQ and of the dK/dV kernel.

    Args:
        capability: as `runtime.capability`.
        head_dim: a power of two.
        itemsize: bytes of an element.

    block_m of the first is a multiple of the other's: whole tiles of rows are padded by it.
    """
    if itemsize == 4 or 0 < capability < 80:  # exact float32; Triton 3.6 leaves out Turing's
        table = _NO_TENSOR_CORES
    else:
        table = {80: _AMPERE, 90: _HOPPER, 100: _HOPPER}.get(capability, _SMALL)
    return table[max(64, head_dim)]


# ---------------------------------------------------------------------------------------------
# What both kernels share
# ---------------------------------------------------------------------------------------------


@triton.jit
def _place(num_blocks, num_heads, num_sequences, BLOCKS_OUTER: tl.constexpr):
    """`(block, sequence, head)` of this program; the grid has one dimension, which may be long.

    BLOCKS_OUTER starts the same block of every head together, for blocks of unequal work.
    """
    pid = tl.program_id(0)
    if BLOCKS_OUTER:
        lanes = num_heads * num_sequences
        block = pid // lanes
        lane = pid % lanes
    else:
        block = pid % num_blocks
        lane = pid // num_blocks
    return block, lane // num_heads, lane % num_heads


@triton.jit
def _sequence(cu_seqlens, sequence, seqlen, VARLEN: tl.constexpr):
    """`(batch, first, length)`: the sequence's rows are `first ... first + length - 1`."""
    if VARLEN:
        first = tl.load(cu_seqlens + sequence)
        return sequence * 0, first, tl.load(cu_seqlens + sequence + 1) - first
    return sequence, sequence * 0, seqlen


@triton.jit
def _offsets(strides, batch, row, head, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets `[ROWS, BLOCK_D]` of a tile's elements."""
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    start = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    return start + rows[:, None] * strides[1] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def _load_tile(
    x, strides, batch, row, head, limit,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DESC: tl.constexpr,
    CHECK: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Rows `row ... row + ROWS - 1`, as `[ROWS, BLOCK_D]`; features past HEAD_DIM are 0.

    CHECK: rows may lie at or past `limit`, the end of the sequence. Pointers then give 0;
    descriptors give 0 past the end of the tensor, but before it the next sequence, unless CLEAR.
    """
    exists = (row + tl.arange(0, ROWS) < limit)[:, None]
    if DESC:
        tile = x.load([batch, row, head, 0]).reshape(ROWS, BLOCK_D)
        if CHECK and CLEAR:
            tile = tl.where(exists, tile, 0.0)
    else:
        pointers = x + _offsets(strides, batch, row, head, ROWS, BLOCK_D)
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
    x, tile, strides, batch, row, head, limit,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the rows before `limit`, rounded to the dtype of x."""
    mask = (row + tl.arange(0, ROWS) < limit)[:, None] & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM)
    pointers = x + _offsets(strides, batch, row, head, ROWS, BLOCK_D)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _zero_tail(
    x, strides, start, stop, step, head,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zero tiles at `start`, `start + step`, ... of rows that belong to no sequence."""
    zeros = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for index in range(tl.cdiv(tl.maximum(stop - start, 0), step)):
        row = start + index * step
        _store_tile(x, zeros, strides, head * 0, row, head, stop, ROWS, HEAD_DIM, BLOCK_D)


@triton.jit
def _padded_start(
    sequence, first, head, seqlen_q, num_pads, PAD: tl.constexpr, VARLEN: tl.constexpr
):
    """Where the rows of one sequence and query head begin in `lse2` and `delta`.

    Both are `[num_q_heads, num_pads, PAD]`; each sequence has whole pads to itself.
    """
    if VARLEN:
        pad = first // PAD + sequence
    else:
        pad = sequence * tl.cdiv(seqlen_q, PAD)
    return (head.to(tl.int64) * num_pads + pad) * PAD


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
    "num_q_heads", "group_size", "num_sequences", "seqlen_q", "seqlen_k", "num_blocks",
    "num_pads", "alibi_stride", "window_left", "window_right",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# dQ: a program owns query rows of one head
# ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_COUNTS)
def _dq_kernel(
    q, k, v, dout, out, softmax_lse, dlse, dq, lse2, delta,
    cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state,
    q_strides, k_strides, v_strides, dout_strides, out_strides, dq_strides, alibi_stride,
    num_q_heads, group_size, num_sequences, seqlen_q, seqlen_k, num_blocks, num_pads,
    window_left, window_right, softmax_scale, softcap, dropout_p,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAD: tl.constexpr, STAGES: tl.constexpr, DESC: tl.constexpr, STAY_SHARED: tl.constexpr,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    HAS_DLSE: tl.constexpr, BLOCKS_OUTER: tl.constexpr,
):  # fmt: skip
    block, sequence, head = _place(
        num_blocks, num_q_heads, num_sequences + (1 if VARLEN else 0), BLOCKS_OUTER
    )
    if BLOCKS_OUTER:  # the last rows see the most keys: begin with them
        block = num_blocks - 1 - block
    row = block * BLOCK_M
    if VARLEN and sequence == num_sequences:  # no sequence: the rows after the last one
        tail = tl.load(cu_seqlens_q + num_sequences) + row
        step = num_blocks * BLOCK_M
        _zero_tail(dq, dq_strides, tail, seqlen_q, step, head, BLOCK_M, HEAD_DIM, BLOCK_D)
        return
    batch, first, len_q = _sequence(cu_seqlens_q, sequence, seqlen_q, VARLEN)
    _, first_k, len_k = _sequence(cu_seqlens_k, sequence, seqlen_k, VARLEN)
    if VARLEN and row >= len_q:
        return
    rows = row + tl.arange(0, BLOCK_M)
    kv_head = head // group_size
    stop, stop_k = first + len_q, first_k + len_k

    # delta and the LSE of these rows, for the loop below and for the other kernel.
    do = _load_tile(
        dout, dout_strides, batch, first + row, head, stop,
        BLOCK_M, HEAD_DIM, BLOCK_D, DESC and not STAY_SHARED, True, False,
    )  # fmt: skip
    o = _load_tile(
        out, out_strides, batch, first + row, head, stop,
        BLOCK_M, HEAD_DIM, BLOCK_D, DESC and not STAY_SHARED, True, False,
    )  # fmt: skip
    place = (batch.to(tl.int64) * num_q_heads + head) * seqlen_q + first + rows
    lse = tl.load(softmax_lse + place, mask=rows < len_q, other=float("inf"))
    row_delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    if HAS_DLSE:
        row_delta -= tl.load(dlse + place, mask=rows < len_q, other=0.0)
    row_lse2 = lse * LOG2E
    padded = rows + _padded_start(sequence, first, head, seqlen_q, num_pads, PAD, VARLEN)
    tl.store(lse2 + padded, row_lse2)
    tl.store(delta + padded, row_delta)

    q_tile = _load_tile(
        q, q_strides, batch, first + row, head, stop,
        BLOCK_M, HEAD_DIM, BLOCK_D, DESC and not STAY_SHARED, True, False,
    )  # fmt: skip
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + sequence * alibi_stride + head)
    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lo, full_lo, full_hi, hi = key_range(
        row, tl.minimum(row + BLOCK_M, len_q), len_q, len_k, window_left, window_right,
        BLOCK_N, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    # First the keys on both sides of the full blocks, which need a mask, then those blocks.
    for unmasked in tl.static_range(2):
        begin, end = (full_lo, full_hi) if unmasked else (lo, hi - (full_hi - full_lo))
        for step in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            col = step
            if not unmasked:
                col = tl.where(step < full_lo, step, step + (full_hi - full_lo))
            cols = col + tl.arange(0, BLOCK_N)
            k_tile = _load_tile(
                k, k_strides, batch, first_k + col, kv_head, stop_k,
                BLOCK_N, HEAD_DIM, BLOCK_D, DESC, not unmasked, VARLEN,
            )  # fmt: skip
            scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            p = _probabilities(
                scores, row_lse2[:, None], rows[:, None], cols[None, :], len_q, len_k,
                window_left, window_right, softmax_scale, softcap, slope,
                HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, not unmasked,
            )  # fmt: skip
            v_tile = _load_tile(
                v, v_strides, batch, first_k + col, kv_head, stop_k,
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
    _store_tile(
        dq, dq_acc * softmax_scale, dq_strides, batch, first + row, head, stop,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# dK, dV: a program owns keys of one kv head
# ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_COUNTS)
def _dkdv_kernel(
    q, k, v, dout, dk, dv, lse2, delta, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, alibi_stride,
    num_q_heads, group_size, num_sequences, seqlen_q, seqlen_k, num_blocks, num_pads,
    window_left, window_right, softmax_scale, softcap, dropout_p,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAD: tl.constexpr, STAGES: tl.constexpr, DESC: tl.constexpr, STAY_SHARED: tl.constexpr,
    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BLOCKS_OUTER: tl.constexpr,
):  # fmt: skip
    # The first keys are seen by the most rows, and come first.
    block, sequence, kv_head = _place(
        num_blocks, num_q_heads // group_size, num_sequences + (1 if VARLEN else 0), BLOCKS_OUTER
    )
    col = block * BLOCK_N
    if VARLEN and sequence == num_sequences:  # no sequence: the rows after the last one
        tail = tl.load(cu_seqlens_k + num_sequences) + col
        step = num_blocks * BLOCK_N
        _zero_tail(dk, dk_strides, tail, seqlen_k, step, kv_head, BLOCK_N, HEAD_DIM, BLOCK_D)
        _zero_tail(dv, dk_strides, tail, seqlen_k, step, kv_head, BLOCK_N, HEAD_DIM, BLOCK_D)
        return
    batch, first, len_q = _sequence(cu_seqlens_q, sequence, seqlen_q, VARLEN)
    _, first_k, len_k = _sequence(cu_seqlens_k, sequence, seqlen_k, VARLEN)
    if VARLEN and col >= len_k:
        return
    cols = col + tl.arange(0, BLOCK_N)
    stop, stop_k = first + len_q, first_k + len_k

    # Keys past the end only reach their own rows of dK and dV, which are not stored.
    k_tile = _load_tile(
        k, k_strides, batch, first_k + col, kv_head, stop_k,
        BLOCK_N, HEAD_DIM, BLOCK_D, DESC and not STAY_SHARED, True, False,
    )  # fmt: skip
    v_tile = _load_tile(
        v, v_strides, batch, first_k + col, kv_head, stop_k,
        BLOCK_N, HEAD_DIM, BLOCK_D, DESC and not STAY_SHARED, True, False,
    )  # fmt: skip
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    lo, full_lo, full_hi, hi = row_range(
        col, tl.minimum(col + BLOCK_N, len_k), len_q, len_k, window_left, window_right,
        BLOCK_M, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    for member in range(group_size):
        head = kv_head * group_size + member
        padded = _padded_start(sequence, first, head, seqlen_q, num_pads, PAD, VARLEN)
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + sequence * alibi_stride + head)
        # First the rows on both sides of the full blocks, which need a mask, then those blocks.
        for unmasked in tl.static_range(2):
            begin, end = (full_lo, full_hi) if unmasked else (lo, hi - (full_hi - full_lo))
            for step in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
                row = step
                if not unmasked:
                    row = tl.where(step < full_lo, step, step + (full_hi - full_lo))
                rows = row + tl.arange(0, BLOCK_M)
                q_tile = _load_tile(
                    q, q_strides, batch, first + row, head, stop,
                    BLOCK_M, HEAD_DIM, BLOCK_D, DESC, not unmasked, VARLEN,
                )  # fmt: skip
                row_lse2 = tl.load(lse2 + padded + rows)
                scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")
                p = _probabilities(
                    scores, row_lse2[None, :], rows[None, :], cols[:, None], len_q, len_k,
                    window_left, window_right, softmax_scale, softcap, slope,
                    HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, not unmasked,
                )  # fmt: skip
                do = _load_tile(
                    dout, dout_strides, batch, first + row, head, stop,
                    BLOCK_M, HEAD_DIM, BLOCK_D, DESC, not unmasked, VARLEN,
                )  # fmt: skip
                keep = None
                kept = p
                if HAS_DROPOUT:
                    stream = sequence * num_q_heads + head
                    keep = keep_mask(rng_state, stream, rows[None, :], cols[:, None], dropout_p)
                    kept = tl.where(keep, p / (1.0 - dropout_p), 0.0)
                dv_acc = tl.dot(kept.to(do.dtype), do, dv_acc, input_precision="ieee")
                row_delta = tl.load(delta + padded + rows)
                dp = _probability_gradients(
                    v_tile, do.T, row_delta[None, :], keep, dropout_p, BLOCK_N, BLOCK_M,
                    HAS_DROPOUT,
                )  # fmt: skip
                ds = _score_gradients(
                    p, dp, scores, softmax_scale, softcap, HAS_SOFTCAP, not unmasked
                )
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    _store_tile(
        dv, dv_acc, dk_strides, batch, first_k + col, kv_head, stop_k,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    _store_tile(
        dk, dk_acc * softmax_scale, dk_strides, batch, first_k + col, kv_head, stop_k,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------


def backward(
    problem: Problem,
    inputs: AttentionInputs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)`, fresh and contiguous, each bitwise repeatable; nothing synchronises.

    Args:
        problem: dense or varlen; float16, bfloat16 or float32.
        inputs: shapes as in `ops`; strides are free but for the last, which is 1.
        dout: gradient of out, `[batch, seqlen_q, num_q_heads, head_dim]` or `[total_q, ...]`,
            last stride 1.
        dlse: gradient of softmax_lse, float32, or None.
        out, softmax_lse: of the forward, contiguous. LSE is natural, +inf in rows that see no key.

    Rows after `cu_seqlens[-1]`, sequences without queries or keys, and rows that see no key get
    zeros. `max_seqlen_q` and `max_seqlen_k` bound the lengths; larger ones only cost time.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        return dq, dk, dv
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    capability = runtime.capability(q.device)
    tiles = choose_tiles(capability, _block_d(problem), q.element_size())
    launches = _plan(problem, inputs, dout, dlse, out, softmax_lse, dq, dk, dv, *tiles)
    with runtime.on_device(q.device):
        for kernel, grid, arguments in launches:
            kernel[(grid,)](**arguments)
    return dq, dk, dv


def _plan(
    problem: Problem,
    inputs: AttentionInputs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dq_tile: Tile,
    dkdv_tile: Tile,
) -> list[tuple[Any, int, dict[str, Any]]]:
    """`(kernel, number of programs, arguments)`, to be launched in this order."""
    varlen = inputs.cu_seqlens_q is not None
    q, k, v, dout, out, dq, dk = (
        x.unsqueeze(0) if varlen else x for x in (inputs.q, inputs.k, inputs.v, dout, out, dq, dk)
    )
    longest_q = min(inputs.max_seqlen_q, q.shape[1]) if varlen else q.shape[1]
    longest_k = min(inputs.max_seqlen_k, k.shape[1]) if varlen else k.shape[1]
    block_d = _block_d(problem)
    # Descriptors feed tensor cores, which float32 does not use.
    use_descriptors = q.element_size() < 4 and runtime.descriptors_fit(q, k, v, dout, out)
    shared = {
        **_shared_arguments(problem, inputs, q.shape[1], k.shape[1], dq_tile.block_m),
        **_strides(q=q, k=k, v=v, dout=dout),
        "BLOCK_D": block_d,
        "DESC": use_descriptors,
    }

    def sources(tile: Tile, stays: bool, rows: int, **tensors: Tensor) -> dict[str, Any]:
        if not use_descriptors or (stays and tile.stay_shared):
            return tensors
        shape = (1, rows, 1, block_d)
        return {name: runtime.descriptor(x, shape) for name, x in tensors.items()}

    def launch(
        kernel: Any, tile: Tile, longest: int, block: int, num_heads: int, own: dict[str, Any]
    ) -> tuple[Any, int, dict[str, Any]]:
        num_blocks = max(1, triton.cdiv(longest, block))
        # A varlen grid has one more sequence: the rows after the last one.
        num_programs = num_blocks * num_heads * (shared["num_sequences"] + varlen)
        arguments = {
            **shared,
            **own,
            "num_blocks": num_blocks,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "STAY_SHARED": tile.stay_shared,
            "num_warps": tile.num_warps,
        }
        return kernel, num_programs, arguments

    of_dq = {
        **sources(dq_tile, True, dq_tile.block_m, q=q, dout=dout, out=out),
        **sources(dq_tile, False, dq_tile.block_n, k=k, v=v),
        "softmax_lse": softmax_lse,
        "dlse": None if dlse is None else dlse.contiguous(),
        "dq": dq,
        **_strides(out=out, dq=dq),
        "HAS_DLSE": dlse is not None,
    }
    of_dkdv = {
        **sources(dkdv_tile, False, dkdv_tile.block_m, q=q, dout=dout),
        **sources(dkdv_tile, True, dkdv_tile.block_n, k=k, v=v),
        "dk": dk,
        "dv": dv,
        **_strides(dk=dk),
    }
    num_q_heads, num_kv_heads = problem.num_q_heads, problem.num_kv_heads
    return [
        launch(_dq_kernel, dq_tile, longest_q, dq_tile.block_m, num_q_heads, of_dq),
        launch(_dkdv_kernel, dkdv_tile, longest_k, dkdv_tile.block_n, num_kv_heads, of_dkdv),
    ]


def _shared_arguments(
    problem: Problem, inputs: AttentionInputs, seqlen_q: int, seqlen_k: int, pad: int
) -> dict[str, Any]:
    """What both kernels take of the problem; seqlen: rows of one batch, all tokens if varlen."""
    if inputs.cu_seqlens_q is None:
        num_sequences = inputs.q.shape[0]
        num_pads = num_sequences * triton.cdiv(seqlen_q, pad)
    else:
        num_sequences = inputs.cu_seqlens_q.shape[0] - 1
        num_pads = seqlen_q // pad + num_sequences
    padded = (problem.num_q_heads, num_pads, pad)
    slopes = inputs.alibi_slopes
    has_left, has_right = problem.window_left >= 0, problem.window_right >= 0
    return {
        "lse2": torch.empty(padded, dtype=torch.float32, device=inputs.q.device),
        "delta": torch.empty(padded, dtype=torch.float32, device=inputs.q.device),
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "alibi_slopes": slopes,
        "alibi_stride": slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        "rng_state": inputs.rng_state,
        "num_q_heads": problem.num_q_heads,
        "group_size": problem.group_size,
        "num_sequences": num_sequences,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "num_pads": num_pads,
        # Wider than both lengths is as good as unbounded, and a sum must fit an int32.
        "window_left": min(problem.window_left, seqlen_q + seqlen_k),
        "window_right": min(problem.window_right, seqlen_q + seqlen_k),
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
        "HEAD_DIM": problem.head_dim,
        "PAD": pad,
        "VARLEN": inputs.cu_seqlens_q is not None,
        "HAS_LEFT": has_left,
        "HAS_RIGHT": has_right,
        "HAS_SOFTCAP": problem.softcap > 0,
        "HAS_ALIBI": slopes is not None,
        "HAS_DROPOUT": problem.dropout_p > 0,
        "BLOCKS_OUTER": has_right and not has_left,
    }


def _block_d(problem: Problem) -> int:
    """Features of a tile: a power of two that tensor cores accept."""
    return max(16, triton.next_power_of_2(problem.head_dim))


def _strides(**tensors: Tensor) -> dict[str, tuple[int, ...]]:
    """Strides of batch, row and head, under the names of the kernels' arguments."""
    return {f"{name}_strides": x.stride()[:3] for name, x in tensors.items()}
