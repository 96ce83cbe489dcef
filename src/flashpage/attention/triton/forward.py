"""Forward attention in Triton: dense, variable-length and paged keys in one kernel.

One program owns a tile of query rows of one head and walks the keys that any of its rows sees,
with the online softmax of FlashAttention-2 (Dao 2023, algorithm 1). Blocks of keys that every row
sees need no mask; the few others are handled in loops of their own. Shapes as in `ops`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.problem import Problem, round128
from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import (
    as_batch,
    cdiv,
    keys_per_row,
    padded_head_dim,
    raw_scores,
    slopes_stride,
    strides_of,
    switches,
    window,
)
from flashpage.attention.triton.combine import Parts, combine, empty_parts
from flashpage.attention.triton.keys import load_keys
from flashpage.attention.triton.score import LN2, LOG2E, keep_mask, key_range, logits2, visible


@dataclass(frozen=True)
class Tiles:
    """Shape of the work of one program: rows of queries, keys per step, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """of a thread, where that lets more programs share a multiprocessor without spilling; not for
    scores that take more than a scale"""


FEW_KEYS = {128: 512, 256: 2048}
"""seen by a row on average, by head_dim: up to these, smaller tiles, of which more run at a time
and less is masked, are the faster ones on Hopper"""


@cache
def forward_tiles(
    capability: int, block_d: int, itemsize: int, block_size: int, few_keys: bool
) -> Tiles:
    """The table of tiles: by compute capability, head_dim rounded up to a power of two, bytes of
    an element, tokens of a page (0 without pages), and whether rows see few keys (`FEW_KEYS`).
    """
    if few_keys and capability == 90 and itemsize == 2 and block_size == 0:
        return Tiles(64, 32, 4, 3)
    tiles = _tiles(capability, block_d, itemsize)
    if block_size == 0:
        return tiles
    if block_size % tiles.block_n and itemsize == 2 and block_d >= 64 and capability >= 80:
        # Gathered rows need more registers for their addresses: more warps share them.
        tiles = replace(tiles, block_m=128, num_warps=8, max_registers=None)
    # A stage goes to the page id that a load waits for, so that half of them hold keys.
    return replace(tiles, num_stages=2 * tiles.num_stages - 1)


def _tiles(capability: int, block_d: int, itemsize: int) -> Tiles:
    if itemsize == 4 or 0 < capability < 80:
        # Products on the ordinary units: exact in float32; Triton 3.6 knows no others for Turing.
        return Tiles(32, 32, 8, 1) if block_d <= 64 else Tiles(16, 32, 8, 1)
    if capability == 90:
        if block_d <= 64:
            return Tiles(64, 64, 4, 3, max_registers=128)
        return Tiles(64, 64, 4, 3) if block_d <= 128 else Tiles(128, 32, 8, 3)
    if capability in (80, 87, 100, 103):  # 164 KB of shared memory and more
        if block_d <= 64:
            return Tiles(128, 64, 4, 3)
        return Tiles(128, 64, 8, 3) if block_d <= 128 else Tiles(64, 32, 4, 2)
    # 100 KB (8.6, 8.9, 12.0) and less
    if block_d <= 64:
        return Tiles(128, 32, 4, 3)
    return Tiles(64, 32, 4, 2)


# ---------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------


@triton.jit
def _forward_tile(
    q,
    k,
    v,
    out_ptr,
    lse_ptr,
    sum_ptr,
    row_lo,
    sequence,
    head,
    first_q,
    len_q,
    first_k,
    len_k,
    table_ptr,
    slopes_ptr,
    rng_state_ptr,
    num_pages,
    q_strides,
    k_strides,
    v_strides,
    seqlen_q,
    stride_slopes,
    num_q_heads,
    group_size,
    head_dim: tl.constexpr,
    softmax_scale,
    softcap,
    dropout_p,
    window_left,
    window_right,
    entry,
    split,
    num_splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    Q_DESCRIPTOR: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    RAW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Query rows `row_lo ...` of one head of one sequence, which begins at rows first_q and
    first_k of batch entry `entry`.

    RAW: see `arguments.raw_scores`; the largest score is then the largest logit.
    SPLIT: of the keys only part `split` of `num_splits`; what is written is for `combine`.
    """
    rows = row_lo + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row_ok = rows < len_q
    if Q_DESCRIPTOR:
        q_tile = q.load([entry, first_q + row_lo, head, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        q_base = q + entry.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[2]
        q_rows = (first_q + rows).to(tl.int64) * q_strides[1]
        q_tile = tl.load(
            q_base + q_rows[:, None] + d[None, :],
            mask=row_ok[:, None] & (d < head_dim)[None, :],
            other=0.0,
        )
    slope = 0.0
    if HAS_ALIBI:
        # The rows after the last sequence have no slopes.
        slopes_row = slopes_ptr + sequence.to(tl.int64) * stride_slopes
        slope = tl.load(slopes_row + head, mask=len_k > 0, other=0.0)
    kv_head = head // group_size
    sequence_head = sequence * num_q_heads + head
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # With RAW scores stay unscaled until the exponent, where the scale costs nothing.
    scale2 = softmax_scale * LOG2E if RAW else 1.0
    lo, full_lo, full_hi, hi = key_range(
        row_lo, tl.minimum(row_lo + BLOCK_M, len_q), len_q, len_k, window_left, window_right,
        BLOCK_N, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    if SPLIT:
        keys = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N), num_splits) * BLOCK_N
        lo += split * keys
        hi = tl.minimum(hi, lo + keys)
        full_lo = tl.minimum(tl.maximum(full_lo, lo), lo + keys)
        full_hi = tl.minimum(tl.maximum(full_hi, lo), lo + keys)
    bounds = (lo, tl.minimum(full_lo, hi), full_lo, full_hi, full_hi, hi)
    # Keys on the window's left edge, keys that every row sees, keys on the right edge.
    for phase in tl.static_range(0 if HAS_LEFT else 1, 3):
        for n in tl.range(bounds[2 * phase], bounds[2 * phase + 1], BLOCK_N):
            n = tl.multiple_of(n, BLOCK_N)
            cols = n + tl.arange(0, BLOCK_N)
            k_tile = load_keys(
                k, entry, first_k, kv_head, n, len_k, table_ptr, num_pages, k_strides, head_dim,
                BLOCK_N, BLOCK_D, PAGE, DESCRIPTOR, phase != 1 and not DESCRIPTOR,
            )  # fmt: skip
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            if not RAW:
                s = logits2(
                    s, rows[:, None], cols[None, :], len_k - len_q, softmax_scale, softcap, slope,
                    HAS_SOFTCAP, HAS_ALIBI,
                )  # fmt: skip
            if phase != 1:
                seen = visible(
                    rows[:, None], cols[None, :], len_q, len_k, window_left, window_right,
                    HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
                s = tl.where(seen, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            shift = new_max
            if phase != 1:  # a row that has seen no key yet
                shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(s * scale2 - (shift * scale2)[:, None])
            alpha = tl.exp2((row_max - shift) * scale2)
            row_sum = row_sum * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            if HAS_DROPOUT:
                keep = keep_mask(
                    rng_state_ptr, sequence_head, rows[:, None], cols[None, :], dropout_p
                )
                p = tl.where(keep, p, 0.0)
            v_tile = load_keys(
                v, entry, first_k, kv_head, n, len_k, table_ptr, num_pages, v_strides, head_dim,
                BLOCK_N, BLOCK_D, PAGE, DESCRIPTOR, phase != 1,
            )  # fmt: skip
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
            row_max = new_max
    out_rows = (entry.to(tl.int64) * len_q + first_q + rows) * num_q_heads + head
    inside = row_ok[:, None] & (d < head_dim)[None, :]
    if SPLIT:
        acc = acc * (1.0 / (1.0 - dropout_p))
        places = out_rows * num_splits + split
        tl.store(out_ptr + (places * head_dim)[:, None] + d[None, :], acc, mask=inside)
        tl.store(lse_ptr + places, row_max, mask=row_ok)
        tl.store(sum_ptr + places, row_sum, mask=row_ok)
    else:
        nothing_seen = row_sum == 0.0
        row_sum = tl.where(nothing_seen, 1.0, row_sum)
        lse = tl.where(nothing_seen, float("inf"), (row_max * scale2 + tl.log2(row_sum)) * LN2)
        acc = acc * (1.0 / (row_sum * (1.0 - dropout_p)))[:, None]
        lse_row = (entry.to(tl.int64) * num_q_heads + head) * seqlen_q + first_q
        tl.store(
            out_ptr + (out_rows * head_dim)[:, None] + d[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=inside,
        )
        tl.store(lse_ptr + lse_row + rows, lse, mask=row_ok)


_NEVER_SPECIALISED = (
    "num_tiles_m",
    "group_heads",
    "batch",
    "num_q_heads",
    "group_size",
    "seqlen_q",
    "seqlen_k",
    "stride_slopes",
    "stride_table",
    "num_pages",
    "window_left",
    "window_right",
    "num_splits",
)


@triton.jit
def _packed_tile(number, cu_q_ptr, batch, seqlen_q, BLOCK_M: tl.constexpr, PACKED: tl.constexpr):
    """`(tile, sequence)` of the tile `number` in the order of the sequences; the last sequence is
    that of the rows after all. Past the last tile: a tile that lies behind its sequence's end."""
    sequences = tl.arange(0, PACKED)
    there = sequences < batch
    begin = tl.load(cu_q_ptr + sequences, mask=there, other=0)
    end = tl.load(cu_q_ptr + sequences + 1, mask=sequences < batch - 1, other=seqlen_q)
    tiles = tl.where(there, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M), 0)
    ends = tl.cumsum(tiles, 0)
    before = ends <= number
    sequence = tl.minimum(tl.sum((before & there).to(tl.int32), 0), batch - 1)
    earlier = tl.where(sequences < sequence, tiles, 0)
    return number - tl.sum(earlier, 0), sequence


@triton.jit(do_not_specialize=_NEVER_SPECIALISED)
def forward_kernel(
    q,
    k,
    v,
    out_ptr,  # SPLIT: float32 [rows, num_splits, head_dim], not normalised; else the output
    lse_ptr,  # SPLIT: float32 [rows, num_splits], the rows' maxima; else the LSE
    sum_ptr,  # SPLIT: float32 [rows, num_splits], the rows' sums; else None
    cu_q_ptr,
    cu_k_ptr,
    table_ptr,
    slopes_ptr,
    rng_state_ptr,
    q_strides,
    k_strides,
    v_strides,
    stride_slopes,
    stride_table,
    num_tiles_m,
    group_heads,
    batch,
    num_q_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    num_pages,
    softmax_scale,
    softcap,
    dropout_p,
    window_left,
    window_right,
    num_splits,
    head_dim: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
    PAGE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    Q_DESCRIPTOR: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    RAW: tl.constexpr,
    PACKED: tl.constexpr,  # with VARLEN: sequences that are looked through at once; 0: see below
    SPLIT: tl.constexpr,
):
    """Grid: (parts of the keys) x (tiles of rows) x (sequences x heads), in program_id(0) alone,
    which has no limit of 65,535. `group_heads` heads whose K and V fit into the L2 cache together
    run side by side, the tiles with the most keys first.

    PACKED: (as many tiles as all rows can make) x heads, for lengths that differ much. Every
    program counts the tiles of the sequences to find its own.
    """
    program = tl.program_id(0)
    split = 0
    if SPLIT:
        split = program % num_splits
        program = program // num_splits
    if PACKED:
        head = program % num_q_heads
        # From the end, where causal tiles see the most keys.
        number = num_tiles_m - 1 - program // num_q_heads
        tile, sequence = _packed_tile(number, cu_q_ptr, batch, seqlen_q, BLOCK_M, PACKED)
    else:
        per_group = num_tiles_m * group_heads
        group = program // per_group
        num_here = tl.minimum(group_heads, batch * num_q_heads - group * group_heads)
        within = program % per_group
        tile = num_tiles_m - 1 - within // num_here
        sequence_head = group * group_heads + within % num_here
        sequence = sequence_head // num_q_heads
        head = sequence_head % num_q_heads
    if VARLEN:
        # One sequence more than there are: the rows after the last, which see no key.
        is_tail = sequence == batch - 1
        first_q = tl.load(cu_q_ptr + sequence)
        len_q = tl.load(cu_q_ptr + sequence + 1, mask=not is_tail, other=seqlen_q) - first_q
        first_k = tl.load(cu_k_ptr + sequence)
        len_k = tl.load(cu_k_ptr + sequence + 1, mask=not is_tail, other=0) - first_k
        len_k = tl.where(is_tail, 0, len_k)
        table_row = table_ptr
        if PAGE > 0:
            first_k = 0
            table_row += sequence.to(tl.int64) * stride_table
        entry = sequence * 0
        # max_seqlen_q only sizes the grid: a longer sequence takes more than one round.
        step = num_tiles_m * BLOCK_M
        if PACKED:
            step = tl.maximum(len_q, BLOCK_M)
        for row_lo in tl.range(tile * BLOCK_M, len_q, step, disable_licm=True):
            _forward_tile(
                q, k, v, out_ptr, lse_ptr, sum_ptr, row_lo, sequence, head, first_q, len_q, first_k,
                len_k, table_row, slopes_ptr, rng_state_ptr, num_pages, q_strides,
                k_strides, v_strides, seqlen_q,
                stride_slopes, num_q_heads, group_size, head_dim, softmax_scale, softcap,
                dropout_p, window_left, window_right, entry, split, num_splits,
                BLOCK_M, BLOCK_N, BLOCK_D, PAGE, DESCRIPTOR, Q_DESCRIPTOR, HAS_LEFT, HAS_RIGHT,
                HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, RAW, SPLIT,
            )  # fmt: skip
    else:
        _forward_tile(
            q, k, v, out_ptr, lse_ptr, sum_ptr, tile * BLOCK_M, sequence, head, 0, seqlen_q, 0,
            seqlen_k, table_ptr, slopes_ptr, rng_state_ptr, num_pages, q_strides,
            k_strides, v_strides, seqlen_q,
            stride_slopes, num_q_heads, group_size, head_dim, softmax_scale, softcap, dropout_p,
            window_left, window_right, sequence, split, num_splits, BLOCK_M, BLOCK_N,
            BLOCK_D, PAGE, DESCRIPTOR, Q_DESCRIPTOR, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI,
            HAS_DROPOUT, RAW, SPLIT,
        )  # fmt: skip


@triton.jit
def dropout_sign_kernel(
    q,
    k,
    out_ptr,
    cu_q_ptr,
    cu_k_ptr,
    table_ptr,
    slopes_ptr,
    rng_state_ptr,
    q_strides,
    k_strides,
    stride_slopes,
    stride_table,
    num_pages,
    side_q,
    side_k,
    num_q_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    softmax_scale,
    dropout_p,
    window_left,
    window_right,
    head_dim: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """S_dmask: `exp(t - max_j t)`, negative where dropped, 0 where not visible. For tests.

    seqlen_q and seqlen_k are the bounds of the lengths; what lies beyond them is not written.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    sequence_head = tl.program_id(0) // tiles
    sequence = sequence_head // num_q_heads
    head = sequence_head % num_q_heads
    row_lo = tl.program_id(0) % tiles * BLOCK_M
    entry = sequence
    first_q = 0
    first_k = 0
    len_q = seqlen_q
    len_k = seqlen_k
    if VARLEN:
        entry = sequence * 0
        first_q = tl.load(cu_q_ptr + sequence)
        first_k = tl.load(cu_k_ptr + sequence)
        len_q = tl.load(cu_q_ptr + sequence + 1) - first_q
        len_k = tl.load(cu_k_ptr + sequence + 1) - first_k
    table_row = table_ptr
    if PAGE > 0:
        first_k = 0
        table_row += sequence.to(tl.int64) * stride_table
    rows = row_lo + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_rows = entry.to(tl.int64) * q_strides[0] + (first_q + rows).to(tl.int64) * q_strides[1]
    q_tile = tl.load(
        q + head.to(tl.int64) * q_strides[2] + q_rows[:, None] + d[None, :],
        mask=(rows < len_q)[:, None] & (d < head_dim)[None, :],
        other=0.0,
    )
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + sequence.to(tl.int64) * stride_slopes + head)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for write in range(2):
        for n in range(0, len_k, BLOCK_N):
            cols = n + tl.arange(0, BLOCK_N)
            k_tile = load_keys(
                k, entry, first_k, head // group_size, n, len_k, table_row, num_pages, k_strides,
                head_dim, BLOCK_N, BLOCK_D, PAGE, False, True,
            )  # fmt: skip
            s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            s = logits2(
                s, rows[:, None], cols[None, :], len_k - len_q, softmax_scale, 0.0, slope,
                False, HAS_ALIBI,
            )  # fmt: skip
            seen = visible(
                rows[:, None], cols[None, :], len_q, len_k, window_left, window_right,
                HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
            if write == 0:
                m = tl.maximum(m, tl.max(s, 1))
            else:
                p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
                keep = keep_mask(
                    rng_state_ptr, sequence_head, rows[:, None], cols[None, :], dropout_p
                )
                place = (sequence_head.to(tl.int64) * side_q + rows) * side_k
                tl.store(
                    out_ptr + place[:, None] + cols[None, :],
                    tl.where(keep, p, -p).to(out_ptr.dtype.element_ty),
                    mask=(rows < tl.minimum(len_q, seqlen_q))[:, None]
                    & (cols < tl.minimum(len_k, seqlen_k))[None, :],
                )


# ---------------------------------------------------------------------------------------------
# Launching
# ---------------------------------------------------------------------------------------------

L2_BYTES = 32 * 2**20
"""K and V of the heads that run side by side should stay in the second-level cache."""
MAX_PACKED = 512
"""sequences that a program looks through to find its own"""
MIN_SPLIT_KEYS = 1024
"""keys that are worth a part of their own, where rows are too few to occupy the GPU"""
MAX_SPLITS = 16


def forward(
    problem: Problem, inputs: AttentionInputs, return_s_dmask: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`(out, softmax_lse, s_dmask)`, fresh and contiguous."""
    q = inputs.q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse_shape = (*q.shape[:-3], problem.num_q_heads, q.shape[-3])
    softmax_lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    with runtime.on_device(q.device):
        if q.numel() > 0:
            _launch(problem, inputs, out, softmax_lse)
        s_dmask = _s_dmask(problem, inputs) if return_s_dmask else q.new_empty(0)
    return out, softmax_lse, s_dmask


def _launch(problem: Problem, x: AttentionInputs, out: Tensor, softmax_lse: Tensor) -> None:
    q, k, v = as_batch(x.q), as_batch(x.k), as_batch(x.v)
    varlen = x.cu_seqlens_q is not None
    page = k.shape[1] if x.block_table is not None else 0
    # With lengths, one sequence more than there are: the rows after the last.
    num_sequences = x.cu_seqlens_q.shape[0] if varlen else q.shape[0]
    block_d = padded_head_dim(problem.head_dim)
    num_keys = keys_per_row(problem, x.max_seqlen_q, x.max_seqlen_k)
    few_keys = num_keys <= FEW_KEYS.get(block_d, 0)
    capability = runtime.capability(q.device)
    tiles = forward_tiles(capability, block_d, q.element_size(), page, few_keys)
    described = page % tiles.block_n == 0 and runtime.descriptors_fit(k, v)
    q_described = runtime.descriptors_fit(q)
    kv_block = [1, tiles.block_n, 1, block_d]
    # No sequence is longer than all rows, whatever was said; none at all is one round of nothing.
    num_tiles_m = max(1, cdiv(min(x.max_seqlen_q, q.shape[1]), tiles.block_m))
    group_heads = problem.group_size
    if problem.window_right >= 0:
        kv_bytes = max(1, 2 * x.max_seqlen_k * block_d * q.element_size())
        group_heads *= max(1, L2_BYTES // kv_bytes)
    raw = raw_scores(problem)
    num_tiles = num_tiles_m * num_sequences
    packed = 0
    if varlen and num_sequences <= MAX_PACKED:
        # Every sequence may end with a tile that is not full.
        all_tiles = cdiv(q.shape[1], tiles.block_m) + num_sequences
        if num_tiles > 2 * all_tiles:
            num_tiles = num_tiles_m = all_tiles
            packed = 64 if num_sequences <= 64 else MAX_PACKED
    rows = cdiv(out.numel(), problem.head_dim)
    num_splits = _num_splits(
        cdiv(rows, tiles.block_m), num_keys, runtime.num_multiprocessors(q.device)
    )
    parts = Parts(out, softmax_lse, None)
    if num_splits > 1:
        parts = empty_parts(out, num_splits)
    limits = {}
    if tiles.max_registers and raw and problem.dropout_p == 0.0:
        limits["maxnreg"] = tiles.max_registers
    runtime.launch(forward_kernel, (num_splits * num_tiles * problem.num_q_heads,))(
        runtime.descriptor(q, [1, tiles.block_m, 1, block_d]) if q_described else q,
        runtime.descriptor(k, kv_block) if described else k,
        runtime.descriptor(v, kv_block) if described else v,
        *parts,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        x.block_table,
        x.alibi_slopes,
        x.rng_state,
        strides_of(q),
        strides_of(k),
        strides_of(v),
        slopes_stride(x.alibi_slopes),
        x.block_table.stride(0) if x.block_table is not None else 0,
        num_tiles_m,
        min(group_heads, num_sequences * problem.num_q_heads),
        num_sequences,
        problem.num_q_heads,
        problem.group_size,
        q.shape[1],
        k.shape[1],
        k.shape[0],
        problem.softmax_scale,
        problem.softcap,
        problem.dropout_p,
        *window(problem),
        num_splits,
        head_dim=problem.head_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=block_d,
        VARLEN=varlen,
        PAGE=page,
        DESCRIPTOR=described,
        Q_DESCRIPTOR=q_described,
        RAW=raw,
        PACKED=packed,
        SPLIT=num_splits > 1,
        **switches(problem),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **limits,
    )
    if num_splits > 1:
        combine(problem, parts, as_batch(out), softmax_lse)


def _num_splits(num_tiles: int, num_keys: int, num_multiprocessors: int) -> int:
    """Parts of the keys: so many that two tiles of rows for each multiprocessor are at work."""
    return max(1, min(2 * num_multiprocessors // num_tiles, num_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def _s_dmask(problem: Problem, x: AttentionInputs) -> Tensor:
    q, k = as_batch(x.q), as_batch(x.k)
    varlen = x.cu_seqlens_q is not None
    num_sequences = x.cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0]
    sides = round128(x.max_seqlen_q), round128(x.max_seqlen_k)
    s_dmask = torch.zeros(
        num_sequences, problem.num_q_heads, *sides, dtype=q.dtype, device=q.device
    )
    if s_dmask.numel() == 0:
        return s_dmask
    wanted = ("HAS_LEFT", "HAS_RIGHT", "HAS_ALIBI")
    runtime.launch(
        dropout_sign_kernel, (cdiv(x.max_seqlen_q, 32) * num_sequences * problem.num_q_heads,)
    )(
        q,
        k,
        s_dmask,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        x.block_table,
        x.alibi_slopes,
        x.rng_state,
        strides_of(q),
        strides_of(k),
        slopes_stride(x.alibi_slopes),
        x.block_table.stride(0) if x.block_table is not None else 0,
        k.shape[0],
        *sides,
        problem.num_q_heads,
        problem.group_size,
        x.max_seqlen_q,
        x.max_seqlen_k,
        problem.softmax_scale,
        problem.dropout_p,
        *window(problem),
        head_dim=problem.head_dim,
        BLOCK_M=32,
        BLOCK_N=32,
        BLOCK_D=padded_head_dim(problem.head_dim),
        VARLEN=varlen,
        PAGE=k.shape[1] if x.block_table is not None else 0,
        **{name: switches(problem)[name] for name in wanted},
    )
    return s_dmask
