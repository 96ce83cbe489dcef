"""A whole step of a decoder of the Llama family as one numba kernel; imported only with numba.

Between the products everything is float32. The kernel gets addresses: see `run` for the tables.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from flashpage.attention.cpu.numba_math import bytes_at, float32_at, jit
from flashpage.layers.cpu.attention import (
    attend,
    count_parts,
    join,
    plan,
    request_keys,
    scratch_size,
)
from flashpage.layers.cpu.attention_vectors import row_copy, store_key, store_value, write_rotated
from flashpage.layers.cpu.dots import X_BYTES, XS_BYTES
from flashpage.layers.cpu.linear import (
    EXACT,
    aligned,
    block_of,
    group_bytes,
    multiply_columns,
    multiply_group,
    pairs_among,
    rows_at_once,
    rows_in_pairs,
    scales_bytes,
    scales_of,
    scratch_bytes,
    share,
    uses_tiles,
)
from flashpage.layers.cpu.packing import BLOCK, Q6_WIDE
from flashpage.layers.cpu.pairs import UNPACKED_BYTES
from flashpage.layers.cpu.sync import COUNTERS, all_came, meet, take
from flashpage.layers.cpu.tiles import TILE_BYTES, begin_tiles, end_tiles
from flashpage.layers.cpu.vectors import (
    half_at,
    request,
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

NUM_PARTS, GROUPS, COLUMN = 3, 6, 7
"""A projection has up to so many packed weights (of several kinds); where a part's number of groups
and its first output column stand, after what `multiply_group` takes."""

TICKET_ROWS = 16
"""rows from which threads take work piece by piece: one may be slower than another"""

TICKETS = 8
"""shares of attention for each thread where they take it piece by piece"""

ATTENTION = 16
"""where the counter of attention stands, after those of the projections"""

REQUESTED = 8192
"""bytes of weights that a thread asks for before it meets the others, and of their scales as many
groups'"""

MLP_ROWS = 128
"""rows for which gate and up are computed before they are multiplied"""


@jit(**EXACT)
def _norm(x, weight, eps, out, size):  # type: ignore[no-untyped-def]
    scale = np.float32(1) / np.float32(math.sqrt(row_squares(x, size) / np.float32(size) + eps))
    row_scale(x, weight, scale, out, size)


@jit(**EXACT)
def _norm_rows(x, weight, eps, q, xs, first, last, in_pairs, size, room):  # type: ignore[no-untyped-def]
    """Rows of x, normalised and quantised (the first `in_pairs` for pairs), to q with scales xs."""
    blocks = size // BLOCK
    for row in range(first, last):
        _norm(x + row * size * 4, weight, eps, room, size)
        row_quantize(
            room,
            block_of(q, row, 0, blocks, in_pairs),
            scales_of(xs, row, blocks),
            size,
            row < in_pairs,
        )


@jit(**EXACT)
def _project(  # type: ignore[no-untyped-def]
    form, parts, x, xs, num_rows, in_pairs, out, out_step, add, thread, threads, tickets, room
):
    """This thread's columns of all packed weights of one projection, side by side.

    tickets: a counter for each part, from which threads take what to do next where that is much.
    """
    for i in range(NUM_PARTS):
        part = parts[i]
        if part[GROUPS] == 0:
            continue
        out_i = out + part[COLUMN] * 4
        if num_rows < TICKET_ROWS:
            first, last = share(part[GROUPS], thread, threads)
            multiply_columns(
                form, part, first, last, x, xs, num_rows, in_pairs, out_i, out_step, add, room
            )
            continue
        most, pairs = rows_at_once(part[3]), (part[GROUPS] + 1) // 2
        count = (num_rows + most - 1) // most * pairs
        number = take(tickets.ctypes.data + 8 * i)
        while number < count:
            # Two groups at a time: processors fetch lines of cache by twos.
            row, group = number // pairs * most, number % pairs * 2
            last = min(group + 2, part[GROUPS])
            rows = min(most, num_rows - row)
            multiply_columns(
                form, part, group, last, x + row * part[3] * X_BYTES, scales_of(xs, row, part[3]),
                rows, pairs_among(in_pairs, row, rows), out_i + row * out_step, out_step, add, room,
            )  # fmt: skip
            number = take(tickets.ctypes.data + 8 * i)


@jit(**EXACT)
def _request_columns(parts, num_rows, thread, threads):  # type: ignore[no-untyped-def]
    """Ask for what `_project` will read first, before this thread waits for the others."""
    part = parts[0]
    if num_rows < TICKET_ROWS:
        first, last = share(part[GROUPS], thread, threads)
        _request_groups(part, first, last)


@jit(**EXACT)
def _request_groups(part, first, last):  # type: ignore[no-untyped-def]
    weights, scales = part[3] * part[4], part[3] * part[5]
    last = min(last, first + (REQUESTED + weights - 1) // weights)
    request(part[0] + first * weights, min(REQUESTED, (last - first) * weights))
    request(part[1] + first * scales, min(REQUESTED, (last - first) * scales))


@jit(**EXACT)
def _find(parts, column):  # type: ignore[no-untyped-def]
    """The part that an output column is in, and the group within."""
    at = 0
    while at + 1 < NUM_PARTS and parts[at + 1, GROUPS] > 0 and column >= parts[at + 1, COLUMN]:
        at += 1
    return at, (column - parts[at, COLUMN]) // 16


@jit(**EXACT)
def _gate_and_up(  # type: ignore[no-untyped-def]
    form, parts, bias, x, xs, num_rows, in_pairs, size, q, qs, thread, threads, tickets, room
):
    """This thread's columns of silu(gate) * up, quantised to q and qs.

    room: scratch: of a tile, 256 bytes for each of MLP_ROWS rows, and four unpacked groups.
    """
    results = room + TILE_BYTES
    unpacked = results + MLP_ROWS * 256
    block, last = share(size // BLOCK, thread, threads)
    if num_rows >= TICKET_ROWS:
        block, last = take(tickets.ctypes.data), size // BLOCK
    while block < last:
        for rows_from in range(0, num_rows, MLP_ROWS):
            rows = min(MLP_ROWS, num_rows - rows_from)
            pairs = pairs_among(in_pairs, rows_from, rows)
            for i in range(4):  # two groups of gate, two of up
                column = block * 32 + (i % 2) * 16 + (i // 2) * size
                at, group = _find(parts, column)
                part = parts[at]
                space = unpacked + i * part[3] * UNPACKED_BYTES
                bytes_i = group_bytes(form, part, group, num_rows, pairs, space, rows_from > 0)
                multiply_group(
                    form, part, group, bytes_i, x + rows_from * part[3] * X_BYTES,
                    scales_of(xs, rows_from, part[3]), rows, pairs, results + i * 64, 256, 0, room,
                )  # fmt: skip
            for row in range(rows):
                gate = results + row * 256
                if bias != 0:
                    row_add(gate, bias + block * 128, 32)
                    row_add(gate + 128, bias + (size + block * 32) * 4, 32)
                row_silu_mul(gate, gate + 128, gate, 32)
                at = block_of(q, rows_from + row, block, size // BLOCK, in_pairs)
                scales = scales_of(qs, rows_from + row, size // BLOCK) + block * XS_BYTES
                row_quantize(gate, at, scales, BLOCK, rows_from + row < in_pairs)
        block = take(tickets.ctypes.data) if num_rows >= TICKET_ROWS else block + 1


@jit(**EXACT)
def _request_gate_and_up(parts, num_rows, size, thread, threads):  # type: ignore[no-untyped-def]
    """As `_request_columns`, for `_gate_and_up`."""
    if num_rows < TICKET_ROWS:
        block, last = share(size // BLOCK, thread, threads)
        for column in (block * 32, block * 32 + size):
            at, group = _find(parts, column)
            _request_groups(parts[at], group, group + 2 * (last - block))


@jit(**EXACT)
def _rotate_head(  # type: ignore[no-untyped-def]
    kv, head, qkv, vectors, eps, cos, sin, slot, scale, q, k, v, num_q_heads, num_kv_heads, dim,
    room,
):  # fmt: skip
    """A head of q, or of k with its v, of one token: bias, norm, rotation; K and V to the slot."""
    x = qkv + head * dim * 4
    is_key = head >= num_q_heads
    value = x + num_kv_heads * dim * 4
    if vectors[QKV_BIAS] != 0:
        row_add(x, vectors[QKV_BIAS] + head * dim * 4, dim)
        if is_key:
            row_add(value, vectors[QKV_BIAS] + (head + num_kv_heads) * dim * 4, dim)
    norm = vectors[K_NORM] if is_key else vectors[Q_NORM]
    if norm != 0:
        _norm(x, norm, eps, x, dim)
    if not is_key:
        write_rotated(x, cos, sin, scale, q + head * dim * 4, dim)
        return
    write_rotated(x, cos, sin, np.float32(1), room, dim)
    item_size = 2 if len(kv) == 2 else 4
    unit, lane = slot // 16, slot % 16
    at = (unit * num_kv_heads + head - num_q_heads) * 16 * dim * item_size
    store_key(kv, room, k + at + lane * item_size, dim)
    store_value(kv, value, v + at + lane * dim * item_size, dim)


@jit(**EXACT)
def places(arena, offsets):  # type: ignore[no-untyped-def]
    """Addresses of the eight arrays of a step, each aligned to 64."""
    at = aligned(arena)
    return (
        at + offsets[0], at + offsets[1], at + offsets[2], at + offsets[3], at + offsets[4],
        at + offsets[5], at + offsets[6], at + offsets[7],
    )  # fmt: skip


@jit(**EXACT)
def _work(  # type: ignore[no-untyped-def]
    thread, threads, counters, patience, form, kv, x_array, slots, wanted, of_all, of_wanted,
    tables, table_step, units_per_block, weights, vectors, caches, cos, sin, final_norm, eps, scale,
    shape, out, partial, states, arena, offsets, tickets,
):  # fmt: skip
    """One thread's part of `run`. After each `meet` everything from before it is there.

    of_all: positions, tasks of attention, their shares and how many are parts of a row, of all
    rows; of_wanted: of the wanted ones.
    """
    counter, x = counters.ctypes.data, x_array.ctypes.data
    qkv, q, xq, xs, aq, aqs, fq, fqs = places(arena, offsets)
    hidden, intermediate, hq, hkv, dim = shape
    positions, tasks, first_tasks, num_parts = of_all
    num_rows, group = len(slots), hq // hkv
    q_size, qkv_size, heads = hq * dim, (hq + 2 * hkv) * dim, hq + hkv
    most_blocks = max(hidden, max(intermediate, q_size)) // BLOCK
    mlp_bytes = MLP_ROWS * 256 + 4 * (hidden // BLOCK) * UNPACKED_BYTES
    room = np.empty(max(scratch_bytes(most_blocks), TILE_BYTES + mlp_bytes) + 64, np.uint8)
    tile_room = aligned(room)
    row_room = np.empty(max(hidden, dim), np.float32)
    scratch = np.empty(scratch_size(group, dim), np.float32)
    alone = num_rows < threads
    shared_q, shared_s = xq, xs
    if alone:  # every thread has rows of its own, of all the same content: that spares meetings
        xq += thread * num_rows * (hidden // BLOCK) * X_BYTES
        xs += thread * scales_bytes(num_rows, hidden // BLOCK)
    first_row, last_row = (0, num_rows) if alone else share(num_rows, thread, threads)
    first_head, last_head = share(num_rows * heads, thread, threads)
    in_pairs = rows_in_pairs(form, num_rows)
    where = (np.int64(0), aq, aqs, q_size, in_pairs)
    if uses_tiles(form, num_rows):
        begin_tiles(form)
    for layer in range(len(weights)):
        w, v = weights[layer], vectors[layer]
        _norm_rows(
            x, v[ATTENTION_NORM], eps, xq, xs, first_row, last_row, in_pairs, hidden,
            row_room.ctypes.data,
        )  # fmt: skip
        if not alone:
            meet(counter, threads, patience)
        _project(
            form,
            w[QKV],
            xq,
            xs,
            num_rows,
            in_pairs,
            qkv,
            qkv_size * 4,
            0,
            thread,
            threads,
            tickets[layer, QKV],
            tile_room,
        )
        if first_tasks[thread] < first_tasks[thread + 1] and num_rows < TICKET_ROWS:
            request_keys(
                kv, tasks[first_tasks[thread]], tables, table_step, units_per_block,
                caches[layer, 0], caches[layer, 1], hkv, dim,
            )  # fmt: skip
        meet(counter, threads, patience)
        for i in range(first_head, last_head):
            row = i // heads
            angle = positions[row] * dim * 4
            _rotate_head(
                kv, i % heads, qkv + row * qkv_size * 4, v, eps, cos + angle, sin + angle,
                slots[row], scale, q + row * q_size * 4, caches[layer, 0], caches[layer, 1], hq,
                hkv, dim, row_room.ctypes.data,
            )  # fmt: skip
        meet(counter, threads, patience)
        if layer + 1 == len(weights) and len(wanted) < num_rows:
            # All K and V are there: the rest of the last layer is for wanted rows alone.
            if thread == 0:
                for i in range(len(wanted)):
                    row_copy(q + wanted[i] * q_size * 4, q + i * q_size * 4, q_size)
                    row_copy(x + wanted[i] * hidden * 4, x + i * hidden * 4, hidden)
            num_rows, alone, xq, xs = len(wanted), False, shared_q, shared_s
            positions, tasks, first_tasks, num_parts = of_wanted
            first_row, last_row = share(num_rows, thread, threads)
            in_pairs = rows_in_pairs(form, num_rows)
            where = (np.int64(0), aq, aqs, q_size, in_pairs)
            meet(counter, threads, patience)
        t, last_t = first_tasks[thread], first_tasks[thread + 1]
        if num_rows >= TICKET_ROWS:
            t, last_t = take(tickets[layer].ctypes.data + 8 * ATTENTION), len(tasks)
        while t < last_t:
            at = t if num_parts > 0 else 0
            attend(
                kv, tasks[t], q, positions, tables, table_step, units_per_block, caches[layer, 0],
                caches[layer, 1], hkv, group, dim, where, partial[at], states[at], scratch,
            )  # fmt: skip
            if num_rows < TICKET_ROWS:
                t += 1
            else:
                t = take(tickets[layer].ctypes.data + 8 * ATTENTION)
        _request_columns(w[O], num_rows, thread, threads)
        meet(counter, threads, patience)
        if num_parts > 0:
            for t in range(thread, len(tasks), threads):
                join(t, tasks, positions, partial, states, group, dim, where)
            meet(counter, threads, patience)
        _project(
            form,
            w[O],
            aq,
            aqs,
            num_rows,
            in_pairs,
            x,
            hidden * 4,
            1,
            thread,
            threads,
            tickets[layer, O],
            tile_room,
        )
        _request_gate_and_up(w[GATE_UP], num_rows, intermediate, thread, threads)
        meet(counter, threads, patience)
        if v[O_BIAS] != 0:
            first, last = share(num_rows, thread, threads)
            for row in range(first, last):
                row_add(x + row * hidden * 4, v[O_BIAS], hidden)
            meet(counter, threads, patience)
        _norm_rows(
            x, v[MLP_NORM], eps, xq, xs, first_row, last_row, in_pairs, hidden,
            row_room.ctypes.data,
        )  # fmt: skip
        if not alone:
            meet(counter, threads, patience)
        _gate_and_up(
            form, w[GATE_UP], v[GATE_UP_BIAS], xq, xs, num_rows, in_pairs, intermediate, fq,
            fqs, thread, threads, tickets[layer, GATE_UP], tile_room,
        )  # fmt: skip
        _request_columns(w[DOWN], num_rows, thread, threads)
        meet(counter, threads, patience)
        _project(
            form,
            w[DOWN],
            fq,
            fqs,
            num_rows,
            in_pairs,
            x,
            hidden * 4,
            1,
            thread,
            threads,
            tickets[layer, DOWN],
            tile_room,
        )
        if layer + 1 < len(weights):
            _request_columns(weights[layer + 1, QKV], num_rows, thread, threads)
        meet(counter, threads, patience)
        if v[DOWN_BIAS] != 0:
            first, last = share(num_rows, thread, threads)
            for row in range(first, last):
                row_add(x + row * hidden * 4, v[DOWN_BIAS], hidden)
            meet(counter, threads, patience)
    if uses_tiles(form, len(slots)):
        end_tiles(form)
    first, last = share(num_rows, thread, threads)
    for row in range(first, last):
        _norm(x + row * hidden * 4, final_norm, eps, out + row * hidden * 4, hidden)
    room[0] = row_room[0] = scratch[0] = 0  # arrays must outlive the addresses in them


@jit(**EXACT)
def _attention(starts, positions, num_kv_heads, group, threads):  # type: ignore[no-untyped-def]
    """Positions of rows, and their `plan`: see `_work`."""
    shares = threads if len(positions) < TICKET_ROWS else threads * TICKETS
    tasks, first_tasks = plan(starts, positions, num_kv_heads, group, shares)
    return positions, tasks, first_tasks, count_parts(tasks, positions)


@jit(**EXACT)
def _room_of_parts(attention):  # type: ignore[no-untyped-def]
    return len(attention[1]) if attention[3] > 0 else 0


@jit(parallel=True, **EXACT)
def run(  # type: ignore[no-untyped-def]
    form, kv, x, slots, positions, starts, wanted, wanted_starts, tables, units_per_block, weights,
    vectors, caches, cos, sin, final_norm, eps, scale, shape, out, threads, patience,
):  # fmt: skip
    """All layers and the final norm for the rows of a step; returns whether all threads took part.

    The last layer stores K and V of all rows, and goes on with those whose result is wanted.

    Args:
        form, kv: tags of `forms` and of the kind of pages.
        x: float32 `[num_rows, hidden]`, the tokens' embeddings; overwritten.
        slots, positions: int64 `[num_rows]`. starts: int64 `[num_seqs + 1]`, rows of each sequence.
        wanted: int64 `[num_wanted]`, rows in ascending order: all, or at most one of a sequence.
        wanted_starts: int64 `[num_seqs + 1]`, as `starts` in `wanted`.
        tables: int32 `[num_seqs, max_blocks]`; a page is `units_per_block` units of 16 tokens.
        weights: int64 `[num_layers, 4, NUM_PARTS, 8]`: `PackedWeight.address`, groups (0: no such
            part) and the first output column.
        vectors: int64 `[num_layers, 8]`, addresses of float32 vectors, 0 = none.
        caches: int64 `[num_layers, 2]`, addresses of K and V.
        cos, sin: addresses of float32 `[positions, dim]`; sin carries the sign of its half.
        final_norm: address. scale: softmax scale. eps: of the norms.
        shape: (hidden, intermediate, q heads, kv heads, dim).
        out: address of float32 `[num_wanted, hidden]`.
        threads: how many there are. patience: as in `meet`.
    """
    hidden, intermediate, hq, hkv, dim = shape
    rows = len(slots)
    q_size, qkv_size, group = hq * dim, (hq + 2 * hkv) * dim, hq // hkv
    copies = threads if rows < threads else 1
    x_blocks, a_blocks, f_blocks = hidden // BLOCK, q_size // BLOCK, intermediate // BLOCK
    sizes = (
        rows * qkv_size * 4, rows * q_size * 4,
        copies * rows * x_blocks * X_BYTES, copies * scales_bytes(rows, x_blocks),
        rows * a_blocks * X_BYTES, scales_bytes(rows, a_blocks),
        rows * f_blocks * X_BYTES, scales_bytes(rows, f_blocks),
    )  # fmt: skip
    offsets = np.zeros(9, np.int64)
    for i in range(8):
        offsets[i + 1] = offsets[i] + (sizes[i] + 63) // 64 * 64
    arena = np.empty(offsets[8] + 64, np.uint8)
    of_all = _attention(starts, positions, hkv, group, threads)
    of_wanted = of_all
    if len(wanted) < rows:
        of_wanted = _attention(wanted_starts, positions[wanted], hkv, group, threads)
    # The parts' results are found by the number of their task.
    parts = max(1, max(_room_of_parts(of_all), _room_of_parts(of_wanted)))
    partial = np.empty((parts, group * dim), np.float32)
    states = np.empty((parts, 4 * group), np.float32)
    flat_tables = tables.reshape(-1)
    table_step = tables.shape[1]
    counters = np.zeros(COUNTERS, np.int64)
    tickets = np.zeros((len(weights), 5, 4), np.int64)
    for thread in numba.prange(threads):
        # The loop must have the arrays themselves: numba may free what it has only addresses of.
        _work(
            np.int64(thread), threads, counters, patience, form, kv, x, slots, wanted, of_all,
            of_wanted, flat_tables, table_step, units_per_block, weights, vectors, caches, cos, sin,
            final_norm, eps, scale, shape, out, partial, states, arena, offsets, tickets,
        )  # fmt: skip
    return all_came(counters)


@jit(**EXACT)
def extremes(ids, slots, positions):  # type: ignore[no-untyped-def]
    """The smallest and largest of int64 `[num_rows]` ids and slots, and the largest position."""
    return ids.min(), ids.max(), slots.min(), slots.max(), positions.max()


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
