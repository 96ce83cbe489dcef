"""Where top_k and top_p cut a row of logits, without a sort: parts of `triton_sampler`.

A sample of the row tells between which two logits the cut lies, almost surely. The tokens between
are gathered and those above counted and weighed, block by block; then the smallest logit that is
kept is searched among the gathered ones, exactly. Where they turn out not to hold it, or to be too
many, it is searched in the row itself, which takes long. A row's cut depends on that row alone.

Logits are compared as keys: integers in their order, one for each value that their dtype has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""bits of a float32 that a logit of each dtype never has"""

_WAYS: tl.constexpr = tl.constexpr(8)
"""bounds that are compared with in one pass of a search"""
_BINS: tl.constexpr = tl.constexpr(256)
"""of the sample's histogram"""
_DEVIATIONS: tl.constexpr = tl.constexpr(4.5)
"""standard deviations of what the sample says that are allowed for"""
_FARTHEST: tl.constexpr = tl.constexpr(104.0)
"""scores this far below the largest weigh nothing in float32"""
_UNIT: tl.constexpr = tl.constexpr(2.0**35)
"""of weights that are added up as integers: the sum is exact, in whatever order"""
_TOKEN_BIT: tl.constexpr = tl.constexpr(49)
"""above the weights of up to 2^13 tokens"""
_TOKEN: tl.constexpr = tl.constexpr(1 << 49)


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
def total_of(weights):
    """The sum of up to 2^12 weights, float64: what is above 2^-11 of each is added up exactly."""
    large = (weights + 4096.0) - 4096.0
    return tl.sum(large, 0).to(tl.float64) + tl.sum(weights - large, 0).to(tl.float64)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
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
def cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size):
    """A row's top_k (vocab_size: off), its top_p, and whether one of them may cut."""
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab_size), vocab_size)
    top_p = tl.load(top_p_ptr + row)
    wanted = (top_k < vocab_size) | (top_p < 1.0)
    return top_k, top_p, wanted & (tl.load(temperature_ptr + row) > 0)


# ---------------------------------------------------------------------------------------------
# What a sample tells
# ---------------------------------------------------------------------------------------------


@triton.jit
def _narrowed(
    counts,  # of the sampled tokens in each bin
    before,  # how many lie above all bins
    mass_beyond,  # the weight of those below all bins, and the squares of theirs
    squares_beyond,
    begin,
    width,
    beyond,  # the answer if not even what lies above the last bin is enough
    by_count,
    enough,  # tokens
    spare,  # the weight that may be cut off
    ratio,  # tokens of the row for each that was sampled
    num_sampled,
):
    """Two distances: what lies above the first is not enough, what lies above the second is."""
    bins = tl.arange(0, _BINS)
    edges = begin + width * bins
    centers = edges + 0.5 * width
    each = tl.exp(-centers * centers)
    # Of what lies above an edge: how many; of what lies below it: the weight, and its square.
    above = (before + tl.cumsum(counts, 0) - counts).to(tl.float32)
    mass = mass_beyond + tl.cumsum(counts * each, 0, reverse=True)
    squares = squares_beyond + tl.cumsum(counts * each * each, 0, reverse=True)
    # How far the row may be from what its sample says; the second terms are for what is so rare
    # that the sample may have none of it. A sample of all tokens is sure.
    unknown = 1.0 - 1.0 / ratio
    rare = 0.5 * _DEVIATIONS * _DEVIATIONS * unknown
    variance = tl.maximum(squares - mass * mass / num_sampled, 0.0)
    mass_error = _DEVIATIONS * tl.sqrt(variance * unknown) + rare * tl.exp(-edges * edges)
    count_error = _DEVIATIONS * tl.sqrt((above + 1.0) * unknown) + rare
    surely = tl.where(
        by_count,
        (above - count_error) * ratio >= enough,
        (mass + mass_error) * ratio <= spare,
    )
    never = tl.where(
        by_count,
        (above + count_error) * ratio < enough,
        (mass - mass_error) * ratio > spare,
    )
    first = tl.min(tl.where(surely, bins, _BINS), 0)
    last = tl.max(tl.where(never, bins, 0), 0)
    # A bin more on both sides, as the weights within a bin were taken for equal.
    far = tl.where(first < _BINS, begin + width * (first + 1), beyond)
    return begin + width * tl.maximum(last - 1, 0), far


@triton.jit
def _sampled(
    logits_ptr,
    top,
    temperature,
    min_p,
    by_count,
    enough,
    spare,
    vocab_size,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """As `_narrowed`, of a row: by a histogram of a small sample of it, and one of a larger sample
    with the bins around the cut. Distances are the roots of how far scores lie below the largest.
    """
    near = 0.0
    # Beyond this nothing has a weight.
    far = tl.sqrt(tl.minimum(-tl.log(min_p), _FARTHEST) * 1.001 + 0.01)
    num_parts = tl.minimum(PARTS, 2)
    for _ in range(2):
        # Groups of 16 neighbours, evenly over the row.
        num_groups = num_parts * (PART // 16)
        spacing = tl.maximum((vocab_size // 16) / num_groups, 1.0)
        num_sampled = tl.minimum(vocab_size, num_groups * 16).to(tl.float32)
        width = tl.maximum((far - near) / _BINS, 1e-20)
        counts = tl.zeros([_BINS], tl.int32)
        before = tl.cast(0, tl.int32)
        mass_beyond = 0.0
        squares_beyond = 0.0
        for part in range(num_parts):
            places = part * PART + tl.arange(0, PART)
            groups = ((places // 16).to(tl.float32) * spacing).to(tl.int32)
            places = groups * 16 + places % 16
            x = tl.load(logits_ptr + places, mask=places < vocab_size, other=-float("inf"))
            x = x.to(tl.float32)
            bins = (tl.sqrt((top - x) / temperature) - near) / width
            bins = tl.floor(tl.minimum(tl.maximum(bins, -1.0), _BINS * 1.0)).to(tl.int32)
            counts += tl.histogram(bins, _BINS, mask=(bins >= 0) & (bins < _BINS))
            before += tl.sum((bins < 0).to(tl.int32), 0)
            outside = tl.where(bins == _BINS, weights_of(x, top, temperature, min_p), 0.0)
            mass_beyond += tl.sum(outside, 0)
            squares_beyond += tl.sum(outside * outside, 0)
        near, far = _narrowed(
            counts, before, mass_beyond, squares_beyond, near, width, far,
            by_count, enough, spare, vocab_size / num_sampled, num_sampled,
        )  # fmt: skip
        num_parts = tl.cast(PARTS, tl.int32)
    return near, far


@triton.jit
def bracket_kernel(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    brackets_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """For each row that is cut: a key such that it and those above are probably enough, and one
    such that it and those above are probably not."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    top_k, top_p, wanted = cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if wanted:
        blocks = tl.arange(0, BLOCKS)
        there = blocks < num_blocks
        start = row * num_blocks + blocks
        top = tl.max(tl.load(maxima_ptr + start, mask=there, other=-float("inf")), 0)
        if tl.abs(top) < float("inf"):
            temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
            total = tl.sum(tl.load(sums_ptr + start, mask=there, other=0.0), 0)
            by_count = top_k < vocab_size
            spare = ((1.0 - top_p.to(tl.float64)) * total).to(tl.float32)
            near, far = _sampled(
                logits_ptr + row.to(tl.int64) * stride_row, top, temperature, min_p,
                by_count, top_k.to(tl.float32), spare, vocab_size, PARTS, PART,
            )  # fmt: skip
            low = _key(top - temperature * far * far, SHIFT)
            high = _key(top - temperature * near * near, SHIFT)
            # top_p of what top_k keeps: all of that is needed.
            everything = (near == 0.0) | (by_count & (top_p < 1.0))
            high = tl.where(everything, _key(top, SHIFT) + 1, tl.maximum(high, low + 1))
            tl.store(brackets_ptr + 2 * row, low)
            tl.store(brackets_ptr + 2 * row + 1, high)


@triton.jit
def gather_kernel(
    logits_ptr,
    maxima_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    brackets_ptr,
    gathered_ptr,
    counts_ptr,
    weights_ptr,
    stride_row,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of each block: the logits within its row's bracket, up to MOST; how many these are and how
    many lie above; the weights of both."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0)
    row, number = place // num_blocks, place % num_blocks
    _, _, wanted = cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if wanted:
        low, high = tl.load(brackets_ptr + 2 * row), tl.load(brackets_ptr + 2 * row + 1)
        blocks = tl.arange(0, BLOCKS)
        maxima = tl.load(
            maxima_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf")
        )
        count_within = tl.cast(0, tl.int32)
        count_above = tl.cast(0, tl.int32)
        weight_within = tl.cast(0.0, tl.float64)
        weight_above = tl.cast(0.0, tl.float64)
        if _key(tl.load(maxima_ptr + place), SHIFT) >= low:
            temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
            top = tl.max(maxima, 0)
            gathered = gathered_ptr + place.to(tl.int64) * MOST
            for half in range(2):
                x, tokens = block(
                    logits_ptr, row, 2 * number + half, stride_row, vocab_size, BLOCK // 2
                )
                weights = weights_of(x, top, temperature, min_p)
                keys = _key(x, SHIFT)
                above = keys >= high
                within = (keys >= low) & (keys < high) & (tokens < vocab_size)
                ends = count_within + tl.cumsum(within.to(tl.int32), 0)
                x = x.to(gathered_ptr.dtype.element_ty)
                tl.store(gathered + tl.minimum(ends, MOST) - 1, x, mask=within)
                count_within += tl.sum(within.to(tl.int32), 0)
                count_above += tl.sum(above.to(tl.int32), 0)
                weight_within += total_of(tl.where(within, weights, 0.0))
                weight_above += total_of(tl.where(above, weights, 0.0))
        tl.store(counts_ptr + 2 * place, count_within)
        tl.store(counts_ptr + 2 * place + 1, count_above)
        tl.store(weights_ptr + 2 * place, weight_within)
        tl.store(weights_ptr + 2 * place + 1, weight_above)


# ---------------------------------------------------------------------------------------------
# The exact cut
# ---------------------------------------------------------------------------------------------


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
    step = (high - low + _WAYS) // (_WAYS + 1)
    # In a row first by what a weight can be (e^-109 to e^-0.25 of the largest), then evenly.
    distance = 0.25 * tl.exp2(-1.25 * (ways - (_WAYS - 1)).to(tl.float32))
    bounds = _key(top - temperature * distance, SHIFT).to(tl.int64)
    bounds = tl.where(listed, low + step * (ways + 1), bounds)
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
                if _key(largest, SHIFT) > low:
                    x, _ = block(logits_ptr, row, half, stride_row, vocab_size, BLOCK // 2)
                    w = weights_of(x, top, temperature, min_p)
                    sums = _tally(_key(x, SHIFT), _portions(w), limits, ways)
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
    return x, tl.where(there, _key(x, SHIFT), -(2**31) >> SHIFT)


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
    count_within,
    weight_above,
    weight_within,
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
    # First by top_k, then by top_p of what that keeps.
    for stage in range(2):
        by_weight = stage == 1
        enough = tl.where(by_weight, kept * top_p.to(tl.float64), top_k.to(tl.float64))
        above = tl.where(by_weight, weight_above, count_above.to(tl.float64))
        both = above + tl.where(by_weight, weight_within, count_within.to(tl.float64))
        # Where all weight is not enough, nothing is cut (of weights, rounding may ask for more).
        cuts = (enough <= both) | (not none_below)
        if cuts & tl.where(by_weight, top_p < 1.0, top_k < vocab_size):
            listed = usable & (above < enough) & (enough <= both)
            found, count, weight = _search(
                logits_ptr, maxima_ptr, row, listed, keys, portions,
                tl.where(listed, low, -(2**31) >> SHIFT),
                tl.where(listed, high, _key(top, SHIFT) + 1),
                tl.where(listed, count_above, 0), tl.where(listed, weight_above, 0.0),
                top, temperature, min_p, by_weight, enough,
                stride_row, vocab_size, num_blocks, SHIFT, BLOCK,
            )  # fmt: skip
            each = weights_of(_value(found, SHIFT), top, temperature, min_p).to(tl.float64)
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
        if _key(largest, SHIFT) >= key:
            x, tokens = block(logits_ptr, row, number, stride_row, vocab_size, BLOCK)
            keys = _key(x, SHIFT)
            tied = (keys == key).to(tl.int32)
            kept = (keys > key) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= ties))
            weights = tl.where(kept, weights_of(x, top, temperature, min_p), 0.0)
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
    start = 2 * (row * num_blocks + blocks)
    counts = tl.load(counts_ptr + start, mask=there, other=0)
    counts_above = tl.load(counts_ptr + start + 1, mask=there, other=0)
    weights_within = tl.load(weights_ptr + start, mask=there, other=0.0)
    weights_above = tl.load(weights_ptr + start + 1, mask=there, other=0.0)
    count_within = tl.sum(counts, 0)
    usable = (count_within <= LIST) & (tl.max(counts, 0) <= MOST)
    counts = tl.where(usable, counts, 0)
    ends = tl.cumsum(counts, 0)
    x, keys = _gathered(
        gathered_ptr, row, counts, ends, num_blocks, SHIFT, MOST, LIST, BLOCKS, LOG_BLOCKS
    )
    portions = _portions(weights_of(x, top, temperature, min_p))
    low, high = tl.load(brackets_ptr + 2 * row), tl.load(brackets_ptr + 2 * row + 1)
    none_below = weights_of(_value(low - 1, SHIFT), top, temperature, min_p) == 0.0
    key, ties, kept = _cut(
        logits_ptr, maxima_ptr, row, usable, keys, portions, low, high,
        tl.sum(counts_above, 0), count_within,
        tl.sum(weights_above, 0), tl.sum(weights_within, 0), none_below,
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
        taken = taken & (tl.arange(0, LIST) < tl.max(ends, 0))
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
def draw_kernel(
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
    top_k, top_p, wanted = cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if wanted:
        blocks = tl.arange(0, BLOCKS)
        there = blocks < num_blocks
        start = row * num_blocks + blocks
        top = tl.max(tl.load(maxima_ptr + start, mask=there, other=-float("inf")), 0)
        temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
        token = tl.cast(-1, tl.int32)
        # The likeliest token has weight 1, whatever the others have.
        if (tl.abs(top) < float("inf")) & (weights_of(top, top, temperature, min_p) == 1.0):
            total = tl.sum(tl.load(sums_ptr + start, mask=there, other=0.0), 0)
            uniform = tl.load(uniform_ptr + row)
            token = _drawn(
                logits_ptr, maxima_ptr, brackets_ptr, gathered_ptr, counts_ptr, weights_ptr,
                row, top, temperature, min_p, top_k, top_p, uniform, total,
                stride_row, vocab_size, num_blocks, SHIFT, MOST, LIST, BLOCK, BLOCKS, LOG_BLOCKS,
            )  # fmt: skip
        tl.store(tokens_ptr + row, token.to(tl.int64))
