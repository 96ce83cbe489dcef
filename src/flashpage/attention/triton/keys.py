"""Tiles of K or V from memory: batches, flat tokens or pages, through pointers or descriptors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _page(table_ptr, index, num_pages, mask=None):
    """Page ids from the table; a wrong id in it reads a wrong page, never beyond the pool."""
    page = tl.load(table_ptr + index, mask=mask, other=None if mask is None else 0)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1)


@triton.jit
def _load_described(
    x, sequence, first, head, n, table_ptr, num_pages,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    if PAGE > 0:
        tile = x.load([_page(table_ptr, n // PAGE, num_pages), n % PAGE, head, 0])
    else:
        tile = x.load([sequence, first + n, head, 0])
    return tile.reshape(BLOCK_N, BLOCK_D)


@triton.jit
def _load_pointers(
    x, sequence, first, head, n, len_k, table_ptr, num_pages, strides,
    head_dim: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    cols = n + tl.arange(0, BLOCK_N)
    inside = cols < len_k
    base = x + head.to(tl.int64) * strides[2]
    rows = tl.arange(0, BLOCK_N).to(tl.int64) * strides[1]
    if PAGE == 0:
        base += sequence.to(tl.int64) * strides[0] + (first + n).to(tl.int64) * strides[1]
    elif PAGE % BLOCK_N == 0:
        page = _page(table_ptr, n // PAGE, num_pages)
        base += page.to(tl.int64) * strides[0] + (n % PAGE).to(tl.int64) * strides[1]
    else:
        page = _page(table_ptr, cols // PAGE, num_pages, inside)
        rows = page.to(tl.int64) * strides[0] + (cols % PAGE).to(tl.int64) * strides[1]
    d = tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] + d[None, :]
    if MASK:
        tile = tl.load(pointers, mask=inside[:, None] & (d < head_dim)[None, :], other=0.0)
    elif head_dim < BLOCK_D:
        tile = tl.load(pointers, mask=(d < head_dim)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_keys(
    x,
    sequence,
    first,
    head,
    n,
    len_k,
    table_ptr,
    num_pages,
    strides,
    head_dim: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    MASK: tl.constexpr,
):
    """Keys `n ... n + BLOCK_N - 1` of K or V (`x`: a pointer or a descriptor) as a tile.

    `strides`: of batch entry or page, row and head. Without pages the keys are rows `first + n
    ...` of batch entry `sequence`; with pages of PAGE tokens they are found through the
    sequence's row of the table. With MASK rows from len_k on are zeros, whatever lies there.
    """
    if DESCRIPTOR:
        tile = _load_described(
            x, sequence, first, head, n, table_ptr, num_pages, BLOCK_N, BLOCK_D, PAGE
        )
        if MASK:
            tile = tl.where((n + tl.arange(0, BLOCK_N) < len_k)[:, None], tile, 0.0)
    else:
        tile = _load_pointers(
            x, sequence, first, head, n, len_k, table_ptr, num_pages, strides, head_dim, BLOCK_N,
            BLOCK_D, PAGE, MASK,
        )  # fmt: skip
    return tile
