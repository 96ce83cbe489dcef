"""Between padded batches and flat tokens: the helpers of `flash_attn.bert_padding`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop padding tokens.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask: bool or 0/1 `[batch, seqlen]`, 1 = token.
        unused_mask: bool or 0/1 `[batch, seqlen]`, 1 = kept in the flat tensor but not counted
            in `seqused`.

    Returns:
        `(hidden [total, ...], indices int64 [total] into batch * seqlen,
        cu_seqlens int32 [batch + 1], max_seqlen, seqused int32 [batch])`.
    """
    kept = attention_mask if unused_mask is None else (attention_mask + unused_mask)
    kept = kept.bool()
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    seqused = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    max_seqlen = int(seqlens.max()) if seqlens.numel() else 0
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        max_seqlen,
        seqused,
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Inverse of `unpad_input`: `[total, ...]` to `[batch, seqlen, ...]`, zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` of x, `[first, ...]` to `[len(indices), ...]`; differentiable."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros `[first_axis_dim, ...]` with `values` at rows `indices` (unique); differentiable."""
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices, values)
