"""Quantised linear layers on rows of float32, as numba kernels; imported only with numba.

Everything is an address: of float32 rows, of packed weights (`packing`), of scratch.
"""

from __future__ import annotations

import numba
import numpy as np

from flashpage.attention.cpu.numba_math import jit
from flashpage.layers.cpu import forms
from flashpage.layers.cpu.dots import (
    q4_by_1,
    q4_by_4,
    q4_by_8,
    q4_wide_by_1,
    q4_wide_by_4,
    q6_wide_by_1,
    q6_wide_by_4,
    q8_by_1,
    q8_by_4,
    q8_by_8,
)
from flashpage.layers.cpu.packing import Q4, Q4_WIDE, Q8
from flashpage.layers.cpu.tiles import (
    TILE_ROWS,
    begin_tiles,
    end_tiles,
    q4_tile,
    q4_wide_tile,
    q6_wide_tile,
    q8_tile,
    unpack_q4,
)
from flashpage.layers.cpu.vectors import row_quantize

_AMX = forms.AMX
EXACT = {"fastmath": False}
"""jit options of kernels whose float32 operations must stay as written, in their order"""


@jit(**EXACT)
def aligned(array):  # type: ignore[no-untyped-def]
    """The first address in a byte array that is a multiple of 64."""
    return (array.ctypes.data + 63) // 64 * 64


@jit(**EXACT)
def _by_1(form, kind, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add):  # type: ignore[no-untyped-def]
    if kind == Q4:
        q4_by_1(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)
    elif kind == Q8:
        q8_by_1(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)
    elif kind == Q4_WIDE:
        q4_wide_by_1(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)
    else:
        q6_wide_by_1(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)


@jit(**EXACT)
def _by_4(form, kind, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add):  # type: ignore[no-untyped-def]
    if kind == Q4:
        q4_by_4(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)
    elif kind == Q8:
        q8_by_4(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)
    elif kind == Q4_WIDE:
        q4_wide_by_4(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)
    else:
        q6_wide_by_4(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)


@jit(**EXACT)
def _by_8(form, kind, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add):  # type: ignore[no-untyped-def]
    if kind == Q4:
        q4_by_8(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)
    else:
        q8_by_8(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add)


@jit(**EXACT)
def _by_tile(form, kind, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add, scratch):  # type: ignore[no-untyped-def]
    if kind == Q4:
        q4_tile(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add, scratch)
    elif kind == Q8:
        q8_tile(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add, scratch)
    elif kind == Q4_WIDE:
        q4_wide_tile(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add, scratch)
    else:
        q6_wide_tile(form, w, s, x, x_step, xs, xs_step, blocks, out, out_step, add, scratch)


@jit(**EXACT)
def _columns(form, weight, x, xs, num_rows, out, out_step, add, first, last):  # type: ignore[no-untyped-def]
    """All rows, output columns `16 * first ... 16 * last`."""
    w, s, kind, blocks, block_bytes, scale_bytes = weight
    x_step, xs_step = blocks * 32, blocks * 16
    use_tiles = len(form) == _AMX and num_rows >= TILE_ROWS
    unpacks = use_tiles and kind in (Q4, Q4_WIDE)
    room = np.empty(2048 + 64 + (blocks * 512 if unpacks else 0), np.uint8)
    scratch = aligned(room)
    if use_tiles:
        begin_tiles(form)
    for n in range(first, last):
        w_n, s_n, out_n = w + n * blocks * block_bytes, s + n * blocks * scale_bytes, out + n * 64
        m = 0
        if use_tiles:
            bytes_n = w_n
            if unpacks:
                bytes_n = scratch + 2048
                unpack_q4(w_n, bytes_n, blocks)
            while m + TILE_ROWS <= num_rows:
                _by_tile(
                    form, kind, bytes_n, s_n, x + m * x_step, x_step, xs + m * xs_step, xs_step,
                    blocks, out_n + m * out_step, out_step, add, scratch,
                )  # fmt: skip
                m += TILE_ROWS
        while m + 8 <= num_rows and kind in (Q4, Q8):
            _by_8(
                form, kind, w_n, s_n, x + m * x_step, x_step, xs + m * xs_step, xs_step,
                blocks, out_n + m * out_step, out_step, add,
            )  # fmt: skip
            m += 8
        while m + 4 <= num_rows:
            _by_4(
                form, kind, w_n, s_n, x + m * x_step, x_step, xs + m * xs_step, xs_step,
                blocks, out_n + m * out_step, out_step, add,
            )  # fmt: skip
            m += 4
        while m < num_rows:
            _by_1(
                form, kind, w_n, s_n, x + m * x_step, x_step, xs + m * xs_step, xs_step,
                blocks, out_n + m * out_step, out_step, add,
            )  # fmt: skip
            m += 1
    if use_tiles:
        end_tiles(form)
    # The array must outlive the addresses in it.
    return room.size


@jit(parallel=True, **EXACT)
def multiply(form, weight, groups, x, xs, num_rows, out, out_step, add, tasks):  # type: ignore[no-untyped-def]
    """`out = x @ w.T`, or `out += x @ w.T`.

    Args:
        form: of `forms`.
        weight: (address of blocks, address of scales, kind, blocks per row, bytes of a block, bytes
            of a block's scales); groups: of 16 output columns.
        x, xs: addresses of the rows as `quantize_rows` leaves them.
        out: address of `[num_rows, >= 16 * groups]` float32, rows `out_step` bytes apart.
        add: 0 or 1. tasks: how many to share the columns among: the number of threads.
    """
    for task in numba.prange(tasks):
        first, last = task * groups // tasks, (task + 1) * groups // tasks
        _columns(form, weight, x, xs, num_rows, out, out_step, add, first, last)


@jit(parallel=True, **EXACT)
def quantize_rows(source, row_bytes, num_rows, size, x, xs):  # type: ignore[no-untyped-def]
    """Rows of float32, `row_bytes` apart, to int8 `[num_rows, size]` and their scales."""
    for row in numba.prange(num_rows):
        row_quantize(source + row * row_bytes, x + row * size, xs + row * (size // 2), size)


@jit(**EXACT)
def linear(form, weight, groups, source, num_rows, size, out, out_step, tasks):  # type: ignore[no-untyped-def]
    """`out = source @ w.T` for contiguous float32 rows of `size` values."""
    x_room = np.empty(num_rows * size + 64, np.uint8)
    xs_room = np.empty(num_rows * size // 2 + 64, np.uint8)
    x, xs = aligned(x_room), aligned(xs_room)
    quantize_rows(source, 4 * size, num_rows, size, x, xs)
    multiply(form, weight, groups, x, xs, num_rows, out, out_step, 0, tasks)
    return x_room.size + xs_room.size
