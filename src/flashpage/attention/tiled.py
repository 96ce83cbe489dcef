"""The tiled algorithm in plain torch, in the loop orders of FlashAttention 1 and 2.

One head, no options: what is left is the idea itself. The scores are never all in memory;
each block of keys updates, for every query row, a running maximum m, a running sum l and a
running output O (the online softmax of Milakov and Gimelshein 2018, used by Dao et al. 2022):

    m_new = max(m, max_j s_j)
    l_new = l * exp(m - m_new) + sum_j exp(s_j - m_new)
    O_new = O * exp(m - m_new) + sum_j exp(s_j - m_new) v_j          out = O / l

What differs between the two orders is who owns what:

- `fa1_attention`: the workers split the keys of every block. No worker sees a whole row of
  scores, so their partial maxima and sums are reduced across workers once per key block.
- `fa2_attention`: each worker owns query rows and walks all key blocks alone. No exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What one worker holds after one key block. `rows` are its query rows."""

    worker: int
    key_block: int
    rows: range
    s: Tensor
    """scores of this worker's part of the block, `[rows, keys]`"""
    m: Tensor
    """running maximum, `[rows]`"""
    l: Tensor  # noqa: E741 - the letter of the papers
    """running sum of exp(s - m), `[rows]`"""
    o: Tensor
    """running output `O / l`, `[rows, head_dim]`"""


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


def fa2_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size_k: int,
    num_workers: int = 1,
    softmax_scale: float | None = None,
    recorder: Recorder | None = None,
) -> TiledResult:
    """FA2 order: worker w owns a slice of the query rows and walks all key blocks alone.

    Args:
        q: `[seqlen_q, head_dim]`; k, v: `[seqlen_k, head_dim]`, seqlen_k >= 1.
        block_size_k: keys per block.
        recorder: called with a `Step` after each key block of each worker.
    """
    scale = _default_scale(q, softmax_scale)
    out = torch.empty(q.shape[0], v.shape[1], dtype=q.dtype)
    softmax_lse = torch.empty(q.shape[0], dtype=q.dtype)
    for worker, rows in enumerate(torch.arange(q.shape[0]).tensor_split(num_workers)):
        m = torch.full((len(rows),), -torch.inf, dtype=q.dtype)
        l = torch.zeros(len(rows), dtype=q.dtype)  # noqa: E741
        o = torch.zeros(len(rows), v.shape[1], dtype=q.dtype)
        for block, start in enumerate(range(0, k.shape[0], block_size_k)):
            keys = slice(start, start + block_size_k)
            s = scale * (q[rows] @ k[keys].T)
            m_new = torch.maximum(m, s.amax(dim=1))
            rescale = torch.exp(m - m_new)
            p = torch.exp(s - m_new[:, None])
            l = l * rescale + p.sum(dim=1)  # noqa: E741
            o = o * rescale[:, None] + p @ v[keys]
            m = m_new
            if recorder is not None and len(rows):
                owned = range(int(rows[0]), int(rows[-1]) + 1)
                recorder(Step(worker, block, owned, s, m, l, o / l[:, None]))
        out[rows] = o / l[:, None]
        softmax_lse[rows] = m + torch.log(l)
    return TiledResult(out, softmax_lse, num_reductions=0)


def fa1_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size_k: int,
    num_workers: int = 1,
    softmax_scale: float | None = None,
    recorder: Recorder | None = None,
) -> TiledResult:
    """FA1 order: for every key block, worker w holds a slice of its keys, for all query rows.

    Arguments and results as `fa2_attention`. `num_reductions` counts the exchanges between
    workers: one per key block as soon as there is more than one worker.
    """
    scale = _default_scale(q, softmax_scale)
    rows = range(q.shape[0])
    m = torch.full((q.shape[0],), -torch.inf, dtype=q.dtype)
    l = torch.zeros(q.shape[0], dtype=q.dtype)  # noqa: E741
    o = torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype)
    num_reductions = 0
    for block, start in enumerate(range(0, k.shape[0], block_size_k)):
        keys = torch.arange(start, min(start + block_size_k, k.shape[0]))
        parts = keys.tensor_split(num_workers)

        # Each worker alone: scores of its keys, their maximum, sum and weighted values.
        scores = [scale * (q @ k[part].T) for part in parts]
        partial_m = [_row_max(s) for s in scores]
        m_new = torch.stack([m, *partial_m]).amax(dim=0)  # the exchange: maxima ...
        weights = [torch.exp(s - m_new[:, None]) for s in scores]
        block_l = torch.stack([p.sum(dim=1) for p in weights]).sum(dim=0)  # ... sums ...
        block_o = torch.stack(  # ... and outputs
            [p @ v[part] for p, part in zip(weights, parts, strict=True)]
        ).sum(dim=0)
        num_reductions += num_workers > 1

        rescale = torch.exp(m - m_new)
        l = l * rescale + block_l  # noqa: E741
        o = o * rescale[:, None] + block_o
        m = m_new
        if recorder is not None:
            for worker, s in enumerate(scores):
                recorder(Step(worker, block, rows, s, m, l, o / l[:, None]))
    return TiledResult(o / l[:, None], m + torch.log(l), num_reductions)


def _row_max(s: Tensor) -> Tensor:
    """Maximum over keys; -inf for a worker that got none of this block."""
    return s.amax(dim=1) if s.shape[1] else torch.full((s.shape[0],), -torch.inf, dtype=s.dtype)
