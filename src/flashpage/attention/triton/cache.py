"""Writing new keys and values into a KV cache on a GPU, in place, whatever its strides.

Nothing is read back: a token that does not fit, or that names a page which is not there, is not
written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import alignment, cdiv, next_power_of_2
from flashpage.errors import ArgumentError

_WARPS = 4
_PROGRAM_ELEMENTS = 32 * _WARPS * 8
"""Eight to a thread: with 16 bits each, one load of 128 bits."""

# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


@triton.jit
def _copy(
    source_ptr,
    target_ptr,
    heads,
    real,
    source_head,
    target_head,
    source_dim,
    target_dim,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Features FROM ... TO - 1 of some heads of one token, bit for bit."""
    dims = (FROM + tl.arange(0, BLOCK)).to(tl.int64)
    mask = real[:, None] & (dims < TO)[None, :]
    source = source_ptr + (heads * source_head)[:, None] + (dims * source_dim)[None, :]
    target = target_ptr + (heads * target_head)[:, None] + (dims * target_dim)[None, :]
    tl.store(target, tl.load(source, mask=mask), mask=mask)


@triton.jit
def _rotate(
    source_ptr,
    target_ptr,
    heads,
    real,
    source_head,
    target_head,
    cos_ptr,
    sin_ptr,
    position,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """The first 2 * HALF features of some heads of one token, rotated by the angles of a row."""
    dtype: tl.constexpr = target_ptr.dtype.element_ty
    compute: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    pairs = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + position * HALF + pairs, mask=pairs < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + pairs, mask=pairs < HALF, other=0.0)
    cos = cos.to(compute)[None, :]
    sin = sin.to(compute)[None, :]
    source = source_ptr + (heads * source_head)[:, None]
    target = target_ptr + (heads * target_head)[:, None]
    if INTERLEAVED:
        # The two of a pair are neighbours: moved in one piece, taken apart in registers.
        dims = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = real[:, None] & (dims < 2 * HALF)
        x = tl.load(source + dims, mask=mask, other=0.0).to(compute)
        a, b = tl.split(tl.reshape(x, [BLOCK_H, BLOCK_HALF, 2]))
        x = tl.join(a * cos - b * sin, a * sin + b * cos)
        x = tl.reshape(x, [BLOCK_H, 2 * BLOCK_HALF])
        tl.store(target + dims, x.to(dtype), mask=mask)
    else:
        dims = pairs[None, :]
        mask = real[:, None] & (dims < HALF)
        a = tl.load(source + dims, mask=mask, other=0.0).to(compute)
        b = tl.load(source + HALF + dims, mask=mask, other=0.0).to(compute)
        tl.store(target + dims, (a * cos - b * sin).to(dtype), mask=mask)
        tl.store(target + HALF + dims, (a * sin + b * cos).to(dtype), mask=mask)


@triton.jit
def _move(
    source_ptr,
    target_ptr,
    part,
    source_head,
    target_head,
    cos_ptr,
    sin_ptr,
    position,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads `part * BLOCK_H ...` of one token: the rotary features rotated, the others copied."""
    heads = part * BLOCK_H + tl.arange(0, BLOCK_H)
    real = heads < NUM_HEADS
    if HALF > 0:
        _rotate(
            source_ptr, target_ptr, heads, real, source_head, target_head, cos_ptr, sin_ptr,
            position, HALF, INTERLEAVED, BLOCK_H, BLOCK_HALF,
        )  # fmt: skip
    if 2 * HALF < HEAD_DIM:
        _copy(
            source_ptr, target_ptr, heads, real, source_head, target_head, 1, 1, 2 * HALF, HEAD_DIM,
            BLOCK_REST,
        )  # fmt: skip


@triton.jit
def _append_slot(
    table_ptr, batch_idx_ptr, sequence, position, stride_table, page_size, capacity, num_pages
):
    """`(page, place in it, whether there is one)` of a position; a row is a page of a dense cache.

    Page ids are read only for positions within the table.
    """
    there = (position >= 0) & (position < capacity)
    if table_ptr is not None:
        entry = table_ptr + sequence * stride_table + position // page_size
        page = tl.load(entry, mask=there, other=-1)
        place = position % page_size
    else:
        page = sequence
        if batch_idx_ptr is not None:
            page = tl.load(batch_idx_ptr + sequence)
        place = position
    return page.to(tl.int64), place, there & (page >= 0) & (page < num_pages)


@triton.jit(
    do_not_specialize=[
        "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh",
        "stride_vb", "stride_vs", "stride_vh", "stride_k_page", "stride_k_place", "stride_k_head",
        "stride_v_page", "stride_v_place", "stride_v_head", "stride_table", "num_tokens",
        "seqlen_q", "seqlen_new", "seqlen_rotary", "page_size", "capacity", "num_pages",
    ]
)  # fmt: skip
def _append_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_rotated_ptr,
    k_cache_ptr,
    v_cache_ptr,
    seqlens_ptr,
    cos_ptr,
    sin_ptr,
    table_ptr,
    batch_idx_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_k_page,
    stride_k_place,
    stride_k_head,
    stride_v_page,
    stride_v_place,
    stride_v_head,
    stride_table,
    num_tokens,  # the larger of seqlen_q and seqlen_new
    seqlen_q,  # 0 without rotary
    seqlen_new,
    seqlen_rotary,
    page_size,
    capacity,
    num_pages,
    NUM_Q_HEADS: tl.constexpr,  # 0 without rotary
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    INTERLEAVED: tl.constexpr,
    ROTATE_Q_BY_ROW: tl.constexpr,
    ALIGN: tl.constexpr,  # elements: the unit of all strides but that of the table
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One program moves some heads of one token: of q, k or v."""
    Q_PARTS: tl.constexpr = (NUM_Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    part = pid % (Q_PARTS + 2 * KV_PARTS)
    pid = pid // (Q_PARTS + 2 * KV_PARTS)
    token = (pid % num_tokens).to(tl.int64)
    sequence = (pid // num_tokens).to(tl.int64)
    length = tl.load(seqlens_ptr + sequence).to(tl.int64)
    if part < Q_PARTS:
        if token < seqlen_q:
            position = length
            if ROTATE_Q_BY_ROW:
                position = length + token
            _move(
                q_ptr + (sequence * stride_qb + token * stride_qs) * ALIGN,
                q_rotated_ptr + (sequence * seqlen_q + token) * (NUM_Q_HEADS * HEAD_DIM),
                part, stride_qh.to(tl.int64) * ALIGN, HEAD_DIM,
                cos_ptr, sin_ptr, tl.minimum(tl.maximum(position, 0), seqlen_rotary - 1),
                NUM_Q_HEADS, HEAD_DIM, HALF, INTERLEAVED, BLOCK_H, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
    else:
        position = length + token
        page, place, there = _append_slot(
            table_ptr, batch_idx_ptr, sequence, position, stride_table, page_size, capacity,
            num_pages,
        )  # fmt: skip
        if there & (length >= 0) & (token < seqlen_new):
            if part < Q_PARTS + KV_PARTS:
                _move(
                    k_ptr + (sequence * stride_kb + token * stride_ks) * ALIGN,
                    k_cache_ptr + (page * stride_k_page + place * stride_k_place) * ALIGN,
                    part - Q_PARTS, stride_kh.to(tl.int64) * ALIGN,
                    stride_k_head.to(tl.int64) * ALIGN,
                    cos_ptr, sin_ptr, tl.minimum(position, seqlen_rotary - 1),
                    NUM_KV_HEADS, HEAD_DIM, HALF, INTERLEAVED, BLOCK_H, BLOCK_HALF, BLOCK_REST,
                )  # fmt: skip
            else:
                _move(
                    v_ptr + (sequence * stride_vb + token * stride_vs) * ALIGN,
                    v_cache_ptr + (page * stride_v_page + place * stride_v_place) * ALIGN,
                    part - Q_PARTS - KV_PARTS, stride_vh.to(tl.int64) * ALIGN,
                    stride_v_head.to(tl.int64) * ALIGN,
                    None, None, 0,
                    NUM_KV_HEADS, HEAD_DIM, 0, False, BLOCK_H, BLOCK_D, BLOCK_D,
                )  # fmt: skip


# The strides of the last dimension are specialised: 1 makes loads wide.
@triton.jit(
    do_not_specialize=[
        "stride_kt", "stride_kh", "stride_vt", "stride_vh", "stride_k_page", "stride_k_place",
        "stride_k_head", "stride_v_page", "stride_v_place", "stride_v_head", "block_size",
        "num_slots",
    ]
)  # fmt: skip
def _store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_k_page,
    stride_k_place,
    stride_k_head,
    stride_k_dim,
    stride_v_page,
    stride_v_place,
    stride_v_head,
    stride_v_dim,
    block_size,
    num_slots,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGN: tl.constexpr,  # elements: the unit of all strides but those of the last dimension
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program copies some heads of one token, of k and of v."""
    PARTS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page = slot // block_size
        place = slot % block_size
        heads = tl.program_id(0) % PARTS * BLOCK_H + tl.arange(0, BLOCK_H)
        real = heads < NUM_HEADS
        _copy(
            k_ptr + token * stride_kt * ALIGN,
            k_cache_ptr + (page * stride_k_page + place * stride_k_place) * ALIGN,
            heads, real, stride_kh.to(tl.int64) * ALIGN, stride_k_head.to(tl.int64) * ALIGN,
            stride_kd, stride_k_dim, 0, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        _copy(
            v_ptr + token * stride_vt * ALIGN,
            v_cache_ptr + (page * stride_v_page + place * stride_v_place) * ALIGN,
            heads, real, stride_vh.to(tl.int64) * ALIGN, stride_v_head.to(tl.int64) * ALIGN,
            stride_vd, stride_v_dim, 0, HEAD_DIM, BLOCK_D,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Launch
# ---------------------------------------------------------------------------------------------


def append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    rotary_interleaved: bool,
    rotate_q_by_row: bool,
) -> Tensor:
    """Write k (rotated) and v at `cache_seqlens`; returns q rotated, or an empty tensor.

    Shapes and meaning as in `functional.flash_attn_with_kvcache`. A sequence of negative length,
    and tokens beyond the cache or with a page id outside the pool, are not written. cache_leftpad
    plays no part here: positions count it.
    """
    rotary = rotary_cos is not None
    q_rotated = q.new_empty(q.shape if rotary else 0)
    batch, seqlen_new, num_kv_heads, head_dim = k.shape
    seqlen_q, num_q_heads = (q.shape[1], q.shape[2]) if rotary else (0, 0)
    num_tokens = max(seqlen_q, seqlen_new)
    if batch * num_tokens == 0:
        return q_rotated
    if rotary_cos is not None and rotary_cos.shape[0] == 0:
        raise ArgumentError(
            f"rotary_cos must have a row for every query and new key, got {tuple(rotary_cos.shape)}"
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    half = rotary_cos.shape[1] if rotary_cos is not None else 0
    page_size = k_cache.shape[1]
    block_d = next_power_of_2(head_dim)
    block_h = _heads_of_program(max(num_q_heads, num_kv_heads), block_d)
    parts = cdiv(num_q_heads, block_h) + 2 * cdiv(num_kv_heads, block_h)
    tensors = (q, k, v, k_cache, v_cache)
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    align = alignment(*tensors)
    with runtime.on_device(q.device):
        runtime.launch(_append_kernel, (batch * num_tokens * parts,))(
            q,
            k,
            v,
            q_rotated,
            k_cache,
            v_cache,
            cache_seqlens.contiguous(),
            rotary_cos,
            rotary_sin,
            block_table,
            None if cache_batch_idx is None else cache_batch_idx.contiguous(),
            *(stride // align for stride in strides),
            0 if block_table is None else block_table.stride(0),
            num_tokens,
            seqlen_q,
            seqlen_new,
            0 if rotary_cos is None else rotary_cos.shape[0],
            page_size,
            page_size if block_table is None else block_table.shape[1] * page_size,
            k_cache.shape[0],
            NUM_Q_HEADS=num_q_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            INTERLEAVED=rotary_interleaved,
            ROTATE_Q_BY_ROW=rotate_q_by_row,
            ALIGN=align,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            BLOCK_HALF=next_power_of_2(max(half, 1)),
            BLOCK_REST=next_power_of_2(max(head_dim - 2 * half, 1)),
            num_warps=_WARPS,
        )
    return q_rotated


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`k_cache[slot // block_size, slot % block_size] = k[token]`, same for v.

    Shapes as in `flashpage.cache.kv_cache.store_kvcache`; any dtype and strides. A slot that is
    negative or beyond the pool writes nothing.
    """
    if v_cache.shape != k_cache.shape:
        # Checked by the callers of the operator; here it guards memory.
        raise ArgumentError(
            f"v_cache must have the shape of k_cache {tuple(k_cache.shape)}, got "
            f"{tuple(v_cache.shape)}"
        )
    if k.numel() == 0:
        return
    num_blocks, block_size, num_heads, head_dim = k_cache.shape
    tensors = (k, v, k_cache, v_cache)
    if k.element_size() == 1:
        # Some GPUs know no arithmetic of these types; moving needs none.
        tensors = tuple(x.view(torch.int8) for x in tensors)
    align = alignment(*tensors)
    block_d = next_power_of_2(head_dim)
    block_h = _heads_of_program(num_heads, block_d)
    with runtime.on_device(k.device):
        runtime.launch(_store_kernel, (k.shape[0] * cdiv(num_heads, block_h),))(
            *tensors,
            slot_mapping.contiguous(),
            *(
                stride
                for x in tensors
                for stride in (*(s // align for s in x.stride()[:-1]), x.stride(-1))
            ),
            block_size,
            num_blocks * block_size,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            ALIGN=align,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=_WARPS,
        )


def _heads_of_program(num_heads: int, block_d: int) -> int:
    """A power of two of heads, as many as keep every thread at one wide load."""
    return min(next_power_of_2(num_heads), max(1, _PROGRAM_ELEMENTS // block_d))
