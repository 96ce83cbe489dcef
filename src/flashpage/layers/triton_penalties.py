"""`penalties.penalize` as one Triton launch; any GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import cdiv

BLOCK = 2048
"""tokens of a program"""
_GENERATED: tl.constexpr = tl.constexpr((1 << 30) - 1)
"""the bits of a count below `penalties.PROMPT`"""


@triton.jit
def _penalize_kernel(
    logits_ptr,
    table_ptr,
    rows_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    out_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    tokens = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    x = tl.load(logits_ptr + row * stride_row + tokens, mask=mask).to(tl.float32)
    owner = tl.load(rows_ptr + row).to(tl.int64)
    if owner > 0:
        counts = tl.load(table_ptr + owner * vocab_size + tokens, mask=mask, other=0)
        generated = counts & _GENERATED
        factor = tl.load(repetition_ptr + row)
        x = tl.where(counts != 0, tl.where(x > 0, x / factor, x * factor), x)
        amounts = tl.load(presence_ptr + row) + tl.load(frequency_ptr + row) * generated.to(
            tl.float32
        )
        x = tl.where(generated > 0, x - amounts, x)
    tl.store(out_ptr + row * vocab_size + tokens, x, mask=mask)


def penalize(
    logits: Tensor,
    table: Tensor,
    rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """As `penalties.penalize`."""
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1 and vocab_size > 1:
        logits = logits.contiguous()
    out = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    if out.numel() > 0:
        num_blocks = cdiv(vocab_size, BLOCK)
        overlap = runtime.overlap(logits.device)
        with runtime.on_device(logits.device):
            runtime.launch(_penalize_kernel, (num_rows * num_blocks,))(
                logits,
                table,
                rows,
                repetition,
                presence,
                frequency,
                out,
                logits.stride(0),
                vocab_size,
                num_blocks,
                BLOCK=BLOCK,
                OVERLAP=bool(overlap),
                **overlap,
            )
    return out
