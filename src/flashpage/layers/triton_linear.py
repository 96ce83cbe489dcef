"""Products of a few rows, with the norm before them or SiLU * up after them; knows no model.

With one to four rows (`linear.FEW_ROWS`) a product is a read of its weight, so a program takes a
few whole rows of the weight: their first chunks are on their way before the kernel before this one
has ended (a weight depends on nothing), products are added up in float32 by the thread that loaded
them, and reduced once, at the end. What a row of x gives does not depend on the other rows. The
same in steps of their own stands in `linear` and `fused`, and is what these are tested against.
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
    """What a program reads: `block_n` rows of the weight in chunks of `block_k`, `depth` ahead."""

    block_n: int
    block_k: int
    depth: int
    num_warps: int = 4


BYTES = 2**15
"""of the weight, on their way to one program of one or two rows"""
PROGRAMS = 256
"""at least, while a program has more than 4 rows: about two on each multiprocessor"""


@lru_cache(maxsize=256)
def choose_tile(n: int, k: int, element_size: int, num_rows: int) -> Tile:
    """The tile for a weight `[n, k]` and `num_rows` rows of x.

    The order in which a sum is added up follows from block_k and num_warps alone, and these from
    k: a row's result is the same in any company. For that the smallest tile, of 4 rows, must have
    16 bytes for each thread.
    """
    block_k = min(max(next_power_of_2(k), 64), 1024)
    num_warps = min(block_k * element_size // 128, 4)
    # Each row of x has sums of its own in registers: less room for the weight.
    size = BYTES if num_rows <= 2 else BYTES // 2
    block_n = 16
    while block_n > 4 and (
        cdiv(n, block_n) < PROGRAMS or block_n * cdiv(k, block_k) * block_k * element_size > size
    ):
        block_n //= 2
    # Chunks of as many rows of x are in registers beside the weight's.
    depth = min(size // (block_n * block_k * element_size), 8 // next_power_of_2(num_rows))
    return Tile(block_n, block_k, min(max(depth, 1), cdiv(k, block_k)), num_warps)


# ---------------------------------------------------------------------------------------------
# Kernel
# ---------------------------------------------------------------------------------------------


@triton.jit
def _rows_chunk(base_ptr, rows, stride, start, K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of several rows of length K, zeros beyond their ends."""
    columns = start + tl.arange(0, BLOCK)
    places = base_ptr + rows[:, None] * stride + columns[None, :]
    return tl.load(places, mask=(columns < K)[None, :], other=0.0)


@triton.jit
def _chunk(row_ptr, start, K: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row."""
    columns = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + columns, mask=columns < K, other=0.0)


@triton.jit
def _scales(
    x_ptr,
    residual_ptr,
    stride_x,
    stride_residual,
    rows,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """1 / sqrt(mean square + eps) of each row of x + residual, `[ROWS]`."""
    # As many loads on their way together as there are registers for.
    CHUNKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    AHEAD: tl.constexpr = CHUNKS if CHUNKS * ROWS <= 8 else 8 // ROWS
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, K, AHEAD * BLOCK):
        for i in tl.static_range(AHEAD):
            place = start + i * BLOCK
            x = _rows_chunk(x_ptr, rows, stride_x, place, K, BLOCK)
            residual = _rows_chunk(residual_ptr, rows, stride_residual, place, K, BLOCK)
            total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype).to(tl.float32)
            # One rounding, however the loop is unrolled: a row's scale is the same in any company.
            squares = tl.fma(total, total, squares)
    return 1.0 / tl.sqrt_rn(tl.sum(squares, 1) / K + eps)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def _linear_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    total_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    stride_x,
    stride_residual,
    stride_weight,
    size,  # columns of out
    num_rows,  # of x: ROWS or less
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # Elements of 16 bytes: neighbours that one thread loads, and adds up by itself.
    VECTOR: tl.constexpr = 128 // dtype.primitive_bitwidth
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first = tl.program_id(0) * COLUMNS
    places = tl.arange(0, BLOCK_N)
    # Rows beyond the last read the last again: nothing needs a mask but the store.
    if GATED:
        # The gate's rows and the up rows in turn, so that both of a column end side by side.
        rows = tl.minimum(first + places // 2, size - 1) + places % 2 * size
    else:
        rows = tl.minimum(first + places, size - 1)
    rows = rows.to(tl.int64)

    # All that no other kernel writes, before this one waits for them.
    weights = ()
    gains = ()
    for d in tl.static_range(DEPTH):
        weights += (_rows_chunk(weight_ptr, rows, stride_weight, d * BLOCK_K, K, BLOCK_K),)
        if norm_ptr is not None:
            gains += (_chunk(norm_ptr, d * BLOCK_K, K, BLOCK_K),)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows).to(tl.float32)
    if OVERLAP:
        gdc_wait()

    if norm_ptr is not None:
        ms = tl.arange(0, ROWS)
        real = tl.minimum(ms, num_rows - 1).to(tl.int64)
        scales = _scales(
            x_ptr, residual_ptr, stride_x, stride_residual, real, eps, K, ROWS, BLOCK_NORM
        )
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)

    STEP: tl.constexpr = DEPTH * BLOCK_K
    for start in range(0, K, STEP):
        next_weights = weights
        next_gains = gains
        if STEP < K:
            next_weights = ()
            next_gains = ()
            for d in tl.static_range(DEPTH):
                place = start + STEP + d * BLOCK_K
                next_weights += (_rows_chunk(weight_ptr, rows, stride_weight, place, K, BLOCK_K),)
                if norm_ptr is not None:
                    next_gains += (_chunk(norm_ptr, place, K, BLOCK_K),)
        for d in tl.static_range(DEPTH):
            added = ()
            for m in tl.static_range(ROWS):
                row = tl.minimum(m, num_rows - 1).to(tl.int64)
                x = _chunk(x_ptr + row * stride_x, start + d * BLOCK_K, K, BLOCK_K)
                if norm_ptr is not None:
                    other_ptr = residual_ptr + row * stride_residual
                    other = _chunk(other_ptr, start + d * BLOCK_K, K, BLOCK_K)
                    # Rounded where the steps by themselves round: after the sum, after the norm.
                    total = (x.to(tl.float32) + other.to(tl.float32)).to(dtype)
                    columns = start + d * BLOCK_K + tl.arange(0, BLOCK_K)
                    written = (columns < K) & (tl.program_id(0) == 0)
                    tl.store(total_ptr + row * K + columns, total, mask=written)
                    scale = tl.sum(tl.where(ms == m, scales, 0.0), 0)
                    x = (total.to(tl.float32) * scale * gains[d].to(tl.float32)).to(dtype)
                products = weights[d].to(tl.float32) * x.to(tl.float32)[None, :]
                products = tl.reshape(products, (BLOCK_N, BLOCK_K // VECTOR, VECTOR))
                added += (sums[m] + tl.sum(products, 2),)
            sums = added
        weights = next_weights
        gains = next_gains

    columns = first + tl.arange(0, COLUMNS)
    for m in tl.static_range(ROWS):
        out = (tl.sum(sums[m], 1) + bias).to(dtype)
        if GATED:
            gate, up = tl.split(tl.reshape(out.to(tl.float32), (COLUMNS, 2)))
            out = (gate / (1.0 + tl.exp(-gate)) * up).to(dtype)
        place = out_ptr + tl.cast(m, tl.int64) * size + columns
        tl.store(place, out, mask=(columns < size) & (m < num_rows))


# ---------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """`x @ weight.T + bias` of 1 to 8 rows, summed in float32 and rounded once.

    weight and bias are read while earlier kernels of the stream may still run: they must not be
    what those write.

    Args:
        x: `[..., K]`.
        weight: `[N, K]`, dense in its last dimension; bias `[N]`; dtypes as x.
        gated: the first half of the N columns (rounded, as the second) is a gate.

    Returns:
        `[..., N]`; with `gated` `[..., N / 2]`: `silu(first half) * second half`.
    """
    return _launch(x, None, None, 0.0, weight, bias, gated, tile)[0]


def add_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`(linear(rms_norm(x + residual)), x + residual)`, each step rounded as if it were alone.

    As `linear`; residual as x; norm_weight `[K]`, read as early. The sum is a new tensor.
    """
    return _launch(x, residual, norm_weight, eps, weight, bias, gated, tile)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    tile: Tile | None,
) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    size = n // 2 if gated else n
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    total = x
    rows = _as_rows(x)
    others = None
    if residual is not None:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        others = _as_rows(residual)
    num_rows = rows.shape[0]
    tile = tile or choose_tile(n, k, x.element_size(), num_rows)
    overlap = runtime.overlap(x.device)
    with runtime.on_device(x.device):
        runtime.launch(_linear_kernel, (cdiv(n, tile.block_n),))(
            rows,
            others,
            norm_weight,
            total,
            weight,
            bias,
            out,
            rows.stride(0),
            0 if others is None else others.stride(0),
            weight.stride(0),
            size,
            num_rows,
            eps,
            K=k,
            ROWS=next_power_of_2(num_rows),
            GATED=gated,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            DEPTH=tile.depth,
            BLOCK_NORM=512 * tile.num_warps // x.element_size(),
            OVERLAP=bool(overlap),
            num_warps=tile.num_warps,
            **overlap,
        )
    return out, total


def _as_rows(x: Tensor) -> Tensor:
    """`[rows, K]` with dense columns: a view where that is possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
