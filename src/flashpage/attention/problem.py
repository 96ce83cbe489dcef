"""What is asked: one frozen description of an attention call, and every check of its arguments.

Looks only at shapes, dtypes, devices and Python scalars, never at tensor values: it runs
under torch.compile and never synchronises with a device. Values are checked by the backend
that can see them for free.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flashpage.errors import ArgumentError

Layout = Literal["dense", "varlen", "paged"]
Function = Literal["forward", "backward", "decode"]

MAX_HEAD_DIM = 256
MAX_NUM_SPLITS = 128
MAX_WINDOW = 2**31 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).tiny
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem:
    """An attention call without its data: what a backend needs to say whether it can serve it.

    `window_left` and `window_right` are the visible range around the bottom-right diagonal,
    -1 = unbounded; causal is `window_right == 0`.
    """

    layout: Layout
    """where K and V are: as dense batches, as flat tokens, or in pages"""
    device: torch.device
    dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    has_alibi: bool = False
    deterministic: bool = False

    @property
    def group_size(self) -> int:
        """query heads that share one kv head"""
        return self.num_q_heads // self.num_kv_heads

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, and float64 for float64 inputs; also the dtype of all accumulation"""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def round128(n: int) -> int:
    """The side of `S_dmask` that holds n rows or columns."""
    return (n + 127) // 128 * 128


# ---------------------------------------------------------------------------------------------
# Scalars
# ---------------------------------------------------------------------------------------------


def as_int(name: str, value: Any) -> int:
    """An integer given as int, numpy integer or one-element integer tensor; nothing is rounded."""
    if isinstance(value, int | torch.SymInt):
        return value
    try:
        if isinstance(value, Tensor):
            if not value.is_floating_point() and not value.is_complex():
                return int(value)
        else:
            return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ArgumentError(f"{name} must be an integer, got {value!r}")


def as_float(name: str, value: Any) -> float:
    """A number that float32 can hold: kernels compute with it in that type."""
    try:
        number = float("nan") if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = float("nan")
    if -FLOAT32_MAX <= number <= FLOAT32_MAX:
        return number
    raise ArgumentError(f"{name} must be a finite number, got {value!r}")


def as_bool(name: str, value: Any) -> bool:
    """A switch: a bool of Python, numpy or torch, or 0 or 1."""
    if isinstance(value, bool):
        return value
    try:
        if not isinstance(value, str) and value in (0, 1):
            return bool(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ArgumentError(f"{name} must be True or False, got {value!r}")


def resolve_window(window_size: Sequence[int] | Tensor, causal: bool) -> tuple[int, int]:
    """`(window_left, window_right)` with every unbounded side as -1; causal sets right to 0."""
    if isinstance(window_size, Tensor):
        is_pair = tuple(window_size.shape) == (2,)
    else:
        is_pair = not isinstance(window_size, str) and hasattr(window_size, "__len__")
        is_pair = is_pair and len(window_size) == 2
    if not is_pair:
        raise ArgumentError(f"window_size must be a pair (left, right), got {window_size!r}")
    left, right = (as_int("window_size", side) for side in window_size)
    # Beyond every sequence a side is as good as unbounded, and must fit into an operator's int.
    left, right = (-1 if side < 0 else min(side, MAX_WINDOW) for side in (left, right))
    return left, 0 if as_bool("causal", causal) else right


def resolve_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The given scale, or `head_dim ** -0.5`."""
    return head_dim**-0.5 if softmax_scale is None else as_float("softmax_scale", softmax_scale)


def resolve_softcap_and_dropout(softcap: float, dropout_p: float) -> tuple[float, float]:
    """Both as numbers; 0 is off."""
    cap, p = as_float("softcap", softcap), as_float("dropout_p", dropout_p)
    # As kernels see it: the largest number below 1 in float32 is 1 - 2^-24.
    if not 0.0 <= p <= 1.0 - 2.0**-24:
        raise ArgumentError(f"dropout_p must be in [0, 1) in float32, got {dropout_p}")
    if cap != 0.0 and not cap >= FLOAT32_TINY:
        raise ArgumentError(
            f"softcap must be 0 (off) or a positive number of at least {FLOAT32_TINY:.3g}, got "
            f"{softcap}"
        )
    if cap > 0.0 and p > 0.0:
        raise ArgumentError(
            f"Softcapping does not support dropout for now: got softcap = {softcap} and "
            f"dropout_p = {dropout_p}"
        )
    return cap, p


def resolve_num_splits(num_splits: int) -> int:
    """The number of splits; 0 is chosen by the backend."""
    splits = as_int("num_splits", num_splits)
    if not 0 <= splits <= MAX_NUM_SPLITS:
        raise ArgumentError(
            f"num_splits must be between 0 (chosen for you) and {MAX_NUM_SPLITS}, got {num_splits}"
        )
    return splits


# ---------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------


def check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        shown = repr(x)
        raise ArgumentError(
            f"{name} must be a tensor, got {shown if len(shown) < 80 else type(x).__name__}"
        )


def check_same_kind(q: Tensor, **others: Tensor | None) -> None:
    """Dtype of q, then dtype and device of the others against it."""
    check_tensor("q", q)
    for name, x in others.items():
        if x is not None or name in ("k_cache", "v_cache"):
            check_tensor(name, x)
    if q.dtype not in FLOAT_DTYPES:
        raise ArgumentError(
            "FlashAttention only support fp16 and bf16 data type (and flashpage float32 and "
            f"float64), got q of {q.dtype}"
        )
    for name, x in others.items():
        if x is not None and x.dtype != q.dtype:
            field = {"k": "key", "v": "value"}.get(name, name)
            raise ArgumentError(
                f"query and {field} must have the same dtype, got {q.dtype} and {x.dtype}"
            )
    check_device(q, **others)


def check_device(q: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ArgumentError(f"{name} must be on the device of q ({q.device}), is on {x.device}")


def check_shape(name: str, x: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    if x.dim() != len(expected) or any(a != b for a, b in zip(x.shape, expected, strict=True)):
        raise ArgumentError(
            f"{name} must have shape {meaning} = {tuple(expected)}, got {tuple(x.shape)}"
        )


def check_rank(name: str, x: Tensor, rank: int, meaning: str) -> None:
    check_tensor(name, x)
    if x.dim() != rank:
        raise ArgumentError(f"{name} must have shape {meaning}, got {tuple(x.shape)}")


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ArgumentError(
            f"FlashAttention forward only supports head dimension at most {MAX_HEAD_DIM} "
            f"(and at least 1), got {head_dim}"
        )
    if num_kv_heads < 1 or num_q_heads % num_kv_heads != 0:
        raise ArgumentError(
            "Number of heads in key/value must divide number of heads in query, got "
            f"{num_kv_heads} key/value heads and {num_q_heads} query heads"
        )


def check_int32(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dtype != torch.int32:
        raise ArgumentError(f"{name} must have dtype int32, got {x.dtype}")


def check_batch(batch: int) -> None:
    if batch < 1:
        raise ArgumentError(f"batch size must be positive, got {batch}")


def check_cu_seqlens(name: str, cu_seqlens: Tensor, q: Tensor) -> int:
    """Kind of a cumulative length tensor; returns the batch size."""
    check_int32(name, cu_seqlens)
    check_device(q, **{name: cu_seqlens})
    if not cu_seqlens.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, got strides {cu_seqlens.stride()}")
    check_rank(name, cu_seqlens, 1, "(batch + 1,)")
    check_batch(cu_seqlens.shape[0] - 1)
    return cu_seqlens.shape[0] - 1


def check_alibi(alibi_slopes: Tensor | None, q: Tensor, batch: int, num_q_heads: int) -> None:
    if alibi_slopes is None:
        return
    check_tensor("alibi_slopes", alibi_slopes)
    if alibi_slopes.dtype != torch.float32:
        raise ArgumentError(f"ALiBi slopes must have dtype fp32, got {alibi_slopes.dtype}")
    check_device(q, alibi_slopes=alibi_slopes)
    # One comparison at a time: under torch.compile the sizes may be symbols.
    if alibi_slopes.dim() == 1:
        fits = alibi_slopes.shape[0] == num_q_heads
    else:
        fits = (
            alibi_slopes.dim() == 2
            and alibi_slopes.shape[0] == batch
            and alibi_slopes.shape[1] == num_q_heads
        )
    if not fits:
        raise ArgumentError(
            f"alibi_slopes must have shape (num_q_heads,) = ({num_q_heads},) or (batch, "
            f"num_q_heads) = ({batch}, {num_q_heads}), got {tuple(alibi_slopes.shape)}"
        )
    if alibi_slopes.stride(-1) != 1:
        raise ArgumentError(
            f"ALiBi slopes tensor must have contiguous last dimension, got strides "
            f"{alibi_slopes.stride()}"
        )


def check_block_table(block_table: Tensor, q: Tensor, batch: int) -> None:
    check_tensor("block_table", block_table)
    if block_table.dtype != torch.int32:
        raise ArgumentError(f"block_table must have dtype torch.int32, got {block_table.dtype}")
    check_device(q, block_table=block_table)
    check_rank("block_table", block_table, 2, "(batch, max_blocks)")
    if block_table.shape[0] != batch:
        raise ArgumentError(
            f"block_table must have shape (batch, max_blocks) with batch = {batch}, got "
            f"{tuple(block_table.shape)}"
        )
    if block_table.shape[1] > 1 and block_table.stride(-1) != 1:
        raise ArgumentError(
            f"block_table must have contiguous last dimension, got strides {block_table.stride()}"
        )


def check_not_expanded(name: str, cache: Tensor) -> None:
    """A cache that is written must have a place of its own for every token."""
    for size, stride in zip(cache.shape, cache.stride(), strict=True):
        if size > 1 and stride == 0:
            raise ArgumentError(
                f"{name} is written in place and must not be expanded: it has strides "
                f"{cache.stride()} for shape {tuple(cache.shape)}"
            )


def check_pages(name: str, pages: Tensor) -> None:
    if pages.shape[0] < 1 or pages.shape[1] < 1:
        raise ArgumentError(
            f"{name} must hold at least one page of at least one token, as (num_blocks, "
            f"block_size, num_kv_heads, head_dim), got {tuple(pages.shape)}"
        )


def check_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
) -> int:
    """Flat queries against flat or paged keys; returns the batch size."""
    check_same_kind(q, k=k, v=v)
    check_rank("q", q, 3, "(total_q, num_q_heads, head_dim)")
    batch = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    batch_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q)
    if batch_k != batch:
        raise ArgumentError(
            f"cu_seqlens_k must have shape (batch + 1,) = ({batch + 1},) as cu_seqlens_q, got "
            f"({batch_k + 1},)"
        )
    if block_table is None:
        meaning = "(total_k, num_kv_heads, head_dim)"
        check_rank("k", k, 3, meaning)
    else:
        meaning = "(num_blocks, block_size, num_kv_heads, head_dim)"
        check_rank("k", k, 4, meaning)
        check_pages("k", k)
        check_block_table(block_table, q, batch)
    num_q_heads, head_dim = q.shape[1:]
    check_heads(num_q_heads, k.shape[-2], head_dim)
    shape = (*k.shape[:-1], head_dim)
    check_shape("k", k, shape, meaning)
    check_shape("v", v, shape, meaning)
    check_alibi(alibi_slopes, q, batch, num_q_heads)
    return batch


# ---------------------------------------------------------------------------------------------
# The cache
# ---------------------------------------------------------------------------------------------


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> int:
    """Check the cache and what addresses it; returns its capacity in tokens per sequence."""
    batch, _, num_q_heads, head_dim = q.shape
    paged = block_table is not None
    meaning = f"({'num_blocks, block_size' if paged else 'batch, seqlen'}, num_kv_heads, head_dim)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(name, cache, 4, meaning)
        if cache.stride(-1) != 1 and head_dim > 1:
            raise ArgumentError(
                f"{name} must have contiguous last dimension: it is written in place and never "
                f"copied; got strides {cache.stride()}"
            )
    check_heads(num_q_heads, k_cache.shape[2], head_dim)
    rows = k_cache.shape[0] if paged or cache_batch_idx is not None else batch
    shape = (rows, *k_cache.shape[1:3], head_dim)
    check_shape("k_cache", k_cache, shape, meaning)
    check_shape("v_cache", v_cache, shape, meaning)
    for name, index in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if index is None:
            continue
        check_int32(name, index)
        check_device(q, **{name: index})
        check_shape(name, index, (batch,), "(batch,)")
    if block_table is None:
        return k_cache.shape[1]
    if cache_batch_idx is not None:
        raise ArgumentError(
            "Paged KVcache does not support cache_batch_idx: give each sequence its row of "
            "block_table instead"
        )
    if cache_leftpad is not None:
        raise ArgumentError(
            "We don't support Paged KV and leftpad_k running at the same time yet: got both "
            "block_table and cache_leftpad"
        )
    check_pages("k_cache", k_cache)
    check_block_table(block_table, q, batch)
    return block_table.shape[1] * k_cache.shape[1]


def resolve_cache_seqlens(q: Tensor, cache_seqlens: int | Tensor | None, capacity: int) -> Tensor:
    """int32 `[batch]` on the device of q."""
    batch = q.shape[0]
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.dtype != torch.int32:
            raise ArgumentError(
                f"seqlens_k must have dtype int32: cache_seqlens is {cache_seqlens.dtype}"
            )
        check_device(q, cache_seqlens=cache_seqlens)
        check_shape("cache_seqlens", cache_seqlens, (batch,), "(batch,)")
        return cache_seqlens
    if isinstance(cache_seqlens, (list, tuple)):
        raise ArgumentError(
            f"cache_seqlens must be an integer or an int32 tensor (batch,), got {cache_seqlens!r}"
        )
    length = capacity if cache_seqlens is None else as_int("cache_seqlens", cache_seqlens)
    if not 0 <= length <= capacity:
        raise ArgumentError(
            f"cache_seqlens must be between 0 and the capacity of the cache ({capacity}), "
            f"got {length}"
        )
    return torch.full((batch,), length, dtype=torch.int32, device=q.device)


def check_new_tokens(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, capacity: int) -> None:
    meaning = "(batch, seqlen_new, num_kv_heads, head_dim)"
    check_rank("k", k, 4, meaning)
    shape = (q.shape[0], k.shape[1], k_cache.shape[2], q.shape[3])
    check_shape("k", k, shape, meaning)
    check_shape("v", v, shape, meaning)
    if k.shape[1] > capacity:
        raise ArgumentError(
            "If key is supplied, it must have seqlen <= the seqlen of the KV cache: got "
            f"{k.shape[1]} new tokens for a cache of {capacity}"
        )


def check_rotary(
    rotary_cos: Tensor | None, rotary_sin: Tensor | None, head_dim: int, capacity: int
) -> None:
    if rotary_cos is None or rotary_sin is None:
        return
    check_rank("rotary_cos", rotary_cos, 2, "(seqlen_rotary, rotary_dim / 2)")
    check_shape("rotary_sin", rotary_sin, tuple(rotary_cos.shape), "that of rotary_cos")
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if not x.is_contiguous():
            raise ArgumentError(f"{name} must be contiguous, got strides {x.stride()}")
    rotary_dim = 2 * rotary_cos.shape[1]
    if rotary_dim > head_dim:
        raise ArgumentError(
            f"rotary_dim must be <= headdim: rotary_cos has {rotary_cos.shape[1]} columns, so "
            f"rotary_dim = {rotary_dim}, but head_dim = {head_dim}"
        )
    if rotary_cos.shape[0] < capacity:
        raise ArgumentError(
            "cos/sin seqlen must be at least the seqlen of KV cache: rotary_cos has "
            f"{rotary_cos.shape[0]} rows for a cache of {capacity}"
        )
