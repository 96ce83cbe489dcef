"""Plain sampling (temperature and min_p) as three Triton launches, without a sort; any GPU.

A row of logits is read in blocks: their maxima; then, with the row's maximum known, their sums of
weights; then the block that the random number falls into, once more. Nothing waits for the host,
and a row's token depends on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import cdiv, next_power_of_2

BLOCK = 4096
"""tokens of a block"""
_WARPS = 8


@triton.jit
def _block(logits_ptr, row, number, stride_row, vocab_size, BLOCK: tl.constexpr):
    """A block of a row in float32, -inf beyond the vocabulary, and its token ids."""
    tokens = number * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    place = logits_ptr + row.to(tl.int64) * stride_row + tokens
    return tl.load(place, mask=mask, other=-float("inf")).to(tl.float32), tokens


@triton.jit
def _weights(x, top, temperature, min_p):
    """What each token's share of the draw is proportional to."""
    scores = (x - top) / temperature
    return tl.where(scores < tl.log(min_p), 0.0, tl.exp(scores))


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
    x, tokens = _block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
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
        x, _ = _block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
        weights = _weights(x, tl.max(maxima, 0), temperature, tl.load(min_p_ptr + row))
        tl.store(sums_ptr + tl.program_id(0), tl.sum(weights, 0))


@triton.jit
def _choose_kernel(
    logits_ptr,
    maxima_ptr,
    places_ptr,
    sums_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    tokens_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    there = blocks < num_blocks
    start = row * num_blocks + blocks
    maxima = tl.load(maxima_ptr + start, mask=there, other=-float("inf"))
    top = tl.max(maxima, 0)
    places = tl.load(places_ptr + start, mask=there & (maxima == top), other=vocab_size)
    token = tl.min(places, 0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        # In float64, as the unlikely tokens at the end of a long sum have their share too.
        sums = tl.load(sums_ptr + start, mask=there, other=0.0).to(tl.float64)
        uniform = tl.load(uniform_ptr + row)
        target = uniform * tl.sum(sums, 0)
        ends = tl.cumsum(sums, 0)
        # The first block whose end lies beyond the target; rounding may leave none: the last
        # block with any weight then.
        last = tl.max(tl.where(sums > 0, blocks, 0), 0)
        number = tl.min(tl.where((ends > target) & (sums > 0), blocks, last), 0)
        target -= tl.sum(tl.where(blocks < number, sums, 0.0), 0)
        x, tokens = _block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
        weights = _weights(x, top, temperature, tl.load(min_p_ptr + row))
        ends = tl.cumsum(weights.to(tl.float64), 0)
        last = tl.max(tl.where(weights > 0, tokens, 0), 0)
        token = tl.min(tl.where((ends > target) & (weights > 0), tokens, last), 0)
        # The likeliest token has weight 1, whatever the others have.
        valid = _weights(top, top, temperature, tl.load(min_p_ptr + row)) == 1.0
        token = tl.where(valid, token, -1)
    finite = (top == top) & (tl.abs(top) < float("inf"))
    tl.store(tokens_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def sample_plain(logits: Tensor, temperature: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """As `sampler.sample_plain`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    if logits.stride(1) != 1 and vocab_size > 1:
        logits = logits.contiguous()
    num_blocks = cdiv(vocab_size, BLOCK)
    shape = (num_rows, num_blocks)
    maxima, sums = (torch.empty(shape, device=logits.device) for _ in range(2))
    places = torch.empty(shape, dtype=torch.int32, device=logits.device)
    sizes = (logits.stride(0), vocab_size, num_blocks)
    blocks = next_power_of_2(num_blocks)
    overlap = runtime.overlap(logits.device)
    options = {"BLOCK": BLOCK, "OVERLAP": bool(overlap), "num_warps": _WARPS, **overlap}
    with runtime.on_device(logits.device):
        runtime.launch(_maxima_kernel, (num_rows * num_blocks,))(
            logits, maxima, places, *sizes, **options
        )
        runtime.launch(_sums_kernel, (num_rows * num_blocks,))(
            logits, maxima, sums, temperature, min_p, *sizes, BLOCKS=blocks, **options
        )
        runtime.launch(_choose_kernel, (num_rows,))(
            logits, maxima, places, sums, temperature, min_p, uniform, tokens, *sizes,
            BLOCKS=blocks, **options,
        )  # fmt: skip
    return tokens
