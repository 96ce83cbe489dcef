"""Rotary position embedding on tensors (Su et al. 2021, section 3.2.2), both pairings."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.errors import ArgumentError


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first `2 * cos.shape[-1]` features of x in pairs; copy the rest.

    Computed in float32 (float64 for float64) and rounded once to the dtype of x.

    Args:
        x: `[..., heads, head_dim]`.
        cos, sin: `[..., rotary_dim / 2]`, one row per position, broadcast over heads.
        interleaved: pairs are features (0, 1), (2, 3), ... (GPT-J style) if True,
            (0, rotary_dim/2), (1, rotary_dim/2 + 1), ... (GPT-NeoX style) if False.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cos.shape[-1]
    cos, sin = cos.to(compute).unsqueeze(-2), sin.to(compute).unsqueeze(-2)
    rotated = x[..., : 2 * half].to(compute)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        pairs = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((pairs.to(x.dtype), x[..., 2 * half :]), dim=-1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Apply rotary embedding, as `flash_attn.layers.rotary.apply_rotary_emb`; differentiable.

    Args:
        x: `[batch, seqlen, heads, head_dim]`, or `[total_tokens, heads, head_dim]` with
            `cu_seqlens`.
        cos, sin: `[max_position, rotary_dim / 2]`, rotary_dim <= head_dim.
        inplace: write the result into x and return x.
        seqlen_offsets: position of each sequence's first token, an int or int `[batch]`.
        cu_seqlens: int32 `[batch + 1]`.
        max_seqlen: accepted for compatibility; the lengths say it all.

    Raises:
        ArgumentError: a shape does not fit, or a position is beyond `cos`.
    """
    if cos.shape != sin.shape or cos.dim() != 2:
        raise ArgumentError(
            f"cos and sin must both have shape (max_position, rotary_dim / 2), got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ArgumentError(
            f"rotary_dim must be at most head_dim: cos has {cos.shape[1]} columns, so "
            f"rotary_dim = {2 * cos.shape[1]}, but x has head_dim = {x.shape[-1]}"
        )
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if positions.numel() and not (0 <= int(positions.min()) <= int(positions.max()) < len(cos)):
        raise ArgumentError(
            f"seqlen_offsets and seqlen reach positions {int(positions.min())} to "
            f"{int(positions.max())}, but cos/sin have {len(cos)} rows"
        )
    out = rotate(x, cos[positions], sin[positions], interleaved=interleaved)
    return x.copy_(out) if inplace else out


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Absolute position of each token: `[batch, seqlen]`, or `[total_tokens]` with cu_seqlens."""
    if cu_seqlens is None:
        if x.dim() != 4:
            raise ArgumentError(
                f"x must have shape (batch, seqlen, heads, head_dim) when cu_seqlens is None, "
                f"got {tuple(x.shape)}"
            )
        index = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        if isinstance(seqlen_offsets, Tensor):
            return index + seqlen_offsets.to(x.device, torch.int64)[:, None]
        return index + seqlen_offsets
    if x.dim() != 3:
        raise ArgumentError(
            f"x must have shape (total_tokens, heads, head_dim) with cu_seqlens, "
            f"got {tuple(x.shape)}"
        )
    cu = cu_seqlens.to(x.device, torch.int64)
    lengths = cu[1:] - cu[:-1]
    start = torch.repeat_interleave(cu[:-1], lengths)
    index = torch.arange(len(start), device=x.device) - start
    if isinstance(seqlen_offsets, Tensor):
        offsets = seqlen_offsets.to(x.device, torch.int64)
        index = index + torch.repeat_interleave(offsets, lengths)
    else:
        index = index + seqlen_offsets
    # Tail tokens beyond cu_seqlens[-1] belong to no sequence: rotate them by position 0.
    tail = torch.zeros(x.shape[0] - len(index), dtype=torch.int64, device=x.device)
    return torch.cat((index, tail))
