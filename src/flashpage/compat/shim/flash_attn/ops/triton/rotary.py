"""`flash_attn.ops.triton.rotary`: the rotation as callers below autograd ask for it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.attention.rotary import apply_rotary_emb


@torch.no_grad()
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate x as `apply_rotary_emb` does, without a gradient.

    Args:
        conjugate: rotate the other way round, which undoes the rotation.
        Others: shapes, meaning and errors as in `flashpage.attention.rotary.apply_rotary_emb`.
    """
    if conjugate:
        sin = -sin
    return apply_rotary_emb(
        x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    )
