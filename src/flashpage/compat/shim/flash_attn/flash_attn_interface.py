"""`flash_attn.flash_attn_interface`: the seven functions, and the calls below autograd.

The calls below autograd (`_flash_attn_forward` ...) have the signatures and results of flash-attn
2.8, where they are operators; programs that combine partial results (ring attention) use them.
Shapes, dtypes and errors as in `flashpage.attention.functional`; `rng_state` is int64 `[2]`.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from flashpage.attention import ops  # noqa: F401 - defines torch.ops.flashpage
from flashpage.attention import problem as rules
from flashpage.attention.functional import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashpage.errors import ArgumentError, UnsupportedError

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

USE_TRITON_ROCM = False

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """Dense attention: `(out, softmax_lse, S_dmask, rng_state)`.

    S_dmask is empty without `return_softmax`; rng_state is what `_flash_attn_backward` needs to
    repeat the dropout, zeros without dropout.
    """
    _check_dense(q, k, v, alibi_slopes)
    return _forward(
        (q, k, v),
        (None, None, None),
        (q.shape[1], k.shape[1]),
        alibi_slopes,
        _options(q, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        return_softmax,
    )


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """Attention of flat tokens: `(out, softmax_lse, S_dmask, rng_state)`.

    Args:
        leftpad_k: int32 `[batch]`: the first `leftpad_k[i]` keys of sequence i do not exist. Not
            with `block_table`.
        seqused_k: int32 `[batch]`: only the first `seqused_k[i]` keys of sequence i exist.
        max_seqlen_k: with either of the two a true upper bound: keys beyond it raise on the CPU and
            are left out on a GPU, where lengths are not read.
        zero_tensors: accepted; rows of no sequence are zeros in any case.
        num_splits: accepted; the result does not depend on it.
    """
    batch = rules.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes)
    rules.resolve_num_splits(num_splits)
    if leftpad_k is not None or seqused_k is not None:
        k, v, cu_seqlens_k, block_table = _some_keys(
            q, k, v, cu_seqlens_k, max_seqlen_k, block_table, leftpad_k, seqused_k, batch
        )
    return _forward(
        (q, k, v),
        (cu_seqlens_q, cu_seqlens_k, block_table),
        (max_seqlen_q, max_seqlen_k),
        alibi_slopes,
        _options(q, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        return_softmax,
    )


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients into dq, dk and dv (each may be None: not wanted).

    Returns:
        softmax_d, `[batch, num_q_heads, round128(seqlen_q)]`: row sums of dout * out, then zeros.
    """
    _check_dense(q, k, v, alibi_slopes)
    rules.check_shape("softmax_lse", softmax_lse, _lse_shape(q), "(batch, num_q_heads, seqlen_q)")
    options = _options(
        q, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    _backward(
        (dout, q, k, v, out, softmax_lse),
        (dq, dk, dv),
        (None, None, alibi_slopes, rng_state, q.shape[1], k.shape[1]),
        options,
        deterministic,
    )
    delta = _row_sums(dout, out).transpose(1, 2)
    return F.pad(delta, (0, rules.round128(q.shape[1]) - q.shape[1]))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write the gradients into dq, dk and dv (each may be None: not wanted).

    Returns:
        softmax_d, `[num_q_heads, total_q + 128 * batch]`: row sums of dout * out, each sequence
        beginning at a multiple of 128 (`(cu_seqlens_q[i] + 128 * i) // 128 * 128`), else zeros.
    """
    batch = rules.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, None, alibi_slopes)
    rules.check_shape("softmax_lse", softmax_lse, _lse_shape(q), "(num_q_heads, total_q)")
    options = _options(
        q, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    _backward(
        (dout, q, k, v, out, softmax_lse),
        (dq, dk, dv),
        (cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, max_seqlen_q, max_seqlen_k),
        options,
        deterministic,
    )
    cu = cu_seqlens_q.long()
    rows = torch.arange(q.shape[0], device=q.device)
    sequence = torch.searchsorted(cu, rows, right=True) - 1
    sequence = sequence.clamp(max=batch - 1)  # rows of no sequence: zeros, so anywhere behind it
    column = (cu[sequence] + 128 * sequence) // 128 * 128 + rows - cu[sequence]
    softmax_d = q.new_zeros(q.shape[1], q.shape[0] + 128 * batch, dtype=softmax_lse.dtype)
    return softmax_d.index_copy_(1, column, _row_sums(dout, out).t())


# In flash-attn the names through which its own functions reach the operators.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(
    device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """Keys per block of S_dmask: more than any sequence has, since ours is scaled in one block."""
    return 2**30


class _NoCompiledModule:
    """Stands for flash-attn's compiled module, which is not here."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by inspection, not by a caller
            raise AttributeError(name)
        raise UnsupportedError(
            f"flash_attn_gpu.{name} is a function of flash-attn's compiled module, which flashpage "
            "does not have: call the functions of flash_attn or flash_attn.flash_attn_interface"
        )


flash_attn_gpu = _NoCompiledModule()


# ---------------------------------------------------------------------------------------------
# Shared by the calls above
# ---------------------------------------------------------------------------------------------

_Options = tuple[float, int, int, float, float]


def _options(
    q: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> _Options:
    """The scalars of an operator, in its order."""
    softcap, dropout_p = rules.resolve_softcap_and_dropout(softcap, dropout_p)
    scale = rules.resolve_scale(softmax_scale, q.shape[-1])
    left, right = rules.resolve_window((window_size_left, window_size_right), causal)
    return scale, left, right, softcap, dropout_p


def _check_dense(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None) -> None:
    rules.check_same_kind(q, k=k, v=v)
    rules.check_rank("q", q, 4, "(batch, seqlen_q, num_q_heads, head_dim)")
    meaning = "(batch, seqlen_k, num_kv_heads, head_dim)"
    rules.check_rank("k", k, 4, meaning)
    batch, _, num_q_heads, head_dim = q.shape
    rules.check_batch(batch)
    rules.check_heads(num_q_heads, k.shape[2], head_dim)
    shape = (batch, *k.shape[1:3], head_dim)
    rules.check_shape("k", k, shape, meaning)
    rules.check_shape("v", v, shape, meaning)
    rules.check_alibi(alibi_slopes, q, batch, num_q_heads)


def _some_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    block_table: Tensor | None,
    leftpad_k: Tensor | None,
    seqused_k: Tensor | None,
    batch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, v, cu_seqlens_k and block_table that show only the keys that exist, without a copy."""
    for name, x in (("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if x is not None:
            rules.check_int32(name, x)
            rules.check_device(q, **{name: x})
            rules.check_shape(name, x, (batch,), "(batch,)")
    seqlens = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if block_table is not None:
        if leftpad_k is not None:
            raise ArgumentError(
                "We don't support Paged KV and leftpad_k running at the same time yet: got both "
                "block_table and leftpad_k"
            )
        limit = block_table.shape[1] * k.shape[1]
    else:
        # Flat tokens are pages of one token, found in any order that a table gives.
        start = cu_seqlens_k[:-1]
        if leftpad_k is not None:
            leftpad_k = leftpad_k.clamp(min=0)
            start, seqlens = start + leftpad_k, seqlens - leftpad_k
        limit = max(1, min(max_seqlen_k, k.shape[0]))
        block_table = start[:, None] + torch.arange(limit, dtype=torch.int32, device=q.device)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
    if q.device.type == "cpu" and int(seqlens.max()) > limit:
        raise ArgumentError(
            f"max_seqlen_k must be at least the longest sequence here, and seqused_k within the "
            f"keys that there are: got max_seqlen_k = {max_seqlen_k} for {int(seqlens.max())} keys"
        )
    seqlens = seqlens.clamp(min=0, max=limit)
    return k, v, F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0)), block_table


def _forward(
    qkv: tuple[Tensor, Tensor, Tensor],
    index: tuple[Tensor | None, Tensor | None, Tensor | None],
    max_seqlens: tuple[int, int],
    alibi_slopes: Tensor | None,
    options: _Options,
    return_softmax: bool,
) -> Forward:
    q, k, v = (x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in qkv)
    dropout_p = options[-1]
    if return_softmax and dropout_p == 0.0:
        raise ArgumentError(
            "return_softmax is only supported when p_dropout > 0.0: got return_softmax = True and "
            "dropout_p = 0"
        )
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if dropout_p > 0.0:
        rng_state.random_(0, 2**62)
    out, softmax_lse, s_dmask = torch.ops.flashpage.forward(
        q,
        k,
        v,
        *index,
        alibi_slopes,
        rng_state if dropout_p > 0.0 else None,
        *max_seqlens,
        *options,
        False,
        rules.as_bool("return_softmax", return_softmax),
    )
    return out, softmax_lse, s_dmask, rng_state


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    layout: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, int],
    options: _Options,
    deterministic: bool,
) -> None:
    dout, q, k, v, out, softmax_lse = inputs
    rules.check_same_kind(q, dout=dout, out=out)
    for name, x in (("dout", dout), ("out", out)):
        rules.check_shape(name, x, tuple(q.shape), "that of q")
    cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, *max_seqlens = layout
    if options[-1] == 0.0:
        rng_state = None
    elif rng_state is None:
        raise ArgumentError(
            "rng_state must be the one that the forward returned when dropout_p > 0, got None"
        )
    dout, q, k, v, out = (
        x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in (dout, q, k, v, out)
    )
    results = torch.ops.flashpage.backward(
        dout,
        None,
        q,
        k,
        v,
        out,
        # Ring attention passes the LSE of all parts, often as a transposed view.
        softmax_lse.detach().contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        rng_state,
        *max_seqlens,
        *options,
        rules.as_bool("deterministic", deterministic),
    )
    for name, grad, result in zip(("dq", "dk", "dv"), grads, results, strict=True):
        if grad is not None:
            rules.check_shape(name, grad, tuple(result.shape), f"that of {name[1]}")
            grad.copy_(result)


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    """Of softmax_lse: heads before tokens, dense or varlen."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


def _row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """`sum_d dout * out` in float32 (float64 for float64): `[..., heads]`."""
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    return (dout.to(dtype) * out.to(dtype)).sum(-1)
