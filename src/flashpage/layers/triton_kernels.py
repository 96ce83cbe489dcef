"""The small steps between products as Triton kernels, one launch each; knows no model.

Computed in float32 and rounded once. What a row gives depends on that row alone. The same in torch
stands in `fused`, and is what these are tested against.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import cdiv, next_power_of_2

BLOCK = 1024
"""elements of a program of `silu_and_mul`: 16 bytes of each input for a thread"""
HEADS = 8
"""heads of a program that rotates"""


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    stride_x,
    stride_residual,
    num_rows,
    eps,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        place = x_ptr + (row + part * num_rows) * stride_x + columns
        x += tl.load(place, mask=mask, other=0.0)
    x = x.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * stride_residual + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * SIZE + columns, x, mask=mask)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = x * scale * weight
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`; without a residual `(rms_norm(x), x)`.

    Args:
        x: `[..., size]`, or with a residual dense float32 parts `[parts, ..., size]` of it.
        residual: `[..., size]`.

    Returns:
        contiguous tensors, of the dtype of residual (without one: of x).
    """
    size = x.shape[-1]
    rows = _as_rows(x)
    num_parts = 1 if residual is None or x.dim() == residual.dim() else x.shape[0]
    whole = x if residual is None else residual
    out = torch.empty(whole.shape, dtype=whole.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    others = None if residual is None else _as_rows(residual)
    if out.numel() > 0:
        num_rows = out.numel() // size
        block = next_power_of_2(size)
        overlap = runtime.overlap(x.device)
        with runtime.on_device(x.device):
            runtime.launch(_add_rms_norm_kernel, (num_rows,))(
                rows,
                others,
                weight,
                out,
                total,
                rows.stride(0),
                0 if others is None else others.stride(0),
                num_rows,
                eps,
                PARTS=num_parts,
                SIZE=size,
                BLOCK=block,
                OVERLAP=bool(overlap),
                num_warps=min(max(block // 256, 1), 16),
                **overlap,
            )
    return out, total


def _as_rows(x: Tensor) -> Tensor:
    """`[rows, size]` with dense columns: a view where that is possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@triton.jit
def _silu_and_mul_kernel(
    x_ptr, out_ptr, stride, size, num_blocks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`[..., 2 * size]` -> `[..., size]`, contiguous: `silu(first half) * second half`."""
    rows = _as_rows(gate_up)
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() > 0:
        num_blocks = cdiv(size, BLOCK)
        overlap = runtime.overlap(out.device)
        with runtime.on_device(out.device):
            runtime.launch(_silu_and_mul_kernel, (rows.shape[0] * num_blocks,))(
                rows,
                out,
                rows.stride(0),
                size,
                num_blocks,
                BLOCK=BLOCK,
                OVERLAP=bool(overlap),
                **overlap,
            )
    return out


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    eps,
    stride_token,
    stride_head,
    stride_k_page,
    stride_k_place,
    stride_k_head,
    stride_v_page,
    stride_v_place,
    stride_v_head,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    NUM_HEADS: tl.constexpr = NUM_Q_HEADS + 2 * NUM_KV_HEADS
    PARTS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    heads = tl.program_id(0) % PARTS * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    inside = dims < HALF
    real = (heads < NUM_HEADS)[:, None] & inside
    is_k = ((heads >= NUM_Q_HEADS) & (heads < NUM_Q_HEADS + NUM_KV_HEADS))[:, None]
    is_v = (heads >= NUM_Q_HEADS + NUM_KV_HEADS)[:, None]

    if q_weight_ptr is not None:
        # Weights: no kernel before this one writes them.
        q_a = tl.load(q_weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
        q_b = tl.load(q_weight_ptr + HALF + dims, mask=inside, other=0.0).to(tl.float32)
        k_a = tl.load(k_weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
        k_b = tl.load(k_weight_ptr + HALF + dims, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    slot = tl.load(slots_ptr + token).to(tl.int64)
    angle = token * (2 * HALF) + dims
    cos_a = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + HALF + angle, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + HALF + angle, mask=inside, other=0.0).to(tl.float32)
    place = qkv_ptr + token * stride_token + heads.to(tl.int64)[:, None] * stride_head + dims
    a = tl.load(place, mask=real, other=0.0)
    b = tl.load(place + HALF, mask=real, other=0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    if q_weight_ptr is not None:
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        scale = (1.0 / tl.sqrt_rn(squares / (2 * HALF) + eps))[:, None]
        # Rounded between the norm and the rotation, as where they are two steps.
        x = (x * scale * tl.where(is_k, k_a, q_a)).to(dtype).to(tl.float32)
        y = (y * scale * tl.where(is_k, k_b, q_b)).to(dtype).to(tl.float32)
    a = tl.where(is_v, a, (x * cos_a + y * sin_a).to(dtype))
    b = tl.where(is_v, b, (y * cos_b + x * sin_b).to(dtype))
    rotated = real & (heads < NUM_Q_HEADS + NUM_KV_HEADS)[:, None]
    tl.store(place, a, mask=rotated)
    tl.store(place + HALF, b, mask=rotated)

    page, in_page = slot // PAGE, slot % PAGE
    stored = slot >= 0
    head = (heads - NUM_Q_HEADS).to(tl.int64)[:, None]
    target = k_cache_ptr + page * stride_k_page + in_page * stride_k_place + head * stride_k_head
    tl.store(target + dims, a, mask=real & is_k & stored)
    tl.store(target + HALF + dims, b, mask=real & is_k & stored)
    head -= NUM_KV_HEADS
    target = v_cache_ptr + page * stride_v_page + in_page * stride_v_place + head * stride_v_head
    tl.store(target + dims, a, mask=real & is_v & stored)
    tl.store(target + HALF + dims, b, mask=real & is_v & stored)


def rotate_and_store(
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused.rotate_and_store`; q and k are changed in place, and views of `qkv` returned.

    q_weight and k_weight are read while earlier kernels of the stream may still run.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    if num_tokens > 0:
        overlap = runtime.overlap(qkv.device)
        with runtime.on_device(qkv.device):
            runtime.launch(_rotate_and_store_kernel, (num_tokens * cdiv(num_heads, HEADS),))(
                qkv,
                q_weight,
                k_weight,
                cos,
                sin,
                k_cache,
                v_cache,
                slot_mapping,
                eps,
                *qkv.stride()[:2],
                *k_cache.stride()[:3],
                *v_cache.stride()[:3],
                NUM_Q_HEADS=num_q_heads,
                NUM_KV_HEADS=num_kv_heads,
                HALF=head_dim // 2,
                PAGE=k_cache.shape[1],
                BLOCK_H=HEADS,
                BLOCK_HALF=next_power_of_2(head_dim // 2),
                OVERLAP=bool(overlap),
                # 16 bytes of each half for a thread, at a head_dim of 128.
                num_warps=2,
                **overlap,
            )
    q, k, v = qkv.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v
