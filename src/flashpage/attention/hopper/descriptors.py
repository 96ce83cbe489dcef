"""Tensor descriptors for the kernels for Hopper: what the tensor memory accelerator can fetch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashpage.attention.hopper.forward_producer import RAGGED_ROWS

RAGGED_SLICES = 0x7FFF0000
"""Lengths of the two leading dimensions of a ragged descriptor: beyond every row."""


def fits(x: Tensor) -> bool:
    """The tensor memory accelerator can fetch tiles of x."""
    if x.data_ptr() % 16 or x.stride(-1) != 1:
        return False
    return all(
        size == 1 or (stride % 8 == 0 and 0 < stride < 2**33)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


class _Descriptor(TensorDescriptor):
    """Without its checks, which take longer than the launch: `addressable` made them."""

    def __post_init__(self) -> None:
        pass


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


def _strides(x: Tensor) -> list[int]:
    """Those of torch; a dimension of size 1 has any stride there, and here one that is allowed."""
    return [s if n > 1 else 8 for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]


def descriptor(x: Tensor, rows: int, block_d: int, layout_rows: int | None = None) -> Any:
    """Of a batch `[batch, seqlen, heads, head_dim]`, fetched `rows` rows at a time.

    The layout in shared memory is that of `layout_rows` rows, where several copies make a tile.
    """
    layout = _layout((1, layout_rows or rows, 1, block_d), x.dtype)
    return _Descriptor(x, list(x.shape), [*_strides(x), 1], [1, rows, 1, block_d], layout)


def ragged_descriptor(x: Tensor, rows: int, block_d: int, layout_rows: int | None = None) -> Any:
    """Of flat tokens `[total, heads, head_dim]`: see `forward_producer`."""
    row, head = _strides(x)
    shape = [RAGGED_SLICES, RAGGED_SLICES, RAGGED_ROWS.value, *x.shape[1:]]
    layout = _layout((1, 1, layout_rows or rows, 1, block_d), x.dtype)
    return _Descriptor(x, shape, [2**34 - row, row, row, head, 1], [1, 1, rows, 1, block_d], layout)


def packed_descriptor(x: Tensor, num_groups: int, pack: int, rows: int, block_d: int) -> Any:
    """Of a batch whose heads lie in groups, `[batch, seqlen, groups, heads of a group, head_dim]`:
    `rows` rows of one group at a time, each token's `pack` heads behind one another. Heads beyond
    those of a group are read as zeros.
    """
    grouped = x.unflatten(2, (num_groups, -1))
    block = (1, max(1, rows // pack), 1, min(pack, rows), block_d)
    strides = [*_strides(grouped), 1]
    return _Descriptor(grouped, list(grouped.shape), strides, list(block), _layout(block, x.dtype))


def flat_descriptor(x: Tensor) -> Any:
    """Of float32 tiles `[count, ...]`, one tile at a time, in the order of memory."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=x.dim())
    return _Descriptor(x, list(x.shape), list(x.stride()), [1, *x.shape[1:]], layout)
