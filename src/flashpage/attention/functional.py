"""The seven functions of flash-attn: names, arguments and results as in flash-attn 2.8.

Their docstrings are the contract. Each checks its arguments, then calls one operator of
`ops`; nothing here touches tensor values, so all seven trace under torch.compile.

Common to the six functions without a cache:

    t   = softmax_scale * q_i . k_j                     (softmax_scale: head_dim ** -0.5)
    t   = softcap * tanh(t / softcap)                   if softcap > 0
    t  -= slope_h * |i + seqlen_k - seqlen_q - j|       if alibi_slopes
    t   = -inf where key j is not visible to query i
    lse = log(sum_j exp(t)),  p = exp(t - lse),  p = dropout(p),  out_i = sum_j p v_j

- Query head h reads kv head `h // (num_q_heads / num_kv_heads)` (GQA, MQA); nothing is expanded.
- Visible: `i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right`, with
  `window_size = (left, right)`, -1 = unbounded; `causal=True` sets right = 0. The diagonal
  ends in the bottom-right corner. A row that sees no key gives out = 0 and softmax_lse = +inf.
- dtypes: float16, bfloat16, float32, float64; sums are in float32 (float64 for float64).
- Any strides; a last dimension that is not contiguous is copied.
- `dropout_p` in [0, 1): probability of dropping an entry of p; must be 0 at evaluation. The mask
  follows torch's default generator: the same seed gives the same mask, forward and backward.
- `return_attn_probs=True` returns `(out, softmax_lse, S_dmask)`. softmax_lse, float32 (float64
  for float64), natural log, is differentiable too. S_dmask is empty without dropout; with dropout
  it is `[batch, num_q_heads, round128(seqlen_q), round128(seqlen_k)]` of `exp(t - max_j t)`,
  negative where dropped: for tests.
- Differentiable once in q, k, v; the backward is repeatable bit for bit with
  `deterministic=True`. A second derivative raises.

Errors: `ArgumentError` (a ValueError and a RuntimeError) for arguments, `UnsupportedError` (a
NotImplementedError) where no backend can serve the call.
Sources: Dao 2023 (FlashAttention-2), and the behaviour of flash-attn 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashpage.attention import ops  # noqa: F401 - defines torch.ops.flashpage
from flashpage.attention import problem as rules
from flashpage.errors import ArgumentError, UnsupportedError

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of dense batches.

    Args:
        q: `[batch, seqlen_q, num_q_heads, head_dim]`, head_dim 1 to 256.
        k, v: `[batch, seqlen_k, num_kv_heads, head_dim]`.
        alibi_slopes: float32 `[num_q_heads]` or `[batch, num_q_heads]`.
        Others: see the module.

    Returns:
        out, shape and dtype of q; with return_attn_probs also softmax_lse
        `[batch, num_q_heads, seqlen_q]` and S_dmask.
    """
    rules.check_same_kind(q, k=k, v=v)
    rules.check_rank("q", q, 4, "(batch, seqlen_q, num_q_heads, head_dim)")
    rules.check_rank("k", k, 4, "(batch, seqlen_k, num_kv_heads, head_dim)")
    batch, seqlen_q, num_q_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1], k.shape[2]
    rules.check_batch(batch)
    rules.check_heads(num_q_heads, num_kv_heads, head_dim)
    shape = (batch, seqlen_k, num_kv_heads, head_dim)
    rules.check_shape("k", k, shape, "(batch, seqlen_k, num_kv_heads, head_dim)")
    rules.check_shape("v", v, shape, "(batch, seqlen_k, num_kv_heads, head_dim)")
    rules.check_alibi(alibi_slopes, q, batch, num_q_heads)
    return _attention(
        q,
        k,
        v,
        None,
        None,
        None,
        seqlen_q,
        seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with K and V in one tensor, kv `[batch, seqlen_k, 2, num_kv_heads,
    head_dim]`: read in place, and one packed gradient."""
    k, v = _unpack("kv", kv, 2, batch_dims=2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with Q, K and V in one tensor, qkv `[batch, seqlen, 3, num_heads,
    head_dim]`: read in place, and one packed gradient."""
    q, k, v = _unpack("qkv", qkv, 3, batch_dims=2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of sequences of different lengths, laid end to end.

    Args:
        q: `[total_q, num_q_heads, head_dim]`; sequence i is rows
            `cu_seqlens_q[i]:cu_seqlens_q[i + 1]`.
        k, v: `[total_k, num_kv_heads, head_dim]`; with `block_table` pages
            `[num_blocks, block_size, num_kv_heads, head_dim]`, any block_size >= 1.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`, from 0, nondecreasing. Lengths may be 0,
            and may differ between q and k.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; they only size work and S_dmask.
        alibi_slopes: float32 `[num_q_heads]` or `[batch, num_q_heads]`.
        block_table: int32 `[batch, max_blocks]`; token t of sequence i is in page
            `block_table[i, t // block_size]`. Entries beyond the length are not read. No backward.
        Others: see the module.

    Returns:
        out like q; with return_attn_probs also softmax_lse `[num_q_heads, total_q]` and S_dmask.
        Rows after `cu_seqlens_q[-1]` are zeros (LSE +inf), and so are their gradients.
    """
    rules.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes)
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not 0 <= rules.as_int(name, bound) <= rules.MAX_WINDOW:
            raise ArgumentError(
                f"{name} must be at least 0 and at most {rules.MAX_WINDOW}, got {bound}"
            )
    return _attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with K and V in one tensor, kv `[total_k, 2, num_kv_heads,
    head_dim]`: read in place, and one packed gradient."""
    k, v = _unpack("kv", kv, 2, batch_dims=1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with Q, K and V in one tensor, qkv `[total, 3, num_heads,
    head_dim]`, and one `cu_seqlens` for all: read in place, and one packed gradient."""
    q, k, v = _unpack("qkv", qkv, 3, batch_dims=1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new queries over a KV cache, after appending new keys to it in place.

    If k and v are given, they are first written at positions `cache_seqlens[i] ...` of sequence i
    (k rotated if rotary_cos is given), and attention then runs over the keys
    `cache_leftpad[i] ... cache_seqlens[i] + seqlen_new`. No autograd.

    Args:
        q: `[batch, seqlen_q, num_q_heads, head_dim]`; not modified.
        k_cache, v_cache: `[batch_cache, seqlen_cache, num_kv_heads, head_dim]`, or with
            block_table pages `[num_blocks, block_size, num_kv_heads, head_dim]`, any block_size
            >= 1. Any strides but the last, which must be 1. What lies in unused slots, NaN
            included, never reaches the output.
        k, v: `[batch, seqlen_new, num_kv_heads, head_dim]`; needs cache_seqlens.
        rotary_cos, rotary_sin: dtype of q, contiguous `[seqlen_rotary, rotary_dim / 2]` with
            seqlen_rotary >= the capacity of the cache; needs k. Keys are rotated by their
            position; query i by position `cache_seqlens + i` if causal or windowed, else all by
            `cache_seqlens`.
        cache_seqlens: tokens in the cache before this call, int or int32 `[batch]`; None means
            the whole cache. Not modified.
        cache_batch_idx: int32 `[batch]`, the row of the cache that each sequence uses; not with
            block_table.
        cache_leftpad: int32 `[batch]`, first valid position; not with block_table.
        block_table: int32 `[batch, max_blocks]`; token t of sequence i is in page
            `block_table[i, t // block_size]`. Entries beyond the length are not read.
        softmax_scale, causal, window_size, softcap, alibi_slopes: see the module; seqlen_k is
            `cache_seqlens + seqlen_new - cache_leftpad`.
        rotary_interleaved: rotate features (0, 1), (2, 3), ... if True, else the two halves.
        num_splits: parts into which each sequence's keys are split; 0 = chosen for you. The
            result is the same up to rounding.

    Returns:
        out like q; with return_softmax_lse also softmax_lse `[batch, num_q_heads, seqlen_q]`.

    Raises:
        CacheOverflowError: the new tokens do not fit (where the lengths can be seen without a
            synchronisation: on the CPU).
    """
    rules.check_same_kind(
        q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin
    )
    rules.check_rank("q", q, 4, "(batch, seqlen_q, num_q_heads, head_dim)")
    batch, _, num_q_heads, head_dim = q.shape
    rules.check_batch(batch)
    capacity = rules.check_cache(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
    rules.check_alibi(alibi_slopes, q, batch, num_q_heads)
    num_splits = rules.resolve_num_splits(num_splits)
    softcap, _ = rules.resolve_softcap_and_dropout(softcap, 0.0)
    scale = rules.resolve_scale(softmax_scale, head_dim)
    left, right = rules.resolve_window(window_size, causal)
    seqlens = rules.resolve_cache_seqlens(q, cache_seqlens, capacity)

    q, k_cache, v_cache = _last_contiguous(q.detach()), k_cache.detach(), v_cache.detach()
    if k is None and v is not None:
        raise ArgumentError("If value is supplied, key must also be passed in: got v but no k")
    if rotary_cos is not None and k is None:
        raise ArgumentError(
            "If rotary cos/sin are provided, new key / value to be appended to the cache must "
            "also be provided: got rotary_cos but no k"
        )
    if (rotary_cos is None) != (rotary_sin is None):
        raise ArgumentError("rotary_cos and rotary_sin must be given together, got only one")
    if k is not None:
        if v is None:
            raise ArgumentError("If key is supplied, value must also be passed in: got k but no v")
        if cache_seqlens is None:
            raise ArgumentError(
                "If key is supplied, seqlens_k must also be passed in: got k but no cache_seqlens"
            )
        rules.check_new_tokens(q, k, v, k_cache, capacity)
        rules.check_not_expanded("k_cache", k_cache)
        rules.check_not_expanded("v_cache", v_cache)
        rules.check_rotary(rotary_cos, rotary_sin, head_dim, capacity)
        rotated = torch.ops.flashpage.append_kv(
            q,
            k.detach(),
            v.detach(),
            k_cache,
            v_cache,
            seqlens,
            rotary_cos,
            rotary_sin,
            block_table,
            cache_batch_idx,
            cache_leftpad,
            rules.as_bool("rotary_interleaved", rotary_interleaved),
            left >= 0 or right >= 0,
        )
        if rotary_cos is not None:
            q = rotated

    out, softmax_lse = torch.ops.flashpage.decode(
        q,
        k_cache,
        v_cache,
        seqlens,
        0 if k is None else k.shape[1],
        block_table,
        cache_batch_idx,
        cache_leftpad,
        alibi_slopes,
        scale,
        left,
        right,
        softcap,
        num_splits,
    )
    return (out, softmax_lse) if return_softmax_lse else out


# ---------------------------------------------------------------------------------------------
# Shared by the functions above
# ---------------------------------------------------------------------------------------------


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _refuse_tangents(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                f"flash attention has no forward-mode derivative: {name} has a tangent"
            )


def _unpack(name: str, packed: Tensor, parts: int, batch_dims: int) -> tuple[Tensor, ...]:
    """Views of a packed tensor; their gradients come back as one packed tensor."""
    lead = "batch, seqlen" if batch_dims == 2 else "total"
    meaning = f"({lead}, {parts}, num_heads, head_dim)"
    rules.check_rank(name, packed, batch_dims + 3, meaning)
    if packed.shape[batch_dims] != parts:
        raise ArgumentError(f"{name} must have shape {meaning}, got {tuple(packed.shape)}")
    return packed.unbind(batch_dims)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> Result:
    if forward_ad._current_level >= 0:
        _refuse_tangents(q=q, k=k, v=v)
    softcap, dropout_p = rules.resolve_softcap_and_dropout(softcap, dropout_p)
    scale = rules.resolve_scale(softmax_scale, q.shape[-1])
    left, right = rules.resolve_window(window_size, causal)
    rng_state = None
    if dropout_p > 0.0:
        # Drawn outside the operator, which so stays a pure function of its arguments.
        rng_state = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device)
    out, softmax_lse, s_dmask = torch.ops.flashpage.forward(
        _last_contiguous(q),
        _last_contiguous(k),
        _last_contiguous(v),
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        alibi_slopes,
        rng_state,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        left,
        right,
        softcap,
        dropout_p,
        rules.as_bool("deterministic", deterministic),
        bool(return_attn_probs) and dropout_p > 0.0,
    )
    return (out, softmax_lse, s_dmask) if return_attn_probs else out
