"""The two CPU backends: torch for everything, numba for reading pages in decode."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flashpage.attention.cpu import blocks, numba_decode, numba_runtime, torch_kernel
from flashpage.attention.cpu.segments import (
    Segment,
    check_page_ids,
    checked_cu_seqlens,
    checked_leftpad,
    checked_lengths,
    checked_rows,
    gather_pages,
    segment_slopes,
    varlen_segments,
)
from flashpage.attention.dispatch import AttentionInputs, DecodeInputs
from flashpage.attention.problem import FLOAT_DTYPES, Function, Problem, round128
from flashpage.errors import ArgumentError


class TorchBackend:
    """All functions, all options, in torch; the slow twin of the numba backend in decode."""

    name = "cpu_torch"

    def why_not(self, problem: Problem, function: Function) -> str | None:
        if problem.device.type != "cpu":
            return f"serves tensors on the CPU, not on {problem.device}"
        if problem.dtype not in FLOAT_DTYPES:
            return f"serves float16, bfloat16, float32 and float64, not {problem.dtype}"
        if function == "backward" and problem.layout == "paged":
            return "attention over pages has no backward"
        return None

    def but_for(self, problem: Problem, function: Function) -> str | None:
        return None

    def forward(
        self, problem: Problem, inputs: AttentionInputs, return_s_dmask: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = inputs
        if x.cu_seqlens_q is None:
            piece = _piece(problem, x.q, x.k, segment_slopes(x.alibi_slopes, 0, len(x.q)), x, 0)
            out, lse = _attend(piece, x.q, x.k, x.v)
            s_dmask = x.q.new_empty(0)
            if return_s_dmask:
                sides = (round128(x.q.shape[1]), round128(x.k.shape[1]))
                s_dmask = x.q.new_zeros(x.q.shape[0], x.q.shape[2], *sides)
                blocks.s_dmask(x.q, x.k, piece, s_dmask)
            return out.contiguous(), lse.contiguous(), s_dmask

        out = torch.zeros(x.q.shape, dtype=x.q.dtype)
        lse = torch.full((x.q.shape[1], x.q.shape[0]), torch.inf, dtype=problem.lse_dtype)
        s_dmask = x.q.new_empty(0)
        if return_s_dmask:
            sides = (round128(x.max_seqlen_q), round128(x.max_seqlen_k))
            s_dmask = x.q.new_zeros(len(x.cu_seqlens_q) - 1, x.q.shape[1], *sides)
        for s in _segments(x):
            q, (k, v) = s.q_rows(x.q), _keys(s, x)
            piece = _piece(problem, q, k, s.slopes(x.alibi_slopes), x, s.first)
            out_s, lse_s = _attend(piece, q, k, v)
            s.q_rows(out).copy_(out_s)
            s.lse_rows(lse).copy_(lse_s)
            if return_s_dmask:
                _check_bounds(s, x)
                blocks.s_dmask(q, k, piece, s_dmask[s.first : s.first + s.count])
        return out, lse, s_dmask

    def backward(
        self,
        problem: Problem,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        softmax_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = inputs
        if x.cu_seqlens_q is None:
            piece = _piece(problem, x.q, x.k, segment_slopes(x.alibi_slopes, 0, len(x.q)), x, 0)
            grads = _attend_backward(piece, dout, dlse, x.q, x.k, x.v, out, softmax_lse)
            dq, dk, dv = (grad.contiguous() for grad in grads)
            return dq, dk, dv
        dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (x.q, x.k, x.v))
        for s in _segments(x):
            q, k, v = s.q_rows(x.q), s.k_rows(x.k), s.k_rows(x.v)
            grads = _attend_backward(
                _piece(problem, q, k, s.slopes(x.alibi_slopes), x, s.first),
                s.q_rows(dout),
                None if dlse is None else s.lse_rows(dlse),
                q,
                k,
                v,
                s.q_rows(out),
                s.lse_rows(softmax_lse),
            )
            s.q_rows(dq).copy_(grads[0])
            s.k_rows(dk).copy_(grads[1])
            s.k_rows(dv).copy_(grads[2])
        return dq, dk, dv

    def decode(self, problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        # One sequence at a time over exactly its keys: unused slots are never touched, and
        # splitting would change nothing.
        x = inputs
        batch, seqlen_q, num_heads, _ = x.q.shape
        stops = checked_lengths(x.k_cache, x.seqlens_k, x.block_table)
        rows = checked_rows(batch, x.k_cache, x.cache_batch_idx)
        starts = checked_leftpad(x.cache_leftpad, batch)
        out = torch.zeros(x.q.shape, dtype=x.q.dtype)
        lse = torch.full((batch, num_heads, seqlen_q), torch.inf, dtype=problem.lse_dtype)
        for i, (row, start, stop) in enumerate(zip(rows, starts, stops, strict=True)):
            if start >= stop:
                continue
            if x.block_table is None:
                k, v = (cache[row : row + 1, start:stop] for cache in (x.k_cache, x.v_cache))
            else:
                table = x.block_table[i : i + 1]
                k, v = (gather_pages(cache, table, stop) for cache in (x.k_cache, x.v_cache))
            q = x.q[i : i + 1]
            slopes = segment_slopes(x.alibi_slopes, i, 1)
            piece = blocks.Piece(problem, seqlen_q, stop - start, slopes, None, i)
            out[i : i + 1], lse[i : i + 1] = _attend(piece, q, k, v)
        return out, lse


class NumbaBackend(TorchBackend):
    """Decode over a cache that is read in place."""

    name = "cpu_numba"

    def why_not(self, problem: Problem, function: Function) -> str | None:
        if function != "decode":
            return "reads caches: serves decode only"
        if problem.device.type != "cpu":
            return f"serves tensors on the CPU, not on {problem.device}"
        if problem.dtype not in numba_runtime.KINDS:
            return f"serves float32, bfloat16 and float16, not {problem.dtype}"
        return numba_runtime.why_unavailable()

    def decode(self, problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        x = inputs
        empty = x.q.numel() == 0 or x.k_cache.numel() == 0
        if empty or x.q.shape[1] > numba_decode.MAX_SEQLEN_Q:
            # So many queries make it a matter of arithmetic, not of bandwidth.
            return super().decode(problem, x)
        if x.block_table is None:
            checked_lengths(x.k_cache, x.seqlens_k, None)
        checked_rows(x.q.shape[0], x.k_cache, x.cache_batch_idx)
        checked_leftpad(x.cache_leftpad, x.q.shape[0])
        return numba_decode.decode(problem, x)


# ---------------------------------------------------------------------------------------------
# One dense piece
# ---------------------------------------------------------------------------------------------


def _piece(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    slopes: Tensor | None,
    inputs: AttentionInputs,
    first: int,
) -> blocks.Piece:
    return blocks.Piece(problem, q.shape[1], k.shape[1], slopes, inputs.rng_state, first)


def _attend(piece: blocks.Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    problem = piece.problem
    if piece.seqlen_q == 0 or piece.seqlen_k == 0:
        shape = (q.shape[0], q.shape[2], piece.seqlen_q)
        return torch.zeros(q.shape, dtype=q.dtype), torch.full(
            shape, torch.inf, dtype=problem.lse_dtype
        )
    if torch_kernel.fits(problem, piece.seqlen_q, piece.seqlen_k):
        return torch_kernel.forward(q, k, v, problem)
    return blocks.forward(q, k, v, piece)


def _attend_backward(
    piece: blocks.Piece,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    if piece.seqlen_q == 0 or piece.seqlen_k == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        return dq, dk, dv
    # torch's kernel takes no gradient of the LSE.
    if dlse is None and torch_kernel.fits(piece.problem, piece.seqlen_q, piece.seqlen_k):
        return torch_kernel.backward(dout, q, k, v, out, softmax_lse, piece.problem)
    return blocks.backward(dout, dlse, q, k, v, out, softmax_lse, piece)


def _keys(s: Segment, x: AttentionInputs) -> tuple[Tensor, Tensor]:
    if x.block_table is None:
        return s.k_rows(x.k), s.k_rows(x.v)
    table = x.block_table[s.first : s.first + s.count]
    return gather_pages(x.k, table, s.seqlen_k), gather_pages(x.v, table, s.seqlen_k)


def _segments(x: AttentionInputs) -> list[Segment]:
    assert x.cu_seqlens_q is not None
    assert x.cu_seqlens_k is not None
    cu_q = checked_cu_seqlens("cu_seqlens_q", x.cu_seqlens_q, x.q.shape[0])
    total_k = x.k.shape[0] if x.block_table is None else None
    cu_k = checked_cu_seqlens("cu_seqlens_k", x.cu_seqlens_k, total_k)
    if x.block_table is None:
        return list(varlen_segments(cu_q, cu_k))
    lengths = [stop - start for start, stop in pairwise(cu_k)]
    check_page_ids(x.block_table, lengths, x.k.shape[0], x.k.shape[1])
    # One sequence at a time, so that only its own keys are gathered at once.
    return list(varlen_segments(cu_q, cu_k, max_count=1))


def _check_bounds(s: Segment, x: AttentionInputs) -> None:
    for name, length, bound in (
        ("max_seqlen_q", s.seqlen_q, x.max_seqlen_q),
        ("max_seqlen_k", s.seqlen_k, x.max_seqlen_k),
    ):
        if length > bound:
            raise ArgumentError(
                f"{name} must be at least the longest sequence ({length}) when S_dmask is asked "
                f"for, got {bound}"
            )
