"""The operators `flashpage::*`: schemas, fake versions, autograd.

torch.compile, torch.export and CUDA graphs see these and nothing below. Arguments that are
written are declared so. An operator trusts the shapes it gets (`functional` checked them),
asks `dispatch` for a backend and calls it.

Shapes, dense: q `[batch, seqlen_q, num_q_heads, head_dim]`, k and v
`[batch, seqlen_k, num_kv_heads, head_dim]`, out like q, softmax_lse
`[batch, num_q_heads, seqlen_q]`. With `cu_seqlens_q` (varlen): q `[total_q, num_q_heads,
head_dim]`, softmax_lse `[num_q_heads, total_q]`. With `block_table`: k and v are pages
`[num_blocks, block_size, num_kv_heads, head_dim]`. `rng_state` is int64 `[2]`, given iff
`dropout_p > 0`. `window_left`, `window_right`: -1 = unbounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashpage.attention import dispatch
from flashpage.attention.dispatch import AttentionInputs, DecodeInputs
from flashpage.attention.problem import Layout, Problem, round128
from flashpage.errors import UnsupportedError

_OPTIONS = "float softmax_scale, int window_left, int window_right, float softcap, float dropout_p"

torch.library.define(
    "flashpage::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? block_table, Tensor? alibi_slopes, Tensor? rng_state, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {_OPTIONS}, bool deterministic, "
    "bool return_s_dmask) -> (Tensor out, Tensor softmax_lse, Tensor s_dmask)",
)
torch.library.define(
    "flashpage::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, Tensor? rng_state, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {_OPTIONS}, bool deterministic) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
)
torch.library.define(
    "flashpage::decode",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, SymInt num_new_tokens, "
    "Tensor? block_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? alibi_slopes, "
    "float softmax_scale, int window_left, int window_right, float softcap, int num_splits) "
    "-> (Tensor out, Tensor softmax_lse)",
)
torch.library.define(
    "flashpage::append_kv",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor cache_seqlens, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? block_table, "
    "Tensor? cache_batch_idx, Tensor? cache_leftpad, bool rotary_interleaved, "
    "bool rotate_q_by_row) -> Tensor q_rotated",
)
torch.library.define(
    "flashpage::store_kv",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
)


# ---------------------------------------------------------------------------------------------
# forward and backward
# ---------------------------------------------------------------------------------------------


def _problem(
    q: Tensor,
    num_kv_heads: int,
    layout: Layout,
    alibi_slopes: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> Problem:
    return Problem(
        layout=layout,
        device=q.device,
        dtype=q.dtype,
        num_q_heads=q.shape[-2],
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[-1],
        softmax_scale=softmax_scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        dropout_p=dropout_p,
        has_alibi=alibi_slopes is not None,
        deterministic=deterministic,
    )


@torch.library.impl("flashpage::forward", "default")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    return_s_dmask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    layout: Layout = "dense" if cu_seqlens_q is None else "varlen"
    problem = _problem(
        q,
        k.shape[-2],
        "paged" if block_table is not None else layout,
        alibi_slopes,
        softmax_scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
        deterministic,
    )
    inputs = AttentionInputs(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        alibi_slopes,
        rng_state,
        max_seqlen_q,
        max_seqlen_k,
    )
    return dispatch.choose(problem, "forward").forward(problem, inputs, return_s_dmask)


@torch.library.register_fake("flashpage::forward")
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    return_s_dmask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_heads = q.shape[-2]
    if cu_seqlens_q is None:
        batch = q.shape[0]
        softmax_lse = q.new_empty(batch, num_heads, q.shape[1], dtype=lse_dtype)
    else:
        batch = cu_seqlens_q.shape[0] - 1
        softmax_lse = q.new_empty(num_heads, q.shape[0], dtype=lse_dtype)
    if return_s_dmask:
        s_dmask = q.new_empty(batch, num_heads, round128(max_seqlen_q), round128(max_seqlen_k))
    else:
        s_dmask = q.new_empty(0)
    return q.new_empty(q.shape), softmax_lse, s_dmask


@torch.library.impl("flashpage::backward", "default")
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _problem(
        q,
        k.shape[-2],
        "dense" if cu_seqlens_q is None else "varlen",
        alibi_slopes,
        softmax_scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
        deterministic,
    )
    inputs = AttentionInputs(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        alibi_slopes,
        rng_state,
        max_seqlen_q,
        max_seqlen_k,
    )
    backend = dispatch.choose(problem, "backward")
    return backend.backward(problem, inputs, dout, dlse, out, softmax_lse)


@torch.library.register_fake("flashpage::backward")
def _backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, rng_state, *scalars = inputs
    out, softmax_lse, s_dmask = output
    ctx.save_for_backward(
        q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state
    )
    ctx.scalars = scalars[:-1]  # all but return_s_dmask
    ctx.paged = block_table is not None
    ctx.named = dispatch.named()
    ctx.mark_non_differentiable(s_dmask)
    # An unused LSE then arrives as None, and costs nothing.
    ctx.set_materialize_grads(False)


def _forward_backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    if ctx.paged:
        raise UnsupportedError(
            "attention over a block_table has no backward: pages hold no gradients. Call it "
            "under torch.no_grad(), or pass k and v as flat tokens."
        )
    nothing = (None,) * 14
    if dout is None and dlse is None:
        return None, None, None, *nothing
    q, k, v, out, softmax_lse, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()
    with dispatch.within(ctx.named):
        grads = torch.ops.flashpage.backward(
            dout, dlse, q, k, v, out, softmax_lse, *tensors, *ctx.scalars
        )
    return *grads, *nothing


torch.library.register_autograd(
    "flashpage::forward", _forward_backward, setup_context=_save_for_backward
)


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise UnsupportedError(
        "flash attention has no double backward: the gradient of the gradient is not implemented"
    )


torch.library.register_autograd("flashpage::backward", _no_double_backward)


# ---------------------------------------------------------------------------------------------
# the cache
# ---------------------------------------------------------------------------------------------


@torch.library.impl("flashpage::decode", "default")
def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    num_new_tokens: int,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    alibi_slopes: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    problem = _problem(
        q,
        k_cache.shape[-2],
        "dense" if block_table is None else "paged",
        alibi_slopes,
        softmax_scale,
        window_left,
        window_right,
        softcap,
    )
    inputs = DecodeInputs(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        num_new_tokens,
        block_table,
        cache_batch_idx,
        cache_leftpad,
        alibi_slopes,
        num_splits,
    )
    return dispatch.choose(problem, "decode").decode(problem, inputs)


@torch.library.register_fake("flashpage::decode")
def _decode_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads, _head_dim = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(batch, num_heads, seqlen_q, dtype=lse_dtype)


@torch.library.impl("flashpage::append_kv", "cpu")
def _append_kv_cpu(*args: Any) -> Tensor:
    from flashpage.attention.cpu.cache import append_kv

    return append_kv(*args)


@torch.library.impl("flashpage::append_kv", "cuda")
def _append_kv_cuda(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any
) -> Tensor:
    from flashpage.attention.triton.cache import append_kv

    # Nothing is written for an attention that can not follow.
    dispatch.choose(_problem(q, k_cache.shape[-2], "dense", None, 1.0, -1, -1, 0.0), "decode")
    return append_kv(q, k, v, k_cache, v_cache, *args)


@torch.library.register_fake("flashpage::append_kv")
def _append_kv_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    rotary_cos: Tensor | None,
    *_: Any,
) -> Tensor:
    return q.new_empty(0) if rotary_cos is None else q.new_empty(q.shape)


@torch.library.impl("flashpage::store_kv", "cpu")
def _store_kv_cpu(*args: Tensor) -> None:
    from flashpage.attention.cpu.cache import store_kv

    store_kv(*args)


@torch.library.impl("flashpage::store_kv", "cuda")
def _store_kv_cuda(*args: Tensor) -> None:
    from flashpage.attention.triton.cache import store_kv

    store_kv(*args)


@torch.library.register_fake("flashpage::store_kv")
def _store_kv_fake(*_: Tensor) -> None:
    return None
