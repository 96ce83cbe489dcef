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

PART = 4096
"""tokens of a part of a sample; all parts are a quarter of the row"""
MOST = 1024
"""logits that are gathered of one block"""
_WARPS, _WARPS_SAMPLE = 8, 16

_BINS: tl.constexpr = tl.constexpr(256)
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
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """As `_narrowed`, of a row: by histograms of a small sample of it, the second with the bins
    around the cut, and so one of a larger sample. Distances are the roots of how far scores lie
    below the largest."""
    near = 0.0
    # Beyond this nothing has a weight.
    far = tl.sqrt(tl.minimum(-tl.log(min_p), _FARTHEST) * 1.001 + 0.01)
    for step in range(3):
        num_parts = tl.where(step < 2, tl.minimum(PARTS, 2), PARTS)
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
            outside = tl.where(bins == _BINS, rows.weights_of(x, top, temperature, min_p), 0.0)
            mass_beyond += tl.sum(outside, 0)
            squares_beyond += tl.sum(outside * outside, 0)
        near, far = _narrowed(
            counts, before, mass_beyond, squares_beyond, near, width, far,
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
                by_count, top_k.to(tl.float32), spare, vocab_size, PARTS, PART,
            )  # fmt: skip
            low = _key_above(top - temperature * far * far, SHIFT)
            high = _key_above(top - temperature * near * near, SHIFT)
            # top_p of what top_k keeps: all of that is needed.
            everything = (near == 0.0) | (by_count & (top_p < 1.0))
            high = tl.where(everything, rows.key_of(top, SHIFT) + 1, tl.maximum(high, low + 1))
            tl.store(brackets_ptr + 2 * row, low)
            tl.store(brackets_ptr + 2 * row + 1, high)


@triton.jit
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
    _, _, wanted = rows.cut_of(row, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
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
        if rows.key_of(tl.load(maxima_ptr + place), SHIFT) >= low:
            temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
            top = tl.max(maxima, 0)
            gathered = gathered_ptr + place.to(tl.int64) * MOST
            for half in range(2):
                x, tokens = rows.block(
                    logits_ptr, row, 2 * number + half, stride_row, vocab_size, BLOCK // 2
                )
                weights = rows.weights_of(x, top, temperature, min_p)
                keys = rows.key_of(x, SHIFT)
                above = keys >= high
                within = (keys >= low) & (keys < high) & (tokens < vocab_size)
                ends = count_within + tl.cumsum(within.to(tl.int32), 0)
                x = x.to(gathered_ptr.dtype.element_ty)
                tl.store(gathered + tl.minimum(ends, MOST) - 1, x, mask=within)
                count_within += tl.sum(within.to(tl.int32), 0)
                count_above += tl.sum(above.to(tl.int32), 0)
                weight_within += rows.total_of(tl.where(within, weights, 0.0))
                weight_above += rows.total_of(tl.where(above, weights, 0.0))
        tl.store(counts_ptr + 2 * place, count_within)
        tl.store(counts_ptr + 2 * place + 1, count_above)
        tl.store(weights_ptr + 2 * place, weight_within)
        tl.store(weights_ptr + 2 * place + 1, weight_above)


class Gathered(NamedTuple):
    """What lies around the cuts of rows.

    brackets: int32 `[num_rows, 2]`, two keys: the cut is at or above the first, below the second.
    logits: `[num_rows, num_blocks, MOST]`: of each block those within, in the order of tokens.
    counts: int32 `[num_rows, num_blocks, 2]`, how many are within (more than MOST: not all were
        gathered) and at or above the second key.
    weights: float64 `[num_rows, num_blocks, 2]`, the weights of both.

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
    weights = new(num_rows, num_blocks, 2, dtype=torch.float64)
    sizes = (logits.stride(0), vocab_size, num_blocks)
    overlap = runtime.overlap(logits.device)
    options: dict[str, Any] = {
        "SHIFT": rows.SHIFTS[logits.dtype],
        "BLOCKS": next_power_of_2(num_blocks),
        "OVERLAP": bool(overlap),
        **overlap,
    }
    runtime.launch(_bracket_kernel, (num_rows,))(
        logits, maxima, sums, temperature, min_p, top_k, top_p, brackets, *sizes,
        PARTS=cdiv(vocab_size, 4 * PART), PART=PART, num_warps=_WARPS_SAMPLE, **options,
    )  # fmt: skip
    runtime.launch(_gather_kernel, (num_rows * num_blocks,))(
        logits, maxima, temperature, min_p, top_k, top_p, brackets, gathered, counts, weights,
        *sizes, MOST=MOST, BLOCK=rows.BLOCK, num_warps=_WARPS, **options,
    )  # fmt: skip
    return Gathered(brackets, gathered, counts, weights)
