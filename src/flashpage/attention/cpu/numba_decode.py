"""Decode through numba: prepares the arrays for `numba_kernel`, which reads the cache in place.

Shapes as in `functional.flash_attn_with_kvcache`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashpage.attention.cpu.numba_runtime import KINDS, call, kernels
from flashpage.attention.cpu.segments import checked_lengths
from flashpage.attention.dispatch import DecodeInputs
from flashpage.attention.problem import Problem

MAX_SEQLEN_Q = 16
"""Queries per sequence up to which reading in place wins over gathering pages once."""

SPLIT_SIZE = 512
"""Keys per task. Fixed, so that a sequence's result does not depend on its batch mates."""

SERIAL_WORK = 2**16
"""Elements of K and V up to which one thread is faster than waking others."""


def decode(problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)`. Values are checked already, but for cache_seqlens of a paged cache.

    A cache without pages is one with pages of its whole length: row r is page r.
    """
    k_cache, v_cache, alibi_slopes = inputs.k_cache, inputs.v_cache, inputs.alibi_slopes
    q = inputs.q.contiguous()
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlens = inputs.seqlens_k.contiguous()
    if inputs.block_table is not None:
        tables = inputs.block_table
    elif inputs.cache_batch_idx is not None:
        tables = inputs.cache_batch_idx[:, None]
    else:
        tables = torch.arange(batch, dtype=torch.int32)[:, None]
    leftpads = None if inputs.cache_leftpad is None else inputs.cache_leftpad.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    softmax_lse = torch.empty(batch, num_heads, seqlen_q)
    work = 2 * batch * tables.shape[1] * k_cache.shape[1] * problem.num_kv_heads * head_dim
    bad_sequence = call(
        kernels("flashpage.attention.cpu.numba_kernel").decode,
        1 if work <= SERIAL_WORK else torch.get_num_threads(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        KINDS[problem.dtype],
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        tables.data_ptr(),
        tables.stride(0),
        tables.shape[1],
        k_cache.shape[1],
        k_cache.shape[0],
        seqlens.data_ptr(),
        0 if leftpads is None else leftpads.data_ptr(),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        _slope_stride(alibi_slopes),
        batch,
        (seqlen_q, num_heads, problem.num_kv_heads, head_dim),
        np.float32(problem.softmax_scale),
        problem.window_left,
        problem.window_right,
        np.float32(problem.softcap),
        inputs.num_splits,
        SPLIT_SIZE,
        out.data_ptr(),
        softmax_lse.data_ptr(),
    )
    if bad_sequence >= 0:
        checked_lengths(k_cache, seqlens, inputs.block_table)  # raises, and says what is wrong
    return out, softmax_lse


def _slope_stride(alibi_slopes: Tensor | None) -> int:
    """Elements between the slopes of two sequences; -1: there are none."""
    if alibi_slopes is None:
        return -1
    return alibi_slopes.stride(0) if alibi_slopes.dim() == 2 else 0
