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
from flashpage.layers.cpu.sync import COUNTERS, all_came, meet
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
from flashpage.layers.cpu.vectors import row_quantize, row_residual

_AMX = forms.AMX
EXACT = {"fastmath": False}
"""jit options of kernels whose float32 operations must stay as written, in their order"""

TILE_BYTES = 4096
"""scratch of one product with tiles, before unpacked weights"""


@jit(**EXACT)
def aligned(array):  # type: ignore[no-untyped-def]
    """The first address in a byte array that is a multiple of 64."""
    return (array.ctypes.data + 63) // 64 * 64


@jit(**EXACT)
def share(count, thread, threads):  # type: ignore[no-untyped-def]
    """First and last + 1 of what one thread does of `count` things."""
    return thread * count // threads, (thread + 1) * count // threads


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
def uses_tiles(form, num_rows):  # type: ignore[no-untyped-def]
    """Whether products of so many rows need the tile registers (`begin_tiles`)."""
    return len(form) == _AMX and num_rows >= TILE_ROWS


@jit(**EXACT)
def group_bytes(form, part, group, num_rows, room, done):  # type: ignore[no-untyped-def]
    """Address of a group's weights as tiles want them: unpacked to `room` if they are not bytes.

    done: they are there already.
    """
    w = part[0] + group * part[3] * part[4]
    if uses_tiles(form, num_rows) and part[2] in (Q4, Q4_WIDE):
        if not done:
            unpack_q4(w, room, part[3])
        return room
    return w


@jit(**EXACT)
def multiply_group(  # type: ignore[no-untyped-def]
    form, part, group, bytes_at, x, xs, num_rows, out, out_step, add, scratch
):
    """16 output columns of all rows: group `group` of one packed weight.

    Args:
        form: of `forms`.
        part: int64: address of blocks, of scales, kind, blocks per row, bytes of a block, bytes of
            a block's scales.
        bytes_at: `group_bytes` of the group.
        x, xs: addresses of the rows' int8 values and their scales, as `row_quantize` leaves them.
        out: address of the 16 float32 of the first row; rows `out_step` bytes apart.
        add: 1 adds to `out`, 0 replaces it.
        scratch: TILE_BYTES of scratch, aligned to 64.
    """
    kind, blocks = part[2], part[3]
    w = part[0] + group * blocks * part[4]
    s = part[1] + group * blocks * part[5]
    x_step, xs_step = blocks * 32, blocks * 16
    m = 0
    if uses_tiles(form, num_rows):
        while m + TILE_ROWS <= num_rows:
            _by_tile(
                form, kind, bytes_at, s, x + m * x_step, x_step, xs + m * xs_step, xs_step, blocks,
                out + m * out_step, out_step, add, scratch,
            )  # fmt: skip
            m += TILE_ROWS
    while m + 8 <= num_rows and kind in (Q4, Q8):
        _by_8(
            form, kind, w, s, x + m * x_step, x_step, xs + m * xs_step, xs_step, blocks,
            out + m * out_step, out_step, add,
        )  # fmt: skip
        m += 8
    while m + 4 <= num_rows:
        _by_4(
            form, kind, w, s, x + m * x_step, x_step, xs + m * xs_step, xs_step, blocks,
            out + m * out_step, out_step, add,
        )  # fmt: skip
        m += 4
    while m < num_rows:
        _by_1(
            form, kind, w, s, x + m * x_step, x_step, xs + m * xs_step, xs_step, blocks,
            out + m * out_step, out_step, add,
        )  # fmt: skip
        m += 1


@jit(**EXACT)
def multiply_columns(  # type: ignore[no-untyped-def]
    form, part, first, last, x, xs, num_rows, out, out_step, add, scratch
):
    """Output columns `16 * first ... 16 * last` of one packed weight.

    scratch: TILE_BYTES, and 512 for each block of a row.
    """
    for group in range(first, last):
        bytes_at = group_bytes(form, part, group, num_rows, scratch + TILE_BYTES, False)
        multiply_group(
            form, part, group, bytes_at, x, xs, num_rows, out + group * 64, out_step, add, scratch
        )


@jit(**EXACT)
def _linear_share(  # type: ignore[no-untyped-def]
    thread, threads, counters, patience, form, part, groups, source, num_rows, size, out, out_step,
    x_room, xs_room,
):  # fmt: skip
    """One thread's part of `linear`."""
    x, xs = aligned(x_room), aligned(xs_room)
    rest_x, rest_xs = x + num_rows * size, xs + num_rows * (size // 2)
    room = np.empty(TILE_BYTES + 64 + part[3] * 512, np.uint8)
    row_room = np.empty(size, np.float32)
    first, last = share(num_rows, thread, threads)
    for row in range(first, last):
        at, at_s = row * size, row * (size // 2)
        row_quantize(source + at * 4, x + at, xs + at_s, size)
        row_residual(source + at * 4, x + at, xs + at_s, row_room.ctypes.data, size)
        row_quantize(row_room.ctypes.data, rest_x + at, rest_xs + at_s, size)
    meet(counters.ctypes.data, threads, patience)
    if uses_tiles(form, num_rows):
        begin_tiles(form)
    scratch = aligned(room)
    first, last = share(groups, thread, threads)
    for group in range(first, last):
        bytes_at = group_bytes(form, part, group, num_rows, scratch + TILE_BYTES, False)
        for add in range(2):
            multiply_group(
                form, part, group, bytes_at, rest_x if add else x, rest_xs if add else xs,
                num_rows, out + group * 64, out_step, add, scratch,
            )  # fmt: skip
    if uses_tiles(form, num_rows):
        end_tiles(form)
    room[0] = row_room[0] = 0  # they must outlive the addresses in them


@jit(parallel=True, **EXACT)
def linear(  # type: ignore[no-untyped-def]
    form, part, groups, source, num_rows, size, out, out_step, threads, patience
):
    """`out = source @ w.T`; returns whether all threads took part.

    source is quantised twice: what the first rounds away is a second row of int8. That is for
    logits, where an error shows at once, and costs little, as the weights are read once.

    Args:
        part: as in `multiply_group`; groups: of 16 output columns.
        source: address of contiguous float32 rows of `size` values.
        out: address of `[num_rows, >= 16 * groups]` float32, rows `out_step` bytes apart.
        patience: as in `meet`.
    """
    counters = np.zeros(COUNTERS, np.int64)
    x_room = np.empty(2 * num_rows * size + 64, np.uint8)
    xs_room = np.empty(num_rows * size + 64, np.uint8)
    for thread in numba.prange(threads):
        # The loop must have the arrays themselves: numba may free what it has only addresses of.
        _linear_share(
            np.int64(thread), threads, counters, patience, form, part, groups, source, num_rows,
            size, out, out_step, x_room, xs_room,
        )  # fmt: skip
    return all_came(counters)
