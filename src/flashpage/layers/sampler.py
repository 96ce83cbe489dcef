"""From logits to tokens: one row of logits, one wish (`RowSampling`); knows nothing of requests.

The order is fixed: raw logprobs, penalties and biases, then the most likely token or
temperature, min_p, top_k, top_p and one draw. Each row's result depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashpage.attention.triton.runtime import why_no_triton
from flashpage.layers.fused import kernels_enabled

# Rows with top_k or top_p are ranked over this many candidates first; sorting a whole vocabulary
# takes 10 times longer and is hardly ever needed. A row's own logits decide how far it goes.
CANDIDATES = (256, 4096)


@dataclass(frozen=True)
class RowSampling:
    """How to choose the token of one row.

    temperature: 0 takes the most likely token.
    uniform: this row's random number in [0, 1), used by the draw.
    top_k, top_p, min_p: off at 0, 1.0 and 0.0.
    output_counts: token -> how often it was generated (presence and frequency penalty).
    seen_tokens: tokens in the prompt or generated (repetition penalty).
    logit_bias: token -> what is added to its logit.
    masked_tokens: tokens that must not be chosen.
    num_logprobs: how many alternatives to report; None reports nothing, 0 the chosen token only.
    """

    temperature: float = 0.0
    uniform: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    output_counts: Mapping[int, int] = field(default_factory=dict)
    seen_tokens: Collection[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    masked_tokens: Collection[int] = ()
    num_logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """The raw log-probability and rank (1 = most likely) of one token, and the likeliest others."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class SampledRow(NamedTuple):
    """A row's token (and logprobs if asked for), or the reason why it has none."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> list[SampledRow]:
    """Choose one token per row.

    Args:
        logits: `[num_rows, vocab_size]` float32, left unchanged.
        rows: `num_rows` wishes.

    Returns:
        One `SampledRow` per row. A row with NaN, +inf or nothing but -inf gets an error, as does
        one whose masked tokens leave nothing to choose, or whose temperature or min_p leaves no
        distribution to draw from; the other rows do not notice.
    """
    if not rows:
        return []
    token_ids, tops = _most_likely(logits)
    errors = _complaints(tops)
    adjusted = apply_edits(logits, rows)
    if adjusted is not logits:
        token_ids, tops = _most_likely(adjusted)
        for index, top in _not_finite(tops).items():
            reason = "leave no token to choose" if top == -math.inf else "overflow the logits"
            errors.setdefault(index, f"the penalties, biases and masks {reason}")
    drawn = [i for i, row in enumerate(rows) if row.temperature > 0 and i not in errors]
    if drawn:
        scores = temper(adjusted[drawn], [rows[i] for i in drawn])
        bad = {drawn[j] for j in _not_finite(_most_likely(scores)[1])}
        for i in bad:
            errors[i] = (
                f"temperature = {rows[i].temperature} and min_p = {rows[i].min_p} leave no "
                "distribution to draw from"
            )
        if bad:
            scores = scores[[j for j, i in enumerate(drawn) if i not in bad]]
            drawn = [i for i in drawn if i not in bad]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        token_ids[index] = draw(scores, [rows[i] for i in drawn])

    reported = [i for i, row in enumerate(rows) if row.num_logprobs is not None and i not in errors]
    logprobs: dict[int, TokenLogprobs] = {}
    if reported:
        index = torch.tensor(reported, device=logits.device)
        counts = [rows[i].num_logprobs or 0 for i in reported]
        values = gather_logprobs(logits[index], token_ids[index], counts)
        logprobs = dict(zip(reported, values, strict=True))
    return [
        SampledRow(error=errors[i]) if i in errors else SampledRow(token_id, logprobs.get(i))
        for i, token_id in enumerate(token_ids.tolist())
    ]


def sample_plain(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """Choose one token per row by temperature, min_p, top_k and top_p, without waiting for the
    device.

    The same choices as in `sample`, but where a random number lies on the border of two tokens. Of
    equal logits at the border of top_k or top_p the first tokens are kept.

    Args:
        logits: `[num_rows, vocab_size]`, float32, bfloat16 or float16.
        temperature: float32 `[num_rows]`, 0 = the most likely token.
        min_p: float32 `[num_rows]`, 0 = off.
        uniform: float64 `[num_rows]` in [0, 1), the rows' random numbers.
        top_k: int32 `[num_rows]`, 0 = off.
        top_p: float64 (or float32) `[num_rows]`, above 0, 1 = off.

    Returns:
        int64 `[num_rows]`, -1 where `sample` gives an error.
    """
    wishes = (temperature, min_p, uniform, top_k, top_p)
    if logits.device.type == "cuda" and kernels_enabled() and why_no_triton() is None:
        from flashpage.layers import triton_sampler

        return triton_sampler.sample_plain(logits, *wishes)
    return sample_plain_torch(logits, *wishes)


def sample_plain_torch(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    top_k: Tensor,
    top_p: Tensor,
) -> Tensor:
    """`sample_plain` in torch operators, with a sort."""
    logits = logits.float()
    top = logits.amax(dim=-1, keepdim=True)
    drawing = temperature > 0
    scores = (logits - top) / torch.where(drawing, temperature, 1.0)[:, None]
    scores.masked_fill_(scores < min_p.log()[:, None], -torch.inf)
    weights = scores.exp().double()
    cut = (top_k > 0) | (top_p < 1)
    if weights.device.type != "cpu" or cut.any():  # elsewhere the host would have to wait
        order = logits.argsort(dim=-1, descending=True, stable=True)
        weights = weights.gather(1, order)
        ranks = torch.arange(logits.shape[1], device=logits.device)
        weights.masked_fill_((top_k[:, None] > 0) & (ranks >= top_k[:, None]), 0.0)
        mass = weights.cumsum(dim=-1)
        target = top_p.double()[:, None] * mass[:, -1:]
        beyond = (mass - weights >= target) & (ranks > 0)
        weights.masked_fill_((top_p[:, None] < 1) & beyond, 0.0)
        weights = torch.zeros_like(weights).scatter_(1, order, weights)
    drawn = _invert_cdf(weights, uniform.double()[:, None])
    tokens = torch.where(drawing, drawn, logits.argmax(dim=-1))
    valid = top.isfinite().squeeze(1) & (~drawing | (scores.amax(dim=-1) == 0))
    return torch.where(valid, tokens, -1)


def non_finite_rows(logits: Tensor) -> dict[int, str]:
    """Row index -> complaint, for rows that hold NaN, +inf or nothing but -inf.

    The maximum tells: NaN and +inf win it, and -inf wins it only alone. Single -inf logits are
    meant (a model that masks the padding of its vocabulary).
    """
    return _complaints(_most_likely(logits)[1])


def _complaints(tops: list[float]) -> dict[int, str]:
    return {
        index: f"the model's logits are not finite (their maximum is {top})"
        for index, top in _not_finite(tops).items()
    }


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of the given tokens and of the likeliest ones, row by row.

    Args:
        logits: `[num_rows, vocab_size]` float32; token_ids: `[num_rows]` int64.
        num_logprobs: how many of the likeliest tokens to list, per row.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    columns = (column.tolist() for column in (token_ids, chosen.squeeze(1), ranks))
    # Each row asks for its own count: which of equal tokens come first depends on it.
    likeliest: list[tuple[list[int], list[float]]] = [([], [])] * len(num_logprobs)
    for count in set(num_logprobs) - {0}:
        rows = [i for i, wanted in enumerate(num_logprobs) if wanted == count]
        top_logprobs, top_ids = logprobs[rows].topk(count, dim=-1)
        for i, ids, values in zip(rows, top_ids.tolist(), top_logprobs.tolist(), strict=True):
            likeliest[i] = (ids, values)
    return [
        TokenLogprobs(token_id, logprob, rank, ids, values)
        for token_id, logprob, rank, (ids, values) in zip(*columns, likeliest, strict=True)
    ]


def apply_edits(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Penalties, biases and masks, as three sparse edits; without any, `logits` itself."""
    repetition = _Edits()
    additive = _Edits()
    masked = _Edits()
    for i, row in enumerate(rows):
        if row.repetition_penalty != 1.0:
            repetition.add(i, row.seen_tokens, [row.repetition_penalty] * len(row.seen_tokens))
        if row.presence_penalty or row.frequency_penalty:
            presence, frequency = row.presence_penalty, row.frequency_penalty
            amounts = [-presence - frequency * count for count in row.output_counts.values()]
            additive.add(i, row.output_counts, amounts)
        if row.logit_bias:
            additive.add(i, row.logit_bias, row.logit_bias.values())
        masked.add(i, row.masked_tokens, [-math.inf] * len(row.masked_tokens))
    if not (repetition.values or additive.values or masked.values):
        return logits

    logits = logits.clone()
    if repetition.values:
        where, penalties = repetition.tensors(logits)
        values = logits[where]
        logits[where] = torch.where(values > 0, values / penalties, values * penalties)
    if additive.values:
        where, amounts = additive.tensors(logits)
        logits.index_put_(where, amounts, accumulate=True)
    if masked.values:
        where, minus_inf = masked.tensors(logits)
        logits[where] = minus_inf
    return logits


def temper(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """The scores whose exponentials are drawn from: over the temperature (> 0), after min_p.

    Args:
        logits: `[num_rows, vocab_size]` float32, each row's maximum finite.

    Returns:
        `[num_rows, vocab_size]` float32, each row's maximum 0; not 0 where the temperature (or
        min_p) is nothing that float32 can divide by (or compare with).
    """
    # The largest becomes 0 before the division: no temperature can make the scores overflow.
    scores = logits - logits.amax(dim=-1, keepdim=True)
    scores /= _column([row.temperature for row in rows], scores)
    if any(row.min_p > 0 for row in rows):
        floor = [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows]
        scores.masked_fill_(scores < _column(floor, scores), -math.inf)
    return scores


def draw(scores: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Draw one token per row, after top_k and top_p.

    Args:
        scores: `[num_rows, vocab_size]` float32, each row's maximum 0 (see `temper`).

    Returns:
        `[num_rows]` int64.
    """
    vocab_size = scores.shape[-1]
    uniform = _column([row.uniform for row in rows], scores, torch.float64)
    ranked = [i for i, row in enumerate(rows) if 0 < row.top_k < vocab_size or row.top_p < 1]
    if not ranked:
        return _invert_cdf(scores.exp(), uniform)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    index = torch.tensor(ranked, device=scores.device)
    counts = [min(rows[i].top_k or vocab_size, vocab_size) for i in ranked]
    top_k = _column(counts, scores, torch.int64)
    top_p = _column([rows[i].top_p for i in ranked], scores, torch.float64)
    token_ids[index] = _draw_ranked(scores[index], top_k, top_p, uniform[index])
    if len(ranked) < len(rows):
        plain = sorted(set(range(len(rows))) - set(ranked))
        index = torch.tensor(plain, device=scores.device)
        token_ids[index] = _invert_cdf(scores[index].exp(), uniform[index])
    return token_ids


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _draw_ranked(scores: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw among the `top_k` likeliest tokens, cut where their mass reaches `top_p` of its sum.

    Of equal scores at the border the first tokens are kept.

    scores: `[num_rows, vocab_size]`, largest 0; the others `[num_rows, 1]`. Returns `[num_rows]`.
    """
    vocab_size = scores.shape[-1]
    smallest = torch.empty_like(scores[:, :1])  # score that is kept, and for how many tokens
    ties = torch.empty(len(scores), 1, dtype=torch.int64, device=scores.device)
    totals = scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    pending = torch.arange(len(scores), device=scores.device)
    for num_candidates in (*(c for c in CANDIDATES if c < vocab_size), vocab_size):
        k, p = top_k[pending], top_p[pending]
        if num_candidates < vocab_size:
            values = scores[pending].topk(num_candidates, dim=-1).values
        else:
            values = scores[pending].sort(dim=-1, descending=True).values
        weights = values.exp().double()
        weights[torch.arange(num_candidates, device=scores.device) >= k] = 0
        mass = weights.cumsum(dim=-1)
        # With all k among the candidates their mass is known; without a k, so is the row's.
        target = p * torch.where(k <= num_candidates, mass[:, -1:], totals[pending])
        done = (k <= num_candidates) | ((k >= vocab_size) & (mass[:, -1:] >= target))
        in_reach = (weights > 0) & (mass - weights < target)
        num_kept = in_reach.sum(dim=-1, keepdim=True).clamp(min=1)
        last = values.gather(1, num_kept - 1)
        kept = torch.arange(num_candidates, device=scores.device) < num_kept
        done = done.squeeze(1)
        smallest[pending[done]] = last[done]
        ties[pending[done]] = ((values == last) & kept).sum(dim=-1, keepdim=True)[done]
        pending = pending[~done]
        if not len(pending):
            break
    tied = scores == smallest
    kept = (scores > smallest) | (tied & (tied.cumsum(dim=-1) <= ties))
    # Drawn in the order of token ids, as without a cut, and as `sample_plain` does.
    return _invert_cdf(torch.where(kept, scores.exp(), 0.0), uniform)


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the running sum of weights exceeds `uniform` times the sum.

    One random number per row, whatever the vocabulary. In float64, because the running sum of
    100,000 float32 weights would misplace the unlikely ones. weights `[num_rows, n]`, uniform
    `[num_rows, 1]` float64; returns `[num_rows]` int64, never the index of a zero weight.
    """
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    # Rounding must not lift the threshold to the total, which no index exceeds.
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, threshold, right=True).squeeze(1)


class _Edits:
    """Coordinates and values of a sparse edit, collected row by row."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.token_ids: list[int] = []
        self.values: list[float] = []

    def add(self, row: int, token_ids: Collection[int], values: Collection[float]) -> None:
        self.rows.extend([row] * len(token_ids))
        self.token_ids.extend(token_ids)
        self.values.extend(values)

    def tensors(self, like: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        rows = torch.tensor(self.rows, device=like.device)
        token_ids = torch.tensor(self.token_ids, device=like.device)
        return (rows, token_ids), torch.tensor(self.values, dtype=like.dtype, device=like.device)


def _not_finite(tops: list[float]) -> dict[int, float]:
    """Row index -> the row's maximum, where that is not finite."""
    return {i: top for i, top in enumerate(tops) if not math.isfinite(top)}


def _most_likely(logits: Tensor) -> tuple[Tensor, list[float]]:
    """The first of each row's largest logits, int64 `[num_rows]`, and how large it is.

    NaN is larger than all.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # numpy takes a tenth of torch's time, and wakes no threads.
        rows = logits.numpy()
        token_ids = rows.argmax(axis=-1)
        return torch.from_numpy(token_ids), rows[np.arange(len(rows)), token_ids].tolist()
    found = logits.argmax(dim=-1)
    return found, logits.gather(1, found[:, None]).squeeze(1).tolist()
