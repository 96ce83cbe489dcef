"""Launching the backward for Hopper: rows before, the kernel, rows after. Shapes as in `ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.hopper.backward_kernel import BLOCK_N, backward_kernel
from flashpage.attention.hopper.backward_rows import finish_kernel, prepare_kernel
from flashpage.attention.hopper.descriptors import (
    descriptor,
    fits,
    flat_descriptor,
    ragged_descriptor,
)
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import as_batch, cdiv, strides_of, window

L2_BYTES = 32 * 2**20
"""Q, dO and the sums of dQ of the heads that run side by side should stay in the L2 cache."""

ORDERED_KEYS = {64: 2048, 128: 1024}
"""Keys of a sequence up to which dQ is summed in the order of the keys though nobody asked for it,
by BLOCK_D: then no zeros are written first, and few blocks wait for turns. Over sums in any order,
full and causal, on an H200: d 64 1.07 and 1.08 with S 1024, 1.03 and 1.03 with 2048, 1.01 and 0.96
with 4096; d 128 1.04 and 1.01 with S 1024, 1.01 and 0.97 with 2048."""


def buffers(block_d: int, ordered: bool) -> dict[str, int]:
    """Warps that add dQ, each with a buffer of it, and buffers of K and V: 209 to 227 KB in all.

    One warp keeps up where a step is long (BLOCK_D 128) and no turn has to be waited for. What does
    not get a second buffer at BLOCK_D 128 would not fit; how dK and dV then leave, and the next
    block comes in, `backward_writers` says.
    """
    if block_d == 64:
        return {"ADDERS": 2, "K_BUFFERS": 2, "V_BUFFERS": 2}
    if ordered:
        return {"ADDERS": 2, "K_BUFFERS": 1, "V_BUFFERS": 1}
    return {"ADDERS": 1, "K_BUFFERS": 2, "V_BUFFERS": 1}


def backward(
    problem: Problem,
    inputs: AttentionInputs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)`, fresh and contiguous; arguments as in `triton.backward`.

    With `problem.deterministic`, or few keys, dQ is summed up in the order of the keys; without, in
    any order.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        return dq, dk, dv
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not fits(dout):
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    with runtime.on_device(q.device):
        _launch(problem, inputs, dout, dlse, out, softmax_lse, dq, dk, dv)
    return dq, dk, dv


def _launch(
    problem: Problem,
    x: AttentionInputs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    varlen = x.cu_seqlens_q is not None
    block_d = 64 if problem.head_dim <= 64 else 128
    block_m = 8192 // block_d
    block_n = BLOCK_N.value
    num_q_heads, num_kv_heads = problem.num_q_heads, problem.num_kv_heads
    if varlen:
        batch = x.cu_seqlens_q.shape[0] - 1
        seqlen_q, seqlen_k = x.q.shape[0], x.k.shape[0]
        num_tiles_m = seqlen_q // block_m + batch + 1
        num_tiles_n = seqlen_k // block_n + batch + 1
        num_heads, num_lanes, make = num_kv_heads, num_q_heads, ragged_descriptor
    else:
        batch, seqlen_q = x.q.shape[:2]
        seqlen_k = x.k.shape[1]
        num_tiles_m, num_tiles_n = cdiv(seqlen_q, block_m), cdiv(seqlen_k, block_n)
        num_heads, num_lanes, make = batch * num_kv_heads, batch * num_q_heads, descriptor
    stats = torch.empty(2, num_lanes * num_tiles_m, block_m, dtype=torch.float32, device=x.q.device)
    shape = (num_lanes * num_tiles_m, block_m * block_d // 128, 128)
    sums = torch.empty(shape, dtype=torch.float32, device=x.q.device)
    ordered = problem.deterministic or x.max_seqlen_k <= ORDERED_KEYS[block_d]
    turns = None
    if ordered:
        turns = torch.empty(num_lanes * num_tiles_m, dtype=torch.int32, device=x.q.device)
    counter = torch.empty(1, dtype=torch.int32, device=x.q.device)
    places = (
        x.cu_seqlens_q,
        num_tiles_m,
        num_q_heads,
        batch + 1 if varlen else batch,
        seqlen_q,
    )
    constants = {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": block_d,
        "BLOCK_M": block_m,
        "VARLEN": varlen,
    }
    runtime.launch(prepare_kernel, (num_lanes * num_tiles_m,))(
        out,
        dout,
        softmax_lse,
        dlse,
        *stats,
        sums,
        turns,
        counter,
        places[0],
        strides_of(as_batch(dout)),
        *places[1:],
        **constants,
        num_warps=4,
    )
    row_bytes = max(1, x.max_seqlen_q * problem.group_size * block_d * 8)
    grid = min(num_tiles_n * num_heads, runtime.num_multiprocessors(x.q.device))
    runtime.launch(backward_kernel, (grid,))(
        make(x.q, block_m, block_d),
        make(x.k, block_n, block_d),
        make(x.v, block_n, block_d),
        make(dout, block_m, block_d),
        make(dk, block_n, block_d),
        make(dv, block_n, block_d),
        flat_descriptor(sums),
        flat_descriptor(stats.view(-1, block_m)),
        turns,
        counter,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        problem.softmax_scale,
        problem.softcap,
        *window(problem),
        seqlen_q,
        seqlen_k,
        batch,
        num_q_heads,
        num_kv_heads,
        problem.group_size,
        num_tiles_m,
        num_tiles_n,
        num_heads,
        min(num_heads, max(1, L2_BYTES // row_bytes)),
        num_lanes * num_tiles_m,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        VARLEN=varlen,
        HAS_LEFT=problem.window_left >= 0,
        HAS_RIGHT=problem.window_right >= 0,
        HAS_SOFTCAP=problem.softcap > 0.0,
        ORDERED=ordered,
        **buffers(block_d, ordered),
        num_warps=8,
    )
    runtime.launch(finish_kernel, (num_lanes * num_tiles_m,))(
        sums, turns, dq, places[0], problem.softmax_scale, *places[1:], **constants, num_warps=4
    )
