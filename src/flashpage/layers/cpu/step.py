"""A whole step of a decoder of the Llama family as one numba kernel; imported only with numba.

Between the products everything is float32. The kernel gets addresses: see `run` for the tables.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from flashpage.attention.cpu.numba_math import bytes_at, float32_at, jit
from flashpage.layers.cpu.attention import attend, plan
from flashpage.layers.cpu.attention_vectors import store_key, store_value, write_rotated
from flashpage.layers.cpu.linear import EXACT, aligned, multiply, quantize_rows
from flashpage.layers.cpu.packing import Q6_WIDE
from flashpage.layers.cpu.vectors import (
    half_at,
    row_add,
    row_quantize,
    row_scale,
    row_silu_mul,
    row_squares,
)

QKV, O, GATE_UP, DOWN = range(4)  # noqa: E741
"""Projections in the table of weights."""

ATTENTION_NORM, MLP_NORM, Q_NORM, K_NORM, QKV_BIAS, O_BIAS, GATE_UP_BIAS, DOWN_BIAS = range(8)
"""Places in a layer's table of float32 vectors."""

NUM_PARTS, PART_FIELDS = 3, 8
"""A projection has up to so many packed weights (of several kinds), each so many numbers."""

SERIAL_ROWS = 3
"""rows up to which one thread does what lies between products"""


@jit(**EXACT)
def _norm(x, weight, eps, out, size):  # type: ignore[no-untyped-def]
    scale = np.float32(1) / np.float32(math.sqrt(row_squares(x, size) / np.float32(size) + eps))
    row_scale(x, weight, scale, out, size)


@jit(**EXACT)
def _norm_row(x, weight, eps, q, xs, size):  # type: ignore[no-untyped-def]
    room = np.empty(size, np.float32)
    _norm(x, weight, eps, room.ctypes.data, size)
    row_quantize(room.ctypes.data, q, xs, size)
    return room.size


@jit(parallel=True, **EXACT)
def _norm_rows_parallel(x, weight, eps, q, xs, num_rows, size):  # type: ignore[no-untyped-def]
    for row in numba.prange(num_rows):
        _norm_row(x + row * size * 4, weight, eps, q + row * size, xs + row * size // 2, size)


@jit(**EXACT)
def _norm_rows(x, weight, eps, q, xs, num_rows, size):  # type: ignore[no-untyped-def]
    """Rows of x, normalised, to int8 q with scales xs."""
    if num_rows > SERIAL_ROWS:
        _norm_rows_parallel(x, weight, eps, q, xs, num_rows, size)
    else:
        for row in range(num_rows):
            _norm_row(x + row * size * 4, weight, eps, q + row * size, xs + row * size // 2, size)


@jit(**EXACT)
def _silu_row(gate_up, bias, q, xs, size):  # type: ignore[no-untyped-def]
    if bias != 0:
        row_add(gate_up, bias, 2 * size)
    row_silu_mul(gate_up, gate_up + size * 4, gate_up, size)
    row_quantize(gate_up, q, xs, size)


@jit(parallel=True, **EXACT)
def _silu_rows_parallel(gate_up, bias, q, xs, num_rows, size):  # type: ignore[no-untyped-def]
    for row in numba.prange(num_rows):
        _silu_row(gate_up + row * size * 8, bias, q + row * size, xs + row * size // 2, size)


@jit(**EXACT)
def _silu_rows(gate_up, bias, q, xs, num_rows, size):  # type: ignore[no-untyped-def]
    """Rows of gate and up, changed in place, to int8 q of silu(gate) * up."""
    if num_rows > SERIAL_ROWS:
        _silu_rows_parallel(gate_up, bias, q, xs, num_rows, size)
    else:
        for row in range(num_rows):
            _silu_row(gate_up + row * size * 8, bias, q + row * size, xs + row * size // 2, size)


@jit(**EXACT)
def _rotate_row(  # type: ignore[no-untyped-def]
    kv, qkv, vectors, eps, cos, sin, slot, scale, q, k, v, num_q_heads, num_kv_heads, dim
):
    """One token: biases and norms of the heads, rotation, K and V to its slot, q times scale."""
    if vectors[QKV_BIAS] != 0:
        row_add(qkv, vectors[QKV_BIAS], (num_q_heads + 2 * num_kv_heads) * dim)
    room = np.empty(dim, np.float32)
    turned = room.ctypes.data
    item_size = 2 if len(kv) == 2 else 4
    unit, lane = slot // 16, slot % 16
    for head in range(num_q_heads + num_kv_heads):
        x = qkv + head * dim * 4
        if head < num_q_heads:
            if vectors[Q_NORM] != 0:
                _norm(x, vectors[Q_NORM], eps, x, dim)
            write_rotated(x, cos, sin, scale, q + head * dim * 4, dim)
            continue
        if vectors[K_NORM] != 0:
            _norm(x, vectors[K_NORM], eps, x, dim)
        write_rotated(x, cos, sin, np.float32(1), turned, dim)
        at = (unit * num_kv_heads + head - num_q_heads) * 16 * dim * item_size
        store_key(kv, turned, k + at + lane * item_size, dim)
        store_value(kv, x + num_kv_heads * dim * 4, v + at + lane * dim * item_size, dim)
    return room.size


@jit(parallel=True, **EXACT)
def _rotate_rows_parallel(  # type: ignore[no-untyped-def]
    kv, qkv, vectors, eps, cos, sin, slots, positions, scale, q, k, v, hq, hkv, dim
):
    for row in numba.prange(len(slots)):
        angle = positions[row] * dim * 4
        _rotate_row(
            kv, qkv + row * (hq + 2 * hkv) * dim * 4, vectors, eps, cos + angle, sin + angle,
            slots[row], scale, q + row * hq * dim * 4, k, v, hq, hkv, dim,
        )  # fmt: skip


@jit(**EXACT)
def _rotate_rows(  # type: ignore[no-untyped-def]
    kv, qkv, vectors, eps, cos, sin, slots, positions, scale, q, k, v, hq, hkv, dim
):
    if len(slots) > SERIAL_ROWS:
        _rotate_rows_parallel(
            kv, qkv, vectors, eps, cos, sin, slots, positions, scale, q, k, v, hq, hkv, dim
        )
        return
    for row in range(len(slots)):
        angle = positions[row] * dim * 4
        _rotate_row(
            kv, qkv + row * (hq + 2 * hkv) * dim * 4, vectors, eps, cos + angle, sin + angle,
            slots[row], scale, q + row * hq * dim * 4, k, v, hq, hkv, dim,
        )  # fmt: skip


@jit(**EXACT)
def _quantize_rows(source, num_rows, size, q, xs):  # type: ignore[no-untyped-def]
    if num_rows > SERIAL_ROWS:
        quantize_rows(source, 4 * size, num_rows, size, q, xs)
    else:
        for row in range(num_rows):
            row_quantize(source + row * size * 4, q + row * size, xs + row * (size // 2), size)


@jit(**EXACT)
def _project(form, parts, q, xs, num_rows, out, out_step, add, threads):  # type: ignore[no-untyped-def]
    """All packed weights of one projection, side by side."""
    for i in range(NUM_PARTS):
        part = parts[i]
        if part[6] > 0:
            weight = (part[0], part[1], part[2], part[3], part[4], part[5])
            multiply(
                form, weight, part[6], q, xs, num_rows, out + part[7] * 4, out_step, add, threads
            )


@jit(**EXACT)
def _add_bias(x, bias, num_rows, size):  # type: ignore[no-untyped-def]
    if bias != 0:
        for row in range(num_rows):
            row_add(x + row * size * 4, bias, size)


@jit(**EXACT)
def run(  # type: ignore[no-untyped-def]
    form, kv, x, slots, positions, starts, tables, units_per_block, weights, vectors, caches,
    cos, sin, final_norm, eps, head_eps, scale, shape, out, threads,
):  # fmt: skip
    """All layers and the final norm for the rows of a step.

    Args:
        form, kv: tags of `forms` and of the kind of pages.
        x: float32 `[num_rows, hidden]`, the tokens' embeddings; overwritten.
        slots, positions: int64 `[num_rows]`. starts: int64 `[num_seqs + 1]`, rows of each sequence.
        tables: int32 `[num_seqs, max_blocks]`; a page is `units_per_block` units of 16 tokens.
        weights: int64 `[num_layers, 4, NUM_PARTS, PART_FIELDS]`: `PackedWeight.address`, groups (0:
            no such part) and the first output column.
        vectors: int64 `[num_layers, 8]`, addresses of float32 vectors, 0 = none.
        caches: int64 `[num_layers, 2]`, addresses of K and V.
        cos, sin: addresses of float32 `[positions, dim]`; sin carries the sign of its half.
        final_norm: address. scale: softmax scale. eps, head_eps: of the norms.
        shape: (hidden, intermediate, q heads, kv heads, dim).
        out: address of float32 `[num_rows, hidden]`.
        threads: how many there are.
    """
    hidden, intermediate, hq, hkv, dim = shape
    num_rows = len(slots)
    q_size, qkv_size = hq * dim, (hq + 2 * hkv) * dim
    widest = max(hidden, max(intermediate, q_size))
    x_room = np.empty(num_rows * widest + 64, np.uint8)
    xs_room = np.empty(num_rows * (widest // 2) + 64, np.uint8)
    xq, xs = aligned(x_room), aligned(xs_room)
    wide_room = np.empty(num_rows * max(qkv_size + 2 * q_size, 2 * intermediate) * 4 + 64, np.uint8)
    qkv = aligned(wide_room)
    q = qkv + num_rows * qkv_size * 4
    attended = q + num_rows * q_size * 4
    gate_up = qkv
    tasks = plan(starts, positions, hkv, hq // hkv)
    flat_tables = tables.reshape(-1)
    x_at = x.ctypes.data
    for layer in range(len(weights)):
        w, v = weights[layer], vectors[layer]
        _norm_rows(x_at, v[ATTENTION_NORM], eps, xq, xs, num_rows, hidden)
        _project(form, w[QKV], xq, xs, num_rows, qkv, qkv_size * 4, 0, threads)
        _rotate_rows(
            kv, qkv, v, head_eps, cos, sin, slots, positions, scale, q, caches[layer, 0],
            caches[layer, 1], hq, hkv, dim,
        )  # fmt: skip
        attend(
            kv, tasks, q, q_size * 4, positions, flat_tables, tables.shape[1], units_per_block,
            caches[layer, 0], caches[layer, 1], hkv, hq // hkv, dim, attended, q_size * 4, threads,
        )  # fmt: skip
        _quantize_rows(attended, num_rows, q_size, xq, xs)
        _project(form, w[O], xq, xs, num_rows, x_at, hidden * 4, 1, threads)
        _add_bias(x_at, v[O_BIAS], num_rows, hidden)
        _norm_rows(x_at, v[MLP_NORM], eps, xq, xs, num_rows, hidden)
        _project(form, w[GATE_UP], xq, xs, num_rows, gate_up, intermediate * 8, 0, threads)
        _silu_rows(gate_up, v[GATE_UP_BIAS], xq, xs, num_rows, intermediate)
        _project(form, w[DOWN], xq, xs, num_rows, x_at, hidden * 4, 1, threads)
        _add_bias(x_at, v[DOWN_BIAS], num_rows, hidden)
    for row in range(num_rows):
        _norm(x_at + row * hidden * 4, final_norm, eps, out + row * hidden * 4, hidden)
    # The arrays must outlive the addresses in them.
    return x_room.size + xs_room.size + wide_room.size


@jit(**EXACT)
def embed(weight, ids, out):  # type: ignore[no-untyped-def]
    """Rows `ids` of a packed table to float32 `[len(ids), 32 * blocks]`; weight: see `multiply`."""
    w, s, kind, num_blocks, block_bytes, scale_bytes = weight
    halves = 2 if kind == Q6_WIDE else 1
    for row in range(len(ids)):
        group, lane = ids[row] // 16, ids[row] % 16
        for block in range(num_blocks):
            at = group * num_blocks + block
            values = bytes_at(w + at * block_bytes, block_bytes)
            for half in range(halves):
                scales = s + at * scale_bytes + half * 128
                if scale_bytes == 64:
                    d, m = half_at(scales + lane * 2), half_at(scales + 32 + lane * 2)
                else:
                    d, m = float32_at(scales, 32)[lane], float32_at(scales, 32)[16 + lane]
                for column in range(32 // halves * half, 32 // halves * (half + 1)):
                    place = lane * 4 + column % 4
                    if block_bytes == 512:
                        value = np.int64(values[column // 4 * 64 + place])
                    else:
                        byte = np.int64(values[column % 16 // 4 * 64 + place])
                        value = byte & 15 if column < 16 else byte >> 4
                    out[row, block * 32 + column] = d * np.float32(value) + m
