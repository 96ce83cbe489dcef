"""Where top_k and top_p cut a row of logits, exactly, and a token of what they keep.

The smallest key that is kept is searched among the logits that `triton_bracket` gathered: what
lies above each of _WAYS bounds is counted and weighed in one pass, and the next bounds lie between
two of them, until one key is left. Where those logits turn out not to hold it, or to be more than
LIST, it is searched in the row itself, which takes long.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import next_power_of_2
from flashpage.layers import triton_rows as rows
from flashpage.layers.triton_bracket import Gathered

LIST = 4096
"""logits around a row's cut among which it is searched"""
_WARPS = 8

_WAYS: tl.constexpr = tl.constexpr(8)
_UNIT: tl.constexpr = tl.constexpr(2.0**37)
"""of weights that are added up as integers: the sum is exact, in whatever order"""
_TOKEN_BIT: tl.constexpr = tl.constexpr(50)
"""above the weights of up to 2^12 tokens"""
_TOKEN: tl.constexpr = tl.constexpr(1 << 50)


@triton.jit
def _portions(weights):
    """Tokens as integers that can be added up: one for the token, above its weight in units."""
    return (weights * _UNIT + 0.5).to(tl.int64) + _TOKEN


@triton.jit
def _count(portions):
    return (portions >> _TOKEN_BIT).to(tl.int32)


@triton.jit
def _weight(portions):
    return (portions & (_TOKEN - 1)).to(tl.float64) * (1.0 / _UNIT)


@triton.jit
def _tally(keys, portions, limits, ways):
    """Of each way: the sum of the portions of the keys that reach its limit."""
    sums = tl.zeros([_WAYS], tl.int64)
    for way in tl.static_range(_WAYS):
        sums += tl.where(ways == way, tl.sum(tl.where(keys >= limits[way], portions, 0), 0), 0)
    return sums


@triton.jit
def _closest(keys, low, high):
    """The smallest of the keys that is not below `low`, and one more than the largest below `high`:
    they and those above are as many tokens."""
    inside = (keys >= low) & (keys < high)
    first = tl.min(tl.where(inside, keys, 2**31 - 1), 0).to(tl.int64)
    last = tl.max(tl.where(inside, keys, -(2**31)), 0).to(tl.int64)
    some = first <= last
    return tl.where(some, first, low), tl.where(some, last + 1, high)


@triton.jit
def _search(
    logits_ptr,
    maxima_ptr,
    row,
    listed,  # search in `keys`, else in the row
    keys,
    portions,
    low,  # it and those above are enough
    high,  # it and those above are not
    count_above,  # of `high` and above
    weight_above,
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
    ways = tl.arange(0, _WAYS)
    # What lies above `high` and is not among the keys that are looked at.
    count_outside = tl.where(listed, count_above, 0)
    weight_outside = tl.where(listed, weight_above, 0.0)
    low, high = low.to(tl.int64), high.to(tl.int64)
    if listed:
        low, high = _closest(keys, low, high)
    # In a row first by what a weight can be (e^-109 to e^-0.25 of the largest), then evenly.
    distance = 0.25 * tl.exp2(-1.25 * (ways - (_WAYS - 1)).to(tl.float32))
    bounds = rows.key_of(top - temperature * distance, SHIFT).to(tl.int64)
    bounds = tl.where(listed, low + (high - low + _WAYS) // (_WAYS + 1) * (ways + 1), bounds)
    while high - low > 1:
        inside = (bounds > low) & (bounds < high)
        places = tl.where(inside, bounds, high).to(tl.int32)
        limits = ()
        for way in tl.static_range(_WAYS):
            limits += (tl.sum(tl.where(ways == way, places, 0), 0),)
        counts = tl.zeros([_WAYS], tl.int32) + count_outside
        weights = tl.zeros([_WAYS], tl.float64) + weight_outside
        if listed:
            sums = _tally(keys, portions, limits, ways)
            counts += _count(sums)
            weights += _weight(sums)
        else:
            for half in range(2 * num_blocks):
                largest = tl.load(maxima_ptr + row * num_blocks + half // 2)
                if rows.key_of(largest, SHIFT) > low:
                    x, _ = rows.block(logits_ptr, row, half, stride_row, vocab_size, BLOCK // 2)
                    w = rows.weights_of(x, top, temperature, min_p)
                    sums = _tally(rows.key_of(x, SHIFT), _portions(w), limits, ways)
                    counts += _count(sums)
                    weights += _weight(sums)
        reached = inside & (tl.where(by_weight, weights, counts.to(tl.float64)) >= enough)
        # Those of the smaller bounds: the next ones lie between the last that is and the next.
        low = tl.maximum(low, tl.max(tl.where(reached, bounds, low), 0))
        missed = inside & (reached == 0)
        next_high = tl.min(tl.where(missed, bounds, high), 0)
        if next_high < high:
            first = tl.min(tl.where(missed, ways, _WAYS), 0)
            count_above = tl.sum(tl.where(ways == first, counts, 0), 0)
            weight_above = tl.sum(tl.where(ways == first, weights, 0.0), 0)
            high = next_high
        if listed:
            low, high = _closest(keys, low, high)
        bounds = low + (high - low + _WAYS) // (_WAYS + 1) * (ways + 1)
    return low.to(tl.int32), count_above, weight_above


@triton.jit
def _gathered(
    gathered_ptr,
    row,
    counts,  # of each block
    ends,
    num_blocks,
    SHIFT: tl.constexpr,
    MOST: tl.constexpr,
    LIST: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOG_BLOCKS: tl.constexpr,
):
    """The logits that were gathered of a row, one block's after the other's: float32, and keys;
    those that there are not have a key below all others."""
    places = tl.arange(0, LIST)
    number = tl.zeros([LIST], tl.int32)
    for power in tl.static_range(LOG_BLOCKS):
        half = BLOCKS >> (power + 1)
        number += tl.where(tl.gather(ends, number + half - 1, 0) <= places, half, 0)
    begin = tl.gather(ends - counts, number, 0)
    there = places < tl.max(ends, 0)
    start = gathered_ptr + row.to(tl.int64) * num_blocks * MOST
    x = tl.load(start + number * MOST + places - begin, mask=there, other=0.0).to(tl.float32)
    return x, tl.where(there, rows.key_of(x, SHIFT), -(2**31) >> SHIFT)


@triton.jit
def _cut(
    logits_ptr,
    maxima_ptr,
    row,
    usable,  # the gathered ones can be searched
    keys,
    portions,
    low,  # the bracket
    high,
    count_above,
    weight_above,
    none_below,  # nothing below the bracket has a weight
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
    within = tl.sum(portions, 0)
    # First by top_k, then by top_p of what that keeps.
    for stage in range(2):
        by_weight = stage == 1
        enough = tl.where(by_weight, kept * top_p.to(tl.float64), top_k.to(tl.float64))
        above = tl.where(by_weight, weight_above, count_above.to(tl.float64))
        both = above + tl.where(by_weight, _weight(within), _count(within).to(tl.float64))
        # Where all weight is not enough, nothing is cut (of weights, rounding may ask for more).
        cuts = (enough <= both) | (not (usable & none_below))
        if cuts & tl.where(by_weight, top_p < 1.0, top_k < vocab_size):
            listed = usable & (above < enough) & (enough <= both)
            found, count, weight = _search(
                logits_ptr, maxima_ptr, row, listed, keys, portions,
                tl.where(listed, low, -(2**31) >> SHIFT),
                tl.where(listed, high, rows.key_of(top, SHIFT) + 1),
                tl.where(listed, count_above, 0), tl.where(listed, weight_above, 0.0),
                top, temperature, min_p, by_weight, enough,
                stride_row, vocab_size, num_blocks, SHIFT, BLOCK,
            )  # fmt: skip
            each = rows.weights_of(rows.value_of(found, SHIFT), top, temperature, min_p).to(
                tl.float64
            )
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
    number,  # the block to begin with
    before,  # weight that is kept of those before it
    seen,  # tokens with the smallest key in those before it
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
    found = False
    while (number < num_blocks) & (not found):
        largest = tl.load(maxima_ptr + row * num_blocks + number)
        if rows.key_of(largest, SHIFT) >= key:
            x, tokens = rows.block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
            keys = rows.key_of(x, SHIFT)
            tied = (keys == key).to(tl.int32)
            kept = (keys > key) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= ties))
            weights = tl.where(kept, rows.weights_of(x, top, temperature, min_p), 0.0)
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
def _drawn(
    logits_ptr,
    maxima_ptr,
    brackets_ptr,
    gathered_ptr,
    counts_ptr,
    weights_ptr,
    row,
    top,
    temperature,
    min_p,
    top_k,
    top_p,
    uniform,
    total,  # weight of the row, float64
    stride_row,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
    MOST: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOG_BLOCKS: tl.constexpr,
):
    """A token of what top_k and top_p keep of a row."""
    blocks = tl.arange(0, BLOCKS)
    there = blocks < num_blocks
    start = row * num_blocks + blocks
    counts = tl.load(counts_ptr + 2 * start, mask=there, other=0)
    counts_above = tl.load(counts_ptr + 2 * start + 1, mask=there, other=0)
    weights_above = tl.load(weights_ptr + start, mask=there, other=0.0)
    usable = (tl.sum(counts, 0) <= LIST) & (tl.max(counts, 0) <= MOST)
    counts = tl.where(usable, counts, 0)
    ends = tl.cumsum(counts, 0)
    x, keys = _gathered(
        gathered_ptr, row, counts, ends, num_blocks, SHIFT, MOST, LIST, BLOCKS, LOG_BLOCKS
    )
    portions = _portions(rows.weights_of(x, top, temperature, min_p))
    portions = tl.where(tl.arange(0, LIST) < tl.max(ends, 0), portions, 0)
    low, high = tl.load(brackets_ptr + 2 * row), tl.load(brackets_ptr + 2 * row + 1)
    none_below = rows.weights_of(rows.value_of(low - 1, SHIFT), top, temperature, min_p) == 0.0
    key, ties, kept = _cut(
        logits_ptr, maxima_ptr, row, usable, keys, portions, low, high,
        tl.sum(counts_above, 0), tl.sum(weights_above, 0), none_below,
        top, temperature, min_p, top_k, top_p, total,
        stride_row, vocab_size, num_blocks, SHIFT, BLOCK,
    )  # fmt: skip
    target = uniform * kept
    # The block that the target falls into is known if what is kept was gathered or lies above.
    number = tl.cast(0, tl.int32)
    before = tl.cast(0.0, tl.float64)
    seen = tl.cast(0, tl.int32)
    if usable & (key < high) & ((key >= low) | none_below):
        tied = (keys == key).to(tl.int32)
        ranks = tl.cumsum(tied, 0)
        taken = (keys > key) | ((tied > 0) & (ranks <= ties))
        units = tl.where(taken, portions & (_TOKEN - 1), 0)
        sums = tl.cumsum(units, 0)
        begins = ends - counts
        last_place = tl.maximum(ends - 1, 0)
        place_before = tl.maximum(begins - 1, 0)
        sums_after = _weight(tl.where(ends > 0, tl.gather(sums, last_place, 0), 0))
        sums_before = _weight(tl.where(begins > 0, tl.gather(sums, place_before, 0), 0))
        ties_before = tl.where(begins > 0, tl.gather(ranks, place_before, 0), 0)
        above = tl.cumsum(weights_above, 0)
        beyond = above + sums_after > target
        held = (weights_above > 0) | (sums_after > sums_before)
        last = tl.max(tl.where(held, blocks, 0), 0)
        number = tl.min(tl.where(beyond & held, blocks, last), 0)
        chosen = blocks == number
        before = tl.sum(tl.where(chosen, above - weights_above + sums_before, 0.0), 0)
        seen = tl.sum(tl.where(chosen, ties_before, 0), 0)
    return _draw_kept(
        logits_ptr, maxima_ptr, row, number, before, seen, top, temperature, min_p, key, ties,
        target, stride_row, vocab_size, num_blocks, SHIFT, BLOCK,
    )  # fmt: skip


@triton.jit
def _draw_kernel(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    top_k_ptr,
    top_p_ptr,
    brackets_ptr,
    gathered_ptr,
    counts_ptr,
    weights_ptr,
    tokens_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
    MOST: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOG_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The token of each row that is cut, or -1."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    top_k, top_p, wanted = rows.cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if wanted:
        blocks = tl.arange(0, BLOCKS)
        there = blocks < num_blocks
        start = row * num_blocks + blocks
        top = tl.max(tl.load(maxima_ptr + start, mask=there, other=-float("inf")), 0)
        temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
        token = tl.cast(-1, tl.int32)
        # The likeliest token has weight 1, whatever the others have.
        if (tl.abs(top) < float("inf")) & (rows.weights_of(top, top, temperature, min_p) == 1.0):
            total = tl.sum(tl.load(sums_ptr + start, mask=there, other=0.0), 0)
            uniform = tl.load(uniform_ptr + row)
            token = _drawn(
                logits_ptr, maxima_ptr, brackets_ptr, gathered_ptr, counts_ptr, weights_ptr,
                row, top, temperature, min_p, top_k, top_p, uniform, total,
                stride_row, vocab_size, num_blocks, SHIFT, MOST, LIST, BLOCK, BLOCKS, LOG_BLOCKS,
            )  # fmt: skip
        tl.store(tokens_ptr + row, token.to(tl.int64))


def draw_cut(
    logits: Tensor,
    maxima: Tensor,
    sums: Tensor,
    gathered: Gathered,
    temperature: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    tokens: Tensor,
) -> None:
    """Write the tokens of the rows that are cut (int64 `[num_rows]`, -1: there is none)."""
    num_rows, vocab_size = logits.shape
    num_blocks = maxima.shape[1]
    blocks = next_power_of_2(num_blocks)
    overlap = runtime.overlap(logits.device)
    runtime.launch(_draw_kernel, (num_rows,))(
        logits, maxima, sums, temperature, min_p, uniform, top_k, top_p, *gathered, tokens,
        logits.stride(0), vocab_size, num_blocks,
        SHIFT=rows.SHIFTS[logits.dtype], MOST=gathered.logits.shape[2], LIST=LIST,
        BLOCK=rows.BLOCK, BLOCKS=blocks, LOG_BLOCKS=blocks.bit_length() - 1,
        OVERLAP=bool(overlap), num_warps=_WARPS, **overlap,
    )  # fmt: skip
