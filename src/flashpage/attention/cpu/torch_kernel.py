"""Attention through torch's own flash kernel for the CPU, stretched to the bottom-right diagonal.

torch's kernel knows full attention and a causal mask from the top-left corner. Both are the
same for square problems. For others, the keys left of the last square are seen by every row:
that rectangle and the causal square are two calls, joined by their LSE.

Shapes as in `blocks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.attention.problem import Problem

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def is_causal(problem: Problem, seqlen_q: int, seqlen_k: int) -> bool | None:
    """Whether the mask is the causal one, False if there is none, None if it is another mask.

    Windows so wide that they hide nothing count as none.
    """
    left, right = problem.window_left, problem.window_right
    if 0 <= left < seqlen_k - 1:
        return None
    if right < 0 or right >= seqlen_q - 1:
        return False
    return True if right == 0 else None


def fits(problem: Problem, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether torch's kernel can do this. It masks before it scales, so not with scale <= 0."""
    if problem.softmax_scale <= 0.0:
        return False
    plain = problem.softcap == 0.0 and problem.dropout_p == 0.0 and not problem.has_alibi
    return plain and is_causal(problem, seqlen_q, seqlen_k) is not None


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = _FLASH(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, causal, scale=scale
    )
    return out.transpose(1, 2), lse


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)`; seqlen_q and seqlen_k at least 1."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    scale = problem.softmax_scale
    if not is_causal(problem, seqlen_q, seqlen_k):
        return _flash(q, k, v, scale, False)
    if seqlen_q == seqlen_k:
        return _flash(q, k, v, scale, True)
    if seqlen_q > seqlen_k:
        blind = seqlen_q - seqlen_k  # the first rows see no key
        out = torch.zeros(q.shape, dtype=q.dtype)
        shape = (q.shape[0], q.shape[2], seqlen_q)
        lse = torch.full(shape, torch.inf, dtype=problem.lse_dtype)
        out[:, blind:], lse[:, :, blind:] = _flash(q[:, blind:], k, v, scale, True)
        return out, lse
    past = seqlen_k - seqlen_q
    return _merge(
        *_flash(q, k[:, :past], v[:, :past], scale, False),
        *_flash(q, k[:, past:], v[:, past:], scale, True),
    )


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (torch.exp(x - lse).transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    problem: Problem,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)`; seqlen_q and seqlen_k at least 1.

    With the LSE and the output of the whole row, the backward of each part gives that part's
    share of the gradient.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    scale = problem.softmax_scale
    rows = (dout, q, out, softmax_lse)
    if not is_causal(problem, seqlen_q, seqlen_k):
        return _flash_backward(*rows, k, v, scale, False)
    if seqlen_q == seqlen_k:
        return _flash_backward(*rows, k, v, scale, True)
    if seqlen_q > seqlen_k:
        blind = seqlen_q - seqlen_k
        seeing = (dout[:, blind:], q[:, blind:], out[:, blind:], softmax_lse[:, :, blind:])
        dq = torch.zeros(q.shape, dtype=q.dtype)
        dq[:, blind:], dk, dv = _flash_backward(*seeing, k, v, scale, True)
        return dq, dk, dv
    past = seqlen_k - seqlen_q
    dq_a, dk_a, dv_a = _flash_backward(*rows, k[:, :past], v[:, :past], scale, False)
    dq_b, dk_b, dv_b = _flash_backward(*rows, k[:, past:], v[:, past:], scale, True)
    return dq_a + dq_b, torch.cat((dk_a, dk_b), dim=1), torch.cat((dv_a, dv_b), dim=1)


def _flash_backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _FLASH_BACKWARD(
        *(x.transpose(1, 2) for x in (dout, q, k, v, out)),
        softmax_lse,
        0.0,
        causal,
        scale=scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv
