"""How the sampling kernels read a row of logits: in blocks, as weights, as keys.

Keys are integers in the order of the logits, one for each value that their dtype has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""tokens of a block"""
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""bits of a float32 that a logit of each dtype never has"""
NEIGHBOURS = {torch.float32: 4, torch.bfloat16: 8, torch.float16: 8}
"""logits of each dtype that a thread loads at once"""


@triton.jit
def block(logits_ptr, row, number, stride_row, vocab_size, BLOCK: tl.constexpr):
    """A block of a row in float32, -inf beyond the vocabulary, and its token ids."""
    tokens = number * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    place = logits_ptr + row.to(tl.int64) * stride_row + tokens
    return tl.load(place, mask=mask, other=-float("inf")).to(tl.float32), tokens


@triton.jit
def weights_of(x, top, temperature, min_p):
    """What each token's share of the draw is proportional to."""
    scores = (x - top) / temperature
    return tl.where(scores < tl.log(min_p), 0.0, tl.exp(scores))


@triton.jit
def by_groups(x, NEIGHBOURS: tl.constexpr):
    """Sums of neighbours, which one thread has, so that no thread waits for others."""
    return tl.sum(tl.reshape(x, (x.shape[0] // NEIGHBOURS, NEIGHBOURS)), 1)


@triton.jit
def halves_of(weights):
    """What is above 2^-11 of each weight, and the rest: up to 2^12 of the first add up exactly."""
    large = (weights + 4096.0) - 4096.0
    return large, weights - large


@triton.jit
def total_of(weights, NEIGHBOURS: tl.constexpr):
    """The sum of up to 2^12 weights, float64."""
    large, small = halves_of(weights)
    large, small = by_groups(large, NEIGHBOURS), by_groups(small, NEIGHBOURS)
    return tl.sum(large.to(tl.float64) + small.to(tl.float64), 0)


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """int32, the key of an x."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The x of a key."""
    bits = key << SHIFT
    if SHIFT > 0:
        bits = tl.where(key < 0, bits | ((1 << SHIFT) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size):
    """A row's top_k (vocab_size: off), its top_p, and whether one of them may cut."""
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab_size), vocab_size)
    top_p = tl.load(top_p_ptr + row)
    wanted = (top_k < vocab_size) | (top_p < 1.0)
    return top_k, top_p, wanted & (tl.load(temperature_ptr + row) > 0)
