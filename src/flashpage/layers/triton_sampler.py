"""Plain sampling (temperature, min_p, top_k, top_p) in six Triton launches, without a sort.

A row of logits is read in blocks: their maxima; then, with the row's maximum known, their sums of
weights; then the block that the random number falls into, once more. Three launches between are
for rows that top_k or top_p cut (`triton_bracket`, `triton_cut`): for others their programs end at
once. Nothing waits for the host, and a row's token depends on that row alone.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import cdiv, next_power_of_2
from flashpage.layers import triton_rows as rows
from flashpage.layers.triton_bracket import gather
from flashpage.layers.triton_cut import draw_cut

_WARPS = 8


@triton.jit
def _maxima_kernel(
    logits_ptr,
    maxima_ptr,
    places_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, number = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    x, tokens = rows.block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
    # +inf says that a row has no maximum to subtract: NaN is told in the same way.
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    tl.store(maxima_ptr + tl.program_id(0), top)
    tl.store(places_ptr + tl.program_id(0), tl.min(tl.where(x == top, tokens, vocab_size), 0))


@triton.jit
def _sums_kernel(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    temperature_ptr,
    min_p_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    NEIGHBOURS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, number = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        blocks = tl.arange(0, BLOCKS)
        maxima = tl.load(
            maxima_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf")
        )
        x, _ = rows.block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
        weights = rows.weights_of(x, tl.max(maxima, 0), temperature, tl.load(min_p_ptr + row))
        tl.store(sums_ptr + tl.program_id(0), rows.total_of(weights, NEIGHBOURS))


@triton.jit
def _choose_kernel(
    logits_ptr,
    maxima_ptr,
    places_ptr,
    sums_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    top_k_ptr,
    top_p_ptr,
    tokens_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The token of each row that is not cut, or -1."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    _, _, is_cut = rows.cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if not is_cut:
        blocks = tl.arange(0, BLOCKS)
        there = blocks < num_blocks
        start = row * num_blocks + blocks
        maxima = tl.load(maxima_ptr + start, mask=there, other=-float("inf"))
        top = tl.max(maxima, 0)
        places = tl.load(places_ptr + start, mask=there & (maxima == top), other=vocab_size)
        token = tl.min(places, 0)
        finite = (top == top) & (tl.abs(top) < float("inf"))
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0) & finite:
            min_p = tl.load(min_p_ptr + row)
            # In float64, as the unlikely tokens at the end of a long sum have their share too.
            sums = tl.load(sums_ptr + start, mask=there, other=0.0)
            target = tl.load(uniform_ptr + row) * tl.sum(sums, 0)
            ends = tl.cumsum(sums, 0)
            # The first block whose end lies beyond the target; rounding may leave none: the last
            # block with any weight then.
            last = tl.max(tl.where(sums > 0, blocks, 0), 0)
            number = tl.min(tl.where((ends > target) & (sums > 0), blocks, last), 0)
            target -= tl.sum(tl.where(blocks < number, sums, 0.0), 0)
            x, tokens = rows.block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
            weights = rows.weights_of(x, top, temperature, min_p)
            ends = tl.cumsum(weights.to(tl.float64), 0)
            last = tl.max(tl.where(weights > 0, tokens, 0), 0)
            token = tl.min(tl.where((ends > target) & (weights > 0), tokens, last), 0)
            # The likeliest token has weight 1, whatever the others have.
            valid = rows.weights_of(top, top, temperature, min_p) == 1.0
            token = tl.where(valid, token, -1)
        tl.store(tokens_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def sample_plain(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """As `sampler.sample_plain`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    if logits.stride(1) != 1 and vocab_size > 1:
        logits = logits.contiguous()
    num_blocks = cdiv(vocab_size, rows.BLOCK)
    new = partial(torch.empty, (num_rows, num_blocks), device=logits.device)
    maxima, sums, places = new(), new(dtype=torch.float64), new(dtype=torch.int32)
    sizes = (logits.stride(0), vocab_size, num_blocks)
    overlap = runtime.overlap(logits.device)
    options = {"BLOCK": rows.BLOCK, "OVERLAP": bool(overlap), "num_warps": _WARPS, **overlap}
    with runtime.on_device(logits.device):
        runtime.launch(_maxima_kernel, (num_rows * num_blocks,))(
            logits, maxima, places, *sizes, **options
        )
        options["BLOCKS"] = next_power_of_2(num_blocks)
        runtime.launch(_sums_kernel, (num_rows * num_blocks,))(
            logits, maxima, sums, temperature, min_p, *sizes,
            NEIGHBOURS=rows.NEIGHBOURS[logits.dtype], **options,
        )  # fmt: skip
        cut = (top_k, top_p)
        gathered = gather(logits, maxima, sums, temperature, min_p, *cut)
        draw_cut(logits, maxima, sums, gathered, temperature, min_p, uniform, *cut, tokens)
        runtime.launch(_choose_kernel, (num_rows,))(
            logits, maxima, places, sums, temperature, min_p, uniform, *cut, tokens,
            *sizes, **options,
        )  # fmt: skip
    return tokens
