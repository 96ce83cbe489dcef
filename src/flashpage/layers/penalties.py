"""Repetition, presence and frequency penalties from a table of counts on the device.

A row of the table says how often one sequence has generated each token, and by the bit `PROMPT`
which tokens its prompt has. Row 0 is nobody's, and stays zero. The definitions are those of
`sampler.RowSampling`, and what `sampler.apply_edits` does with lists from the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.layers.fused import on_gpu

PROMPT = 1 << 30


def penalize(
    logits: Tensor,
    table: Tensor,
    rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """The logits of a step after penalties.

    Args:
        logits: `[num_rows, vocab_size]`, any float dtype.
        table: int32 `[table_rows, vocab_size]`, dense.
        rows: int32 `[num_rows]`, whose counts count for a row of logits; 0: it has no penalties.
        repetition: float32 `[num_rows]`: positive logits of tokens of the prompt and generated ones
            are divided by it, others multiplied.
        presence, frequency: float32 `[num_rows]`: what is subtracted if a token was generated, and
            for each time.

    Returns:
        float32 `[num_rows, vocab_size]`, a new tensor.
    """
    penalties = (repetition, presence, frequency)
    if on_gpu(logits):
        from flashpage.layers import triton_penalties

        return triton_penalties.penalize(logits, table, rows, *penalties)
    return penalize_torch(logits, table, rows, *penalties)


def penalize_torch(
    logits: Tensor,
    table: Tensor,
    rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """`penalize` in torch operators."""
    x = logits.float()
    counts = table[rows.long()]
    generated = counts & (PROMPT - 1)
    factor = repetition[:, None]
    x = torch.where(counts != 0, torch.where(x > 0, x / factor, x * factor), x)
    amounts = presence[:, None] + frequency[:, None] * generated
    return torch.where(generated > 0, x - amounts, x)


def count_tokens(table: Tensor, rows: Tensor, tokens: Tensor, times: int = 1) -> None:
    """Add a step's tokens `[num_rows]` to the counts; those of row 0, and -1, are no one's.

    times: -1 takes them back.
    """
    counted = (rows > 0) & (tokens >= 0)
    places = rows.long() * table.shape[1] + tokens
    # Whoever is not counted adds 0 to the first place, which no one reads.
    table.view(-1).index_add_(0, places * counted, counted.to(table.dtype) * times)
