"""Decode through numba: prepares the arrays for `numba_kernel`, which reads the cache in place.

numba is optional: `why_unavailable` says what is missing. The first call on a machine compiles
for a few seconds and says so; the code is then kept on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpage.attention.cpu.segments import checked_lengths
from flashpage.attention.problem import Problem

logger = logging.getLogger("flashpage")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MAX_SEQLEN_Q = 16
"""Queries per sequence up to which reading in place wins over gathering pages once."""

SPLIT_SIZE = 512
"""Keys per task. Fixed, so that a sequence's result does not depend on its batch mates."""

# numba's fallback threading layer must not be entered twice; and two calls at once would only
# share the same cores.
_lock = threading.Lock()


@cache
def why_unavailable() -> str | None:
    """None if the kernels can be used, else the reason."""
    try:
        import numba
    except ImportError:
        return "numba is not installed (pip install numba)"
    # torch brings an OpenMP runtime; numba starts a parallel loop in 2 us with it, and in 80 us
    # with its own work queue. Only a preference: set before anything of numba runs in parallel.
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    return None


@cache
def _kernel() -> ModuleType:
    from flashpage.attention.cpu import numba_kernel

    return numba_kernel


def _flat(x: Tensor) -> np.ndarray:
    """All memory between the first and the last element of x as one contiguous array."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    flat = torch.as_strided(x, (extent,), (1,), x.storage_offset())
    if x.dtype == torch.float32:
        return flat.numpy()
    return flat.view(torch.int16).numpy().view(np.uint16)


def _kinds(kernel: ModuleType) -> dict[torch.dtype, int]:
    return {
        torch.float32: kernel.FLOAT32,
        torch.bfloat16: kernel.BFLOAT16,
        torch.float16: kernel.FLOAT16,
    }


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
    kernel = _kernel()
    bad_sequence = _run(
        kernel.decode,
        q.float().contiguous().numpy().reshape(-1),
        _flat(k_cache),
        _flat(v_cache),
        _kinds(kernel)[problem.dtype],
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


def _run(decode_kernel: Any, *args: object) -> int:
    """Call the kernel on torch's number of threads; say so if that compiled it."""
    import numba

    with _lock:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        known = len(decode_kernel.signatures)
        start = time.perf_counter()
        bad_sequence = decode_kernel(*args)
        if len(decode_kernel.signatures) > known and sum(decode_kernel.stats.cache_misses.values()):
            seconds = time.perf_counter() - start
            logger.warning(
                "flashpage compiled its CPU decode kernel in %.1f s (once; kept on disk)", seconds
            )
    return bad_sequence
