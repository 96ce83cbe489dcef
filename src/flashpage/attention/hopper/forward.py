"""Launching the forward kernel for Hopper: tiles, descriptors, grid. Shapes as in `ops`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.hopper.descriptors import descriptor, fits, ragged_descriptor
from flashpage.attention.hopper.forward_kernel import forward_kernel
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import as_batch, cdiv, next_power_of_2, raw_scores, window

MB = 2**20


@dataclass(frozen=True)
class Tiles:
    """Shape of the work of one thread block; the words are those of `forward_kernel`."""

    consumers: int
    """warpgroups, of 64 query rows each"""
    block_n: int
    k_stages: int
    v_stages: int
    ping_pong: bool = True
    lazy: bool = True
    persistent: bool = True
    out_in_q: bool = False
    skip: bool = False
    immediates: bool = False
    halves: bool = True
    l2_bytes: int = 16 * MB
    """K and V of the heads that run side by side, so that they stay in the second-level cache"""
    registers: tuple[int, int] = (240, 24)
    """of a thread of a consumer and of the producer"""
    blocks: int = 1
    """thread blocks that share a multiprocessor"""

    @property
    def registers_at_launch(self) -> int | None:
        """Of a thread; None where one thread block takes all there are."""
        if self.blocks == 1:
            return None
        return 65536 // (self.blocks * 128 * (self.consumers + 1)) // 8 * 8


TILES_64_SHORT = Tiles(
    consumers=1,
    block_n=64,
    k_stages=2,
    v_stages=3,
    ping_pong=False,
    immediates=True,
    registers=(136, 24),
    blocks=3,
)
TILES_64 = Tiles(
    consumers=3,
    block_n=128,
    k_stages=4,
    v_stages=4,
    skip=True,
    immediates=True,
    l2_bytes=32 * MB,
    registers=(160, 32),
)
TILES_128 = Tiles(consumers=2, block_n=128, k_stages=2, v_stages=3, immediates=True)
TILES_256 = Tiles(consumers=2, block_n=64, k_stages=2, v_stages=3, out_in_q=True, halves=False)
TILES_256_MASKED = replace(TILES_256, skip=True, immediates=True)


def forward_tiles(block_d: int, masked: bool, keys: int, paged: bool) -> Tiles:
    """The table of tiles: by head_dim rounded up to a power of two, whether a causal mask or a
    window hides keys, how many keys a row may see, and whether they lie in pages.

    What each gave: docs/kernel_notes.md. Three small thread blocks a multiprocessor hide how each
    tile begins and ends; tiles of 192 rows read keys less often. A stage of V is free a softmax
    later than one of K, so V has one more where shared memory allows.
    """
    if block_d == 128:
        return TILES_128
    if block_d == 256:
        return TILES_256_MASKED if masked else TILES_256
    if masked and keys <= 1024 and not paged:
        return TILES_64_SHORT
    return TILES_64


def addressable(x: AttentionInputs) -> bool:
    """The tensor memory accelerator can fetch these tensors as the kernel asks for them."""
    tensors = (x.q, x.k, x.v)
    if any(t.numel() > 0 and not fits(t) for t in tensors):
        return False
    return x.block_table is None or pages_fit(x.k, x.v)


def pages_fit(*pages: Tensor) -> bool:
    """Pages are slices of flat memory: several copies make a tile, from whole numbers of rows."""
    return all(t.shape[1] % 8 == 0 and rows_follow(t) for t in pages)


def rows_follow(x: Tensor) -> bool:
    """Entries of the first dimension lie as many rows apart as each has."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def forward(problem: Problem, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)`, fresh and contiguous."""
    q = inputs.q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse_shape = (*q.shape[:-3], problem.num_q_heads, q.shape[-3])
    softmax_lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if inputs.k.numel() == 0:
        return out.zero_(), softmax_lse.fill_(torch.inf)
    with runtime.on_device(q.device):
        if q.numel() > 0:
            launch(problem, inputs, out, softmax_lse)
    return out, softmax_lse


def tiles_for(problem: Problem, max_seqlen_k: int, page: int) -> Tiles:
    """The tiles of a problem; `page` is the number of tokens in a page, 0 without pages."""
    block_d = max(64, next_power_of_2(problem.head_dim))
    left, right = problem.window_left, problem.window_right
    keys = min(max_seqlen_k, left + 1 + right) if left >= 0 and right >= 0 else max_seqlen_k
    return registers_for_pages(
        forward_tiles(block_d, left >= 0 or right >= 0, keys, page > 0), page
    )


def halves(tiles: Tiles, problem: Problem) -> bool:
    """Whether the softmax goes by halves of the rows: with softcap registers would be spilled."""
    return tiles.halves and raw_scores(problem)


def registers_for_pages(tiles: Tiles, page: int) -> Tiles:
    """Where copies bring less than a tile, which needs registers for the page ids."""
    if page and page % tiles.block_n and tiles.consumers == 2:
        return replace(tiles, registers=(232, 40))
    return tiles


def launch(
    problem: Problem,
    x: AttentionInputs,
    out: Tensor,
    softmax_lse: Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Fill out and softmax_lse; `tiles` in place of the table's, to compare them."""
    varlen = x.cu_seqlens_q is not None
    page = x.k.shape[1] if x.block_table is not None else 0
    tiles = tiles or tiles_for(problem, x.max_seqlen_k, page)
    block_d = max(64, next_power_of_2(problem.head_dim))
    block_m = 64 * tiles.consumers
    chunk = gcd(page, tiles.block_n) if page else tiles.block_n
    if varlen:
        batch = x.cu_seqlens_q.shape[0] - 1
        seqlen_q = x.q.shape[0]
        num_tiles_m, num_heads = seqlen_q // block_m + batch + 1, problem.num_q_heads
        k, v = (t.flatten(0, 1) if page else t for t in (x.k, x.v))
        q_desc, o_desc = (ragged_descriptor(t, 64, block_d) for t in (x.q, out))
        k_desc, v_desc = (ragged_descriptor(t, chunk, block_d, tiles.block_n) for t in (k, v))
    else:
        batch, seqlen_q = x.q.shape[:2]
        num_tiles_m, num_heads = cdiv(seqlen_q, block_m), batch * problem.num_q_heads
        q_desc, o_desc = (descriptor(t, 64, block_d) for t in (x.q, out))
        k_desc, v_desc = (descriptor(t, tiles.block_n, block_d) for t in (x.k, x.v))
    group_heads = problem.group_size
    if problem.window_right >= 0:
        kv_bytes = max(1, 2 * x.max_seqlen_k * block_d * x.q.element_size())
        group_heads *= max(1, tiles.l2_bytes // kv_bytes)
    num_tiles = num_tiles_m * num_heads
    grid, counter = num_tiles, None
    if tiles.persistent:
        grid = min(num_tiles, tiles.blocks * runtime.num_multiprocessors(x.q.device))
        counter = torch.zeros(1, dtype=torch.int32, device=x.q.device)
    runtime.launch(forward_kernel, (grid,))(
        q_desc,
        k_desc,
        v_desc,
        o_desc,
        softmax_lse,
        counter,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        x.block_table,
        problem.softmax_scale,
        problem.softcap,
        *window(problem),
        seqlen_q,
        as_batch(x.k).shape[1],
        batch,
        problem.num_q_heads,
        problem.group_size,
        num_tiles_m,
        num_heads,
        min(group_heads, num_heads),
        x.k.shape[0],
        x.block_table.stride(0) if page else 0,
        CONSUMERS=tiles.consumers,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        K_STAGES=tiles.k_stages,
        V_STAGES=tiles.v_stages,
        CHUNK=chunk,
        VARLEN=varlen,
        PAGE=page,
        HAS_LEFT=problem.window_left >= 0,
        HAS_RIGHT=problem.window_right >= 0,
        HAS_SOFTCAP=problem.softcap > 0.0,
        RAW=raw_scores(problem),
        PING_PONG=tiles.ping_pong,
        LAZY=tiles.lazy,
        PERSISTENT=tiles.persistent,
        OUT_IN_Q=tiles.out_in_q,
        SKIP=tiles.skip,
        IMMEDIATES=tiles.immediates,
        HALVES=halves(tiles, problem),
        CONSUMER_REGISTERS=tiles.registers[0],
        PRODUCER_REGISTERS=tiles.registers[1],
        num_warps=4,
        maxnreg=tiles.registers_at_launch,
    )
