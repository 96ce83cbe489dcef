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
from flashpage.attention.ops import round128
from flashpage.attention.problem import FLOAT_DTYPES, Function, Problem
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

    def forward(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        block_table: Tensor | None,
        alibi_slopes: Tensor | None,
        rng_state: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        return_s_dmask: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        s_dmask = q.new_empty(0)
        if cu_seqlens_q is None or cu_seqlens_k is None:
            slopes = segment_slopes(alibi_slopes, 0, q.shape[0])
            out, lse = _attend(problem, q, k, v, slopes, rng_state, 0)
            if return_s_dmask:
                sides = (round128(q.shape[1]), round128(k.shape[1]))
                s_dmask = q.new_zeros(q.shape[0], q.shape[2], *sides)
                blocks.s_dmask(q, k, _piece(problem, q, k, slopes, rng_state, 0), s_dmask)
            return out.contiguous(), lse.contiguous(), s_dmask

        out = torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), torch.inf, dtype=problem.lse_dtype)
        segments = _segments(q, k, cu_seqlens_q, cu_seqlens_k, block_table)
        if return_s_dmask:
            batch = cu_seqlens_q.shape[0] - 1
            sides = (round128(max_seqlen_q), round128(max_seqlen_k))
            s_dmask = q.new_zeros(batch, q.shape[1], *sides)
        for s in segments:
            q_s, k_s, v_s = s.q_rows(q), *_keys(s, k, v, block_table)
            slopes = s.slopes(alibi_slopes)
            out_s, lse_s = _attend(problem, q_s, k_s, v_s, slopes, rng_state, s.first)
            s.q_rows(out).copy_(out_s)
            s.lse_rows(lse).copy_(lse_s)
            if return_s_dmask:
                _check_bounds(s, max_seqlen_q, max_seqlen_k)
                piece = _piece(problem, q_s, k_s, slopes, rng_state, s.first)
                blocks.s_dmask(q_s, k_s, piece, s_dmask[s.first : s.first + s.count])
        return out, lse, s_dmask

    def backward(
        self,
        problem: Problem,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        *,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        alibi_slopes: Tensor | None,
        rng_state: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if cu_seqlens_q is None or cu_seqlens_k is None:
            slopes = segment_slopes(alibi_slopes, 0, q.shape[0])
            grads = _attend_backward(
                problem, dout, dlse, q, k, v, out, softmax_lse, slopes, rng_state, 0
            )
            dq, dk, dv = (x.contiguous() for x in grads)
            return dq, dk, dv
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        for s in _segments(q, k, cu_seqlens_q, cu_seqlens_k, None):
            grads = _attend_backward(
                problem,
                s.q_rows(dout),
                None if dlse is None else s.lse_rows(dlse),
                s.q_rows(q),
                s.k_rows(k),
                s.k_rows(v),
                s.q_rows(out),
                s.lse_rows(softmax_lse),
                s.slopes(alibi_slopes),
                rng_state,
                s.first,
            )
            s.q_rows(dq).copy_(grads[0])
            s.k_rows(dk).copy_(grads[1])
            s.k_rows(dv).copy_(grads[2])
        return dq, dk, dv

    def decode(
        self,
        problem: Problem,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        *,
        block_table: Tensor | None,
        cache_batch_idx: Tensor | None,
        cache_leftpad: Tensor | None,
        alibi_slopes: Tensor | None,
        num_splits: int,
    ) -> tuple[Tensor, Tensor]:
        # One sequence at a time over exactly its keys: unused slots are never touched, and
        # splitting would change nothing.
        stops = checked_lengths(k_cache, cache_seqlens, block_table)
        rows = checked_rows(q.shape[0], k_cache, cache_batch_idx)
        starts = checked_leftpad(cache_leftpad, len(stops))
        out = torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.inf, dtype=problem.lse_dtype)
        for i, (row, start, stop) in enumerate(zip(rows, starts, stops, strict=True)):
            if start >= stop:
                continue
            if block_table is None:
                k_i, v_i = (cache[row : row + 1, start:stop] for cache in (k_cache, v_cache))
            else:
                table = block_table[i : i + 1]
                k_i, v_i = (gather_pages(cache, table, stop) for cache in (k_cache, v_cache))
            slopes = segment_slopes(alibi_slopes, i, 1)
            out[i], lse[i] = (
                x[0] for x in _attend(problem, q[i : i + 1], k_i, v_i, slopes, None, i)
            )
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

    def decode(
        self,
        problem: Problem,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        *,
        block_table: Tensor | None,
        cache_batch_idx: Tensor | None,
        cache_leftpad: Tensor | None,
        alibi_slopes: Tensor | None,
        num_splits: int,
    ) -> tuple[Tensor, Tensor]:
        empty = q.numel() == 0 or k_cache.numel() == 0
        if empty or q.shape[1] > numba_decode.MAX_SEQLEN_Q:
            # So many queries make it a matter of arithmetic, not of bandwidth.
            return super().decode(
                problem,
                q,
                k_cache,
                v_cache,
                cache_seqlens,
                block_table=block_table,
                cache_batch_idx=cache_batch_idx,
                cache_leftpad=cache_leftpad,
                alibi_slopes=alibi_slopes,
                num_splits=num_splits,
            )
        if block_table is None:
            checked_lengths(k_cache, cache_seqlens, None)
        rows = None if cache_batch_idx is None else checked_rows(0, k_cache, cache_batch_idx)
        leftpad = None if cache_leftpad is None else checked_leftpad(cache_leftpad, 0)
        return numba_decode.decode(
            problem,
            q,
            k_cache,
            v_cache,
            cache_seqlens,
            block_table,
            rows,
            leftpad,
            alibi_slopes,
            num_splits,
        )


# ---------------------------------------------------------------------------------------------
# One dense piece
# ---------------------------------------------------------------------------------------------


def _piece(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    slopes: Tensor | None,
    rng_state: Tensor | None,
    first: int,
) -> blocks.Piece:
    return blocks.Piece(problem, q.shape[1], k.shape[1], slopes, rng_state, first)


def _attend(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    rng_state: Tensor | None,
    first: int,
) -> tuple[Tensor, Tensor]:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if seqlen_q == 0 or seqlen_k == 0:
        lse = torch.full((q.shape[0], q.shape[2], seqlen_q), torch.inf, dtype=problem.lse_dtype)
        return torch.zeros(q.shape, dtype=q.dtype), lse
    if torch_kernel.fits(problem, seqlen_q, seqlen_k):
        return torch_kernel.forward(q, k, v, problem)
    return blocks.forward(q, k, v, _piece(problem, q, k, slopes, rng_state, first))


def _attend_backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    slopes: Tensor | None,
    rng_state: Tensor | None,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if seqlen_q == 0 or seqlen_k == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        return dq, dk, dv
    # torch's kernel takes no gradient of the LSE.
    if dlse is None and torch_kernel.fits(problem, seqlen_q, seqlen_k):
        return torch_kernel.backward(dout, q, k, v, out, softmax_lse, problem)
    piece = _piece(problem, q, k, slopes, rng_state, first)
    return blocks.backward(dout, dlse, q, k, v, out, softmax_lse, piece)


def _keys(s: Segment, k: Tensor, v: Tensor, block_table: Tensor | None) -> tuple[Tensor, Tensor]:
    if block_table is None:
        return s.k_rows(k), s.k_rows(v)
    table = block_table[s.first : s.first + s.count]
    return gather_pages(k, table, s.seqlen_k), gather_pages(v, table, s.seqlen_k)


def _segments(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
) -> list[Segment]:
    cu_q = checked_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    total_k = k.shape[0] if block_table is None else None
    cu_k = checked_cu_seqlens("cu_seqlens_k", cu_seqlens_k, total_k)
    if block_table is None:
        return list(varlen_segments(cu_q, cu_k))
    lengths = [stop - start for start, stop in pairwise(cu_k)]
    check_page_ids(block_table, lengths, k.shape[0], k.shape[1])
    # One sequence at a time, so that only its own keys are gathered at once.
    return list(varlen_segments(cu_q, cu_k, max_count=1))


def _check_bounds(s: Segment, max_seqlen_q: int, max_seqlen_k: int) -> None:
    for name, length, bound in (
        ("max_seqlen_q", s.seqlen_q, max_seqlen_q),
        ("max_seqlen_k", s.seqlen_k, max_seqlen_k),
    ):
        if length > bound:
            raise ArgumentError(
                f"{name} must be at least the longest sequence ({length}) when S_dmask is asked "
                f"for, got {bound}"
            )
