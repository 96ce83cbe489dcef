"""Launching the decode kernel for Hopper: tiles, parts of the keys, descriptors, grid.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from flashpage.attention.dispatch import DecodeInputs
from flashpage.attention.hopper.decode_kernel import BLOCK_M, decode_kernel
from flashpage.attention.hopper.descriptors import fits, packed_descriptor, ragged_descriptor
from flashpage.attention.hopper.forward import (
    Tiles,
    halves,
    pages_fit,
    registers_for_pages,
    rows_follow,
)
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import cdiv, next_power_of_2, raw_scores, window
from flashpage.attention.triton.combine import Parts, combine, empty_parts
from flashpage.attention.triton.decode import capacity, num_splits_for

TILES = {
    64: Tiles(consumers=2, block_n=128, k_stages=6, v_stages=6, immediates=True),
    128: Tiles(consumers=2, block_n=128, k_stages=3, v_stages=3, immediates=True),
    256: Tiles(consumers=2, block_n=64, k_stages=2, v_stages=2, immediates=True, halves=False),
}
"""By head_dim rounded up to a power of two. O has no shared memory of its own: more keys are on
their way."""


def addressable(x: DecodeInputs) -> bool:
    """The tensor memory accelerator can fetch these tensors as the kernel asks for them."""
    if x.cache_batch_idx is not None or x.cache_leftpad is not None or x.k_cache.numel() == 0:
        return False
    caches = x.k_cache, x.v_cache
    one_memory = all(map(rows_follow, caches)) if x.block_table is None else pages_fit(*caches)
    return one_memory and all(map(fits, (x.q, *caches)))


def decode_tiles(problem: Problem, page: int) -> Tiles:
    """The tiles of a problem; `page` is the number of tokens in a page, 0 without pages."""
    return registers_for_pages(TILES[max(64, next_power_of_2(problem.head_dim))], page)


def decode(problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)`, fresh and contiguous, as `triton.decode.decode`."""
    q = inputs.q
    batch, seqlen_q, num_q_heads = q.shape[:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse_shape = (batch, num_q_heads, seqlen_q)
    softmax_lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, softmax_lse
    tiles = decode_tiles(problem, 0 if inputs.block_table is None else inputs.k_cache.shape[1])
    num_splits = num_splits_for(
        problem,
        inputs,
        batch * problem.num_kv_heads * cdiv(num_rows(problem, seqlen_q), BLOCK_M.value),
        runtime.num_multiprocessors(q.device),
        tiles.block_n,
    )
    launch(problem, inputs, out, softmax_lse, tiles, num_splits)
    return out, softmax_lse


def num_rows(problem: Problem, seqlen_q: int) -> int:
    """Rows that share a kv head: each token has those of a group, rounded up to a power of two."""
    return next_power_of_2(problem.group_size) * seqlen_q


def launch(
    problem: Problem,
    x: DecodeInputs,
    out: Tensor,
    softmax_lse: Tensor,
    tiles: Tiles,
    num_splits: int,
) -> None:
    """Write `out` and `softmax_lse`, contiguous, with given tiles and a number of splits."""
    with runtime.on_device(out.device):
        if num_splits == 1:
            _launch_parts(problem, x, Parts(out, softmax_lse, None), tiles, 1)
            return
        parts = empty_parts(out, num_splits)
        _launch_parts(problem, x, parts, tiles, num_splits)
        combine(problem, parts, out, softmax_lse)


def _launch_parts(
    problem: Problem, x: DecodeInputs, parts: Parts, tiles: Tiles, num_splits: int
) -> None:
    batch, seqlen_q, _, head_dim = x.q.shape
    block_d = max(64, next_power_of_2(head_dim))
    most_keys = capacity(x)
    page = 0 if x.block_table is None else x.k_cache.shape[1]
    chunk = gcd(page, tiles.block_n) if page else tiles.block_n
    pack = next_power_of_2(problem.group_size)
    k_desc, v_desc = (
        ragged_descriptor(t.flatten(0, 1), chunk, block_d, tiles.block_n)
        for t in (x.k_cache, x.v_cache)
    )
    num_tiles_m = cdiv(num_rows(problem, seqlen_q), BLOCK_M.value)
    num_parts = batch * num_splits * num_tiles_m * problem.num_kv_heads
    num_multiprocessors = runtime.num_multiprocessors(x.q.device)
    grid, counter = num_parts, None
    # One part a multiprocessor needs no counter, which costs a launch.
    persistent = tiles.persistent and num_parts > num_multiprocessors
    if persistent:
        grid = num_multiprocessors
        counter = torch.zeros(1, dtype=torch.int32, device=x.q.device)
    runtime.launch(decode_kernel, (grid,))(
        packed_descriptor(x.q, problem.num_kv_heads, pack, 64, block_d),
        k_desc,
        v_desc,
        *parts,
        counter,
        x.cache_seqlens.contiguous(),
        x.block_table,
        problem.softmax_scale,
        problem.softcap,
        *window(problem),
        seqlen_q,
        x.num_new_tokens,
        most_keys,
        problem.num_kv_heads,
        problem.group_size,
        num_tiles_m,
        num_splits,
        num_parts,
        x.k_cache.shape[0],
        x.block_table.stride(0) if page else 0,
        BLOCK_N=tiles.block_n,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        K_STAGES=tiles.k_stages,
        V_STAGES=tiles.v_stages,
        PACK=pack,
        CHUNK=chunk,
        PAGE=page,
        # A window that hides nothing is none: a single query sees every key to its right.
        HAS_LEFT=0 <= problem.window_left < most_keys,
        HAS_RIGHT=0 <= problem.window_right < seqlen_q - 1,
        HAS_SOFTCAP=problem.softcap > 0.0,
        RAW=raw_scores(problem),
        PING_PONG=tiles.ping_pong,
        LAZY=tiles.lazy,
        PERSISTENT=persistent,
        IMMEDIATES=tiles.immediates,
        HALVES=halves(tiles, problem),
        CONSUMER_REGISTERS=tiles.registers[0],
        PRODUCER_REGISTERS=tiles.registers[1],
        num_warps=4,
    )
