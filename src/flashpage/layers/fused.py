"""The small steps between products, each in one pass over its rows; knows no model.

On a CPU with numba and on a GPU with Triton: one kernel each, computed in float32 and rounded once.
Elsewhere: the same in torch operators, which are also what the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from flashpage.attention.cpu.numba_runtime import KINDS, call, kernels, why_unavailable
from flashpage.attention.triton.runtime import why_no_triton
from flashpage.cache.kv_cache import store_kvcache

SERIAL_WORK = 2**14
"""Elements up to which one thread is faster than waking others."""

_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_KERNELS = "flashpage.layers.numba_kernels"


_enabled = ContextVar("fused kernels are used", default=True)


@contextmanager
def without_kernels() -> Iterator[None]:
    """In this thread, until it ends: torch operators instead of the kernels here and of the plain
    sampler's, to see what those are worth. What was captured in a CUDA graph before stays."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def kernels_enabled() -> bool:
    """False within `without_kernels`."""
    return _enabled.get()


def _can_fuse(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these: they take addresses, and know nothing of autograd."""
    first = tensors[0]
    return (
        first.device.type == "cpu"
        and first.dtype in (torch.float32, torch.bfloat16)
        and first.numel() > 0
        and all(x.dtype == first.dtype and x.stride(-1) == 1 for x in tensors)
        and not any(x.requires_grad for x in tensors)
        and not torch.compiler.is_compiling()
        and kernels_enabled()
        and why_unavailable() is None
    )


def on_gpu(*tensors: Tensor) -> bool:
    """Whether the Triton kernels can work on these."""
    return (
        all(x.device.type == "cuda" and x.dtype in _GPU_DTYPES for x in tensors)
        and not any(x.requires_grad for x in tensors)
        and not torch.compiler.is_compiling()
        and kernels_enabled()
        and why_no_triton() is None
    )


def _triton() -> ModuleType:
    from flashpage.layers import triton_kernels

    return triton_kernels


def _threads(work: int) -> int:
    return 1 if work <= SERIAL_WORK else torch.get_num_threads()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, `[..., size]`."""
    if on_gpu(x, weight):
        return _triton().add_rms_norm(x, None, weight, eps)[0]
    if not _can_fuse(x, weight):
        return rms_norm_torch(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    _add_rms_norm(x, None, weight, out, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`, the sum rounded to the dtype of residual first.

    x: as residual, or float32 parts of it `[parts, *residual.shape]`: their sum is rounded too.
    """
    if on_gpu(x, residual, weight):
        return _triton().add_rms_norm(x, residual, weight, eps)
    if x.dim() > residual.dim():
        x = x.sum(0).to(residual.dtype)
    if not _can_fuse(x, residual, weight):
        return add_rms_norm_torch(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _add_rms_norm(x, residual, weight, out, total, eps)
    return out, total


def _add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor, eps: float
) -> None:
    size = x.shape[-1]
    call(
        kernels(_KERNELS).add_rms_norm,
        _threads(x.numel()),
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        x.numel() // size,
        size,
        eps,
        KINDS[x.dtype],
    )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for a fused `[..., 2 * size]` input: gate is the first half, up the second.

    Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU without its projections).

    Returns:
        `[..., size]`, in the dtype of the input.
    """
    if on_gpu(gate_up):
        return _triton().silu_and_mul(gate_up)
    if not _can_fuse(gate_up):
        return silu_and_mul_torch(gate_up)
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    call(
        kernels(_KERNELS).silu_and_mul,
        _threads(gate_up.numel()),
        gate_up.data_ptr(),
        out.data_ptr(),
        out.numel() // size,
        size,
        KINDS[gate_up.dtype],
    )
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + roll(x, head_dim / 2) * sin`: half-split rotation.

    Args:
        x: `[num_tokens, num_heads, head_dim]`; tokens may be strided.
        cos, sin: `[num_tokens, 1, head_dim]`, contiguous; sin carries the sign of its half.

    Returns:
        a new tensor, shape and dtype of x.
    """
    num_tokens, num_heads, head_dim = x.shape
    dense_heads = x.stride(1) == head_dim or num_heads == 1
    if not (dense_heads and head_dim % 2 == 0 and _can_fuse(x, cos, sin)):
        return rope_torch(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype)
    call(
        kernels(_KERNELS).rope,
        _threads(x.numel()),
        x.data_ptr(),
        cos.contiguous().data_ptr(),
        sin.contiguous().data_ptr(),
        out.data_ptr(),
        num_tokens,
        num_heads,
        head_dim,
        x.stride(0),
        KINDS[x.dtype],
    )
    return out


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
    """Make queries and keys ready for the scores, and write keys and values to the cache.

    Args:
        qkv: `[num_tokens, num_q_heads + 2 * num_kv_heads, head_dim]`; may be changed in place.
        q_weight, k_weight: `[head_dim]`, of the norms of each head (Qwen3), or None.
        eps: of the norms.
        cos, sin: `[num_tokens, 1, head_dim]`, as in `rope`.
        k_cache, v_cache, slot_mapping: as in `store_kvcache`.

    Returns:
        q `[num_tokens, num_q_heads, head_dim]`, k and v `[num_tokens, num_kv_heads, head_dim]`.
    """
    fits = (
        qkv.shape[-1] % 2 == 0 and qkv.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    )
    if fits and on_gpu(qkv, cos, sin, k_cache, v_cache):
        return _triton().rotate_and_store(
            qkv, num_q_heads, num_kv_heads, q_weight, k_weight, eps, cos, sin, k_cache, v_cache,
            slot_mapping,
        )  # fmt: skip
    qk, v = qkv.split((num_q_heads + num_kv_heads, num_kv_heads), dim=1)
    if q_weight is None or k_weight is None:
        # q and k turn by the same angles: one call serves both.
        q, k = rope(qk, cos, sin).split((num_q_heads, num_kv_heads), dim=1)
    else:
        q, k = qk.split((num_q_heads, num_kv_heads), dim=1)
        q = rope(rms_norm(q, q_weight, eps), cos, sin)
        k = rope(rms_norm(k, k_weight, eps), cos, sin)
    store_kvcache(k, v, k_cache, v_cache, slot_mapping)
    return q, k, v


def load_kernels() -> None:
    """Load the CPU kernels of the layers from disk, or compile them: once, before work begins."""
    if why_unavailable() is not None:
        return
    x = torch.zeros(1, 2)
    add_rms_norm(x, x, x[0], 1e-6)
    silu_and_mul(x)
    rope(x[None], x[None], x[None])


# ---------------------------------------------------------------------------------------------
# The same in torch
# ---------------------------------------------------------------------------------------------


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # For 16-bit inputs the operator itself computes in float32 and rounds once, at the end.
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
