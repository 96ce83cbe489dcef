"""Backward of dense and varlen attention in Triton: which tiles, and the launch of two kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import (
    as_batch,
    cdiv,
    padded_head_dim,
    slopes_stride,
    strides_of,
    switches,
    window,
)
from flashpage.attention.triton.backward_kernels import dkdv_kernel, dq_kernel

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


# By head_dim up to: the tiles of the dQ kernel and of the dK/dV kernel.
_HOPPER = {  # measured on an H200
    64: (Tile(128, 64, 8, 3), Tile(32, 128, 4, 3)),
    128: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    256: (Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
}
_HOPPER_CAUSAL = {
    64: (Tile(64, 64, 4, 3), Tile(32, 128, 4, 3)),
    128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    256: _HOPPER[256],
}
_HOPPER_DROPOUT = {  # more warps for dK/dV: random numbers take registers, which would spill
    64: (Tile(64, 64, 4, 3), Tile(32, 128, 8, 3)),
    128: (Tile(128, 64, 8, 3), Tile(32, 128, 8, 2)),
    256: (Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
}
_BLACKWELL = {  # 227 KB of shared memory
    64: (Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    128: (Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    256: (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
}
_AMPERE = {  # 164 KB
    64: (Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    128: (Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
    256: (Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
_SMALL = {  # 64 KB: fits every machine with tensor cores
    64: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: (Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    256: (Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
}
_NO_TENSOR_CORES = {  # products from registers: small tiles, many warps
    64: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    128: (Tile(16, 16, 8, 1), Tile(16, 32, 8, 1)),
    256: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


@cache
def backward_tiles(
    capability: int, block_d: int, itemsize: int, causal: bool, dropout: bool
) -> tuple[Tile, Tile]:
    """Tiles of the dQ and of the dK/dV kernel.

    Args:
        capability: as `runtime.capability`.
        block_d: head_dim, rounded up to a power of two.
        itemsize: bytes of an element.
        causal: the window is bounded on the right.
        dropout: there is dropout.

    block_m of the first is a multiple of the other's: whole tiles of rows are padded by it.
    """
    if itemsize == 4 or 0 < capability < 80:  # exact float32; Triton 3.6 leaves out Turing's
        table = _NO_TENSOR_CORES
    elif capability == 90:
        table = _HOPPER_DROPOUT if dropout else _HOPPER_CAUSAL if causal else _HOPPER
    else:
        table = {80: _AMPERE, 100: _BLACKWELL}.get(capability, _SMALL)
    return table[max(64, block_d)]


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
    zeros. `max_seqlen_q` and `max_seqlen_k` are not used.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        return dq, dk, dv
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
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
    q, k, v, dout, out = map(as_batch, (x.q, x.k, x.v, dout, out))
    batch, seqlen_q, num_q_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1:3]
    itemsize = q.element_size()
    block_d = padded_head_dim(head_dim)
    capability = runtime.capability(q.device)
    causal, dropout = problem.window_right >= 0, problem.dropout_p > 0.0
    of_dq, of_dkdv = backward_tiles(capability, block_d, itemsize, causal, dropout)
    varlen = x.cu_seqlens_q is not None
    if varlen:  # one sequence more than there are, the rows after the last; all end to end
        num_sequences, num_lanes = x.cu_seqlens_q.shape[0], 1
        num_blocks_q = seqlen_q // of_dq.block_m + num_sequences
        num_blocks_k = seqlen_k // of_dkdv.block_n + num_sequences
    else:
        num_sequences = num_lanes = batch
        num_blocks_q = cdiv(seqlen_q, of_dq.block_m)
        num_blocks_k = cdiv(seqlen_k, of_dkdv.block_n)
    num_pads = num_lanes * num_blocks_q  # a pad is a block of the dQ kernel
    stats_shape = (2, num_q_heads, num_pads, of_dq.block_m)
    row_stats = torch.empty(stats_shape, dtype=torch.float32, device=q.device)
    # Descriptors feed tensor cores, which float32 does not use.
    described = itemsize < 4 and runtime.descriptors_fit(q, k, v, dout)

    # What a program keeps for its whole loop always comes through pointers: Triton 3.6 then leaves
    # it in shared memory, where Hopper's tensor cores read it. What comes through descriptors of
    # more than two dimensions it would hold in registers, which larger tiles need.
    def walked(tensor: Tensor, rows: int) -> Any:
        return runtime.descriptor(tensor, [1, rows, 1, block_d]) if described else tensor

    data = (x.cu_seqlens_q, x.cu_seqlens_k, x.alibi_slopes, x.rng_state)
    strides = (strides_of(q), strides_of(k), strides_of(v), strides_of(dout))
    numbers = (
        slopes_stride(x.alibi_slopes),
        num_q_heads,
        problem.group_size,
        num_sequences,
        seqlen_q,
        seqlen_k,
        num_pads,
        *window(problem),
        problem.softmax_scale,
        problem.softcap,
        problem.dropout_p,
        head_dim,
        block_d,
        of_dq.block_m,
        described,
        varlen,
    )
    options = switches(problem)
    num_lanes_q, num_lanes_kv = num_lanes * num_q_heads, num_lanes * num_kv_heads
    runtime.launch(dq_kernel, (num_blocks_q * num_lanes_q,))(
        q,
        walked(k, of_dq.block_n),
        walked(v, of_dq.block_n),
        dout,
        out,
        softmax_lse,
        dlse,
        dq,
        row_stats,
        *data,
        *strides,
        strides_of(out),
        num_blocks_q,
        num_lanes_q,
        *numbers,
        BLOCK_M=of_dq.block_m,
        BLOCK_N=of_dq.block_n,
        **options,
        num_warps=of_dq.num_warps,
        num_stages=of_dq.num_stages,
    )
    runtime.launch(dkdv_kernel, (num_blocks_k * num_lanes_kv,))(
        walked(q, of_dkdv.block_m),
        k,
        v,
        walked(dout, of_dkdv.block_m),
        dk,
        dv,
        row_stats,
        *data,
        *strides,
        num_blocks_k,
        num_lanes_kv,
        *numbers,
        BLOCK_M=of_dkdv.block_m,
        BLOCK_N=of_dkdv.block_n,
        **options,
        num_warps=of_dkdv.num_warps,
        num_stages=of_dkdv.num_stages,
    )
