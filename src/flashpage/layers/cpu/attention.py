"""Causal attention over pages for the rows of a step, as numba kernels; imported only with numba.

One order of operations for every row: softmax of SPLIT keys at a time, from position 0 on, whose
results are merged in order. Whether a row comes
alone (its splits may then run on different threads) or among many, its bits are the same.
"""

from __future__ import annotations

import numpy as np

from flashpage.attention.cpu.numba_math import jit
from flashpage.layers.cpu.attention_vectors import (
    AHEAD,
    LOG2_E,
    SPLIT,
    UNITS,
    merge_row,
    narrow_values_1,
    narrow_values_3,
    row_copy,
    row_multiply,
    scores_1,
    scores_2,
    scores_3,
    scores_4,
    scores_6,
    scores_6_of_unit,
    tops_1,
    tops_2,
    tops_3,
    tops_4,
    tops_6,
    values_1,
    values_2,
    values_3,
    values_4,
    values_6,
    weights_1,
    weights_2,
    weights_3,
    weights_4,
    weights_6,
)
from flashpage.layers.cpu.dots import XS_BYTES
from flashpage.layers.cpu.linear import EXACT, block_of, scales_of
from flashpage.layers.cpu.packing import BLOCK
from flashpage.layers.cpu.vectors import request, row_quantize

MAX_ROWS = 48
"""rows of one task at most, unless one token alone has more (query heads per kv head)"""

REQUESTED_KEYS = 64
"""keys whose K and V are asked for before a row's first are worked on"""

_TABLE = UNITS + AHEAD
"""addresses of K, and of V, that a split needs"""

_NEG_INF = np.float32(-np.inf)
_LOG2_E = np.float32(LOG2_E)


@jit(**EXACT)
def _at_once(rows):  # type: ignore[no-untyped-def]
    """How many of `rows` rows are worked on together."""
    return 6 if rows >= 6 else (4 if rows >= 4 else rows)


@jit(**EXACT)
def _scores(kv, n, q, s, units, count, dim):  # type: ignore[no-untyped-def]
    """Scores of n rows (`_at_once`) and `count` keys of a split, up to a multiple of 16 or 64."""
    for first in range(0, count, 64):
        k, s_first = units + first // 16 * 8, s + first * 4
        if n == 6:
            if count - first > 48:
                scores_6(kv, q, s_first, k, dim)
            else:
                for key in range(0, count - first, 16):
                    scores_6_of_unit(kv, q, s_first + key * 4, k + key // 16 * 8, dim)
        elif n == 4:
            scores_4(kv, q, s_first, k, dim)
        elif n == 3:
            scores_3(kv, q, s_first, k, dim)
        elif n == 2:
            scores_2(kv, q, s_first, k, dim)
        else:
            scores_1(kv, q, s_first, k, dim)


@jit(**EXACT)
def _tops(n, s, seen, count, state, step):  # type: ignore[no-untyped-def]
    if n == 6:
        tops_6(s, seen, count, state, step)
    elif n == 4:
        tops_4(s, seen, count, state, step)
    elif n == 3:
        tops_3(s, seen, count, state, step)
    elif n == 2:
        tops_2(s, seen, count, state, step)
    else:
        tops_1(s, seen, count, state, step)


@jit(**EXACT)
def _weights(n, s, seen, count, state, step):  # type: ignore[no-untyped-def]
    if n == 6:
        weights_6(s, seen, count, state, step)
    elif n == 4:
        weights_4(s, seen, count, state, step)
    elif n == 3:
        weights_3(s, seen, count, state, step)
    elif n == 2:
        weights_2(s, seen, count, state, step)
    else:
        weights_1(s, seen, count, state, step)


@jit(**EXACT)
def _values(kv, n, p, seen, units, dim, o, state, step):  # type: ignore[no-untyped-def]
    """Add the values of the keys of a split that they see to n rows (`_at_once`)."""
    item_size = 2 if len(kv) == 2 else 4
    d = 0
    while d + 64 <= dim:
        offset, o_d = d * item_size, o + d * 4
        if n == 6:
            values_6(kv, p, seen, units, offset, dim, o_d, state, step)
        elif n == 4:
            values_4(kv, p, seen, units, offset, dim, o_d, state, step)
        elif n == 3:
            values_3(kv, p, seen, units, offset, dim, o_d, state, step)
        elif n == 2:
            values_2(kv, p, seen, units, offset, dim, o_d, state, step)
        else:
            values_1(kv, p, seen, units, offset, dim, o_d, state, step)
        d += 64
    if d < dim:
        offset = d * item_size
        row = 0
        while row < n:
            p_row, o_row = p + row * SPLIT * 4, o + (row * dim + d) * 4
            seen_row = seen + row * 8
            if row + 3 <= n:
                narrow_values_3(
                    kv, p_row, seen_row, units, offset, dim, o_row, state + row * 4, step
                )
                row += 3
            else:
                narrow_values_1(
                    kv, p_row, seen_row, units, offset, dim, o_row, state + row * 4, step
                )
                row += 1


@jit(**EXACT)
def _unit(table, index, units_per_block):  # type: ignore[no-untyped-def]
    return np.int64(table[index // units_per_block]) * units_per_block + index % units_per_block


@jit(**EXACT)
def _attend_split(kv, q, begin, rows, dim, seen, units, s, o, state):  # type: ignore[no-untyped-def]
    """One split's keys for rows `begin ... rows` of one kv head, into o and state.

    The keys that come next are asked for meanwhile, those of the next split too.

    seen: int64 `[rows]`, how many of the keys a row sees. units: address of the addresses of the
    head's K, then V, in the units of the split and in the AHEAD after. s, o, state: addresses of
    float32 `[rows, SPLIT]`, `[rows, dim]` and `[5, rows]` (see `tops`).
    """
    step = rows * 4
    # `tops` and `weights` in different loops: what one waits for at its end, others do meanwhile.
    row = begin
    while row < rows:
        n = _at_once(rows - row)
        count = seen[row + n - 1]
        _scores(kv, n, q + row * dim * 4, s + row * SPLIT * 4, units, count, dim)
        seen_at = seen.ctypes.data + row * 8
        _tops(n, s + row * SPLIT * 4, seen_at, count, state + row * 4, step)
        row += n
    row = begin
    while row < rows:
        n = _at_once(rows - row)
        count, seen_at = seen[row + n - 1], seen.ctypes.data + row * 8
        _weights(n, s + row * SPLIT * 4, seen_at, count, state + row * 4, step)
        row += n
    row = begin
    while row < rows:
        n = _at_once(rows - row)
        _values(
            kv, n, s + row * SPLIT * 4, seen.ctypes.data + row * 8, units + _TABLE * 8, dim,
            o + row * dim * 4, state + row * 4, step,
        )  # fmt: skip
        row += n


@jit(**EXACT)
def _merge(total, total_state, o, state, rows, dim):  # type: ignore[no-untyped-def]
    """Rows of a split into those of all splits before it."""
    for row in range(rows):
        merge_row(
            total.ctypes.data + row * dim * 4, total_state.ctypes.data + row * 4,
            o.ctypes.data + row * dim * 4, state.ctypes.data + row * 4, rows * 4, dim,
        )  # fmt: skip


@jit(**EXACT)
def _write(total, state, rows, group, dim, where, first_row, head):  # type: ignore[no-untyped-def]
    """Normalised rows to their places, in float32 and quantised; see `attend`."""
    out, q, xs, row_size, in_pairs = where
    for token in range(rows // group):
        place, column = first_row + token, head * group * dim
        first = place * row_size + column
        for row in range(token * group, (token + 1) * group):
            x = total.ctypes.data + row * dim * 4
            row_multiply(x, np.float32(1) / state[rows + row], x, dim)
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
    for unit in range(begin // 16, (min(begin + REQUESTED_KEYS, end) + 15) // 16):
        at = (_unit(table, unit, units_per_block) * num_kv_heads + head) * unit_bytes
        request(k + at, unit_bytes)
        request(v + at, unit_bytes)


@jit(**EXACT)
def scratch_size(group, dim):  # type: ignore[no-untyped-def]
    """float32 that `attend` needs."""
    return 4 * _TABLE + max(1, MAX_ROWS // group) * group * (2 + SPLIT + 2 * dim + 5)


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
        partial, state_of_partial: float32 `[group * dim]` and `[2 * group]` or more, for the result
            of one split of several, which `join` brings to its place.
        scratch: float32 `[scratch_size]`.
    """
    sequence, head, first_row, tokens, begin, end = task
    item_size = 2 if len(kv) == 2 else 4
    rows = tokens * group
    units = scratch[: 4 * _TABLE].view(np.int64)
    seen = scratch[4 * _TABLE : 4 * _TABLE + 2 * rows].view(np.int64)
    rest = scratch[4 * _TABLE + 2 * rows :]
    s = rest.ctypes.data
    q_rows = s + rows * SPLIT * 4
    total = rest[rows * (SPLIT + dim) : rows * (SPLIT + 2 * dim)]
    state = rest[rows * (SPLIT + 2 * dim) : rows * (SPLIT + 2 * dim + 5)]
    for token in range(tokens):
        source = q + ((first_row + token) * where[3] + head * group * dim) * 4
        row_multiply(source, _LOG2_E, q_rows + token * group * dim * 4, group * dim)
    position = positions[first_row]
    table = tables[sequence * table_step : (sequence + 1) * table_step]
    if tokens == 1 and begin == 0:  # those of later splits were asked for by the one before
        request_keys(kv, task, tables, table_step, units_per_block, k, v, num_kv_heads, dim)
    total[:] = np.float32(0)
    state[:rows], state[rows : 2 * rows] = _NEG_INF, np.float32(0)
    last_unit = (position + tokens - 1) // 16
    for key in range(begin, end, SPLIT):
        for i in range(_TABLE):
            # The last unit stands in for those that are not there.
            unit = _unit(table, min(key // 16 + i, last_unit), units_per_block)
            at = (unit * num_kv_heads + head) * 16 * dim * item_size
            units[i], units[_TABLE + i] = k + at, v + at
        for token in range(tokens):
            for row in range(token * group, (token + 1) * group):
                seen[row] = min(position + token + 1, min(key + SPLIT, end)) - key
        begin_row = max(0, key - position) * group  # rows before see none of these keys
        _attend_split(
            kv, q_rows, begin_row, rows, dim, seen, units.ctypes.data, s, total.ctypes.data,
            state.ctypes.data,
        )  # fmt: skip
    if _is_part(task, positions):
        partial[:] = total
        state_of_partial[: 2 * rows] = state[: 2 * rows]
    else:
        _write(total, state, rows, group, dim, where, first_row, head)


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
