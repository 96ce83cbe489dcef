"""Decode through numba: prepares the arrays for `numba_kernel`, which reads the cache in place.

Shapes as in `functional.flash_attn_with_kvcache`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashpage.attention.cpu.numba_runtime import KINDS, call, flat, kernels
from flashpage.attention.cpu.segments import checked_lengths
from flashpage.attention.problem import Problem

MAX_SEQLEN_Q = 16
"""Queries per sequence up to which reading in place wins over gathering pages once."""

SPLIT_SIZE = 512
"""Keys per task. Fixed, so that a sequence's result does not depend on its batch mates."""

SERIAL_WORK = 2**16
"""Elements of K and V up to which one thread is faster than waking others."""


def decode(
    problem: Problem,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cache_rows: list[int] | None,
    leftpad: list[int] | None,
    alibi_slopes: Tensor | None,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)`. Values are checked already, but for cache_seqlens of a paged cache.

    A cache without pages is one with pages of its whole length: row r is page r.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    stops = cache_seqlens.numpy().astype(np.int64)
    leftpads = np.zeros_like(stops) if leftpad is None else np.array(leftpad, dtype=np.int64)
    if block_table is not None:
        tables = block_table.numpy()
    else:
        tables = np.array(cache_rows or range(batch), dtype=np.int32)[:, None]
    if alibi_slopes is None:
        slopes = np.empty((0, 0), np.float32)
    else:
        slopes = alibi_slopes.expand(batch, num_heads).contiguous().numpy()
    out = np.empty((batch, seqlen_q, num_heads, head_dim), np.float32)
    lse = np.empty((batch, num_heads, seqlen_q), np.float32)
    work = 2 * int(stops.sum()) * problem.num_kv_heads * head_dim
    bad_sequence = call(
        kernels("flashpage.attention.cpu.numba_kernel").decode,
        1 if work <= SERIAL_WORK else torch.get_num_threads(),
        q.float().contiguous().numpy().reshape(-1),
        flat(k_cache),
        flat(v_cache),
        KINDS[problem.dtype],
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        tables,
        k_cache.shape[1],
        k_cache.shape[0],
        np.maximum(stops, leftpads) if leftpad else stops,
        leftpads,
        slopes,
        (seqlen_q, num_heads, problem.num_kv_heads, head_dim),
        np.float32(problem.softmax_scale),
        problem.window_left,
        problem.window_right,
        np.float32(problem.softcap),
        num_splits,
        SPLIT_SIZE,
        out,
        lse,
    )
    if bad_sequence >= 0:
        checked_lengths(k_cache, cache_seqlens, block_table)  # raises, and says what is wrong
    return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse)
