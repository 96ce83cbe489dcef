"""Attention of a few queries over a KV cache: the keys are split over the GPU, then combined.

One program of the split kernel serves one kv head of one sequence, and one part of its keys: the
(token, query head) pairs that share the head are the rows of one tile, so keys are read once for
all of them. Lengths are read on the device, and the work of each part follows them: a captured
graph may be replayed with others.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from flashpage.attention.dispatch import DecodeInputs
from flashpage.attention.problem import MAX_NUM_SPLITS, Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import (
    alignment,
    cdiv,
    next_power_of_2,
    padded_head_dim,
    raw_scores,
    slopes_stride,
    window,
)
from flashpage.attention.triton.combine import combine, empty_parts
from flashpage.attention.triton.decode_kernel import split_kernel

# ---------------------------------------------------------------------------------------------
# Choices: the size of a tile, and into how many parts the keys are split
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How one program works, and how many of them to a multiprocessor."""

    block_m: int
    """rows: (token, query head) pairs that share a kv head"""
    block_n: int
    """keys that are fetched together"""
    num_warps: int
    depth: int
    """blocks of keys on their way while one is worked on"""
    per_multiprocessor: int
    """programs that run on a multiprocessor at the same time, by its memory and registers"""

    def num_stages(self, paged: bool) -> int:
        """Of Triton's pipeline, which shares them out over loads that wait for each other."""
        return 1 + self.depth * (2 if paged else 1)


@cache
def choose_tile(capability: int, head_dim: int, element_size: int, num_rows: int) -> Tile:
    """The tile for `num_rows` (token, query head) pairs per kv head.

    Decoding is bound by memory: what counts is the bytes on their way to a multiprocessor, which
    several programs provide together, each hiding the start and the end of the others.
    """
    bytes_per_key = 2 * padded_head_dim(head_dim) * element_size
    # Without matrix units (float32) and with wide heads, more rows do not fit the registers.
    most_rows = 16 if element_size > 2 else 32 if head_dim > 128 else 64
    if most_rows == 64 and capability == 90:
        most_rows = 128  # tiles of the same keys would read them twice, if only from the cache
    block_m = min(most_rows, max(16, next_power_of_2(num_rows)))
    # Bytes of keys and values in one block, and blocks on their way: by the shared memory.
    if capability in (80, 90, 100, 103):
        block_bytes, depth = 32768, 2
    elif capability > 80:
        block_bytes, depth = 16384, 2
    else:
        block_bytes, depth = 16384, 1
    if element_size > 2 or head_dim * element_size % 16 != 0:
        # Products without matrix units, and heads that are fetched through registers.
        block_bytes, depth = block_bytes // 2, 1
    block_n = max(16, min(128, block_bytes // bytes_per_key))
    num_warps = 8 if block_m >= 64 else 4
    per_multiprocessor = 3 if block_m == 16 and capability >= 90 else 2
    if capability == 90 and block_m == 16 and depth == 2:
        depth, per_multiprocessor = 3, 2  # fewer programs with more each: evener in small grids
    elif capability == 90 and block_m == 64:
        num_warps = 4  # a warpgroup, of which two then fit
    elif block_m == 128:
        depth, per_multiprocessor = depth + 1, 1
    return Tile(block_m, block_n, num_warps, depth, per_multiprocessor)


@lru_cache(maxsize=1024)
def choose_num_splits(num_programs: int, slots: int, max_blocks: int) -> int:
    """Parts of the keys: the fewest that keep the GPU's memory as busy as any number does, or 98 %
    of that, as a model of it says.

    num_programs: programs without splitting; slots: programs that run at the same time;
    max_blocks: blocks of keys that the longest sequence can have.
    """

    def busy(splits: int) -> float:
        programs = num_programs * splits
        # Slots that stay empty. Where programs are set up while others still run, these leave some
        # multiprocessors full and others not; in a last round of several half is made up for.
        idle = -programs % slots
        used = programs / (programs + (idle if programs <= slots else idle / 2))
        # Parts are whole blocks, and starting and ending a program take about a block.
        return used * max_blocks / splits / (cdiv(max_blocks, splits) + 1)

    candidates = range(1, max(1, min(max_blocks, MAX_NUM_SPLITS)) + 1)
    best = max(map(busy, candidates))
    return next(splits for splits in candidates if busy(splits) >= 0.98 * best)


# ---------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------


def decode(problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)` of queries over a cache, dense or in pages; nothing synchronises.

    Shapes as in `functional.flash_attn_with_kvcache`; float16, bfloat16 or float32. softmax_lse
    is float32 `[batch, num_q_heads, seqlen_q]`. Lengths beyond the cache end with it, negative
    ones are 0.
    """
    batch, seqlen_q, num_q_heads, head_dim = inputs.q.shape
    out = inputs.q.new_empty(inputs.q.shape)
    softmax_lse = inputs.q.new_empty(batch, num_q_heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, softmax_lse
    num_rows = problem.group_size * seqlen_q
    tile = choose_tile(runtime.capability(out.device), head_dim, out.element_size(), num_rows)
    num_splits = num_splits_for(
        problem,
        inputs,
        batch * problem.num_kv_heads * cdiv(num_rows, tile.block_m),
        runtime.num_multiprocessors(out.device) * tile.per_multiprocessor,
        tile.block_n,
    )
    launch(problem, inputs, out, softmax_lse, tile, num_splits)
    return out, softmax_lse


def launch(
    problem: Problem,
    inputs: DecodeInputs,
    out: Tensor,
    softmax_lse: Tensor,
    tile: Tile,
    num_splits: int,
) -> None:
    """Write `out` and `softmax_lse`, contiguous, with a given tile and number of splits."""
    with runtime.on_device(out.device):
        if num_splits == 1:
            _launch_split(problem, inputs, out, softmax_lse, None, tile, 1)
            return
        parts = empty_parts(out, num_splits)
        _launch_split(problem, inputs, *parts, tile, num_splits)
        combine(problem, parts, out, softmax_lse)


def num_splits_for(
    problem: Problem, inputs: DecodeInputs, num_programs: int, slots: int, block_n: int
) -> int:
    """Parts of the keys: as many as were asked for, or as `choose_num_splits` says."""
    if inputs.num_splits:
        return inputs.num_splits
    num_keys = capacity(inputs)
    if 0 <= problem.window_left < num_keys:
        num_keys = min(num_keys, problem.window_left + inputs.q.shape[1])
    return choose_num_splits(num_programs, slots, cdiv(num_keys, block_n))


def capacity(inputs: DecodeInputs) -> int:
    """Positions of one sequence."""
    length = inputs.k_cache.shape[1]
    return length if inputs.block_table is None else inputs.block_table.shape[1] * length


def _launch_split(
    problem: Problem,
    inputs: DecodeInputs,
    out: Tensor,
    lse: Tensor,
    sums: Tensor | None,
    tile: Tile,
    num_splits: int,
) -> None:
    q, k, v, table = inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table
    batch, seqlen_q, _, head_dim = q.shape
    most_keys = capacity(inputs)
    num_tiles = cdiv(problem.group_size * seqlen_q, tile.block_m)
    slopes = inputs.alibi_slopes
    raw = raw_scores(problem)
    align = alignment(q, k, v)
    overlap = runtime.overlap(q.device)
    runtime.launch(split_kernel, (batch * num_splits * num_tiles * problem.num_kv_heads,))(
        q,
        k,
        v,
        out,
        lse,
        sums,
        inputs.cache_seqlens.contiguous(),
        table,
        None if inputs.cache_batch_idx is None else inputs.cache_batch_idx.contiguous(),
        None if inputs.cache_leftpad is None else inputs.cache_leftpad.contiguous(),
        slopes,
        *(stride // align for x in (q, k, v) for stride in x.stride()[:3]),
        0 if table is None else table.stride(0),
        slopes_stride(slopes),
        problem.softmax_scale,
        problem.softcap,
        *window(problem),
        seqlen_q,
        inputs.num_new_tokens,
        most_keys,
        k.shape[0],
        problem.num_kv_heads,
        num_tiles,
        num_splits,
        GROUP=problem.group_size,
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PAGE=0 if table is None else k.shape[1],
        ALIGN=align,
        SAME_STRIDES=k.stride() == v.stride(),
        # A window that hides nothing is none: a single query sees every key to its right.
        HAS_LEFT=0 <= problem.window_left < most_keys,
        HAS_RIGHT=0 <= problem.window_right < seqlen_q - 1,
        HAS_SOFTCAP=problem.softcap > 0,
        RAW_SCORES=raw,
        SPLIT=sums is not None,
        STAGES=tile.num_stages(table is not None),
        OVERLAP=bool(overlap),
        num_warps=tile.num_warps,
        # Logits are rounded before their maximum is taken off: fused, they would not cancel.
        enable_fp_fusion=raw,
        **overlap,
    )
