"""Where the keys of a row were split into parts: the parts' results into the row's.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.problem import MAX_NUM_SPLITS, Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import cdiv, padded_head_dim, raw_scores
from flashpage.attention.triton.score import LN2, LOG2E


class Parts(NamedTuple):
    """What each part gave. Maxima are kept apart from sums, so that the parts' weights are exact
    at any magnitude; they are of q . k itself where `arguments.raw_scores`, else of logits."""

    partial: Tensor
    """float32 `[batch, seqlen_q, num_q_heads, num_splits, head_dim]`, not normalised"""
    maxima: Tensor
    """float32 `[batch, seqlen_q, num_q_heads, num_splits]`"""
    sums: Tensor | None
    """float32 `[batch, seqlen_q, num_q_heads, num_splits]`"""


def empty_parts(out: Tensor, num_splits: int) -> Parts:
    """Room for the parts of an output `[..., num_q_heads, head_dim]`."""
    *rows, head_dim = out.shape
    device = out.device
    partial = torch.empty(*rows, num_splits, head_dim, dtype=torch.float32, device=device)
    return Parts(partial, *torch.empty(2, *rows, num_splits, dtype=torch.float32, device=device))


@triton.jit(
    do_not_specialize=["scale2", "num_rows", "num_q_heads", "seqlen_q", "num_splits"],
)
def _combine_kernel(
    partial_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    lse_ptr,
    scale2,
    num_rows,
    num_q_heads,
    seqlen_q,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the parts of each row, weighted by the distance of their maxima."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    splits = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    real = rows < num_rows
    there = real[:, None] & (splits < num_splits)[None, :]
    place = rows[:, None] * num_splits + splits[None, :]
    if OVERLAP:
        # Not before the parts are done: the next kernel's programs would take the places that are
        # free beside them, and leave others empty later.
        gdc_wait()
        gdc_launch_dependents()
    m = tl.load(max_ptr + place, mask=there, other=float("-inf"))
    l = tl.load(sum_ptr + place, mask=there, other=0.0)  # noqa: E741 - the field's name
    # Read before it is known which parts are empty: one trip to memory, not two.
    partial = tl.load(
        partial_ptr + (place * HEAD_DIM)[:, :, None] + dims[None, None, :],
        mask=there[:, :, None] & (dims < HEAD_DIM)[None, None, :],
        other=0.0,
    )
    m_row = tl.max(m, 1)
    top = tl.where(m_row == float("-inf"), 0.0, m_row)
    weight = tl.exp2((m - top[:, None]) * scale2)
    total = tl.sum(weight * l, 1)
    # A part without keys may have written nothing: what lies there may be NaN.
    filled = (m > float("-inf"))[:, :, None]
    acc = tl.sum(tl.where(filled, partial * weight[:, :, None], 0.0), 1)
    empty = total == 0
    acc = tl.where(empty, 0.0, 1.0 / total)[:, None] * acc
    lse = tl.where(empty, float("inf"), (top * scale2 + tl.log2(total)) * LN2)
    tl.store(
        out_ptr + (rows * HEAD_DIM)[:, None] + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
    )
    head = rows % num_q_heads
    token = rows // num_q_heads % seqlen_q
    sequence = rows // num_q_heads // seqlen_q
    tl.store(lse_ptr + (sequence * num_q_heads + head) * seqlen_q + token, lse, mask=real)


def combine(problem: Problem, parts: Parts, out: Tensor, lse: Tensor) -> None:
    """Write `out` `[batch, seqlen_q, num_q_heads, head_dim]` and `lse`, contiguous."""
    num_rows, num_splits = lse.numel(), parts.maxima.shape[-1]
    # Few variants, so that no number of splits compiles its own.
    block_s = 8 if num_splits <= 8 else 32 if num_splits <= 32 else MAX_NUM_SPLITS
    block_r = 4 if block_s == 8 else 1
    overlap = runtime.overlap(out.device)
    runtime.launch(_combine_kernel, (cdiv(num_rows, block_r),))(
        *parts,
        out,
        lse,
        problem.softmax_scale * LOG2E.value if raw_scores(problem) else 1.0,
        num_rows,
        problem.num_q_heads,
        out.shape[1],
        num_splits,
        HEAD_DIM=problem.head_dim,
        BLOCK_D=padded_head_dim(problem.head_dim),
        BLOCK_R=block_r,
        BLOCK_S=block_s,
        OVERLAP=bool(overlap),
        num_warps=8 if block_s == MAX_NUM_SPLITS else 4,
        **overlap,
    )
