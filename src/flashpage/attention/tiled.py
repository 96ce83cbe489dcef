"""The tiled algorithm in plain torch, in the loop orders of FlashAttention 1 and 2.

One head, no option but the causal mask: what is left is the idea itself. The scores are never all
in memory; each block of keys updates, for every query row, a running maximum m, a running sum l and
a running output O (the online softmax of Milakov and Gimelshein 2018, used by Dao et al. 2022):

    m_new = max(m, max_j s_j)
    l_new = l * exp(m - m_new) + sum_j exp(s_j - m_new)
    O_new = O * exp(m - m_new) + sum_j exp(s_j - m_new) v_j          out = O / l

What differs between the two orders is who owns what:

- `fa1_attention`: the workers split the keys of every block. No worker sees a whole row of
  scores, so their partial maxima and sums are reduced across workers once per key block.
- `fa2_attention`: each worker owns query rows and walks all key blocks alone. No exchange.

Causal masks are aligned to the bottom-right corner; a row that sees no key gives
out = 0 and lse = inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What one worker holds after one key block: `rows` are its query rows, `keys` its keys."""

    worker: int
    key_block: int
    rows: range
    keys: range
    s: Tensor
    """scores of this worker's part of the block, `[rows, keys]`, -inf where masked"""
    m_before: Tensor
    """running maximum before the block, `[rows]`, -inf where no key was seen"""
    m: Tensor
    """running maximum, `[rows]`"""
    rescale: Tensor
    """correction factor exp(m_before - m) of l and O, `[rows]`; 0 where no key was seen before"""
    l: Tensor  # noqa: E741 - the letter of the papers
    """running sum of exp(s - m), `[rows]`"""
    o: Tensor
    """running output `O / l`, `[rows, head_dim]`"""
    num_reductions: int
    """how often all workers have exchanged partial results so far"""


Recorder = Callable[[Step], None]


@dataclass(frozen=True)
class TiledResult:
    out: Tensor
    """`[seqlen_q, head_dim]`"""
    softmax_lse: Tensor
    """`[seqlen_q]`, natural log"""
    num_reductions: int
    """how often all workers had to exchange partial results"""


def _default_scale(q: Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _hide_later(s: Tensor, rows: Tensor, keys: Tensor, offset: int) -> Tensor:
    """Scores `[rows, keys]` with -inf where key > row + offset."""
    return s.masked_fill(keys[None, :] > rows[:, None] + offset, -torch.inf)


def _finite(m: Tensor) -> Tensor:
    """What exponents are taken against: m, or 0 in rows that have seen no key, to avoid NaN."""
    return m.masked_fill(m == -torch.inf, 0.0)


def _divide(o: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """`O / l`; l >= 1 once a row has seen a key, its largest score adds exp(0); before, O = 0."""
    return o / l.clamp(min=1.0)[:, None]


def _lse(m: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    return torch.where(l == 0, torch.inf, m + torch.log(l))


def fa2_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size_k: int,
    num_workers: int = 1,
    softmax_scale: float | None = None,
    causal: bool = False,
    recorder: Recorder | None = None,
) -> TiledResult:
    """FA2 order: worker w owns a slice of the query rows and walks all key blocks alone.

    Args:
        q: `[seqlen_q, head_dim]`; k, v: `[seqlen_k, head_dim]`, seqlen_k >= 1.
        block_size_k: keys per block.
        causal: key j is visible to query i iff `j <= i + seqlen_k - seqlen_q`; a worker stops
            before the first block that none of its rows sees.
        recorder: called with a `Step` after each key block of each worker.
    """
    scale, offset = _default_scale(q, softmax_scale), k.shape[0] - q.shape[0]
    out = torch.empty(q.shape[0], v.shape[1], dtype=q.dtype)
    softmax_lse = torch.empty(q.shape[0], dtype=q.dtype)
    for worker, rows in enumerate(torch.arange(q.shape[0]).tensor_split(num_workers)):
        m = torch.full((len(rows),), -torch.inf, dtype=q.dtype)
        l = torch.zeros(len(rows), dtype=q.dtype)  # noqa: E741
        o = torch.zeros(len(rows), v.shape[1], dtype=q.dtype)
        owned = range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0)
        stop = min(k.shape[0], owned.stop + offset) if causal else k.shape[0]
        for block, start in enumerate(range(0, stop, block_size_k)):
            end = min(start + block_size_k, k.shape[0])
            s = scale * (q[rows] @ k[start:end].T)
            if causal:
                s = _hide_later(s, rows, torch.arange(start, end), offset)
            m_before, m = m, torch.maximum(m, s.amax(dim=1))
            rescale = torch.exp(m_before - _finite(m))
            p = torch.exp(s - _finite(m)[:, None])
            l = l * rescale + p.sum(dim=1)  # noqa: E741
            o = o * rescale[:, None] + p @ v[start:end]
            if recorder is not None and len(rows):
                part = (range(start, end), s, m_before, m, rescale, l, _divide(o, l))
                recorder(Step(worker, block, owned, *part, num_reductions=0))
        out[rows] = _divide(o, l)
        softmax_lse[rows] = _lse(m, l)
    return TiledResult(out, softmax_lse, num_reductions=0)


def fa1_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size_k: int,
    num_workers: int = 1,
    softmax_scale: float | None = None,
    causal: bool = False,
    recorder: Recorder | None = None,
) -> TiledResult:
    """FA1 order: for every key block, worker w holds a slice of its keys, for all query rows.

    Arguments and results as `fa2_attention`. `num_reductions` counts the exchanges between
    workers: one per key block as soon as there is more than one worker.
    """
    scale, offset = _default_scale(q, softmax_scale), k.shape[0] - q.shape[0]
    rows = torch.arange(q.shape[0])
    m = torch.full((q.shape[0],), -torch.inf, dtype=q.dtype)
    l = torch.zeros(q.shape[0], dtype=q.dtype)  # noqa: E741
    o = torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype)
    num_reductions = 0
    for block, start in enumerate(range(0, k.shape[0], block_size_k)):
        keys = torch.arange(start, min(start + block_size_k, k.shape[0]))
        parts = keys.tensor_split(num_workers)

        # Each worker alone: scores of its keys, their maximum, sum and weighted values.
        scores = [scale * (q @ k[part].T) for part in parts]
        if causal:
            pairs = zip(scores, parts, strict=True)
            scores = [_hide_later(s, rows, part, offset) for s, part in pairs]
        partial_m = [_row_max(s) for s in scores]
        m_before, m = m, torch.stack([m, *partial_m]).amax(dim=0)  # the exchange: maxima ...
        weights = [torch.exp(s - _finite(m)[:, None]) for s in scores]
        block_l = torch.stack([p.sum(dim=1) for p in weights]).sum(dim=0)  # ... sums ...
        block_o = torch.stack(  # ... and outputs
            [p @ v[part] for p, part in zip(weights, parts, strict=True)]
        ).sum(dim=0)
        num_reductions += num_workers > 1

        rescale = torch.exp(m_before - _finite(m))
        l = l * rescale + block_l  # noqa: E741
        o = o * rescale[:, None] + block_o
        if recorder is not None:
            first = start  # of the worker's keys
            for worker, s in enumerate(scores):
                part = range(first, first + s.shape[1])
                state = (m_before, m, rescale, l, _divide(o, l), num_reductions)
                recorder(Step(worker, block, range(q.shape[0]), part, s, *state))
                first = part.stop
    return TiledResult(_divide(o, l), _lse(m, l), num_reductions)


def _row_max(s: Tensor) -> Tensor:
    """Maximum over keys; -inf for a worker that got none of this block."""
    return s.amax(dim=1) if s.shape[1] else torch.full((s.shape[0],), -torch.inf, dtype=s.dtype)
