"""`flash_attn.bert_padding`: between padded batches and flat tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.attention.padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
)

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`(rows of x at indices, x)`: for a block whose residual branch keeps all rows.

    Args:
        x: `[first, ...]`.
        indices: int64 `[n]`.

    Returns:
        `[n, ...]` and x itself; gradients of both reach x.
    """
    return index_first_axis(x, indices), x


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Drop padding from rows that each hold several sequences end to end.

    Args:
        hidden_states: `[batch, seqlen, ...]`.
        attention_mask_in_length: int `[batch, seqlen]`; row i begins with the lengths of its
            sequences, in order, then zeros: `[2, 3, 0, 0, 0, 0]` is a sequence of 2 tokens, one
            of 3, and one token of padding.

    Returns:
        `(hidden [total, ...], indices int64 [total] into batch * seqlen,
        cu_seqlens int32 [num_sequences + 1], max_seqlen)`.
    """
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    columns = torch.arange(attention_mask_in_length.shape[1], device=tokens.device)
    hidden, indices, *_ = unpad_input(hidden_states, columns < tokens)
    seqlens = attention_mask_in_length[attention_mask_in_length > 0]
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(seqlens.max()) if seqlens.numel() else 0
    return hidden, indices, cu_seqlens, max_seqlen
