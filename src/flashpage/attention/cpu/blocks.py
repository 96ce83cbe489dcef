"""Every option of attention, block by block, in plain torch: never all scores in memory.

The general path of the CPU backend, for what torch's own kernel can not do: windows, softcap,
ALiBi, dropout, the gradient of the LSE. Blocks that no query may see are skipped.

Shapes: q, out, dout `[count, seqlen_q, num_q_heads, head_dim]`; k, v `[count, seqlen_k,
num_kv_heads, head_dim]`; softmax_lse `[count, num_q_heads, seqlen_q]`. Inside, query heads that
share a kv head lie in one matrix of `group_size * rows` rows, so K and V are never expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpage.attention.problem import Problem

BLOCK_Q = 128
BLOCK_K = 512
# Scores of one block, all heads and sequences together: a few of these live at once.
MAX_BLOCK_SCORES = 2**20


@dataclass(frozen=True)
class Piece:
    """What a block computation needs to know beside its tensors."""

    problem: Problem
    seqlen_q: int
    seqlen_k: int
    slopes: Tensor | None
    """`[count or 1, num_q_heads]`"""
    rng_state: Tensor | None
    first_sequence: int
    """index of the first sequence in the batch: dropout masks depend on it"""

    def key_range(self, rows: range) -> tuple[int, int]:
        """Keys that at least one of these query rows may see."""
        offset = self.seqlen_k - self.seqlen_q
        left, right = self.problem.window_left, self.problem.window_right
        start = 0 if left < 0 else max(0, rows.start + offset - left)
        stop = self.seqlen_k if right < 0 else min(self.seqlen_k, rows.stop + offset + right)
        return start, stop

    def block_sizes(self, count: int) -> tuple[int, int, int]:
        """(sequences, rows, keys) per block"""
        heads = self.problem.num_q_heads
        block_q = min(BLOCK_Q, self.seqlen_q)
        block_k = min(BLOCK_K, self.seqlen_k)
        while heads * block_q * block_k > MAX_BLOCK_SCORES and block_q * block_k > 64 * 64:
            if block_k >= block_q:
                block_k //= 2
            else:
                block_q //= 2
        sequences = max(1, MAX_BLOCK_SCORES // (heads * block_q * block_k))
        return min(sequences, count), block_q, block_k

    def narrow(self, start: int, stop: int) -> Piece:
        """The same for sequences `start:stop`."""
        slopes = self.slopes
        if slopes is not None and slopes.shape[0] > 1:
            slopes = slopes[start:stop]
        return Piece(
            self.problem,
            self.seqlen_q,
            self.seqlen_k,
            slopes,
            self.rng_state,
            self.first_sequence + start,
        )


def _group_rows(x: Tensor, piece: Piece) -> Tensor:
    """`[count, rows, num_q_heads, d]` to `[count, num_kv_heads, group_size * rows, d]`."""
    p = piece.problem
    x = x.unflatten(2, (p.num_kv_heads, p.group_size)).permute(0, 2, 3, 1, 4)
    return x.to(p.lse_dtype).flatten(2, 3)


def _ungroup_rows(x: Tensor, piece: Piece) -> Tensor:
    """Inverse of `_group_rows`."""
    return x.unflatten(2, (piece.problem.group_size, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _group_row_values(x: Tensor, piece: Piece) -> Tensor:
    """`[count, num_q_heads, rows]` to `[count, num_kv_heads, group_size * rows, 1]`."""
    return x.unflatten(1, (piece.problem.num_kv_heads, -1)).flatten(2, 3).unsqueeze(-1)


def _kv_block(x: Tensor, keys: range, piece: Piece) -> Tensor:
    """Keys `[count, num_kv_heads, len(keys), d]` in the dtype of accumulation."""
    return x[:, keys.start : keys.stop].transpose(1, 2).to(piece.problem.lse_dtype)


def _as_heads(x: Tensor, piece: Piece) -> Tensor:
    """View of grouped scores as `[count, num_q_heads, rows, keys]`."""
    return x.unflatten(2, (piece.problem.group_size, -1)).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, rows: range, keys: range, piece: Piece) -> Tensor:
    """Scaled, capped, biased, masked scores of one block; q and k already grouped."""
    p = piece.problem
    s = torch.matmul(q, k.transpose(-1, -2)).mul_(p.softmax_scale)
    if p.softcap > 0:
        s = s.div_(p.softcap).tanh_().mul_(p.softcap)
    offset = piece.seqlen_k - piece.seqlen_q
    row = torch.arange(rows.start + offset, rows.stop + offset)[:, None]
    key = torch.arange(keys.start, keys.stop)[None, :]
    heads = _as_heads(s, piece)
    if piece.slopes is not None:
        heads -= piece.slopes.to(s.dtype)[:, :, None, None] * (row - key).abs()
    if p.window_left >= 0 and keys.start < rows.stop - 1 + offset - p.window_left:
        heads.masked_fill_(key < row - p.window_left, -torch.inf)
    if p.window_right >= 0 and keys.stop - 1 > rows.start + offset + p.window_right:
        heads.masked_fill_(key > row + p.window_right, -torch.inf)
    return s


def _blocks(piece: Piece, block_q: int, block_k: int) -> Iterator[tuple[range, list[range]]]:
    """Rows, and the key blocks that they can see."""
    for row in range(0, piece.seqlen_q, block_q):
        rows = range(row, min(row + block_q, piece.seqlen_q))
        start, stop = piece.key_range(rows)
        yield rows, [range(key, min(key + block_k, stop)) for key in range(start, stop, block_k)]


# ---------------------------------------------------------------------------------------------
# Dropout: a mask that can be made again
# ---------------------------------------------------------------------------------------------

# Odd 64-bit constants (as signed integers): the golden ratio, and the finaliser of splitmix64
# (Steele, Lea, Flood 2014).
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 counters in place; logical shifts."""
    x ^= (x >> 30) & (2**34 - 1)
    x *= _MIX_1
    x ^= (x >> 27) & (2**37 - 1)
    x *= _MIX_2
    x ^= (x >> 31) & (2**33 - 1)
    return x


def keep_mask(rows: range, keys: range, count: int, piece: Piece) -> Tensor:
    """True where dropout keeps: bool `[count, num_q_heads, rows, keys]`.

    A function of the seed and of (sequence, head, row, key) alone, whatever the blocks are.
    """
    assert piece.rng_state is not None
    seed, offset = piece.rng_state.tolist()
    sequence = torch.arange(piece.first_sequence, piece.first_sequence + count)[:, None]
    stream = _mix((sequence << 32) + torch.arange(piece.problem.num_q_heads) + offset)
    row = _mix(stream[..., None] + torch.arange(rows.start, rows.stop) * _GOLDEN + seed)
    counter = _mix(row[..., None] + torch.arange(keys.start, keys.stop) * _GOLDEN)
    return (counter & (2**32 - 1)) >= round(piece.problem.dropout_p * 2**32)


def _drop(x: Tensor, keep: Tensor, piece: Piece) -> Tensor:
    """x, grouped, with dropped entries zero and the others scaled up."""
    kept = _as_heads(x, piece).mul(keep).div_(1.0 - piece.problem.dropout_p)
    return kept.reshape(x.shape)


# ---------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------


def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)`; online softmax over key blocks."""
    count, seqlen_q, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    softmax_lse = torch.empty(count, num_heads, seqlen_q, dtype=piece.problem.lse_dtype)
    sequences, block_q, block_k = piece.block_sizes(count)
    for start in range(0, count, sequences):
        part = slice(start, min(start + sequences, count))
        sub = piece.narrow(part.start, part.stop)
        for rows, key_blocks in _blocks(sub, block_q, block_k):
            row = slice(rows.start, rows.stop)
            q_block = _group_rows(q[part, row], sub)
            o, lse = _forward_rows(q_block, k[part], v[part], rows, key_blocks, sub)
            out[part, row] = _ungroup_rows(o, sub)
            softmax_lse[part, :, row] = _as_heads(lse, sub).squeeze(-1)
    return out, softmax_lse


def _forward_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: range, key_blocks: list[range], piece: Piece
) -> tuple[Tensor, Tensor]:
    m = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=q.dtype)
    l = torch.zeros_like(m)  # noqa: E741
    o = torch.zeros_like(q)
    for keys in key_blocks:
        s = _scores(q, _kv_block(k, keys, piece), rows, keys, piece)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        # Rows that have seen no key yet keep m = -inf; shift those by 0 instead.
        shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
        p = s.sub_(shift).exp_()
        rescale = torch.exp(m - shift)
        l = l * rescale + p.sum(-1, keepdim=True)  # noqa: E741
        if piece.rng_state is not None:
            p = _drop(p, keep_mask(rows, keys, q.shape[0], piece), piece)
        o = (o * rescale).add_(torch.matmul(p, _kv_block(v, keys, piece)))
        m = m_new
    empty = m == -torch.inf
    lse = (m + torch.log(l)).masked_fill_(empty, torch.inf)
    return o.div_(l.masked_fill(empty, 1.0)), lse


def s_dmask(q: Tensor, k: Tensor, piece: Piece, out: Tensor) -> None:
    """Fill `out[:, :, :seqlen_q, :seqlen_k]` with `exp(s - max s)`, negative where dropped.

    out: `[count, num_q_heads, >= seqlen_q, >= seqlen_k]`. The one place that holds a whole S,
    because the caller asked for it.
    """
    count = q.shape[0]
    keys = range(piece.seqlen_k)
    _, block_q, _ = piece.block_sizes(count)
    for index in range(count):
        sub = piece.narrow(index, index + 1)
        one = slice(index, index + 1)
        k_all = _kv_block(k[one], keys, sub)
        for rows, _ in _blocks(sub, block_q, BLOCK_K):
            row = slice(rows.start, rows.stop)
            s = _as_heads(_scores(_group_rows(q[one, row], sub), k_all, rows, keys, sub), sub)
            top = s.amax(-1, keepdim=True)
            e = torch.exp(s - top.masked_fill(top == -torch.inf, 0.0))
            # A dropped entry must stay visible when exp(...) rounds to zero: -0.0 has a sign,
            # but does not compare below zero.
            e = e.clamp_min(torch.finfo(q.dtype).tiny)
            e = torch.where(keep_mask(rows, keys, 1, sub), e, -e)
            out[one, :, row, : piece.seqlen_k] = e.to(out.dtype)


# ---------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    piece: Piece,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(dq, dk, dv)` in the dtype of q (Dao 2023, algorithm 2).

    With P = exp(S - lse): dV = P^T dO, dS = P * (dO V^T - delta), delta = rowsum(dO * O). The
    gradient of the LSE, dlse * P, only changes delta.
    """
    count = q.shape[0]
    p = piece.problem
    dq = torch.empty(q.shape, dtype=q.dtype)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (k, v))
    delta = (dout.to(p.lse_dtype) * out.to(p.lse_dtype)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    sequences, block_q, block_k = piece.block_sizes(count)
    for start in range(0, count, sequences):
        part = slice(start, min(start + sequences, count))
        sub = piece.narrow(part.start, part.stop)
        shape = (part.stop - part.start, p.num_kv_heads, piece.seqlen_k, p.head_dim)
        dk_sum, dv_sum = (torch.zeros(shape, dtype=p.lse_dtype) for _ in range(2))
        for rows, key_blocks in _blocks(sub, block_q, block_k):
            row = slice(rows.start, rows.stop)
            dq_rows = _backward_rows(
                _group_rows(dout[part, row], sub),
                _group_rows(q[part, row], sub),
                _group_row_values(softmax_lse[part, :, row], sub),
                _group_row_values(delta[part, :, row], sub),
                k[part],
                v[part],
                dk_sum,
                dv_sum,
                rows,
                key_blocks,
                sub,
            )
            dq[part, row] = _ungroup_rows(dq_rows, sub)
        dk[part] = dk_sum.transpose(1, 2)
        dv[part] = dv_sum.transpose(1, 2)
    return dq, dk, dv


def _backward_rows(
    dout: Tensor,
    q: Tensor,
    lse: Tensor,
    delta: Tensor,
    k: Tensor,
    v: Tensor,
    dk_sum: Tensor,
    dv_sum: Tensor,
    rows: range,
    key_blocks: list[range],
    piece: Piece,
) -> Tensor:
    p_ = piece.problem
    dq = torch.zeros_like(q)
    for keys in key_blocks:
        key = slice(keys.start, keys.stop)
        k_block, v_block = _kv_block(k, keys, piece), _kv_block(v, keys, piece)
        s = _scores(q, k_block, rows, keys, piece)
        prob = torch.exp(s - lse)  # 0 where masked, and where the row saw no key (lse = +inf)
        dprob = torch.matmul(dout, v_block.transpose(-1, -2))
        kept = prob
        if piece.rng_state is not None:
            keep = keep_mask(rows, keys, q.shape[0], piece)
            kept, dprob = _drop(prob, keep, piece), _drop(dprob, keep, piece)
        dv_sum[:, :, key] += torch.matmul(kept.transpose(-1, -2), dout)
        ds = dprob.sub_(delta).mul_(prob).mul_(p_.softmax_scale)
        if p_.softcap > 0:
            ds.mul_(_softcap_slope(q, k_block, p_))
        dq += torch.matmul(ds, k_block)
        dk_sum[:, :, key] += torch.matmul(ds.transpose(-1, -2), q)
    return dq


def _softcap_slope(q: Tensor, k: Tensor, problem: Problem) -> Tensor:
    """d/dt of `softcap * tanh(t / softcap)`: `1 - tanh^2`."""
    t = torch.matmul(q, k.transpose(-1, -2)).mul_(problem.softmax_scale / problem.softcap)
    return 1.0 - t.tanh_().square_()
