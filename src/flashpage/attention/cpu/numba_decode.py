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

import numpy as np
import torch
from torch import Tensor

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


def _kind(dtype: torch.dtype) -> int:
    kernel = _kernel()
    kinds = {
        torch.float32: kernel.FLOAT32,
        torch.bfloat16: kernel.BFLOAT16,
        torch.float16: kernel.FLOAT16,
    }
    return kinds[dtype]


def _plan(
    lengths: np.ndarray, seqlen_q: int, left: int, right: int, num_splits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut every sequence's visible keys into tasks.

    Returns:
        tasks int64 `[num_tasks, 3]`: sequence, first key, last key + 1;
        first_task int64 `[batch + 1]`.
    """
    start = np.zeros_like(lengths)
    stop = lengths
    if left >= 0:
        start = np.maximum(0, lengths - seqlen_q - left)
    if right >= 0:
        stop = np.clip(lengths + right, 0, lengths)
    visible = np.maximum(stop - start, 0)
    if num_splits == 0:
        size = np.full_like(visible, SPLIT_SIZE)
    else:
        size = np.maximum(-(-visible // num_splits), 1)
    counts = -(-visible // size)
    first_task = np.concatenate(([0], np.cumsum(counts)))
    sequence = np.repeat(np.arange(len(lengths)), counts)
    begin = start[sequence] + (np.arange(len(sequence)) - first_task[sequence]) * size[sequence]
    end = np.minimum(begin + size[sequence], stop[sequence])
    return np.stack((sequence, begin, end), axis=1), first_task


def decode(
    problem: Problem,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cache_rows: list[int],
    leftpad: list[int],
    alibi_slopes: Tensor | None,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)`; values already checked.

    A cache without pages is one with pages of its whole length: row r is page r.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    if block_table is None:
        tables = np.array(cache_rows, dtype=np.int32)[:, None]
    else:
        tables = block_table.numpy()
    leftpads = np.array(leftpad, dtype=np.int64)
    lengths = np.maximum(cache_seqlens.numpy().astype(np.int64), leftpads)
    left, right = problem.window_left, problem.window_right
    tasks, first_task = _plan(lengths - leftpads, seqlen_q, left, right, num_splits)
    if alibi_slopes is None:
        slopes = np.empty((0, 0), np.float32)
    else:
        slopes = alibi_slopes.expand(batch, num_heads).contiguous().numpy()

    rows = seqlen_q * num_heads
    m, l = np.empty((2, len(tasks), rows), np.float32)  # noqa: E741
    o = np.empty((len(tasks), rows * head_dim), np.float32)
    out = np.empty((batch, seqlen_q, num_heads, head_dim), np.float32)
    lse = np.empty((batch, num_heads, seqlen_q), np.float32)
    with _lock:
        _run(
            q.float().contiguous().numpy().reshape(-1),
            _flat(k_cache),
            _flat(v_cache),
            _kind(problem.dtype),
            k_cache.stride()[:3],
            v_cache.stride()[:3],
            tables,
            k_cache.shape[1],
            lengths,
            leftpads,
            slopes,
            (seqlen_q, num_heads, problem.num_kv_heads, head_dim),
            np.float32(problem.softmax_scale),
            left,
            right,
            np.float32(problem.softcap),
            tasks,
            (m, l, o),
            first_task,
            out,
            lse,
        )
    return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse)


def _run(*args: object) -> None:
    *inputs, partials, first_task, out, lse = args
    kernel = _kernel()
    import numba

    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    _, seqlen_q_etc = None, inputs[11]
    start = time.perf_counter()
    misses = _cache_misses(kernel)
    kernel.decode_tasks(*inputs, *partials)
    kernel.combine_tasks(
        *partials, first_task, seqlen_q_etc[0], seqlen_q_etc[1], seqlen_q_etc[3], out, lse
    )
    if _cache_misses(kernel) > misses:
        logger.warning(
            "flashpage compiled its CPU decode kernel in %.1f s (once; kept on disk)",
            time.perf_counter() - start,
        )


def _cache_misses(kernel: ModuleType) -> int:
    return sum(sum(f.stats.cache_misses.values()) for f in (kernel.decode_tasks,))
