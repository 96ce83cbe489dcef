"""Attention over pages in units of 16 tokens, against standard attention."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from flashpage.attention.cpu.numba_runtime import call, kernels
from flashpage.attention.standard import standard_attention
from layers.cpu.test_linear import quantised, unpacked

pytest.importorskip("numba")
ATTENTION = "flashpage.layers.cpu.attention"
TAGS = {torch.float32: (0,), torch.bfloat16: (0, 0)}


@cache
def attend_all():
    """Every task of one layer, then the rows whose splits were several."""
    import numba

    attention = kernels(ATTENTION)
    attend, join = attention.attend, attention.join
    scratch_size = attention.scratch_size

    @numba.njit(parallel=True)
    def run(
        kv, tasks, q, positions, tables, step, units, k, v, num_kv_heads, group, dim, where, threads
    ):
        partial = np.full((len(tasks), group * dim), np.nan, np.float32)
        states = np.full((len(tasks), 2 * group), np.nan, np.float32)
        for thread in numba.prange(threads):
            scratch = np.full(scratch_size(group, dim), np.nan, np.float32)
            for t in range(thread, len(tasks), threads):
                attend(
                    kv, tasks[t], q, positions, tables, step, units, k, v, num_kv_heads, group,
                    dim, where, partial[t], states[t], scratch,
                )  # fmt: skip
        for t in range(len(tasks)):
            join(t, tasks, positions, partial, states, group, dim, where)

    return run


class Step:
    """Sequences of given (context, new tokens), their K and V in pages full of NaN elsewhere."""

    def __init__(self, lengths, heads, dim, dtype, block_size):
        self.lengths, (self.hq, self.hkv), self.dim, self.dtype = lengths, heads, dim, dtype
        self.block_size = block_size
        totals = [context + new for context, new in lengths]
        width = max(-(-total // block_size) for total in totals)
        num_blocks = width * len(totals) + 2
        order = torch.randperm(num_blocks)[: width * len(totals)]
        self.tables = order.reshape(len(totals), width).to(torch.int32)
        units = num_blocks * block_size // 16
        self.k = torch.full((units, self.hkv, dim, 16), torch.nan, dtype=dtype)
        self.v = torch.full((units, self.hkv, 16, dim), torch.nan, dtype=dtype)
        self.keys = [torch.randn(2, n, self.hkv, dim).to(dtype) for n in totals]
        for table, (k, v) in zip(self.tables.tolist(), self.keys, strict=True):
            for t in range(len(k)):
                slot = table[t // block_size] * block_size + t % block_size
                self.k[slot // 16, :, :, slot % 16] = k[t]
                self.v[slot // 16, :, slot % 16] = v[t]
        self.q = [torch.randn(new, self.hq, dim) for _, new in lengths]

    def run(self, which=None, rows=None, threads=1, shares=1, finite=True) -> list[Tensor]:
        """Results of the sequences `which`, of their new tokens `rows`, cut in `shares`."""
        which = range(len(self.lengths)) if which is None else which
        q = torch.cat([self.q[i][slice(*(rows or (None,)))] for i in which])
        positions = [
            torch.arange(self.lengths[i][0], sum(self.lengths[i]))[slice(*(rows or (None,)))]
            for i in which
        ]
        starts = np.cumsum([0, *(len(p) for p in positions)])
        scaled = (q * self.dim**-0.5).contiguous()
        out = torch.full((len(q), self.hq, self.dim), torch.nan)
        packed = torch.empty(2 * q.numel(), dtype=torch.int8)
        scales = torch.empty(-(-len(q) // 16), self.hq * self.dim // 32, 16, 4)
        tables = self.tables[list(which)].numpy()
        group = self.hq // self.hkv
        tasks, first_tasks = call(
            kernels(ATTENTION).plan,
            1,
            starts,
            torch.cat(positions).numpy(),
            self.hkv,
            group,
            shares,
        )
        assert [first_tasks[0], first_tasks[-1]] == [0, len(tasks)]
        assert (np.diff(first_tasks) >= 0).all()
        call(
            attend_all(), threads, TAGS[self.dtype], tasks, scaled.data_ptr(),
            torch.cat(positions).numpy(), tables.reshape(-1), tables.shape[1],
            self.block_size // 16, self.k.data_ptr(), self.v.data_ptr(), self.hkv, group, self.dim,
            (out.data_ptr(), packed.data_ptr(), scales.data_ptr(), self.hq * self.dim, 0), threads,
        )  # fmt: skip
        if finite:
            assert torch.equal(unpacked(packed, scales).reshape(out.shape), quantised(out))
        return list(out.split(np.diff(starts).tolist()))


LENGTHS = [(0, 1), (0, 33), (70, 1), (15, 2), (600, 1), (255, 1), (256, 1), (500, 31), (64, 65)]


@pytest.mark.parametrize("dtype", TAGS, ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "block_size"),
    [((9, 3), 64, 16), ((4, 4), 32, 32), ((7, 1), 96, 16), ((8, 4), 128, 64), ((64, 1), 32, 16)],
)
def test_equals_standard_attention(heads, dim, block_size, dtype):
    step = Step(LENGTHS, heads, dim, dtype, block_size)
    for out, q, (k, v) in zip(step.run(threads=2, shares=5), step.q, step.keys, strict=True):
        q, k, v = (x.double()[None] for x in (q, k, v))
        expected = standard_attention(q, k, v, causal=True).out[0]
        assert (out - expected).abs().max() < 5e-6


@pytest.mark.parametrize("dtype", TAGS, ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype):
    step = Step(LENGTHS, (9, 3), 64, dtype, 16)
    together = step.run(threads=2)
    for i, whole in enumerate(together):
        for shares in (1, 2, 3, 8):
            assert torch.equal(step.run([i], shares=shares)[0], whole)
        for first in range(0, len(whole), 7):
            row = slice(first, first + 1)
            for shares in (1, 2, 7):
                alone = step.run([i], (first, first + 1), shares=shares)[0]
                assert torch.equal(alone, whole[row])
        assert torch.equal(
            step.run([i], (len(whole) // 3, len(whole)))[0], whole[len(whole) // 3 :]
        )


def test_powers_of_two():
    """Merging 1 into 0, whose largest score is d more, gives 2**-d."""
    import numba

    merge_row = kernels("flashpage.layers.cpu.attention_vectors").merge_row

    @numba.njit
    def merge_all(d, out, ones, states):
        for i in range(len(d)):
            states[0], states[1], states[2], states[3] = 0, 1, -d[i], 1
            at = states.ctypes.data
            merge_row(out.ctypes.data + i * 64, at, ones.ctypes.data, at + 8, 4, 16)

    d = np.concatenate([np.linspace(0, 130, 100_001), [np.inf]]).astype(np.float32)
    out = np.zeros((len(d), 16), np.float32)
    merge_all(d, out, np.ones(16, np.float32), np.empty(4, np.float32))
    expected = 2.0 ** -np.minimum(d.astype(np.float64), 126)
    assert (abs(out / expected[:, None] - 1) < 2e-7).all()
    assert (out[0] == 1).all()


@pytest.mark.parametrize("dtype", TAGS, ids=str)
def test_scores_that_overflow_are_not_hidden(dtype):
    step = Step([(300, 1), (0, 90), (200, 40)], (2, 1), 64, dtype, 16)
    step.k.copy_(step.k.abs() * 1e30)  # every score of the first two is +inf
    for q in step.q[:2]:
        q.fill_(1e30)
    step.q[2] *= 1e-30
    *overflown, whole = step.run(finite=False)
    assert not any(out.isfinite().any() for out in overflown)
    assert whole.isfinite().all()
    assert torch.equal(step.run([2])[0], whole), "of another sequence"


def test_huge_scores():
    step = Step([(300, 1), (0, 90)], (2, 1), 64, torch.float32, 16)
    for q in step.q:
        q *= 1e4
    for out, q, (k, v) in zip(step.run(), step.q, step.keys, strict=True):
        expected = standard_attention(*(x.double()[None] for x in (q, k, v)), causal=True).out[0]
        assert (out - expected).abs().max() < 2e-2  # of scores that float32 knows to 1e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize("dtype", TAGS, ids=str)
@pytest.mark.parametrize(
    ("heads", "dim"), [((1, 1), 64), ((3, 1), 96), ((9, 3), 64), ((8, 2), 32)], ids=str
)
def test_keys_that_a_row_does_not_see_have_no_part_in_it(heads, dim, dtype, what, value):
    """Even if they are not numbers: weights of 0 would not do."""
    context, new = 120, 30  # the second split begins at the 9th row
    step = Step([(context, new)], heads, dim, dtype, 16)
    (clean,) = step.run()
    for bad in (28, 15, 11, 8, 7, 4):  # each time with those before
        page, slot = divmod(context + bad, 16)
        page = step.tables[0, page]
        if what == "k":
            step.k[page, :, :, slot] = value
        else:
            step.v[page, :, slot] = value
        for threads in (1, 2):
            (out,) = step.run(finite=False, threads=threads, shares=threads)
            assert torch.equal(out[:bad], clean[:bad])
            assert not out[bad].isfinite().any()


@pytest.mark.parametrize("dtype", TAGS, ids=str)
@pytest.mark.parametrize("low", [[(0, 128)], [(0, 140)], [(128, 300)], [(0, 256), (384, 520)]])
def test_splits_of_which_all_scores_are_minus_infinity(low, dtype):
    """They weigh nothing; a row that sees no other score is NaN."""
    step = Step([(0, 520)], (2, 1), 64, dtype, 16)
    q, (k, v) = step.q[0].fill_(1e20), step.keys[0]
    k *= 1e-20
    for first, stop in low:
        k[first:stop] = -1e25
    for t, key in enumerate(k):
        step.k[step.tables[0, t // 16], :, :, t % 16] = key
    expected = standard_attention(*(x.double()[None] for x in (q, k, v)), causal=True).out[0]
    blind = low[0][1] if low[0][0] == 0 else 0
    (out,) = step.run(finite=False, threads=2, shares=2)
    assert out[:blind].isnan().all()
    assert (out[blind:] - expected[blind:]).abs().max() < 5e-6
    for row in (300, 519):
        for shares in (1, 3):
            (alone,) = step.run(rows=(row, row + 1), shares=shares)
            assert torch.equal(alone, out[row : row + 1])
