"""Where the kernels for Hopper serve unasked: where they were measured faster than `triton/`.

Everything here is known on the host. `dispatch.only("hopper")` asks for the kernels elsewhere too.

Measured on H200s in bfloat16 (docs/benchmarks.md, "Hopper forward" and "Hopper backward"), TFLOP/s
over those of `triton/` in the same run. The forward:

- head_dim 64: 1.01-1.21 full and 1.09-1.17 causal from S 512 on; head_dim 32, causal at S 4096,
  0.83, with the tiles before.
- head_dim 128: 1.33-1.42 full and 1.30-1.43 causal from S 512 on; varlen 1.25 and 1.21; pages of 16
  1.51-1.76 and of 256 1.18-1.34 (pages of 64 were only tested); a window of 1024 1.35; head_dim 80
  and 96, causal at S 4096, 1.32 and 1.41; softcap 0.68.
- head_dim 256: 1.41-1.82 full, 1.33-1.87 causal; varlen 1.37 and 1.59; head_dim 192, causal at S
  4096, 1.39; softcap 1.14.
- one sequence of 32 heads, head_dim 128, causal: 0.80 and 0.83 with S 128 and 256 (at most 64 tiles
  of 128 rows for 132 multiprocessors), 1.06 with S 1024.

The backward, as many query as kv heads, no windows, S from 1024 on: head_dim 64 1.13-1.36, head_dim
128 1.30-1.45; with `deterministic=True` 1.12-1.28 and 1.07-1.28.

Decode over pages, 64 query and 8 kv heads, head_dim 128, times of `triton/` over those here: 16
queries 1.35-1.69 at full bandwidth and 1.02-1.15 in short cases, 9, 32 and 64 queries 1.43-1.79;
with 64 rows (32/8 heads) 0.97-1.13.
"""

from __future__ import annotations

from flashpage.attention.dispatch import AttentionInputs, DecodeInputs
from flashpage.attention.problem import Function, Problem
from flashpage.attention.triton.arguments import cdiv

FEWEST = {"forward": 512, "backward": 1024}
"""No shorter lengths were measured where there are many tiles, neither of queries nor of keys."""
FEWEST_KEYS_64_PAGED = 2048
FEWEST_KEYS_64_PAGED_MASKED = 8192
"""The same for keys in pages with head_dim up to 64, where only earlier tiles were measured, and
without pages; and where a causal mask or a window hides some."""
FEWEST_DECODE_ROWS = 65
"""Queries times the query heads of a kv head: fewer fit one tile of `triton/`, which there is as
fast as memory."""
TILE = 128
"""Fewer tiles of so many rows (in the backward: keys) than multiprocessors leave some idle, where
`triton/` has smaller ones, and cuts the keys in parts."""


def why_slower(problem: Problem, function: Function) -> str | None:
    """Why `triton/` is the faster one whatever the lengths, None if it is not."""
    if function == "decode":
        measured = problem.layout == "paged" and 64 < problem.head_dim <= 128
        if not measured or problem.softcap > 0.0 or problem.window_left >= 0:
            return "was only measured over pages with head_dim 65 to 128, no softcap and no window"
        return None
    if problem.head_dim <= 32:
        return "is slower than triton with head_dim up to 32"
    if function == "backward":
        if problem.softcap > 0.0 or problem.window_left >= 0 or problem.window_right > 0:
            return "was not measured with softcap or windows in the backward: serves it by name"
    elif problem.softcap > 0.0 and problem.head_dim <= 128:
        return "is slower than triton with softcap and head_dim up to 128"
    return None


def fewest_keys(problem: Problem, function: Function) -> int:
    """Keys that the rows of the longest sequence must see for these kernels to be the faster."""
    if problem.head_dim > 64 or problem.layout != "paged":
        return FEWEST[function]
    masked = problem.window_left >= 0 or problem.window_right >= 0
    return FEWEST_KEYS_64_PAGED_MASKED if masked else FEWEST_KEYS_64_PAGED


def slower_here(
    problem: Problem, function: Function, x: AttentionInputs, num_multiprocessors: int
) -> bool:
    """Whether `triton/` is the faster one for these lengths, where `why_slower` says nothing."""
    keys = x.max_seqlen_k
    if problem.window_left >= 0 and problem.window_right >= 0:
        keys = min(keys, problem.window_left + 1 + problem.window_right)
    tiled, num_heads = (
        (x.q, problem.num_q_heads) if function == "forward" else (x.k, problem.num_kv_heads)
    )
    if x.cu_seqlens_q is None:
        batch, rows, length = x.q.shape[0], x.q.shape[1], tiled.shape[1]
    else:
        batch = x.cu_seqlens_q.shape[0] - 1
        rows, length = x.q.shape[0] // batch, tiled.shape[0] // batch  # in the mean
    tiles = batch * cdiv(length, TILE) * num_heads
    return (
        rows < FEWEST[function]
        or keys < fewest_keys(problem, function)
        or tiles < num_multiprocessors
    )


def slower_to_decode(problem: Problem, x: DecodeInputs) -> bool:
    """The same for a decode."""
    return problem.group_size * x.q.shape[1] < FEWEST_DECODE_ROWS
