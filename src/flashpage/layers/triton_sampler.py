"""Plain sampling (temperature, min_p, top_k, top_p) in three Triton launches, without a sort.

A row of logits is read in blocks: their maxima; then, with the row's maximum known, their sums of
weights; then the block that the random number falls into, once more. Where top_k or top_p cut a
row, the last launch first searches the smallest logit that is kept: what lies above each of WAYS
bounds is counted and weighed in one pass over the row, and the next bounds lie between two of them,
until one value is left. After the first pass, few blocks have a maximum that is large enough to be
read again. Nothing waits for the host, and a row's token depends on that row alone.
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
WAYS: tl.constexpr = tl.constexpr(8)
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""bits of a float32 that a logit of each dtype never has"""


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
def _key(x, SHIFT: tl.constexpr):
    """int32 in the order of x, one for each value that the logits' dtype has."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The x of a key."""
    bits = key << SHIFT
    if SHIFT > 0:
        bits = tl.where(key < 0, bits | ((1 << SHIFT) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    logits_ptr,
    maxima_ptr,
    row,
    top,
    temperature,
    min_p,
    by_weight,
    enough,  # weight or tokens, float64
    stride_row,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key such that the tokens with it and above are `enough`; of those above it, how
    many there are, and their weight (float64)."""
    # Neighbours in memory that one thread has: it adds them up by itself.
    NEIGHBOURS: tl.constexpr = 8 if SHIFT > 0 else 4
    ways = tl.arange(0, WAYS)
    low = tl.cast(-(2**31) >> SHIFT, tl.int64)  # always enough
    high = _key(top, SHIFT).to(tl.int64) + 1  # never
    count_above = tl.cast(0, tl.int32)
    weight_above = tl.cast(0.0, tl.float64)
    # First by what a weight can be (e^-109 to e^-0.25 of the largest), then evenly.
    distance = 0.25 * tl.exp2(-1.25 * (ways - (WAYS - 1)).to(tl.float32))
    bounds = _key(top - temperature * distance, SHIFT).to(tl.int64)
    while high - low > 1:
        inside = (bounds > low) & (bounds < high)
        keys = tl.where(inside, bounds, high).to(tl.int32)
        limits = ()
        for way in tl.static_range(WAYS):
            limits += (tl.sum(tl.where(ways == way, keys, 0), 0),)
        counts = tl.zeros([WAYS], tl.int32)
        weights = tl.zeros([WAYS], tl.float64)
        for number in range(num_blocks):
            largest = tl.load(maxima_ptr + row * num_blocks + number)
            if _key(largest, SHIFT) > low:
                x, _ = _block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
                w = _weights(x, top, temperature, min_p)
                x = tl.reshape(_key(x, SHIFT), (BLOCK // NEIGHBOURS, NEIGHBOURS))
                w = tl.reshape(w, (BLOCK // NEIGHBOURS, NEIGHBOURS))
                for way in tl.static_range(WAYS):
                    above = x >= limits[way]
                    weight = tl.sum(tl.sum(tl.where(above, w, 0.0), 1), 0)
                    weights += tl.where(ways == way, weight, 0.0).to(tl.float64)
                    count = tl.sum(tl.sum(above.to(tl.int32), 1), 0)
                    counts += tl.where(ways == way, count, 0)
        reached = inside & (tl.where(by_weight, weights, counts.to(tl.float64)) >= enough)
        # Those of the smaller bounds: the next ones lie between the last that is and the next.
        low = tl.maximum(low, tl.max(tl.where(reached, bounds, low), 0))
        missed = inside & (reached == 0)
        next_high = tl.min(tl.where(missed, bounds, high), 0)
        if next_high < high:
            first = tl.min(tl.where(missed, ways, WAYS), 0)
            count_above = tl.sum(tl.where(ways == first, counts, 0), 0)
            weight_above = tl.sum(tl.where(ways == first, weights, 0.0), 0)
            high = next_high
        bounds = low + (high - low + WAYS - 1) // WAYS * (ways + 1)
    return low.to(tl.int32), count_above, weight_above


@triton.jit
def _cut(
    logits_ptr,
    maxima_ptr,
    row,
    top,
    temperature,
    min_p,
    top_k,  # at most vocab_size
    top_p,
    total,  # weight of the row, float64
    stride_row,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest key that is kept, how many tokens with that key are (the first ones), and the
    weight of all that are kept."""
    key = tl.cast(-(2**31) >> SHIFT, tl.int32)
    ties = tl.cast(vocab_size, tl.int32)
    kept = total
    # First by top_k, then by top_p of what that keeps.
    for stage in range(2):
        by_weight = stage == 1
        enough = tl.where(by_weight, kept * top_p.to(tl.float64), top_k.to(tl.float64))
        if tl.where(by_weight, top_p < 1.0, top_k < vocab_size):
            found, count, weight = _search(
                logits_ptr, maxima_ptr, row, top, temperature, min_p, by_weight, enough,
                stride_row, vocab_size, num_blocks, SHIFT, BLOCK,
            )  # fmt: skip
            each = _weights(_value(found, SHIFT), top, temperature, min_p).to(tl.float64)
            # Rounding may ask for more weight than there is: nothing is cut then.
            if (not by_weight) | ((found >= key) & (each > 0)):
                most = tl.where(by_weight, tl.ceil((enough - weight) / each), enough - count)
                most = tl.maximum(tl.minimum(most, vocab_size * 1.0), 1.0).to(tl.int32)
                ties = tl.where(by_weight & (found == key), tl.minimum(ties, most), most)
                key = found
                kept = weight + ties * each
    return key, ties, kept


@triton.jit
def _draw_kept(
    logits_ptr,
    maxima_ptr,
    row,
    top,
    temperature,
    min_p,
    key,
    ties,
    target,
    stride_row,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first of the kept tokens at which the running sum of weights exceeds `target`; rounding
    may leave none: the last one then."""
    token = tl.cast(-1, tl.int32)
    before = tl.cast(0.0, tl.float64)
    seen = tl.cast(0, tl.int32)
    number = tl.cast(0, tl.int32)
    found = False
    while (number < num_blocks) & (not found):
        largest = tl.load(maxima_ptr + row * num_blocks + number)
        if _key(largest, SHIFT) >= key:
            x, tokens = _block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
            keys = _key(x, SHIFT)
            tied = (keys == key).to(tl.int32)
            kept = (keys > key) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= ties))
            weights = tl.where(kept, _weights(x, top, temperature, min_p), 0.0)
            ends = before + tl.cumsum(weights.to(tl.float64), 0)
            beyond = (ends > target) & (weights > 0)
            first = tl.min(tl.where(beyond, tokens, vocab_size), 0)
            found = first < vocab_size
            last = tl.max(tl.where(weights > 0, tokens, -1), 0)
            token = tl.where(found, first, tl.maximum(token, last))
            before += tl.sum(weights.to(tl.float64), 0)
            seen += tl.sum(tied, 0)
        number += 1
    return token


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
    top_k_ptr,
    top_p_ptr,
    tokens_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
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
    finite = (top == top) & (tl.abs(top) < float("inf"))
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & finite:
        min_p = tl.load(min_p_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab_size), vocab_size)
        top_p = tl.load(top_p_ptr + row)
        uniform = tl.load(uniform_ptr + row)
        # In float64, as the unlikely tokens at the end of a long sum have their share too.
        sums = tl.load(sums_ptr + start, mask=there, other=0.0).to(tl.float64)
        total = tl.sum(sums, 0)
        # The likeliest token has weight 1, whatever the others have.
        valid = _weights(top, top, temperature, min_p) == 1.0
        if valid & ((top_k < vocab_size) | (top_p < 1.0)):
            key, ties, kept = _cut(
                logits_ptr, maxima_ptr, row, top, temperature, min_p, top_k, top_p, total,
                stride_row, vocab_size, num_blocks, SHIFT, BLOCK,
            )  # fmt: skip
            token = _draw_kept(
                logits_ptr, maxima_ptr, row, top, temperature, min_p, key, ties, uniform * kept,
                stride_row, vocab_size, num_blocks, SHIFT, BLOCK,
            )  # fmt: skip
        else:
            target = uniform * total
            ends = tl.cumsum(sums, 0)
            # The first block whose end lies beyond the target; rounding may leave none: the last
            # block with any weight then.
            last = tl.max(tl.where(sums > 0, blocks, 0), 0)
            number = tl.min(tl.where((ends > target) & (sums > 0), blocks, last), 0)
            target -= tl.sum(tl.where(blocks < number, sums, 0.0), 0)
            x, tokens = _block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
            weights = _weights(x, top, temperature, min_p)
            ends = tl.cumsum(weights.to(tl.float64), 0)
            last = tl.max(tl.where(weights > 0, tokens, 0), 0)
            token = tl.min(tl.where((ends > target) & (weights > 0), tokens, last), 0)
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
            logits, maxima, places, sums, temperature, min_p, uniform, top_k, top_p, tokens,
            *sizes, SHIFT=_SHIFTS[logits.dtype], BLOCKS=blocks, **options,
        )  # fmt: skip
    return tokens
