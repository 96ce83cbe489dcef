"""The numba kernels of the cache: writing tokens to their slots, and decode in place.

Imported only where numba is installed, by `numba_decode`, which documents the arrays. Compiled
when first called and kept on disk. A task of decode is one range of keys of one sequence, all
heads: it walks its keys in chunks, copies each chunk to float32 scratch that fits the nearest
caches (the only read of the keys from memory), and updates every row's running m, l and O.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from flashpage.attention.cpu.numba_math import copy_bits, exp, jit, load, prefetch

CHUNK = 32
"""keys whose float32 copies are worked on at a time"""

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
def _load_chunk(dst, src, kind, at, count, head_stride, heads, dim):  # type: ignore[no-untyped-def]
    """The keys that begin at `at[:count]` to `[count, heads, dim]`."""
    for t in range(count):
        if head_stride == dim:
            load(dst, t * heads * dim, src, at[t], heads * dim, kind)
        else:
            for h in range(heads):
                load(dst, (t * heads + h) * dim, src, at[t] + h * head_stride, dim, kind)


@jit()
def _prefetch_keys(k, v, k_at, v_at, k_head_stride, v_head_stride, first, step, count, heads, dim):  # type: ignore[no-untyped-def]
    """Ask for keys `first, first + step, ...` of those that begin at `k_at[:count]`."""
    line = 64 // k.itemsize
    for t in range(first, count, step):
        for h in range(heads):
            for d in range(0, dim, line):
                prefetch(k, k_at[t] + h * k_head_stride + d)
                prefetch(v, v_at[t] + h * v_head_stride + d)


@jit()
def _dots(s, q, q_at, k, k_at, k_step, first, stop, dim, scale):  # type: ignore[no-untyped-def]
    """s[t] = scale * (q . k_t) for first <= t < stop, four keys for each pass over q."""
    row = q[q_at : q_at + dim]
    t = first
    while t + 4 <= stop:
        at = k_at + t * k_step
        k0, k1 = k[at : at + dim], k[at + k_step : at + k_step + dim]
        at += 2 * k_step
        k2, k3 = k[at : at + dim], k[at + k_step : at + k_step + dim]
        s0, s1, s2, s3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for d in range(dim):
            s0 += row[d] * k0[d]
            s1 += row[d] * k1[d]
            s2 += row[d] * k2[d]
            s3 += row[d] * k3[d]
        s[t], s[t + 1], s[t + 2], s[t + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
        t += 4
    while t < stop:
        at = k_at + t * k_step
        k0 = k[at : at + dim]
        s0 = np.float32(0.0)
        for d in range(dim):
            s0 += row[d] * k0[d]
        s[t] = s0 * scale
        t += 1


@jit()
def _add_values(o, o_at, s, v, v_at, v_step, first, stop, dim):  # type: ignore[no-untyped-def]
    """o += sum_t s[t] v_t, four keys for each pass over o."""
    row = o[o_at : o_at + dim]
    t = first
    while t + 4 <= stop:
        at = v_at + t * v_step
        v0, v1 = v[at : at + dim], v[at + v_step : at + v_step + dim]
        at += 2 * v_step
        v2, v3 = v[at : at + dim], v[at + v_step : at + v_step + dim]
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


@jit()
def _update_row(s, m, l, o, row, dim):  # type: ignore[no-untyped-def]  # noqa: E741
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
            for d in range(dim):
                o[row * dim + d] *= rescale
        m[row] = top
    total = np.float32(0.0)
    for t in range(CHUNK):
        # exp does not go below exp(-87): a masked score must weigh nothing at all.
        weight = exp(s[t] - top)
        weight = np.float32(0.0) if s[t] == _NEG_INF else weight
        s[t] = weight
        total += weight
    l[row] += total


@jit()
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


@jit(parallel=True)
def _run_tasks(  # type: ignore[no-untyped-def]
    q, k, v, kind, k_strides, v_strides, tables, block_size, stops, leftpads, slopes,
    shape, scale, left, right, softcap, tasks, m, l, o,  # noqa: E741
):  # fmt: skip
    """Fill m, l, o of every task."""
    seqlen_q, num_heads, num_kv_heads, dim = shape
    group = num_heads // num_kv_heads
    step = num_kv_heads * dim
    for task in numba.prange(tasks.shape[0]):
        sequence, begin, end = tasks[task]
        q_base = sequence * seqlen_q * num_heads * dim
        m_task, l_task, o_task = m[task], l[task], o[task]
        m_task[:] = _NEG_INF
        l_task[:] = 0.0
        o_task[:] = 0.0
        k_chunk = np.empty(CHUNK * step, np.float32)
        v_chunk = np.empty(CHUNK * step, np.float32)
        k_at, v_at = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int64)
        s = np.empty(CHUNK, np.float32)
        pages = tables[sequence]
        pad = leftpads[sequence]
        diagonal = stops[sequence] - pad - seqlen_q
        next_n = min(CHUNK, end - begin)
        _addresses(k_at, v_at, k_strides, v_strides, pages, block_size, pad + begin, next_n)
        for chunk in range(begin, end, CHUNK):
            n = next_n
            _load_chunk(k_chunk, k, kind, k_at, n, k_strides[2], num_kv_heads, dim)
            _load_chunk(v_chunk, v, kind, v_at, n, v_strides[2], num_kv_heads, dim)
            # From here on the scratch is read, and the next keys come in meanwhile.
            next_n = max(0, min(CHUNK, end - chunk - CHUNK))
            first = pad + chunk + CHUNK
            _addresses(k_at, v_at, k_strides, v_strides, pages, block_size, first, next_n)
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
                        _prefetch_keys(
                            k, v, k_at, v_at, k_strides[2], v_strides[2], head, num_heads,
                            next_n, num_kv_heads, dim,
                        )  # fmt: skip
                    at = (head // group) * dim
                    row = i * num_heads + head
                    if stop - first < CHUNK:
                        s[:] = _NEG_INF
                    _dots(s, q, q_base + row * dim, k_chunk, at, step, first, stop, dim, scale)
                    if softcap > 0:
                        for t in range(first, stop):
                            s[t] = softcap * np.float32(math.tanh(s[t] / softcap))
                    if slopes.shape[0] > 0:
                        slope = slopes[sequence, head]
                        for t in range(first, stop):
                            s[t] -= slope * np.float32(abs(i + diagonal - (chunk + t)))
                    _update_row(s, m_task, l_task, o_task, row, dim)
                    _add_values(o_task, row * dim, s, v_chunk, at, step, first, stop, dim)


@jit(parallel=True)
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
                    weight = exp(m[task, row] - top)
                    total += weight * l[task, row]
                    for d in range(dim):
                        result[d] += weight * o[task, row * dim + d]
            if total == 0:
                lse[sequence, head, i] = np.inf
            else:
                lse[sequence, head, i] = top + np.float32(math.log(total))
                for d in range(dim):
                    result[d] /= total


@jit()
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
