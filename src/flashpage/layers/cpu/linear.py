"""Quantised linear layers on rows of float32, as numba kernels; imported only with numba.

Everything is an address: of float32 rows, of packed weights (`packing`), of scratch.
"""

from __future__ import annotations

import numba
import numpy as np

from flashpage.attention.cpu.numba_math import jit
from flashpage.layers.cpu import forms
from flashpage.layers.cpu.dots import (
    X_BYTES,
    XS_BYTES,
    XS_ROW,
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
from flashpage.layers.cpu.pairs import (
    PAIR_ROWS,
    UNPACKED_BYTES,
    q4_pairs,
    q4_wide_pairs,
    q6_wide_pairs,
    q8_pairs,
    unpack_q4_wide_words,
    unpack_q4_words,
    unpack_q6_wide_words,
    unpack_q8_words,
)
from flashpage.layers.cpu.sync import COUNTERS, all_came, meet
from flashpage.layers.cpu.tiles import (
    TILE_BYTES,
    TILE_ROWS,
    begin_tiles,
    end_tiles,
    q4_tiles,
    q4_wide_tiles,
    q6_wide_tiles,
    q8_tiles,
    unpack_q4,
)
from flashpage.layers.cpu.vectors import row_quantize

_AMX, _PAIRS = forms.AMX, forms.PAIRS
EXACT = {"fastmath": False}
"""jit options of kernels whose float32 operations must stay as written, in their order"""

PAIRS_FROM = 16
"""rows of a step from which unpacking weights for `pairs` is worth it; from 32 on it pays"""

_CACHED_BYTES = 2**19
"""of activations that are multiplied by all weights before the next rows are: half of a cache that
a core has to itself"""


@jit(**EXACT)
def aligned(array):  # type: ignore[no-untyped-def]
    """The first address in a byte array that is a multiple of 64."""
    return (array.ctypes.data + 63) // 64 * 64


@jit(**EXACT)
def share(count, thread, threads):  # type: ignore[no-untyped-def]
    """First and last + 1 of what one thread does of `count` things."""
    return thread * count // threads, (thread + 1) * count // threads


@jit(**EXACT)
def scales_of(xs, row, blocks):  # type: ignore[no-untyped-def]
    """Where the scales of a row's first block are: those of 16 rows are together, block by block.

    xs: address of the scales of row 0; blocks: of a row.
    """
    return xs + row // 16 * blocks * XS_BYTES + row % 16 * XS_ROW


@jit(**EXACT)
def block_of(x, row, block, blocks, in_pairs):  # type: ignore[no-untyped-def]
    """Where the integers of a row's block are, for `row_quantize`; blocks: of a row.

    x: address of row 0. Of the first in_pairs rows those of PAIR_ROWS are together, block by block.
    """
    if row < in_pairs:
        first = row // PAIR_ROWS * PAIR_ROWS
        return x + ((first * blocks + block * PAIR_ROWS) + row - first) * X_BYTES
    return x + (row * blocks + block) * X_BYTES


@jit(**EXACT)
def scales_bytes(num_rows, blocks):  # type: ignore[no-untyped-def]
    """What the scales of so many rows take."""
    return (num_rows + 15) // 16 * blocks * XS_BYTES


@jit(**EXACT)
def _by_1(form, kind, w, s, x, x_step, xs, blocks, out, out_step, add):  # type: ignore[no-untyped-def]
    if kind == Q4:
        q4_by_1(form, w, s, x, x_step, xs, blocks, out, out_step, add)
    elif kind == Q8:
        q8_by_1(form, w, s, x, x_step, xs, blocks, out, out_step, add)
    elif kind == Q4_WIDE:
        q4_wide_by_1(form, w, s, x, x_step, xs, blocks, out, out_step, add)
    else:
        q6_wide_by_1(form, w, s, x, x_step, xs, blocks, out, out_step, add)


@jit(**EXACT)
def _by_4(form, kind, w, s, x, x_step, xs, blocks, out, out_step, add):  # type: ignore[no-untyped-def]
    if kind == Q4:
        q4_by_4(form, w, s, x, x_step, xs, blocks, out, out_step, add)
    elif kind == Q8:
        q8_by_4(form, w, s, x, x_step, xs, blocks, out, out_step, add)
    elif kind == Q4_WIDE:
        q4_wide_by_4(form, w, s, x, x_step, xs, blocks, out, out_step, add)
    else:
        q6_wide_by_4(form, w, s, x, x_step, xs, blocks, out, out_step, add)


@jit(**EXACT)
def _by_8(form, kind, w, s, x, x_step, xs, blocks, out, out_step, add):  # type: ignore[no-untyped-def]
    if kind == Q4:
        q4_by_8(form, w, s, x, x_step, xs, blocks, out, out_step, add)
    else:
        q8_by_8(form, w, s, x, x_step, xs, blocks, out, out_step, add)


@jit(**EXACT)
def _by_tiles(  # type: ignore[no-untyped-def]
    form, kind, w, s, x, x_step, xs, blocks, tiles, out, out_step, add, scratch
):
    if kind == Q4:
        q4_tiles(form, w, s, x, x_step, xs, blocks, tiles, out, out_step, add, scratch)
    elif kind == Q8:
        q8_tiles(form, w, s, x, x_step, xs, blocks, tiles, out, out_step, add, scratch)
    elif kind == Q4_WIDE:
        q4_wide_tiles(form, w, s, x, x_step, xs, blocks, tiles, out, out_step, add, scratch)
    else:
        q6_wide_tiles(form, w, s, x, x_step, xs, blocks, tiles, out, out_step, add, scratch)


@jit(**EXACT)
def _by_pairs(form, kind, packed, w, s, x, xs, blocks, tiles, out, out_step, add):  # type: ignore[no-untyped-def]
    if kind == Q4:
        q4_pairs(form, packed, w, s, x, xs, blocks, tiles, out, out_step, add)
    elif kind == Q8:
        q8_pairs(form, packed, w, s, x, xs, blocks, tiles, out, out_step, add)
    elif kind == Q4_WIDE:
        q4_wide_pairs(form, packed, w, s, x, xs, blocks, tiles, out, out_step, add)
    else:
        q6_wide_pairs(form, packed, w, s, x, xs, blocks, tiles, out, out_step, add)


@jit(**EXACT)
def _unpack_words(form, kind, w, s, out, blocks):  # type: ignore[no-untyped-def]
    if kind == Q4:
        unpack_q4_words(form, w, s, out, blocks)
    elif kind == Q8:
        unpack_q8_words(form, w, s, out, blocks)
    elif kind == Q4_WIDE:
        unpack_q4_wide_words(form, w, s, out, blocks)
    else:
        unpack_q6_wide_words(form, w, s, out, blocks)


@jit(**EXACT)
def uses_tiles(form, num_rows):  # type: ignore[no-untyped-def]
    """Whether products of so many rows need the tile registers (`begin_tiles`)."""
    return len(form) == _AMX and num_rows >= TILE_ROWS


@jit(**EXACT)
def rows_in_pairs(form, num_rows):  # type: ignore[no-untyped-def]
    """How many rows of a step, the first ones, are multiplied as `pairs` does, and quantised for
    it."""
    many = len(form) == _PAIRS and num_rows >= PAIRS_FROM
    return num_rows // PAIR_ROWS * PAIR_ROWS if many else 0


@jit(**EXACT)
def pairs_among(in_pairs, first, num_rows):  # type: ignore[no-untyped-def]
    """How many of so many rows from `first` on are among the first in_pairs."""
    return min(max(in_pairs - first, 0), num_rows)


@jit(**EXACT)
def group_bytes(form, part, group, num_rows, in_pairs, room, done):  # type: ignore[no-untyped-def]
    """Address of a group's weights as kernels for many rows want them, unpacked to `room` if they
    are not so already, and as they are if there are few rows.

    done: they are in `room`.
    """
    w = part[0] + group * part[3] * part[4]
    if in_pairs > 0:
        if not done:
            _unpack_words(form, part[2], w, part[1] + group * part[3] * part[5], room, part[3])
        return room
    if uses_tiles(form, num_rows) and part[2] in (Q4, Q4_WIDE):
        if not done:
            unpack_q4(w, room, part[3])
        return room
    return w


@jit(**EXACT)
def multiply_group(  # type: ignore[no-untyped-def]
    form, part, group, bytes_at, x, xs, num_rows, in_pairs, out, out_step, add, scratch
):
    """16 output columns of all rows: group `group` of one packed weight.

    Args:
        form: of `forms`.
        part: int64: address of blocks, of scales, kind, blocks per row, bytes of a block, bytes of
            a block's scales.
        bytes_at: `group_bytes` of the group.
        x, xs: addresses of the rows' integers (`block_of`) and of their scales (`scales_of`).
        in_pairs: how many of the rows, the first ones, are quantised for `pairs`.
        out: address of the 16 float32 of the first row; rows `out_step` bytes apart.
        add: 1 adds to `out`, 0 replaces it.
        scratch: TILE_BYTES of scratch, aligned to 64.
    """
    kind, blocks = part[2], part[3]
    w = part[0] + group * blocks * part[4]
    s = part[1] + group * blocks * part[5]
    x_step = blocks * X_BYTES
    m = in_pairs
    if m > 0:
        tiles = m // PAIR_ROWS
        _by_pairs(form, kind, w, bytes_at, s, x, xs, blocks, tiles, out, out_step, add)
    if uses_tiles(form, num_rows):
        tiles = num_rows // TILE_ROWS
        _by_tiles(
            form, kind, bytes_at, s, x, x_step, xs, blocks, tiles, out, out_step, add,
            scratch,
        )  # fmt: skip
        m = tiles * TILE_ROWS
    while m + 8 <= num_rows and kind in (Q4, Q8):
        _by_8(
            form, kind, w, s, x + m * x_step, x_step, scales_of(xs, m, blocks), blocks,
            out + m * out_step, out_step, add,
        )  # fmt: skip
        m += 8
    while m + 4 <= num_rows:
        _by_4(
            form, kind, w, s, x + m * x_step, x_step, scales_of(xs, m, blocks), blocks,
            out + m * out_step, out_step, add,
        )  # fmt: skip
        m += 4
    while m < num_rows:
        _by_1(
            form, kind, w, s, x + m * x_step, x_step, scales_of(xs, m, blocks), blocks,
            out + m * out_step, out_step, add,
        )  # fmt: skip
        m += 1


@jit(**EXACT)
def multiply_columns(  # type: ignore[no-untyped-def]
    form, part, first, last, x, xs, num_rows, in_pairs, out, out_step, add, scratch
):
    """Output columns `16 * first ... 16 * last` of one packed weight.

    scratch: `scratch_bytes`, aligned to 64.
    """
    for group in range(first, last):
        bytes_at = group_bytes(form, part, group, num_rows, in_pairs, scratch + TILE_BYTES, False)
        multiply_group(
            form, part, group, bytes_at, x, xs, num_rows, in_pairs, out + group * 64, out_step, add,
            scratch,
        )  # fmt: skip


@jit(**EXACT)
def rows_at_once(blocks):  # type: ignore[no-untyped-def]
    """How many rows of so many blocks are multiplied by all weights before the next ones are."""
    rows = _CACHED_BYTES // (blocks * (X_BYTES + XS_ROW))
    return max(TILE_ROWS, rows // TILE_ROWS * TILE_ROWS)


@jit(**EXACT)
def scratch_bytes(blocks):  # type: ignore[no-untyped-def]
    """What `multiply_columns` needs, for rows of so many blocks."""
    return TILE_BYTES + blocks * UNPACKED_BYTES


@jit(**EXACT)
def _linear_share(  # type: ignore[no-untyped-def]
    thread, threads, counters, patience, form, part, groups, source, num_rows, size, out, out_step,
    x_room, xs_room,
):  # fmt: skip
    """One thread's part of `linear`."""
    x, xs = aligned(x_room), aligned(xs_room)
    room = np.empty(scratch_bytes(part[3]) + 64, np.uint8)
    in_pairs = rows_in_pairs(form, num_rows)
    first, last = share(num_rows, thread, threads)
    for row in range(first, last):
        at = block_of(x, row, 0, part[3], in_pairs)
        row_quantize(source + row * size * 4, at, scales_of(xs, row, part[3]), size, row < in_pairs)
    meet(counters.ctypes.data, threads, patience)
    if uses_tiles(form, num_rows):
        begin_tiles(form)
    first, last = share(groups, thread, threads)
    multiply_columns(
        form, part, first, last, x, xs, num_rows, in_pairs, out, out_step, 0, aligned(room)
    )
    if uses_tiles(form, num_rows):
        end_tiles(form)
    room[0] = 0  # it must outlive the addresses in it


@jit(parallel=True, **EXACT)
def linear(  # type: ignore[no-untyped-def]
    form, part, groups, source, num_rows, size, out, out_step, threads, patience
):
    """`out = source @ w.T`; returns whether all threads took part.

    Args:
        part: as in `multiply_group`; groups: of 16 output columns.
        source: address of contiguous float32 rows of `size` values.
        out: address of `[num_rows, >= 16 * groups]` float32, rows `out_step` bytes apart.
        patience: as in `meet`.
    """
    counters = np.zeros(COUNTERS, np.int64)
    x_room = np.empty(num_rows * part[3] * X_BYTES + 64, np.uint8)
    xs_room = np.empty(scales_bytes(num_rows, part[3]) + 64, np.uint8)
    for thread in numba.prange(threads):
        # The loop must have the arrays themselves: numba may free what it has only addresses of.
        _linear_share(
            np.int64(thread), threads, counters, patience, form, part, groups, source, num_rows,
            size, out, out_step, x_room, xs_room,
        )  # fmt: skip
    return all_came(counters)
