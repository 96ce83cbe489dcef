"""The numba kernels of decode: attention of few queries over a cache read in place.

Imported only where numba is installed, by `numba_decode`, which documents the arrays. Compiled
when first called and kept on disk. A task is one range of keys of one sequence, all heads: it
walks its keys in chunks, copies each chunk to float32 scratch that fits the nearest caches
(the only read of the keys from memory), and updates every row's running m, l and O.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

CHUNK = 32
"""keys whose float32 copies are worked on at a time"""

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

# Sums may be reordered (that is what makes them vectors); NaN and infinity stay what they are.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def _jit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """numba.njit, cached on disk where some folder can be written."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        settings = {"fastmath": _FAST, "nogil": True, "error_model": "numpy", **options}
        try:
            return numba.njit(cache=True, **settings)(function)
        except RuntimeError:  # numba found no writable folder for its cache
            return numba.njit(**settings)(function)

    return wrap


_ONE = np.float32(1.0)
_NEG_INF = np.float32(-np.inf)
_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts, so that n * ln 2 is exact to more than float32 (Cody and Waite).
_LN2_HI = np.float32(0.693359375)
_LN2_LO = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)


@_jit(inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """exp for x <= 0, relative error under 2e-7; unlike math.exp it becomes vector code.

    Taylor's polynomial of degree 6 on [-ln2/2, ln2/2].
    """
    x = _LOWEST if x < _LOWEST else x
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = (x - n * _LN2_HI) - n * _LN2_LO
    p = np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + _ONE
    p = p * r + _ONE
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@_jit()
def _load(dst, dst_at, src, src_at, n, kind):  # type: ignore[no-untyped-def]
    """n values to float32. 16-bit values come as their bits."""
    x, y = src[src_at : src_at + n], dst[dst_at : dst_at + n]
    if kind == FLOAT32:
        for i in range(n):
            y[i] = x[i]
    elif kind == BFLOAT16:
        for i in range(n):
            bits = np.uint32(x[i]) << np.uint32(16)
            y[i] = np.uint32(bits).view(np.float32)
    else:
        for i in range(n):
            half = np.uint32(x[i])
            magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
            # The exponent, now float32's, is 112 too small; subnormals come out right as well.
            value = magnitude.view(np.float32) * np.float32(2.0**112)
            bits = np.float32(value).view(np.uint32)
            if magnitude >= np.uint32(0x0F800000):  # infinity and NaN
                bits = magnitude | np.uint32(0x7F800000)
            bits |= (half & np.uint32(0x8000)) << np.uint32(16)
            y[i] = np.uint32(bits).view(np.float32)


@_jit()
def _load_chunk(dst, src, kind, strides, pages, block_size, first, count, heads, dim):  # type: ignore[no-untyped-def]
    """Keys `first ... first + count` of one sequence to `[count, heads, dim]`."""
    block_stride, slot_stride, head_stride = strides
    for t in range(count):
        position = first + t
        page = np.int64(pages[position // block_size])
        at = page * block_stride + np.int64(position % block_size) * slot_stride
        if head_stride == dim:
            _load(dst, t * heads * dim, src, at, heads * dim, kind)
        else:
            for h in range(heads):
                _load(dst, (t * heads + h) * dim, src, at + h * head_stride, dim, kind)


@_jit()
def _dots(s, q, q_at, k, k_at, k_step, first, stop, dim, scale):  # type: ignore[no-untyped-def]
    """s[t] = scale * (q . k_t) for first <= t < stop."""
    row = q[q_at : q_at + dim]
    for t in range(first, stop):
        key = k[k_at + t * k_step : k_at + t * k_step + dim]
        total = np.float32(0.0)
        for d in range(dim):
            total += row[d] * key[d]
        s[t] = total * scale


@_jit()
def _add_values(o, o_at, s, v, v_at, v_step, first, stop, dim):  # type: ignore[no-untyped-def]
    """o += sum_t s[t] v_t, four keys for each pass over o."""
    row = o[o_at : o_at + dim]
    t = first
    while t + 4 <= stop:
        at = v_at + t * v_step
        v0, v1 = v[at : at + dim], v[at + v_step : at + v_step + dim]
        v2, v3 = (
            v[at + 2 * v_step : at + 2 * v_step + dim],
            v[at + 3 * v_step : at + 3 * v_step + dim],
        )
        p0, p1, p2, p3 = s[t], s[t + 1], s[t + 2], s[t + 3]
        for d in range(dim):
            row[d] += (p0 * v0[d] + p1 * v1[d]) + (p2 * v2[d] + p3 * v3[d])
        t += 4
    while t < stop:
        at = v_at + t * v_step
        v0 = v[at : at + dim]
        for d in range(dim):
            row[d] += s[t] * v0[d]
        t += 1


@_jit()
def _update_row(s, first, stop, m, l, o, row, dim):  # type: ignore[no-untyped-def]  # noqa: E741
    """Online softmax: s becomes exp(s - m), and m, l, o of this row follow."""
    top = m[row]
    for t in range(first, stop):
        top = s[t] if s[t] > top else top
    if top == _NEG_INF:
        top = np.float32(0.0)  # all scores are -inf: exp(-inf - 0) = 0, and m stays
    elif top > m[row]:
        if l[row] != 0:
            rescale = _exp(m[row] - top)
            l[row] *= rescale
            for d in range(dim):
                o[row * dim + d] *= rescale
        m[row] = top
    total = np.float32(0.0)
    for t in range(first, stop):
        # _exp does not go below exp(-87): a masked score must weigh nothing at all.
        weight = _exp(s[t] - top) if s[t] != _NEG_INF else np.float32(0.0)
        s[t] = weight
        total += weight
    l[row] += total


@_jit()
def _find_bad_sequence(tables, block_size, num_blocks, stops):  # type: ignore[no-untyped-def]
    """First sequence of negative length or with a page which is not there, -1 if there is none."""
    for sequence in range(len(stops)):
        if stops[sequence] < 0:
            return sequence
        used = (stops[sequence] + block_size - 1) // block_size
        if used > tables.shape[1]:
            return sequence
        for page in tables[sequence, :used]:
            if page < 0 or page >= num_blocks:
                return sequence
    return -1


@_jit()
def _plan(lengths, seqlen_q, left, right, num_splits, split_size):  # type: ignore[no-untyped-def]
    """Cut every sequence's visible keys into tasks.

    Returns `(tasks, first_task)`: rows (sequence, first key, last key + 1), and where each
    sequence's rows begin. Keys are counted from the first valid one.
    """
    batch = len(lengths)
    starts, sizes = np.zeros(batch, np.int64), np.empty(batch, np.int64)
    first_task = np.zeros(batch + 1, np.int64)
    for i in range(batch):
        stop = lengths[i]
        if left >= 0:
            starts[i] = max(0, stop - seqlen_q - left)
        if right >= 0:
            stop = max(0, min(stop, stop + right))
        visible = max(0, stop - starts[i])
        sizes[i] = split_size if num_splits == 0 else max(1, -(-visible // num_splits))
        first_task[i + 1] = first_task[i] + -(-visible // sizes[i])
    tasks = np.empty((first_task[batch], 3), np.int64)
    for i in range(batch):
        for task in range(first_task[i], first_task[i + 1]):
            begin = starts[i] + (task - first_task[i]) * sizes[i]
            tasks[task, 0] = i
            tasks[task, 1] = begin
            tasks[task, 2] = min(begin + sizes[i], lengths[i])
    return tasks, first_task


@_jit(parallel=True)
def _run_tasks(  # type: ignore[no-untyped-def]
    q, k, v, kind, k_strides, v_strides, tables, block_size, stops, leftpads, slopes,
    shape, scale, left, right, softcap, tasks, m, l, o,  # noqa: E741
):  # fmt: skip
    """Fill m, l, o of every task."""
    seqlen_q, num_heads, num_kv_heads, dim = shape
    group = num_heads // num_kv_heads
    rows = seqlen_q * num_heads
    step = num_kv_heads * dim
    for task in numba.prange(tasks.shape[0]):
        sequence, begin, end = tasks[task]
        m_task, l_task, o_task = m[task], l[task], o[task]
        m_task[:] = _NEG_INF
        l_task[:] = 0.0
        o_task[:] = 0.0
        k_chunk = np.empty(CHUNK * step, np.float32)
        v_chunk = np.empty(CHUNK * step, np.float32)
        s = np.empty(CHUNK, np.float32)
        pages = tables[sequence]
        pad = leftpads[sequence]
        diagonal = stops[sequence] - pad - seqlen_q
        for chunk in range(begin, end, CHUNK):
            n = min(CHUNK, end - chunk)
            _load_chunk(
                k_chunk, k, kind, k_strides, pages, block_size, pad + chunk, n, num_kv_heads, dim
            )
            _load_chunk(
                v_chunk, v, kind, v_strides, pages, block_size, pad + chunk, n, num_kv_heads, dim
            )
            for row in range(rows):
                i, head = row // num_heads, row % num_heads
                first, stop = 0, n
                if left >= 0:
                    first = max(first, i + diagonal - left - chunk)
                if right >= 0:
                    stop = min(stop, i + diagonal + right + 1 - chunk)
                if first >= stop:
                    continue
                at = (head // group) * dim
                q_at = (sequence * rows + row) * dim
                _dots(s, q, q_at, k_chunk, at, step, first, stop, dim, scale)
                if softcap > 0:
                    for t in range(first, stop):
                        s[t] = softcap * np.float32(math.tanh(s[t] / softcap))
                if slopes.shape[0] > 0:
                    slope = slopes[sequence, head]
                    for t in range(first, stop):
                        s[t] -= slope * np.float32(abs(i + diagonal - (chunk + t)))
                _update_row(s, first, stop, m_task, l_task, o_task, row, dim)
                _add_values(o_task, row * dim, s, v_chunk, at, step, first, stop, dim)


@_jit(parallel=True)
def _combine_tasks(m, l, o, first_task, seqlen_q, num_heads, dim, out, lse):  # type: ignore[no-untyped-def]  # noqa: E741
    """Join the tasks of each sequence: out `[batch, seqlen_q, heads, dim]`, lse `[batch, heads,
    seqlen_q]`; a row that saw no key gives 0 and +inf."""
    for sequence in numba.prange(first_task.shape[0] - 1):
        begin, end = first_task[sequence], first_task[sequence + 1]
        for row in range(seqlen_q * num_heads):
            i, head = row // num_heads, row % num_heads
            result = out[sequence, i, head]
            result[:] = 0.0
            top = _NEG_INF
            for task in range(begin, end):
                if l[task, row] != 0:
                    top = m[task, row] if m[task, row] > top else top
            total = np.float32(0.0)
            for task in range(begin, end):
                if l[task, row] != 0:
                    weight = _exp(m[task, row] - top)
                    total += weight * l[task, row]
                    for d in range(dim):
                        result[d] += weight * o[task, row * dim + d]
            if total == 0:
                lse[sequence, head, i] = np.inf
            else:
                lse[sequence, head, i] = top + np.float32(math.log(total))
                for d in range(dim):
                    result[d] /= total


@_jit()
def decode(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    kind,
    k_strides,
    v_strides,
    tables,
    block_size,
    num_blocks,
    stops,
    leftpads,
    slopes,
    shape,
    scale,
    left,
    right,
    softcap,
    num_splits,
    split_size,
    out,
    lse,
):
    """Attention of q over the cache into out and lse.

    Args:
        q: float32, flat `[batch, seqlen_q, num_heads, dim]`.
        k, v: float32, or the bits of bfloat16 or float16 as uint16 (see kind): all memory of the
            cache; key t of page p and head h begins at `p, t, h` times k_strides.
        tables: int32 `[batch, max_blocks]`.
        stops, leftpads: int64 `[batch]`, positions after the last and of the first valid key.
        slopes: float32 `[batch, num_heads]`, or of no rows.
        shape: (seqlen_q, num_heads, num_kv_heads, dim).
        left, right: window, -1 = unbounded. num_splits: 0 = keys per task from split_size.
        out: float32 `[batch, seqlen_q, num_heads, dim]`; lse: float32
            `[batch, num_heads, seqlen_q]`.

    Returns:
        -1, or the index of a sequence of negative length or with a page which is not there (nothing
        is then done).
    """
    bad = _find_bad_sequence(tables, block_size, num_blocks, stops)
    if bad >= 0:
        return bad
    seqlen_q, num_heads, _, dim = shape
    tasks, first_task = _plan(stops - leftpads, seqlen_q, left, right, num_splits, split_size)
    rows = seqlen_q * num_heads
    m = np.empty((len(tasks), rows), np.float32)
    l = np.empty((len(tasks), rows), np.float32)  # noqa: E741
    o = np.empty((len(tasks), rows * dim), np.float32)
    _run_tasks(
        q,
        k,
        v,
        kind,
        k_strides,
        v_strides,
        tables,
        block_size,
        stops,
        leftpads,
        slopes,
        shape,
        scale,
        left,
        right,
        softcap,
        tasks,
        m,
        l,
        o,
    )
    _combine_tasks(m, l, o, first_task, seqlen_q, num_heads, dim, out, lse)
    return -1
