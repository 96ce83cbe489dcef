"""The numba kernels of the cache: writing tokens to their slots, and decode in place.

Imported only where numba is installed, through `numba_runtime`. Compiled when first called and kept
on disk. A task of decode is one range of keys of one sequence, all heads: it walks its keys in
chunks, copies each chunk to float32 scratch that fits the nearest caches (the only read of the keys
from memory), and updates every row's running m, l and O.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from flashpage.attention.cpu.numba_math import (
    FLOAT32,
    copy_bits,
    exp,
    float32_at,
    int32_at,
    jit,
    load_from,
    prefetch,
    store_to,
)
from flashpage.attention.cpu.numba_vectors import LANES, add_values_16, add_values_64, dots

CHUNK = 32
"""keys whose float32 copies are worked on at a time, a multiple of LANES"""

_NEG_INF = np.float32(-np.inf)


@jit()
def store_tokens(src, dst, slots, block_size, num_heads, dim, src_strides, dst_strides):  # type: ignore[no-untyped-def]
    """Copy each token's heads to its slot; a token of slot -1 is left out.

    Args:
        src, dst: addresses of `[num_tokens, num_heads, dim]` and `[num_blocks, block_size,
            num_heads, dim]`. dim and the strides (token, head) and (block, slot, head) count words
            of 16 bits; the last dimension is contiguous.
        slots: int64 `[num_tokens]`.
    """
    whole = src_strides[1] == dim and dst_strides[2] == dim
    for token in range(len(slots)):
        slot = slots[token]
        if slot < 0:
            continue
        to = (slot // block_size) * dst_strides[0] + (slot % block_size) * dst_strides[1]
        at = token * src_strides[0]
        if whole:
            copy_bits(dst, to, src, at, num_heads * dim)
        else:
            for h in range(num_heads):
                copy_bits(dst, to + h * dst_strides[2], src, at + h * src_strides[1], dim)


@jit()
def _addresses(k_at, v_at, k_strides, v_strides, pages, block_size, first, count):  # type: ignore[no-untyped-def]
    """Where keys `first ... first + count` of one sequence begin, page by page."""
    page = first // block_size
    slot = first - page * block_size
    t = 0
    while t < count:
        n = min(block_size - slot, count - t)
        k_page = np.int64(pages[page]) * k_strides[0]
        v_page = np.int64(pages[page]) * v_strides[0]
        for i in range(n):
            k_at[t + i] = k_page + (slot + i) * k_strides[1]
            v_at[t + i] = v_page + (slot + i) * v_strides[1]
        t += n
        page += 1
        slot = 0


@jit()
def _load_chunk(dst, src, kind, at, count, head_stride, heads, dim, width):  # type: ignore[no-untyped-def]
    """The keys that begin at elements `at[:count]` of src to `[count, heads, width]`."""
    row = heads * width
    t = 0
    while t < count:
        n = 1
        if head_stride == dim and dim == width:  # neighbours in a page are one run
            while t + n < count and at[t + n] == at[t] + n * row:
                n += 1
            load_from(dst, t * row, src, at[t], n * row, kind)
        else:
            for h in range(heads):
                load_from(dst, t * row + h * width, src, at[t] + h * head_stride, dim, kind)
        t += n


@jit()
def _prefetch_keys(src, item_size, at, first, step, count, head_stride, heads, dim):  # type: ignore[no-untyped-def]
    """Ask for keys `first, first + step, ...` of those that begin at `at[:count]`."""
    for t in range(first, count, step):
        for h in range(heads):
            start = src + (at[t] + h * head_stride) * item_size
            for line in range(0, dim * item_size, 64):
                prefetch(start + line)


@jit()
def _add_values(o, o_at, s, first, stop, v, v_at, v_step, width):  # type: ignore[no-untyped-def]
    """o += sum_t s[t] v_t, over the whole width of a row."""
    d = 0
    while d + 64 <= width:
        add_values_64(o, o_at + d, s, first, stop, v, v_at + d, v_step)
        d += 64
    while d < width:
        add_values_16(o, o_at + d, s, first, stop, v, v_at + d, v_step)
        d += 16


@jit()
def _update_row(s, m, l, o, row, width):  # type: ignore[no-untyped-def]  # noqa: E741
    """Online softmax: s becomes exp(s - m), and m, l, o of this row follow.

    All CHUNK entries are worked on, of which those that do not count are -inf: loops of constant
    length become vector code without a remainder.
    """
    top = m[row]
    for t in range(CHUNK):
        top = s[t] if s[t] > top else top
    if top == _NEG_INF:
        top = np.float32(0.0)  # all scores are -inf: exp(-inf - 0) = 0, and m stays
    elif top > m[row]:
        if l[row] != 0:
            rescale = exp(m[row] - top)
            l[row] *= rescale
            for d in range(width):
                o[row * width + d] *= rescale
        m[row] = top
    total = np.float32(0.0)
    for t in range(CHUNK):
        weight = exp(s[t] - top)
        s[t] = weight
        total += weight
    l[row] += total


@jit()
def _find_bad_sequence(tables, table_stride, block_size, num_blocks, max_blocks, stops):  # type: ignore[no-untyped-def]
    """First sequence of negative length or with a page which is not there, -1 if there is none."""
    for sequence in range(len(stops)):
        if stops[sequence] < 0:
            return sequence
        used = (stops[sequence] + block_size - 1) // block_size
        if used > max_blocks:
            return sequence
        for i in range(used):
            page = tables[sequence * table_stride + i]
            if page < 0 or page >= num_blocks:
                return sequence
    return -1


@jit()
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


@jit()
def _run_task(  # type: ignore[no-untyped-def]
    q, q_base, k, v, kind, k_strides, v_strides, pages, block_size, pad, diagonal, slopes,
    slope_base, shape, width, scale, left, right, softcap, begin, end, m, l, o,  # noqa: E741
):  # fmt: skip
    """Keys `begin ... end` of one sequence, counted from its first valid one, into m, l and o."""
    seqlen_q, num_heads, num_kv_heads, dim = shape
    group = num_heads // num_kv_heads
    step = num_kv_heads * width
    item_size = 4 if kind == FLOAT32 else 2
    m[:] = _NEG_INF
    l[:] = 0.0
    o[:] = 0.0
    # Zeros, because what lies between dim and width must not count.
    k_chunk = np.zeros(CHUNK * step, np.float32)
    v_chunk = np.zeros(CHUNK * step, np.float32)
    k_at, v_at = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
    s = np.empty(CHUNK, np.float32)
    next_n = min(CHUNK, end - begin)
    _addresses(k_at, v_at, k_strides, v_strides, pages, block_size, pad + begin, next_n)
    for chunk in range(begin, end, CHUNK):
        n = next_n
        _load_chunk(k_chunk, k, kind, k_at, n, k_strides[2], num_kv_heads, dim, width)
        _load_chunk(v_chunk, v, kind, v_at, n, v_strides[2], num_kv_heads, dim, width)
        # From here on the scratch is read, and the next keys come in meanwhile.
        next_n = max(0, min(CHUNK, end - chunk - CHUNK))
        following = pad + chunk + CHUNK
        _addresses(k_at, v_at, k_strides, v_strides, pages, block_size, following, next_n)
        for i in range(seqlen_q):
            first, stop = 0, n
            if left >= 0:
                first = max(first, i + diagonal - left - chunk)
            if right >= 0:
                stop = min(stop, i + diagonal + right + 1 - chunk)
            if first >= stop:
                continue
            for head in range(num_heads):
                if i == seqlen_q - 1:
                    for src, at, strides in ((k, k_at, k_strides), (v, v_at, v_strides)):
                        _prefetch_keys(
                            src, item_size, at, head, num_heads, next_n, strides[2],
                            num_kv_heads, dim,
                        )  # fmt: skip
                head_at = (head // group) * width
                row = i * num_heads + head
                # All keys of the scratch, loaded or not: what does not count goes next.
                for t in range(0, n, LANES):
                    dots(
                        s, t, q, q_base + row * width, k_chunk, head_at + t * step, step,
                        width, scale,
                    )  # fmt: skip
                if softcap > 0:
                    for t in range(first, stop):
                        s[t] = softcap * np.float32(math.tanh(s[t] / softcap))
                if slope_base >= 0:
                    slope = slopes[slope_base + head]
                    for t in range(first, stop):
                        s[t] -= slope * np.float32(abs(i + diagonal - (chunk + t)))
                s[:first] = _NEG_INF
                s[stop:] = _NEG_INF
                _update_row(s, m, l, o, row, width)
                _add_values(o, row * width, s, first, stop, v_chunk, head_at, step, width)


@jit(parallel=True)
def _run_tasks(  # type: ignore[no-untyped-def]
    q, k, v, kind, k_strides, v_strides, tables, table_stride, block_size, stops, leftpads,
    slopes, slope_stride, shape, width, scale, left, right, softcap, tasks, m, l, o,  # noqa: E741
):  # fmt: skip
    """Fill m, l, o of every task. Rows of q and o are `width` apart, zeros behind `dim`."""
    seqlen_q, num_heads, _, _ = shape
    for task in numba.prange(tasks.shape[0]):
        sequence, begin, end = tasks[task]
        pad = leftpads[sequence]
        _run_task(
            q, sequence * seqlen_q * num_heads * width, k, v, kind, k_strides, v_strides,
            tables[sequence * table_stride :], block_size, pad, stops[sequence] - pad - seqlen_q,
            slopes, sequence * slope_stride if slope_stride >= 0 else -1, shape, width, scale,
            left, right, softcap, begin, end, m[task], l[task], o[task],
        )  # fmt: skip


@jit()
def _combine_tasks(m, l, o, first_task, shape, width, out, kind, lse):  # type: ignore[no-untyped-def]  # noqa: E741
    """Join the tasks of each sequence; a row that saw no key gives 0 and +inf."""
    seqlen_q, num_heads, _, dim = shape
    rows = seqlen_q * num_heads
    for sequence in range(first_task.shape[0] - 1):
        begin, end = first_task[sequence], first_task[sequence + 1]
        result = np.empty(width, np.float32)
        for row in range(rows):
            result[:] = 0.0
            top = _NEG_INF
            for task in range(begin, end):
                if l[task, row] != 0:
                    top = m[task, row] if m[task, row] > top else top
            total = np.float32(0.0)
            for task in range(begin, end):
                if l[task, row] != 0:
                    weight = exp(m[task, row] - top)
                    total += weight * l[task, row]
                    for d in range(dim):
                        result[d] += weight * o[task, row * width + d]
            i, head = row // num_heads, row % num_heads
            at = (sequence * num_heads + head) * seqlen_q + i
            if total == 0:
                lse[at] = np.inf
            else:
                lse[at] = top + np.float32(math.log(total))
                for d in range(dim):
                    result[d] /= total
            store_to(out, (sequence * rows + row) * dim, result, 0, dim, kind)


@jit()
def decode(  # type: ignore[no-untyped-def]
    q, k, v, kind, k_strides, v_strides, tables, table_stride, max_blocks, block_size, num_blocks,
    seqlens, leftpads, slopes, slope_stride, batch, shape, scale, left, right, softcap,
    num_splits, split_size, out, lse,
):  # fmt: skip
    """Attention of q over the cache into out and lse. Tensors come as addresses.

    Args:
        q, out: `[batch, seqlen_q, num_heads, dim]`, contiguous, of dtype `kind`.
        k, v: the cache, of dtype `kind`; key t of page p and head h begins at element
            `p, t, h` times the strides.
        tables: int32, the pages of sequence i from element `i * table_stride` on.
        seqlens: int32 `[batch]`, position after the last key.
        leftpads: int32 `[batch]`, position of the first key; 0 = all 0.
        slopes: float32, those of sequence i from `i * slope_stride` on; slope_stride -1 = none.
        shape: (seqlen_q, num_heads, num_kv_heads, dim).
        left, right: window, -1 = unbounded. num_splits: 0 = keys per task from split_size.
        lse: float32 `[batch, num_heads, seqlen_q]`, contiguous.

    Returns:
        -1, or the index of a sequence of negative length or with a page which is not there (nothing
        is then done).
    """
    stops = int32_at(seqlens, batch).astype(np.int64)
    starts = np.zeros(batch, np.int64)
    if leftpads != 0:
        starts[:] = int32_at(leftpads, batch)
        stops = np.maximum(stops, starts)
    pages = int32_at(tables, batch * table_stride + max_blocks)
    bad = _find_bad_sequence(pages, table_stride, block_size, num_blocks, max_blocks, stops)
    if bad >= 0:
        return bad
    seqlen_q, num_heads, _, dim = shape
    rows = seqlen_q * num_heads
    width = (dim + LANES - 1) // LANES * LANES
    q_rows = np.zeros(batch * rows * width, np.float32)
    for row in range(batch * rows):
        load_from(q_rows, row * width, q, row * dim, dim, kind)
    tasks, first_task = _plan(stops - starts, seqlen_q, left, right, num_splits, split_size)
    m = np.empty((len(tasks), rows), np.float32)
    l = np.empty((len(tasks), rows), np.float32)  # noqa: E741
    o = np.empty((len(tasks), rows * width), np.float32)
    _run_tasks(
        q_rows, k, v, kind, k_strides, v_strides, pages, table_stride, block_size, stops, starts,
        float32_at(slopes, batch * num_heads), slope_stride, shape, width, scale, left, right,
        softcap, tasks, m, l, o,
    )  # fmt: skip
    lse_rows = float32_at(lse, batch * rows)
    _combine_tasks(m, l, o, first_task, shape, width, out, kind, lse_rows)
    return -1
