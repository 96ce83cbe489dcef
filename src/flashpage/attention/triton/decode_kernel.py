"""The kernel of decode: one kv head of one sequence and one part of its keys; see `decode`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.triton.score import LN2, LOG2E, key_range, logits2


@triton.jit
def _num_keys(seqlens_ptr, leftpad_ptr, sequence, num_new_tokens, capacity):
    """`(first position, number of keys)` of a sequence, within the cache whatever was given."""
    length = tl.load(seqlens_ptr + sequence)
    stored = tl.minimum(length, capacity) + num_new_tokens
    length = tl.where(length < 0, 0, tl.minimum(stored, capacity))
    start = 0
    if leftpad_ptr is not None:
        start = tl.maximum(tl.load(leftpad_ptr + sequence), 0)
    return start, tl.maximum(length - start, 0)


@triton.jit
def _elements(stride0, stride1, stride2, ALIGN: tl.constexpr):
    """Strides in elements, int64, from strides in units of ALIGN elements."""
    return (
        stride0.to(tl.int64) * ALIGN,
        stride1.to(tl.int64) * ALIGN,
        stride2.to(tl.int64) * ALIGN,
    )


@triton.jit
def _page_of_keys(
    table_row_ptr, begin, capacity, num_blocks, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Page id of each of the BLOCK_N keys from `begin`, a multiple of BLOCK_N, on; or of all.

    Page ids are moved into the pool: garbage may give a wrong result, never a wild read.
    """
    page = 0
    if PAGE > 0:
        if PAGE % BLOCK_N == 0:
            entries = begin // PAGE
            page = tl.load(table_row_ptr + entries)
        else:
            if BLOCK_N % PAGE == 0:
                entries = begin // PAGE + tl.arange(0, BLOCK_N) // PAGE
            else:
                entries = (begin + tl.arange(0, BLOCK_N)) // PAGE
            page = tl.load(table_row_ptr + tl.minimum(entries, capacity // PAGE - 1))
        page = tl.minimum(page.to(tl.uint32), (num_blocks - 1).to(tl.uint32)).to(tl.int32)
    return page


@triton.jit
def _key_pointers(
    base, page, begin, dims, stride_b, stride_s, ALIGN: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pointers to the BLOCK_N keys from `begin` on; strides of page and token in units of ALIGN.

    What is the same in every block of keys stands apart, for the compiler to compute it once.
    """
    stride_b, stride_s = stride_b.to(tl.int64), stride_s.to(tl.int64)
    offsets = tl.arange(0, BLOCK_N)
    if PAGE == 0:
        block = begin * stride_s
    elif PAGE % BLOCK_N == 0:
        block = page * stride_b + begin % PAGE * stride_s
    else:
        if BLOCK_N % PAGE == 0:
            offsets = offsets % PAGE
        else:
            offsets = (begin + offsets) % PAGE
        block = (page * stride_b)[:, None]
    return base + (offsets * stride_s * ALIGN)[:, None] + dims[None, :] + block * ALIGN


@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh",
        "stride_vb", "stride_vs", "stride_vh", "stride_table", "stride_slopes",
        "softmax_scale", "softcap", "window_left", "window_right", "seqlen_q", "num_new_tokens",
        "capacity", "num_blocks", "num_kv_heads", "num_tiles", "num_splits",
    ]
)  # fmt: skip
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # SPLIT: float32 [rows, num_splits, head_dim], not normalised; else the output
    lse_ptr,  # SPLIT: float32 [rows, num_splits], the row's maximum; else the LSE
    sum_ptr,  # SPLIT: float32 [rows, num_splits], the row's sum; else None
    seqlens_ptr,
    table_ptr,
    batch_idx_ptr,
    leftpad_ptr,
    slopes_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_table,
    stride_slopes,
    softmax_scale,
    softcap,
    window_left,
    window_right,
    seqlen_q,
    num_new_tokens,
    capacity,
    num_blocks,
    num_kv_heads,
    num_tiles,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,  # tokens of a page, 0 without pages
    ALIGN: tl.constexpr,  # elements: the unit of the strides of q, k and v
    SAME_STRIDES: tl.constexpr,  # of k and v
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RAW_SCORES: tl.constexpr,  # the maximum is kept of q . k itself: scale > 0 and nothing else
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        # The next kernel may be set up while this one runs; it waits for its end.
        gdc_launch_dependents()
        gdc_wait()
    # Heads vary fastest: programs that run together read neighbouring memory.
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    pid = pid // num_kv_heads
    tile = pid % num_tiles
    pid = pid // num_tiles
    split = pid % num_splits
    sequence = (pid // num_splits).to(tl.int64)

    pad, len_k = _num_keys(seqlens_ptr, leftpad_ptr, sequence, num_new_tokens, capacity)
    diff = len_k - seqlen_q
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = pairs // GROUP
    heads = kv_head * GROUP + pairs % GROUP
    real = rows < seqlen_q
    row_lo = tile * BLOCK_M // GROUP
    row_hi = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, seqlen_q)

    lo, _, _, hi = key_range(
        row_lo, row_hi, seqlen_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    # lo is the start of a block; its keys before `first` are hidden, and may be garbage.
    first = lo
    if HAS_LEFT:
        first = tl.maximum(row_lo + diff - window_left, 0)
    if SPLIT:
        per_split = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), num_splits), BLOCK_N) * BLOCK_N
        lo = lo + split * per_split
        hi = tl.minimum(hi, lo + per_split)

    # Multiplied here, the compiler knows what they are multiples of, and makes wide loads.
    stride_qb, stride_qs, stride_qh = _elements(stride_qb, stride_qs, stride_qh, ALIGN)
    dims = tl.arange(0, BLOCK_D)
    q_offsets = sequence * stride_qb + rows * stride_qs + heads * stride_qh
    q = tl.load(
        q_ptr + q_offsets[:, None] + dims[None, :],
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + sequence * stride_slopes + heads, mask=real, other=0.0)[
            :, None
        ]

    if SAME_STRIDES:
        stride_vb, stride_vs = stride_kb, stride_ks
    k_base = k_ptr + kv_head * stride_kh.to(tl.int64) * ALIGN
    v_base = v_ptr + kv_head * stride_vh.to(tl.int64) * ALIGN
    table_row_ptr = table_ptr
    if PAGE > 0:
        table_row_ptr = table_ptr + sequence * stride_table
    else:
        cache_row = sequence
        if batch_idx_ptr is not None:
            cache_row = tl.load(batch_idx_ptr + sequence).to(tl.int64)
            cache_row = tl.minimum(tl.maximum(cache_row, 0), num_blocks - 1)
        k_base += (cache_row * stride_kb + pad * stride_ks.to(tl.int64)) * ALIGN
        v_base += (cache_row * stride_vb + pad * stride_vs.to(tl.int64)) * ALIGN

    scale2 = softmax_scale * LOG2E
    if not RAW_SCORES:
        scale2 = 1.0
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741 - the field's name
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    limits = tl.full([BLOCK_M], hi, tl.int32)
    seen_by_all = hi
    if HAS_RIGHT:
        limits = tl.minimum(limits, rows + (diff + window_right + 1))
        seen_by_all = tl.minimum(hi, row_lo + (diff + window_right + 1))
    for begin in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        cols = begin + tl.arange(0, BLOCK_N)
        inside = cols < hi
        if HAS_LEFT:
            inside = inside & (cols >= first)
        # Selected, not multiplied by zero: an unused slot may hold NaN.
        used = inside[:, None] & (dims < HEAD_DIM)[None, :]
        page = _page_of_keys(table_row_ptr, begin, capacity, num_blocks, PAGE, BLOCK_N)
        places = _key_pointers(
            k_base, page, begin, dims, stride_kb, stride_ks, ALIGN, PAGE, BLOCK_N
        )
        k = tl.load(places, mask=used, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if not RAW_SCORES:
            scores = logits2(
                scores, rows[:, None], cols[None, :], diff, softmax_scale, softcap, slope,
                HAS_SOFTCAP, slopes_ptr is not None,
            )  # fmt: skip
        # Many rows are bound by instructions, few by memory: these do without the branch.
        if BLOCK_M < 64 or HAS_LEFT or begin + BLOCK_N > seen_by_all:
            seen = cols[None, :] < limits[:, None]
            if HAS_LEFT:
                seen = seen & (cols[None, :] >= (rows + (diff - window_left))[:, None])
            scores = tl.where(seen, scores, float("-inf"))

        m_new = tl.maximum(m, tl.max(scores, 1))
        # Rows that saw no key yet: exp2(-inf - 0) is 0 where exp2(-inf + inf) were NaN.
        top = tl.where(m_new == float("-inf"), 0.0, m_new)
        # The difference is scaled, not scaled terms subtracted: exact at any magnitude.
        p = tl.exp2((scores - top[:, None]) * scale2)
        fade = tl.exp2((m - top) * scale2)
        l = l * fade + tl.sum(p, 1)  # noqa: E741
        m = m_new
        places = _key_pointers(
            v_base, page, begin, dims, stride_vb, stride_vs, ALIGN, PAGE, BLOCK_N
        )
        v = tl.load(places, mask=used, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")

    num_q_heads = num_kv_heads * GROUP
    place = (sequence * seqlen_q + rows) * num_q_heads + heads
    if SPLIT:
        place = place * num_splits + split
        tl.store(lse_ptr + place, m, mask=real)
        tl.store(sum_ptr + place, l, mask=real)
        real = real & (lo < hi)
    else:
        empty = l == 0
        acc = tl.where(empty, 0.0, 1.0 / l)[:, None] * acc
        lse = tl.where(empty, float("inf"), (m * scale2 + tl.log2(l)) * LN2)
        tl.store(lse_ptr + (sequence * num_q_heads + heads) * seqlen_q + rows, lse, mask=real)
    tl.store(
        out_ptr + (place * HEAD_DIM)[:, None] + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
    )
