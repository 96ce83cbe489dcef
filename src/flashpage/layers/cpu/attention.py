"""Causal attention over pages for the rows of a step, as numba kernels; imported only with numba.

One order of operations for every row: keys in blocks of 64 from position 0, softmax brought up to
date block by block, SPLIT keys at a time, whose results are merged in order. Whether a row comes
alone (its splits may then run on different threads) or among many, its bits are the same.
"""

from __future__ import annotations

import numpy as np

from flashpage.attention.cpu.numba_math import jit
from flashpage.layers.cpu.attention_vectors import (
    KEYS,
    merge_row,
    narrow_values_1,
    narrow_values_4,
    row_copy,
    row_expand,
    row_multiply,
    scores_1,
    scores_2,
    scores_3,
    scores_4,
    scores_6,
    softmax,
    values_1,
    values_2,
    values_3,
    values_4,
    values_6,
)
from flashpage.layers.cpu.dots import XS_BYTES
from flashpage.layers.cpu.linear import EXACT, block_of, scales_of
from flashpage.layers.cpu.packing import BLOCK
from flashpage.layers.cpu.vectors import request, row_quantize

SPLIT = 128
"""keys per split: where the work of one row can be cut in two"""

MAX_ROWS = 48
"""rows of one task at most, unless one token alone has more (query heads per kv head)"""

FEW_ROWS = 12
"""rows up to which 16-bit keys are made float32 as they are used, and not once before"""

_NEG_INF = np.float32(-np.inf)


@jit(**EXACT)
def _scores(kv, n, q, s, k0, k1, k2, k3, n0, n1, n2, n3, dim):  # type: ignore[no-untyped-def]
    """Scores of up to n rows; returns how many."""
    if n >= 6:
        scores_6(kv, q, s, k0, k1, k2, k3, n0, n1, n2, n3, dim)
        return 6
    if n >= 4:
        scores_4(kv, q, s, k0, k1, k2, k3, n0, n1, n2, n3, dim)
        return 4
    if n == 3:
        scores_3(kv, q, s, k0, k1, k2, k3, n0, n1, n2, n3, dim)
    elif n == 2:
        scores_2(kv, q, s, k0, k1, k2, k3, n0, n1, n2, n3, dim)
    else:
        scores_1(kv, q, s, k0, k1, k2, k3, n0, n1, n2, n3, dim)
    return n


@jit(**EXACT)
def _values(kv, n, p, count, v, next_v, item_size, dim, o, state):  # type: ignore[no-untyped-def]
    """Add the values of `count` of 64 keys to n rows, as many as `_scores` takes."""
    d = 0
    while d + 64 <= dim:
        at = d * item_size
        if n == 6:
            values_6(
                kv, p, count, v[0] + at, v[1] + at, v[2] + at, v[3] + at, next_v[0] + at,
                next_v[1] + at, next_v[2] + at, next_v[3] + at, dim, o + d * 4, state,
            )  # fmt: skip
        elif n == 4:
            values_4(
                kv, p, count, v[0] + at, v[1] + at, v[2] + at, v[3] + at, next_v[0] + at,
                next_v[1] + at, next_v[2] + at, next_v[3] + at, dim, o + d * 4, state,
            )  # fmt: skip
        elif n == 3:
            values_3(
                kv, p, count, v[0] + at, v[1] + at, v[2] + at, v[3] + at, next_v[0] + at,
                next_v[1] + at, next_v[2] + at, next_v[3] + at, dim, o + d * 4, state,
            )  # fmt: skip
        elif n == 2:
            values_2(
                kv, p, count, v[0] + at, v[1] + at, v[2] + at, v[3] + at, next_v[0] + at,
                next_v[1] + at, next_v[2] + at, next_v[3] + at, dim, o + d * 4, state,
            )  # fmt: skip
        else:
            values_1(
                kv, p, count, v[0] + at, v[1] + at, v[2] + at, v[3] + at, next_v[0] + at,
                next_v[1] + at, next_v[2] + at, next_v[3] + at, dim, o + d * 4, state,
            )  # fmt: skip
        d += 64
    while d < dim:
        at = d * item_size
        row = 0
        while row + 4 <= n:
            narrow_values_4(
                kv, p + row * KEYS * 4, count, v[0] + at, v[1] + at, v[2] + at, v[3] + at,
                next_v[0] + at, next_v[1] + at, next_v[2] + at, next_v[3] + at, dim,
                o + (row * dim + d) * 4, state + row * 16,
            )  # fmt: skip
            row += 4
        while row < n:
            narrow_values_1(
                kv, p + row * KEYS * 4, count, v[0] + at, v[1] + at, v[2] + at, v[3] + at,
                next_v[0] + at, next_v[1] + at, next_v[2] + at, next_v[3] + at, dim,
                o + (row * dim + d) * 4, state + row * 16,
            )  # fmt: skip
            row += 1
        d += 16


@jit(**EXACT)
def _unit(table, index, units_per_block):  # type: ignore[no-untyped-def]
    return np.int64(table[index // units_per_block]) * units_per_block + index % units_per_block


@jit(**EXACT)
def _attend_keys(  # type: ignore[no-untyped-def]
    kv, q, begin_row, rows, group, position, first, end, k, v, next_k, next_v, dim, s, o, state
):
    """The 64 keys from `first` on, for rows `begin_row ... rows`; see `_attend_split`.

    k, v: addresses of the head in the four units of these keys; next_k, next_v: of those that come
    next.
    """
    item_size = 2 if len(kv) == 2 else 4
    s_at, o_at, state_at = s.ctypes.data, o.ctypes.data, state.ctypes.data
    row = begin_row
    while row < rows:
        row += _scores(
            kv, rows - row, q + row * dim * 4, s_at + row * KEYS * 4, k[0], k[1], k[2], k[3],
            next_k[0], next_k[1], next_k[2], next_k[3], dim,
        )  # fmt: skip
    for row in range(begin_row, rows):
        valid = min(position + row // group + 1, end) - first
        softmax(s_at + row * KEYS * 4, min(valid, KEYS), state_at + row * 16)
    row = begin_row
    while row < rows:
        n = rows - row
        n = 6 if n >= 6 else (4 if n >= 4 else n)
        valid = min(min(position + (row + n - 1) // group + 1, end) - first, KEYS)
        _values(
            kv, n, s_at + row * KEYS * 4, valid, v, next_v, item_size, dim, o_at + row * dim * 4,
            state_at + row * 16,
        )  # fmt: skip
        row += n


@jit(**EXACT)
def _unit_addresses(base, table, unit, last_unit, units_per_block, unit_bytes):  # type: ignore[no-untyped-def]
    """Of four units of a sequence; the last one stands in for those that are not there."""
    return (
        base + _unit(table, min(unit, last_unit), units_per_block) * unit_bytes,
        base + _unit(table, min(unit + 1, last_unit), units_per_block) * unit_bytes,
        base + _unit(table, min(unit + 2, last_unit), units_per_block) * unit_bytes,
        base + _unit(table, min(unit + 3, last_unit), units_per_block) * unit_bytes,
    )


@jit(**EXACT)
def _expanded(kv, units, dim, room):  # type: ignore[no-untyped-def]
    """The head in four units as float32 in `room`; returns their addresses there."""
    size = 16 * dim
    for i in range(4):
        row_expand(kv, units[i], room + i * size * 4, size)
    return room, room + size * 4, room + 2 * size * 4, room + 3 * size * 4


@jit(**EXACT)
def _attend_split(  # type: ignore[no-untyped-def]
    kv, q, rows, group, position, table, units_per_block, k, v, unit_bytes, dim, begin, end, s, o,
    state, keys_room,
):  # fmt: skip
    """Keys `begin ... end` of one sequence for rows of one kv head, into o and state.

    The keys that come next are asked for meanwhile, those of the next split too.

    Row r is query head `r % group` of the token at `position + r // group`. k and v: addresses of
    the head in unit 0. s, o, state: scratch `[rows, 64]`, `[rows, dim]`, `[rows, 4]` float32;
    keys_room: address of scratch `[2, 64, dim]` float32.
    """
    for row in range(rows):
        state[4 * row], state[4 * row + 1] = _NEG_INF, np.float32(0)
    o[: rows * dim] = np.float32(0)
    last_unit, last_of_all = (end - 1) // 16, (position + rows // group - 1) // 16
    for first in range(begin, end, KEYS):
        unit = first // 16
        this_k = _unit_addresses(k, table, unit, last_unit, units_per_block, unit_bytes)
        this_v = _unit_addresses(v, table, unit, last_unit, units_per_block, unit_bytes)
        next_k = _unit_addresses(k, table, unit + 4, last_of_all, units_per_block, unit_bytes)
        next_v = _unit_addresses(v, table, unit + 4, last_of_all, units_per_block, unit_bytes)
        begin_row = max(0, first - position) * group
        if len(kv) == 2 and rows > FEW_ROWS:
            wide_k = _expanded(kv, this_k, dim, keys_room)
            wide_v = _expanded(kv, this_v, dim, keys_room + KEYS * dim * 4)
            _attend_keys(
                (np.int64(0),), q, begin_row, rows, group, position, first, end, wide_k, wide_v,
                next_k, next_v, dim, s, o, state,
            )  # fmt: skip
        else:
            _attend_keys(
                kv, q, begin_row, rows, group, position, first, end, this_k, this_v, next_k, next_v,
                dim, s, o, state,
            )  # fmt: skip


@jit(**EXACT)
def _merge(total, total_state, o, state, rows, dim):  # type: ignore[no-untyped-def]
    """Rows of a split into those of all splits before it."""
    for row in range(rows):
        if state[4 * row] == _NEG_INF and state[4 * row + 1] == 0:
            continue  # the row sees none of the split's keys
        merge_row(
            total.ctypes.data + row * dim * 4, total_state.ctypes.data + row * 16,
            o.ctypes.data + row * dim * 4, state.ctypes.data + row * 16, dim,
        )  # fmt: skip


@jit(**EXACT)
def _write(total, state, rows, group, dim, where, first_row, head):  # type: ignore[no-untyped-def]
    """Normalised rows to their places, in float32 and quantised; see `attend`."""
    out, q, xs, row_size, in_pairs = where
    for token in range(rows // group):
        place, column = first_row + token, head * group * dim
        first = place * row_size + column
        for row in range(token * group, (token + 1) * group):
            row_multiply(total.ctypes.data + row * dim * 4, np.float32(1) / state[4 * row + 1], dim)
        source = total.ctypes.data + token * group * dim * 4
        if out != 0:
            row_copy(source, out + first * 4, group * dim)
        first_block, blocks = column // BLOCK, row_size // BLOCK
        row_quantize(
            source, block_of(q, place, first_block, blocks, in_pairs),
            scales_of(xs, place, blocks) + first_block * XS_BYTES, group * dim, place < in_pairs,
        )  # fmt: skip


@jit(**EXACT)
def _cut(begin, room, end):  # type: ignore[no-untyped-def]
    """Where keys `begin ... end` of a row can be cut, nearest to `room` keys from their begin."""
    last_split = (end - 1) // SPLIT * SPLIT
    if 2 * (begin + room) >= last_split + end:
        return end
    return min((begin + room + SPLIT // 2) // SPLIT * SPLIT, last_split)


@jit(**EXACT)
def plan(starts, positions, num_kv_heads, group, num_shares):  # type: ignore[no-untyped-def]
    """Tasks of a step, the same for every layer, and their shares of about as much work.

    Args:
        starts: int64 `[num_seqs + 1]`, rows of the sequences in the step.
        positions: int64 `[num_rows]`.

    Returns:
        tasks: int64 `[num_tasks, 6]`: sequence, kv head, first row, rows, first key, last key + 1.
            A row that comes alone has several where a share ends within it: one for its keys up to
            there, and one for each split that follows. They are neighbours.
        first_tasks: int64 `[num_shares + 1]`, where each share begins.
    """
    tokens = max(1, MAX_ROWS // group)
    most, total = 0, 0
    for i in range(len(starts) - 1):
        rows = starts[i + 1] - starts[i]
        for row in range(0, rows, tokens):
            n = min(tokens, rows - row)
            end = positions[starts[i] + row + n - 1] + 1
            total += end * n * num_kv_heads
            most += (1 if rows > 1 else (end + SPLIT - 1) // SPLIT) * num_kv_heads
    tasks = np.empty((most, 6), np.int64)
    first_tasks = np.zeros(num_shares + 1, np.int64)
    at, share, done = 0, 0, 0
    for i in range(len(starts) - 1):
        first, rows = starts[i], starts[i + 1] - starts[i]
        for row in range(0, rows, tokens):
            n = min(tokens, rows - row)
            end = positions[first + row + n - 1] + 1
            for head in range(num_kv_heads):
                key = 0
                while key < end:
                    last = end
                    if share + 1 < num_shares:
                        room = total * (share + 1) // num_shares - done
                        if rows == 1:
                            last = _cut(key, room, end)
                        elif 2 * room < end * n:
                            last = key
                        if last <= key:
                            share += 1
                            first_tasks[share] = at
                            continue
                    if key > 0:
                        last = min(key + SPLIT, end)
                    tasks[at, 0], tasks[at, 1], tasks[at, 2] = i, head, first + row
                    tasks[at, 3], tasks[at, 4], tasks[at, 5] = n, key, last
                    at += 1
                    done += (last - key) * n
                    key = last
    first_tasks[share + 1 :] = at
    return tasks[:at], first_tasks


@jit(**EXACT)
def count_parts(tasks, positions):  # type: ignore[no-untyped-def]
    """How many tasks are some of the keys of a row that comes alone."""
    count = 0
    for task in tasks:
        count += _is_part(task, positions)
    return count


@jit(**EXACT)
def _is_part(task, positions):  # type: ignore[no-untyped-def]
    return task[3] == 1 and (task[4] > 0 or task[5] <= positions[task[2]])


@jit(**EXACT)
def request_keys(  # type: ignore[no-untyped-def]
    kv, task, tables, table_step, units_per_block, k, v, num_kv_heads, dim
):
    """Ask for the K and V that a task of one row reads first; arguments as in `attend`."""
    sequence, head, begin, end = task[0], task[1], task[4], task[5]
    unit_bytes = 16 * dim * (2 if len(kv) == 2 else 4)
    table = tables[sequence * table_step : (sequence + 1) * table_step]
    for unit in range(begin // 16, (min(begin + KEYS, end) + 15) // 16):
        at = (_unit(table, unit, units_per_block) * num_kv_heads + head) * unit_bytes
        request(k + at, unit_bytes)
        request(v + at, unit_bytes)


@jit(**EXACT)
def scratch_size(group, dim):  # type: ignore[no-untyped-def]
    """float32 that `attend` needs."""
    return max(1, MAX_ROWS // group) * group * (KEYS + 3 * dim + 8) + 2 * KEYS * dim


@jit(**EXACT)
def attend(  # type: ignore[no-untyped-def]
    kv, task, q, positions, tables, table_step, units_per_block, k, v, num_kv_heads, group, dim,
    where, partial, state_of_partial, scratch,
):  # fmt: skip
    """One task of one layer.

    Args:
        kv: kind of the pages. task: of `plan`.
        q: address of float32 `[num_rows, num_q_heads * dim]`, times the softmax scale already.
        positions: int64 `[num_rows]`. tables: int32, `table_step` pages per sequence.
        units_per_block: units of 16 tokens in a page. k, v: addresses of the layer's pages.
        where: addresses of the results of all rows as float32 (0: not wanted), quantised, and of
            those's scales (`row_quantize`), how many values a row has, and how many rows, the
            first ones, are quantised for `pairs`.
        partial, state_of_partial: float32 `[group * dim]` and `[4 * group]`, for the result of one
            split of several, which `join` brings to its place.
        scratch: float32 `[scratch_size]`.
    """
    sequence, head, first_row, tokens, begin, end = task
    item_size = 2 if len(kv) == 2 else 4
    unit_bytes = num_kv_heads * 16 * dim * item_size
    rows = tokens * group
    size = rows * dim
    s = scratch[: rows * KEYS]
    o = scratch[rows * KEYS : rows * KEYS + size]
    total = scratch[rows * KEYS + size : rows * KEYS + 2 * size]
    q_rows = scratch[rows * KEYS + 2 * size : rows * KEYS + 3 * size]
    state = scratch[rows * KEYS + 3 * size : rows * KEYS + 3 * size + 4 * rows]
    total_state = scratch[rows * KEYS + 3 * size + 4 * rows : rows * KEYS + 3 * size + 8 * rows]
    for token in range(tokens):
        column = (first_row + token) * where[3] + head * group * dim
        row_copy(q + column * 4, q_rows.ctypes.data + token * group * dim * 4, group * dim)
    keys_room = scratch.ctypes.data + rows * (KEYS + 3 * dim + 8) * 4
    position = positions[first_row]
    table = tables[sequence * table_step : (sequence + 1) * table_step]
    head_at = head * 16 * dim * item_size
    if tokens == 1 and begin == 0:  # those of later splits were asked for by the one before
        request_keys(kv, task, tables, table_step, units_per_block, k, v, num_kv_heads, dim)
    for key in range(begin, end, SPLIT):
        _attend_split(
            kv, q_rows.ctypes.data, rows, group, position, table, units_per_block, k + head_at,
            v + head_at, unit_bytes, dim, key, min(key + SPLIT, end), s, o, state, keys_room,
        )  # fmt: skip
        if key == begin:
            total[:] = o
            total_state[:] = state
        else:
            _merge(total, total_state, o, state, rows, dim)
    if _is_part(task, positions):
        partial[:] = total
        state_of_partial[:] = total_state
    else:
        _write(total, total_state, rows, group, dim, where, first_row, head)


@jit(**EXACT)
def join(first, tasks, positions, partial, states, group, dim, where):  # type: ignore[no-untyped-def]
    """Bring the result of a row whose splits were several tasks to its place.

    first: number of the task; does nothing unless it is the first of several.
    """
    if tasks[first, 4] > 0 or not _is_part(tasks[first], positions):
        return
    t = first + 1
    while t < len(tasks) and tasks[t, 4] > 0:
        _merge(partial[first], states[first], partial[t], states[t], group, dim)
        t += 1
    head, row = tasks[first, 1], tasks[first, 2]
    _write(partial[first], states[first], group, group, dim, where, row, head)
