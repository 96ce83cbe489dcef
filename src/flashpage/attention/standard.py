"""Standard attention with S and P in memory: slow, short, exact; the oracle of every test.

Knows nothing of blocks, pages or backends. Everything else in this package is judged against it.
Formula: Vaswani et al. 2017, equation 1, with the options of FlashAttention-2 in its order:
scale, softcap, ALiBi, mask, softmax, dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StandardResult(NamedTuple):
    """What `standard_attention` computes, intermediate matrices included."""

    out: Tensor
    """`[batch, seqlen_q, num_q_heads, head_dim]`"""
    softmax_lse: Tensor
    """`[batch, num_q_heads, seqlen_q]`, natural log; +inf where a row sees no key"""
    scores: Tensor
    """S, `[batch, num_q_heads, seqlen_q, seqlen_k]`, -inf where masked"""
    probs: Tensor
    """P, `[batch, num_q_heads, seqlen_q, seqlen_k]`, before dropout"""


def visible_mask(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    device: torch.device | str | None = None,
) -> Tensor:
    """Which key each query may see, aligned to the bottom-right corner.

    Key j is visible to query i iff `i + offset - left <= j <= i + offset + right` with
    `offset = seqlen_k - seqlen_q`; a negative side is unbounded; `causal` sets `right = 0`.

    Returns:
        bool `[seqlen_q, seqlen_k]`.
    """
    left, right = (int(side) for side in window_size)
    if causal:
        right = 0
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= key >= diagonal - left
    if right >= 0:
        visible &= key <= diagonal + right
    return visible


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
) -> StandardResult:
    """Attention the direct way, in the dtype of its inputs, differentiable by autograd.

    Args:
        q: `[batch, seqlen_q, num_q_heads, head_dim]`, any float dtype up to float64.
        k, v: `[batch, seqlen_k, num_kv_heads, head_dim]`; `num_kv_heads` divides `num_q_heads`.
        softmax_scale: default `head_dim ** -0.5`.
        causal, window_size: see `visible_mask`.
        softcap: `t -> softcap * tanh(t / softcap)` if positive.
        alibi_slopes: `[num_q_heads]` or `[batch, num_q_heads]`.
        dropout_p: probability with which `dropout_mask` was drawn; kept entries are divided
            by `1 - dropout_p`.
        dropout_mask: bool `[batch, num_q_heads, seqlen_q, seqlen_k]`, True where kept.

    Rows that see no key give `out = 0`, `softmax_lse = +inf` and zero gradients.
    """
    _, seqlen_q, num_q_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1:3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    group = num_q_heads // num_kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))  # clarity before memory, here only

    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        row = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
        distance = (row - torch.arange(seqlen_k, device=q.device)[None, :]).abs()
        slopes = alibi_slopes.to(q.dtype).expand(q.shape[0], num_q_heads)
        scores = scores - slopes[:, :, None, None] * distance
    visible = visible_mask(
        seqlen_q, seqlen_k, causal=causal, window_size=window_size, device=q.device
    )
    scores = scores.masked_fill(~visible, -torch.inf)

    sees_a_key = visible.any(dim=-1)  # [seqlen_q]
    # A row of -inf has no softmax: give it finite scores, then erase what comes out.
    safe_scores = scores.masked_fill(~sees_a_key[:, None], 0.0)
    softmax_lse = torch.logsumexp(safe_scores, dim=-1)
    probs = torch.exp(safe_scores - softmax_lse[..., None])
    probs = probs.masked_fill(~sees_a_key[:, None], 0.0)
    softmax_lse = softmax_lse.masked_fill(~sees_a_key, torch.inf)

    kept = probs
    if dropout_mask is not None:
        kept = probs.masked_fill(~dropout_mask, 0.0) / (1.0 - dropout_p)
    out = torch.einsum("bhqk,bkhd->bqhd", kept, v)
    return StandardResult(out, softmax_lse, scores, probs)
