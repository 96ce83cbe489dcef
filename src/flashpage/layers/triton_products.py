"""Products of some rows (a batch of decodes) on tensor cores; knows no model.

The weight's rows stand where a matrix unit has its 64 fixed rows, and the rows of x where its size
can be chosen, so that 16 rows of x cost no more than they must. A program asks for its part of the
weight to come to the level-2 cache before it waits for the kernel before it: a weight depends on
nothing. Where programs would be too few, each sums over a part of K: the norm that follows adds up
the parts, in their order. With a gate, SiLU * up is computed on the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import cdiv, next_power_of_2

# ---------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """`block_n` rows of the weight by `block_m` rows of x, `stages` blocks of K on their way."""

    block_n: int
    block_m: int
    block_k: int
    stages: int
    splits: int = 1


MAX_SPLITS = 8
MIN_PART = 256
"""columns of K, at least, of a part"""


@lru_cache(maxsize=1024)
def choose_tile(n: int, k: int, num_rows: int, gated: bool, num_multiprocessors: int) -> Tile:
    """The tile for a weight `[n, k]` and `num_rows` rows of x.

    One program on each multiprocessor, in one wave: with a gate from longer tiles, else from more
    parts of K. Measured on an H200 with benchmarks/linear.py.
    """
    block_n = 64
    block_m = min(max(next_power_of_2(num_rows), 16), 64)
    if gated:
        return Tile(block_n, 128, 64, 6) if num_rows > 64 else Tile(block_n, block_m, 128, 4)
    programs = cdiv(n, block_n) * cdiv(num_rows, block_m)
    splits = 1
    while (
        splits < MAX_SPLITS
        and 2 * splits * programs <= num_multiprocessors
        and 2 * splits * MIN_PART <= k
    ):
        splits *= 2
    return Tile(block_n, block_m, 128, 4, splits)


# ---------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    stride_x,
    stride_weight,
    size,  # columns of out
    num_rows,  # of x
    k,
    chunk,  # of K, for one split
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # chunks and k are multiples of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    num_m_blocks = (num_rows + BLOCK_M - 1) // BLOCK_M
    first_m = tl.program_id(0) % num_m_blocks * BLOCK_M
    first_n = tl.program_id(0) // num_m_blocks * COLUMNS
    split = tl.program_id(1)
    start = split * chunk
    end = tl.minimum(start + chunk, k)
    places = tl.arange(0, BLOCK_N)
    # Rows of the weight beyond the last read the last again, and are not stored.
    if GATED:
        # The gate's rows and the up rows in turn, so that both of a column end side by side.
        n = tl.minimum(first_n + places // 2, size - 1) + places % 2 * size
    else:
        n = tl.minimum(first_n + places, size - 1)
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * stride_weight
    if OVERLAP:
        # 128 bytes of each row at a time, LINES of them in one go.
        LINES: tl.constexpr = 4
        WIDTH: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        lines = tl.arange(0, LINES) * WIDTH
        for place in range(start, end, LINES * WIDTH):
            columns = tl.minimum(place + lines, end - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [(weight_ptrs + columns[None, :]).to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()

    rows = first_m + tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * stride_x
    # Not the last row again: all programs would wait for the one place in the cache that has it.
    real_rows = (rows < num_rows)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for place in range(start, end, BLOCK_K):
        columns = place + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(weight_ptrs + columns[None, :])
            x = tl.load(x_ptrs + columns[:, None], mask=real_rows, other=0.0)
        else:
            inside = columns < end
            w = tl.load(weight_ptrs + columns[None, :], mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs + columns[:, None], mask=inside[:, None] & real_rows, other=0.0)
        acc = tl.dot(w, x, acc)

    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n).to(tl.float32)
        acc += tl.where(split == 0, bias, 0.0)[:, None]
    columns = first_n + tl.arange(0, COLUMNS)
    if GATED:
        acc = acc.to(weight_ptr.dtype.element_ty).to(tl.float32)
        pairs = tl.permute(tl.reshape(acc, (COLUMNS, 2, BLOCK_M)), (0, 2, 1))
        gate, up = tl.split(pairs)
        acc = gate / (1.0 + tl.exp(-gate)) * up
    real = (columns < size)[None, :] & (rows < num_rows)[:, None]
    place = rows.to(tl.int64)[:, None] * size + columns[None, :]
    if SPLIT:
        place += tl.cast(split, tl.int64) * num_rows * size
    tl.store(out_ptr + place, tl.trans(acc).to(dtype), mask=real)


# ---------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False, tile: Tile | None = None
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32, whole or in parts.

    weight and bias are read while earlier kernels of the stream may still run: they must not be
    what those write.

    Args:
        x: `[rows, K]`, dense in its last dimension; float16, bfloat16 (float32 only in the tests).
        weight: `[N, K]`, dense in its last dimension; bias `[N]`; dtypes as x.
        gated: the first half of the N columns (rounded, as the second) is a gate.

    Returns:
        `[rows, N]`, with `gated` `[rows, N / 2]`: `silu(first half) * second half`; or, where the
        tile has splits, float32 parts `[splits, rows, N]` whose sum it is.
    """
    n, k = weight.shape
    size = n // 2 if gated else n
    num_rows = x.shape[0]
    multiprocessors = runtime.num_multiprocessors(x.device)
    tile = tile or choose_tile(n, k, num_rows, gated, multiprocessors)
    shape, dtype = (num_rows, size), x.dtype
    if tile.splits > 1:
        shape, dtype = (tile.splits, num_rows, size), torch.float32
    out = torch.empty(shape, dtype=dtype, device=x.device)
    columns = tile.block_n // 2 if gated else tile.block_n
    overlap = runtime.overlap(x.device)
    with runtime.on_device(x.device):
        runtime.launch(
            _product_kernel, (cdiv(num_rows, tile.block_m) * cdiv(size, columns), tile.splits)
        )(
            x,
            weight,
            bias,
            out,
            x.stride(0),
            weight.stride(0),
            size,
            num_rows,
            k,
            cdiv(cdiv(k, tile.splits), tile.block_k) * tile.block_k,
            GATED=gated,
            SPLIT=tile.splits > 1,
            EVEN=k % tile.block_k == 0,
            BLOCK_N=tile.block_n,
            BLOCK_M=tile.block_m,
            BLOCK_K=tile.block_k,
            OVERLAP=bool(overlap),
            num_warps=4,
            num_stages=tile.stages,
            **overlap,
        )
    return out
