"""Where top_k and top_p cut a row of logits, roughly: from a sample, and what lies around the cut.

A sample of the row tells between which two keys the cut lies, almost surely. The logits between
are gathered, and those above counted and weighed, block by block; `triton_cut` checks it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashpage.attention.triton import runtime
from flashpage.attention.triton.arguments import cdiv, next_power_of_2
from flashpage.layers import triton_rows as rows

PART = 2048
"""tokens of a part of a sample; all parts are a quarter of the row"""
MOST = 1024
"""logits that are gathered of one block"""
_WARPS_SAMPLE, _WARPS_GATHER = 8, 4
_PROGRAMS = 8
"""of a multiprocessor, that gather: each goes through several blocks where rows are many"""

_BINS: tl.constexpr = tl.constexpr(128)
"""of the sample's histogram"""
_DEVIATIONS: tl.constexpr = tl.constexpr(4.5)
"""standard deviations of what the sample says that are allowed for"""
_FARTHEST: tl.constexpr = tl.constexpr(104.0)
"""scores this far below the largest weigh nothing in float32"""


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
    NEIGHBOURS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """As `_narrowed`, of a row: by histograms of a small sample of it, the second with the bins
    around the cut, and so one of a larger sample. Distances are the roots of how far scores lie
    below the largest."""
    near = 0.0
    # Beyond this nothing has a weight.
    far = tl.sqrt(tl.minimum(-tl.log(min_p), _FARTHEST) * 1.001 + 0.01)
    GROUPS: tl.constexpr = PART // NEIGHBOURS
    for step in range(3):
        num_parts = tl.where(step < 2, 1, PARTS)
        # Groups of 16 neighbours, evenly over the row.
        num_groups = num_parts * (PART // 16)
        spacing = tl.maximum((vocab_size // 16) / num_groups, 1.0)
        num_sampled = tl.minimum(vocab_size, num_groups * 16).to(tl.float32)
        width = tl.maximum((far - near) / _BINS, 1e-20)
        counts = tl.zeros([_BINS], tl.int32)
        before = tl.zeros([GROUPS], tl.int32)
        mass_beyond = tl.zeros([GROUPS], tl.float32)
        squares_beyond = tl.zeros([GROUPS], tl.float32)
        for part in range(num_parts):
            places = part * PART + tl.arange(0, PART)
            groups = ((places // 16).to(tl.float32) * spacing).to(tl.int32)
            places = groups * 16 + places % 16
            x = tl.load(logits_ptr + places, mask=places < vocab_size, other=-float("inf"))
            x = x.to(tl.float32)
            bins = (tl.sqrt(-((x - top) / temperature)) - near) * (1.0 / width)
            bins = tl.floor(tl.minimum(tl.maximum(bins, -1.0), _BINS * 1.0)).to(tl.int32)
            counts += tl.histogram(bins, _BINS, mask=(bins >= 0) & (bins < _BINS))
            before += rows.by_groups((bins < 0).to(tl.int32), NEIGHBOURS)
            outside = tl.where(bins == _BINS, rows.weights_of(x, top, temperature, min_p), 0.0)
            mass_beyond += rows.by_groups(outside, NEIGHBOURS)
            squares_beyond += rows.by_groups(outside * outside, NEIGHBOURS)
        near, far = _narrowed(
            counts, tl.sum(before, 0), tl.sum(mass_beyond, 0), tl.sum(squares_beyond, 0),
            near, width, far,
            by_count, enough, spare, vocab_size / num_sampled, num_sampled,
        )  # fmt: skip
    return near, far


@triton.jit
def _key_above(x, SHIFT: tl.constexpr):
    """The smallest key of the logits that are at least x."""
    key = rows.key_of(x, SHIFT)
    return tl.where(rows.value_of(key, SHIFT) < x, key + 1, key)


@triton.jit
def _bracket_kernel(
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
    NEIGHBOURS: tl.constexpr,
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
    top_k, top_p, wanted = rows.cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
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
                by_count, top_k.to(tl.float32), spare, vocab_size, NEIGHBOURS, PARTS, PART,
            )  # fmt: skip
            low = _key_above(top - temperature * far * far, SHIFT)
            high = _key_above(top - temperature * near * near, SHIFT)
            # top_p of what top_k keeps: all of that is needed.
            everything = (near == 0.0) | (by_count & (top_p < 1.0))
            high = tl.where(everything, rows.key_of(top, SHIFT) + 1, tl.maximum(high, low + 1))
            tl.store(brackets_ptr + 2 * row, low)
            tl.store(brackets_ptr + 2 * row + 1, high)


@triton.jit
def _gather_block(
    logits_ptr,
    gathered_ptr,  # of the block, as the next two
    counts_ptr,
    weight_ptr,
    row,
    number,
    largest,
    low,
    high,
    top,
    temperature,
    min_p,
    stride_row,
    vocab_size,
    SHIFT: tl.constexpr,
    MOST: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    GROUPS: tl.constexpr = CHUNK // NEIGHBOURS
    num_gathered = tl.cast(0, tl.int32)
    count_above = tl.zeros([GROUPS], tl.int32)
    large_above = tl.zeros([GROUPS], tl.float32)
    small_above = tl.zeros([GROUPS], tl.float32)
    columns = tl.arange(0, NEIGHBOURS)[None, :]
    num_chunks = tl.where(rows.key_of(largest, SHIFT) >= low, BLOCK // CHUNK, 0)
    for chunk in range(num_chunks):
        x, tokens = rows.block(
            logits_ptr, row, number * (BLOCK // CHUNK) + chunk, stride_row, vocab_size, CHUNK
        )
        weights = rows.weights_of(x, top, temperature, min_p)
        keys = rows.key_of(x, SHIFT)
        above = keys >= high
        within = (keys >= low) & (keys < high) & (tokens < vocab_size)
        count_above += rows.by_groups(above.to(tl.int32), NEIGHBOURS)
        large, small = rows.halves_of(tl.where(above, weights, 0.0))
        large_above += rows.by_groups(large, NEIGHBOURS)
        small_above += rows.by_groups(small, NEIGHBOURS)
        # A thread's neighbours one after the other, each thread from its own place on.
        count = rows.by_groups(within.to(tl.int32), NEIGHBOURS)
        places = num_gathered + tl.cumsum(count, 0) - count
        bits = tl.reshape(x.to(tl.int32, bitcast=True), (GROUPS, NEIGHBOURS))
        within = tl.reshape(within.to(tl.int32), (GROUPS, NEIGHBOURS))
        for column in tl.static_range(NEIGHBOURS):
            value = tl.sum(tl.where(columns == column, bits, 0), 1).to(tl.float32, bitcast=True)
            taken = tl.sum(tl.where(columns == column, within, 0), 1)
            tl.store(
                gathered_ptr + tl.minimum(places, MOST - 1),
                value.to(gathered_ptr.dtype.element_ty),
                mask=taken > 0,
            )
            places += taken
        num_gathered += tl.sum(count, 0)
    tl.store(counts_ptr, num_gathered)
    tl.store(counts_ptr + 1, tl.sum(count_above, 0))
    tl.store(weight_ptr, tl.sum(large_above.to(tl.float64) + small_above.to(tl.float64), 0))


@triton.jit(do_not_specialize=["num_programs"])
def _gather_kernel(
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
    num_programs,  # of a row
    SHIFT: tl.constexpr,
    MOST: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of each block: the logits within its row's bracket, up to MOST; how many these are and how
    many lie above, and what these weigh."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, first = tl.program_id(0) // num_programs, tl.program_id(0) % num_programs
    _, _, wanted = rows.cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if wanted:
        low, high = tl.load(brackets_ptr + 2 * row), tl.load(brackets_ptr + 2 * row + 1)
        temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
        blocks = tl.arange(0, BLOCKS)
        maxima = tl.load(
            maxima_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf")
        )
        top = tl.max(maxima, 0)
        for number in range(first, num_blocks, num_programs):
            place = row * num_blocks + number
            _gather_block(
                logits_ptr, gathered_ptr + place.to(tl.int64) * MOST, counts_ptr + 2 * place,
                weights_ptr + place, row, number, tl.load(maxima_ptr + place), low, high,
                top, temperature, min_p, stride_row, vocab_size,
                SHIFT, MOST, NEIGHBOURS, CHUNK, BLOCK,
            )  # fmt: skip


class Gathered(NamedTuple):
    """What lies around the cuts of rows.

    brackets: int32 `[num_rows, 2]`, two keys: the cut is at or above the first, below the second.
    logits: `[num_rows, num_blocks, MOST]`: of each block those within, in the order of tokens.
    counts: int32 `[num_rows, num_blocks, 2]`, how many are within (more than MOST: not all were
        gathered) and at or above the second key.
    weights: float64 `[num_rows, num_blocks]`, of those at or above the second key.

    Rows that are not cut have garbage.
    """

    brackets: Tensor
    logits: Tensor
    counts: Tensor
    weights: Tensor


def gather(
    logits: Tensor,
    maxima: Tensor,
    sums: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Gathered:
    """Look for the cuts of rows `[num_rows, vocab_size]` whose blocks' maxima (float32) and weights
    (float64) `[num_rows, num_blocks]` are known; for the others see `sampler.sample_plain`."""
    num_rows, vocab_size = logits.shape
    num_blocks = maxima.shape[1]

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    brackets = new(num_rows, 2, dtype=torch.int32)
    gathered = new(num_rows, num_blocks, MOST, dtype=logits.dtype)
    counts = new(num_rows, num_blocks, 2, dtype=torch.int32)
    weights = new(num_rows, num_blocks, dtype=torch.float64)
    sizes = (logits.stride(0), vocab_size, num_blocks)
    neighbours = rows.NEIGHBOURS[logits.dtype]
    overlap = runtime.overlap(logits.device)
    options: dict[str, Any] = {
        "SHIFT": rows.SHIFTS[logits.dtype],
        "NEIGHBOURS": neighbours,
        "BLOCKS": next_power_of_2(num_blocks),
        "OVERLAP": bool(overlap),
        **overlap,
    }
    runtime.launch(_bracket_kernel, (num_rows,))(
        logits, maxima, sums, temperature, min_p, top_k, top_p, brackets, *sizes,
        PARTS=cdiv(vocab_size, 4 * PART), PART=PART, num_warps=_WARPS_SAMPLE, **options,
    )  # fmt: skip
    num_programs = _PROGRAMS * runtime.num_multiprocessors(logits.device) // num_rows
    num_programs = min(max(num_programs, 1), num_blocks)
    runtime.launch(_gather_kernel, (num_rows * num_programs,))(
        logits, maxima, temperature, min_p, top_k, top_p, brackets, gathered, counts, weights,
        *sizes, num_programs, MOST=MOST, CHUNK=32 * _WARPS_GATHER * neighbours, BLOCK=rows.BLOCK,
        num_warps=_WARPS_GATHER, **options,
    )  # fmt: skip
    return Gathered(brackets, gathered, counts, weights)
