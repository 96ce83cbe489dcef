"""Attention of a few queries over a KV cache: the keys are split over the GPU, then combined.

One program of the split kernel serves one kv head of one sequence, and one part of its keys: the
(token, query head) pairs that share the head are the rows of one tile, so keys are read once for
all of them. Lengths are read on the device, and the work of each part follows them: a captured
graph may be replayed with others.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.dispatch import DecodeInputs
from flashpage.attention.problem import MAX_NUM_SPLITS, Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import (
    alignment,
    cdiv,
    next_power_of_2,
    padded_head_dim,
    raw_scores,
    slopes_stride,
    window,
)
from flashpage.attention.triton.combine import combine, empty_parts, join_parts
from flashpage.attention.triton.score import LN2, LOG2E, key_range, logits2

# ---------------------------------------------------------------------------------------------
# Choices: the size of a tile, and into how many parts the keys are split
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How one program works, and how many of them to a multiprocessor."""

    block_m: int
    """rows: (token, query head) pairs that share a kv head"""
    block_n: int
    """keys that are fetched together"""
    num_warps: int
    depth: int
    """blocks of keys on their way while one is worked on"""
    per_multiprocessor: int
    """programs that use a multiprocessor's share of the bandwidth; half as many again fit it"""

    def num_stages(self, paged: bool) -> int:
        """Of Triton's pipeline, which shares them out over loads that wait for each other."""
        return 1 + self.depth * (2 if paged else 1)


@cache
def choose_tile(capability: int, head_dim: int, element_size: int, num_rows: int) -> Tile:
    """The tile for `num_rows` (token, query head) pairs per kv head.

    Decoding is bound by memory: what counts is the bytes on their way to a multiprocessor, which
    several programs provide together, each hiding the start and the end of the others.
    """
    bytes_per_key = 2 * padded_head_dim(head_dim) * element_size
    # Without matrix units (float32) and with wide heads, more rows do not fit the registers.
    most_rows = 16 if element_size > 2 else 32 if head_dim > 128 else 64
    block_m = min(most_rows, max(16, next_power_of_2(num_rows)))
    # Bytes of keys and values in one block, and blocks on their way: by the shared memory.
    if capability in (80, 90, 100, 103):
        block_bytes, depth, per_multiprocessor = 32768, 2, 2
    elif capability > 80:
        block_bytes, depth, per_multiprocessor = 16384, 2, 2
    else:
        block_bytes, depth, per_multiprocessor = 16384, 1, 2
    if element_size > 2 or head_dim * element_size % 16 != 0:
        # Products without matrix units, and heads that are fetched through registers.
        block_bytes, depth = block_bytes // 2, 1
    block_n = max(16, min(128, block_bytes // bytes_per_key))
    return Tile(block_m, block_n, 8 if block_m == 64 else 4, depth, per_multiprocessor)


@lru_cache(maxsize=1024)
def choose_num_splits(num_programs: int, slots: int, max_blocks: int) -> int:
    """Parts of the keys: the fewest that keep the GPU's memory as busy as any number does, or 98 %
    of that, as a model of it says.

    num_programs: programs without splitting; slots: programs that use the whole bandwidth, half
    as many again run at the same time; max_blocks: blocks of keys that the longest sequence can
    have.
    """

    def busy(splits: int) -> float:
        programs = num_programs * splits
        if programs <= slots:
            used = programs / slots
        else:
            # In the last round some multiprocessors have less to do; half of it is made up for.
            idle = -programs % (slots + slots // 2)
            used = programs / (programs + idle / 2)
        blocks = max_blocks / splits
        return used * blocks / (blocks + 1)  # starting and ending a program take about a block

    candidates = range(1, max(1, min(max_blocks, MAX_NUM_SPLITS)) + 1)
    best = max(map(busy, candidates))
    return next(splits for splits in candidates if busy(splits) >= 0.98 * best)


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


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
    table_row_ptr, begin, inside, num_blocks, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Page id of each of the BLOCK_N keys from `begin`, a multiple of BLOCK_N, on; or of all.

    Page ids are moved into the pool: garbage may give a wrong result, never a wild read.
    """
    page = 0
    if PAGE > 0:
        if PAGE % BLOCK_N == 0:
            entries = begin // PAGE
            page = tl.load(table_row_ptr + entries)
        elif BLOCK_N % PAGE == 0:
            entries = begin // PAGE + tl.arange(0, BLOCK_N) // PAGE
            page = tl.load(table_row_ptr + entries, mask=inside, other=0)
        else:
            entries = (begin + tl.arange(0, BLOCK_N)) // PAGE
            page = tl.load(table_row_ptr + entries, mask=inside, other=0)
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


@triton.jit
def _join_last(
    partial_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    lse_ptr,
    counter_ptr,
    sequence,
    kv_head,
    tile,
    seqlen_q,
    num_kv_heads,
    num_splits,
    scale2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
    JOIN_SPLITS: tl.constexpr,
):
    """The program whose part of a tile is written last joins all parts, in the order of their
    index, whoever it is; and leaves the counter at zero for the next launch."""
    # What every thread has written counts as written before the one that counts goes on.
    tl.debug_barrier()
    earlier = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    if earlier == num_splits - 1:
        tl.store(counter_ptr, 0)
        pairs = tile * BLOCK_M + tl.arange(0, JOIN_ROWS)
        rows = pairs // GROUP
        heads = kv_head * GROUP + pairs % GROUP
        real = rows < seqlen_q
        num_q_heads = num_kv_heads * GROUP
        place = (sequence * seqlen_q + rows) * num_q_heads + heads
        acc, lse = join_parts(
            partial_ptr, max_ptr, sum_ptr, place * num_splits, real, scale2, num_splits, HEAD_DIM,
            BLOCK_D, JOIN_SPLITS,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_D)
        tl.store(lse_ptr + (sequence * num_q_heads + heads) * seqlen_q + rows, lse, mask=real)
        tl.store(
            out_ptr + (place * HEAD_DIM)[:, None] + dims[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=real[:, None] & (dims < HEAD_DIM)[None, :],
        )


@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh",
        "stride_vb", "stride_vs", "stride_vh", "stride_table", "stride_slopes",
        "softmax_scale", "softcap", "window_left", "window_right", "seqlen_q", "num_new_tokens",
        "capacity", "num_blocks", "num_kv_heads", "num_tiles", "num_splits",
    ]
)  # fmt: skip
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # SPLIT: float32 [rows, num_splits, head_dim], not normalised; else the output
    lse_ptr,  # SPLIT: float32 [rows, num_splits], the row's maximum; else the LSE
    sum_ptr,  # SPLIT: float32 [rows, num_splits], the row's sum; else None
    joined_ptr,  # JOIN_ROWS: the output
    joined_lse_ptr,  # JOIN_ROWS: the LSE
    counters_ptr,  # JOIN_ROWS: int32 [batch, num_kv_heads, num_tiles], zeros
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
    JOIN_ROWS: tl.constexpr,  # of a tile, joined by the last of its programs; 0: by `combine`
    JOIN_SPLITS: tl.constexpr,
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
    if HAS_RIGHT:
        limits = tl.minimum(limits, rows + (diff + window_right + 1))
    for begin in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        cols = begin + tl.arange(0, BLOCK_N)
        inside = cols < hi
        if HAS_LEFT:
            inside = inside & (cols >= first)
        # Selected, not multiplied by zero: an unused slot may hold NaN.
        used = inside[:, None] & (dims < HEAD_DIM)[None, :]
        page = _page_of_keys(table_row_ptr, begin, inside, num_blocks, PAGE, BLOCK_N)
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
    if JOIN_ROWS > 0:
        counter = (sequence * num_kv_heads + kv_head) * num_tiles + tile
        _join_last(
            out_ptr, lse_ptr, sum_ptr, joined_ptr, joined_lse_ptr, counters_ptr + counter, sequence,
            kv_head, tile, seqlen_q, num_kv_heads, num_splits, scale2, GROUP, HEAD_DIM, BLOCK_D,
            BLOCK_M, JOIN_ROWS, JOIN_SPLITS,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------


def decode(problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)` of queries over a cache, dense or in pages; nothing synchronises.

    Shapes as in `functional.flash_attn_with_kvcache`; float16, bfloat16 or float32. softmax_lse
    is float32 `[batch, num_q_heads, seqlen_q]`. Lengths beyond the cache end with it, negative
    ones are 0.
    """
    batch, seqlen_q, num_q_heads, head_dim = inputs.q.shape
    out = inputs.q.new_empty(inputs.q.shape)
    softmax_lse = inputs.q.new_empty(batch, num_q_heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, softmax_lse
    num_rows = problem.group_size * seqlen_q
    tile = choose_tile(runtime.capability(out.device), head_dim, out.element_size(), num_rows)
    num_splits = inputs.num_splits
    if num_splits == 0:
        num_keys = _capacity(inputs)
        if 0 <= problem.window_left < num_keys:
            num_keys = min(num_keys, problem.window_left + seqlen_q)
        num_splits = choose_num_splits(
            batch * problem.num_kv_heads * cdiv(num_rows, tile.block_m),
            runtime.num_multiprocessors(out.device) * tile.per_multiprocessor,
            cdiv(num_keys, tile.block_n),
        )
    launch(problem, inputs, out, softmax_lse, tile, num_splits)
    return out, softmax_lse


def launch(
    problem: Problem,
    inputs: DecodeInputs,
    out: Tensor,
    softmax_lse: Tensor,
    tile: Tile,
    num_splits: int,
    *,
    fused: bool = False,
) -> None:
    """Write `out` and `softmax_lse`, contiguous, with a given tile and number of splits.

    fused: the parts of a tile are joined by the last program of it, not by a second kernel.
    """
    with runtime.on_device(out.device):
        if num_splits == 1:
            _launch_split(problem, inputs, None, out, softmax_lse, None, tile, 1)
            return
        parts = empty_parts(out, num_splits)
        counters = None
        if fused:
            num_tiles = cdiv(problem.group_size * out.shape[1], tile.block_m)
            counters = runtime.counters(out.device, out.shape[0] * problem.num_kv_heads * num_tiles)
        if counters is None:
            _launch_split(problem, inputs, None, *parts, tile, num_splits)
            combine(problem, parts, out, softmax_lse)
        else:
            joined = (out, softmax_lse, counters)
            _launch_split(problem, inputs, joined, *parts, tile, num_splits)


def _capacity(inputs: DecodeInputs) -> int:
    """Positions of one sequence."""
    length = inputs.k_cache.shape[1]
    return length if inputs.block_table is None else inputs.block_table.shape[1] * length


def _join_splits(join_rows: int, head_dim: int, num_warps: int) -> int:
    """How many parts of `join_rows` rows a program reads at a time: 64 numbers a thread."""
    if join_rows == 0:
        return 0
    numbers = num_warps * 32 * 64
    return min(MAX_NUM_SPLITS, max(1, numbers // (join_rows * padded_head_dim(head_dim))))


def _launch_split(
    problem: Problem,
    inputs: DecodeInputs,
    joined: tuple[Tensor, Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor,
    sums: Tensor | None,
    tile: Tile,
    num_splits: int,
) -> None:
    """joined: output, LSE and counters, where the kernel itself is to join the parts."""
    q, k, v, table = inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table
    batch, seqlen_q, _, head_dim = q.shape
    capacity = _capacity(inputs)
    num_rows = problem.group_size * seqlen_q
    num_tiles = cdiv(num_rows, tile.block_m)
    join_rows = 0 if joined is None else min(tile.block_m, next_power_of_2(num_rows))
    slopes = inputs.alibi_slopes
    raw = raw_scores(problem)
    align = alignment(q, k, v)
    overlap = runtime.overlap(q.device)
    _split_kernel[(batch * num_splits * num_tiles * problem.num_kv_heads,)](
        q,
        k,
        v,
        out,
        lse,
        sums,
        *(joined or (None, None, None)),
        inputs.cache_seqlens.contiguous(),
        table,
        None if inputs.cache_batch_idx is None else inputs.cache_batch_idx.contiguous(),
        None if inputs.cache_leftpad is None else inputs.cache_leftpad.contiguous(),
        slopes,
        *(stride // align for x in (q, k, v) for stride in x.stride()[:3]),
        0 if table is None else table.stride(0),
        slopes_stride(slopes),
        problem.softmax_scale,
        problem.softcap,
        *window(problem),
        seqlen_q,
        inputs.num_new_tokens,
        capacity,
        k.shape[0],
        problem.num_kv_heads,
        num_tiles,
        num_splits,
        GROUP=problem.group_size,
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PAGE=0 if table is None else k.shape[1],
        ALIGN=align,
        SAME_STRIDES=k.stride() == v.stride(),
        # A window that hides nothing is none: a single query sees every key to its right.
        HAS_LEFT=0 <= problem.window_left < capacity,
        HAS_RIGHT=0 <= problem.window_right < seqlen_q - 1,
        HAS_SOFTCAP=problem.softcap > 0,
        RAW_SCORES=raw,
        SPLIT=sums is not None,
        STAGES=tile.num_stages(table is not None),
        JOIN_ROWS=join_rows,
        JOIN_SPLITS=_join_splits(join_rows, head_dim, tile.num_warps),
        OVERLAP=bool(overlap),
        num_warps=tile.num_warps,
        # Logits are rounded before their maximum is taken off: fused, they would not cancel.
        enable_fp_fusion=raw,
        **overlap,
    )
