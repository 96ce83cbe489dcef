"""Where rows are cut by top_k and top_p: what is gathered around the cut, and what follows from it,
against a sort."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from flashpage.layers import sampler, triton_bracket, triton_cut, triton_sampler
from flashpage.layers.sampler import RowSampling
from flashpage.layers.triton_bracket import Gathered, gather
from flashpage.layers.triton_rows import BLOCK
from kernels import DEVICE, ON_GPU

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16][: 3 if ON_GPU else 2], ids=str
)


def random_rows(num_rows: int, vocab_size: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size, device=DEVICE) * scale).to(dtype)


def wishes(num_rows: int, top_k: int, top_p: float, min_p: float = 0.0):
    """temperature, min_p, uniform, top_k, top_p."""
    ones = torch.ones(num_rows, device=DEVICE)
    uniform = torch.rand(num_rows, dtype=torch.float64, device=DEVICE)
    wanted_k = torch.full((num_rows,), top_k, dtype=torch.int32, device=DEVICE)
    return ones * 0.7, ones * min_p, uniform, wanted_k, ones * top_p


def keys_of(x: torch.Tensor) -> torch.Tensor:
    """The keys of logits: of 16 bits in bfloat16, 19 in float16 (of float32 without its last)."""
    bits = (x.float() + 0.0).view(torch.int32)
    shift = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[x.dtype]
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


def weights_of(logits, temperature, min_p) -> torch.Tensor:
    x = logits.double()
    weights = ((x - x.amax(1, keepdim=True)) / temperature[:, None].double()).exp()
    return weights.masked_fill(weights < min_p[:, None].double(), 0.0)


def blocks_of(x: torch.Tensor, fill: float) -> torch.Tensor:
    """`[num_rows, vocab_size]` -> `[num_rows, num_blocks, BLOCK]`."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK), value=fill)
    return padded.view(len(x), -1, BLOCK)


def gathered_by_torch(logits, brackets, temperature, min_p, most: int) -> Gathered:
    """As `gather` would return it if it chose these brackets; poisoned where it writes nothing."""
    keys = blocks_of(keys_of(logits).long(), -(2**40))
    weights = blocks_of(weights_of(logits, temperature, min_p), 0.0)
    low, high = brackets.long()[:, :, None, None].unbind(1)
    within, above = (keys >= low) & (keys < high), keys >= high
    counts = torch.stack([within.sum(2), above.sum(2)], 2).int()
    sums = (weights * above).sum(2)
    found = torch.full((*counts.shape[:2], most), torch.nan, dtype=logits.dtype, device=DEVICE)
    x = blocks_of(logits, 0.0)
    for row, number in torch.cartesian_prod(*map(torch.arange, counts.shape[:2])).tolist():
        taken = x[row, number][within[row, number]][:most]
        found[row, number, : len(taken)] = taken
    return Gathered(brackets, found, counts, sums)


def smallest_kept(logits, temperature, min_p, top_k, top_p) -> torch.Tensor:
    """Of each row the smallest key that a sort keeps."""
    x, order = logits.double().sort(dim=1, descending=True, stable=True)
    weights = weights_of(logits, temperature, min_p).gather(1, order)
    ranks = torch.arange(x.shape[1], device=DEVICE)
    weights[(top_k[:, None] > 0) & (ranks >= top_k[:, None])] = 0.0
    mass = weights.cumsum(1)
    beyond = (mass - weights >= top_p[:, None].double() * mass[:, -1:]) & (top_p[:, None] < 1)
    kept = (weights > 0) & ~(beyond & (ranks > 0))
    return keys_of(logits).gather(1, order).gather(1, kept.sum(1, keepdim=True) - 1).squeeze(1)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(40, 1.0, 0.0), (900, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.2, 0.0), (0, 0.95, 0.02), (60, 0.8, 0)],
)
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e-3, torch.float32), (0.5, torch.float16), (4.0, torch.float32), (0.5, torch.bfloat16)][
        : 4 if ON_GPU else 3
    ],
    ids=str,
)
def test_the_cut_is_among_what_is_gathered(scale, top_k, top_p, min_p, dtype, monkeypatch):
    monkeypatch.setattr(triton_bracket, "PART", 256)  # so that there are many, as in long rows
    monkeypatch.setattr(triton_bracket, "_PROGRAMS", 1)  # so that each has several blocks
    logits = random_rows(3, 9001, scale, dtype)
    temperature, min_ps, _, top_ks, top_ps = wishes(3, top_k, top_p, min_p)
    cut = (temperature, min_ps, top_ks, top_ps)
    maxima = blocks_of(logits.float(), -torch.inf).amax(2)
    sums = blocks_of(weights_of(logits, temperature, min_ps), 0.0).sum(2)
    got = gather(logits, maxima, sums, *cut)
    expected = gathered_by_torch(logits, got.brackets, temperature, min_ps, triton_bracket.MOST)
    assert torch.equal(got.counts, expected.counts)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-5, atol=1e-7)
    for row, number in torch.cartesian_prod(*map(torch.arange, got.counts.shape[:2])).tolist():
        count, most = int(got.counts[row, number, 0]), triton_bracket.MOST
        count = count if count <= most else most - 1  # what does not fit goes to the last place
        found, wanted = got.logits[row, number, :count], expected.logits[row, number, :count]
        assert torch.equal(found, wanted)
    smallest = smallest_kept(logits, temperature, min_ps, top_ks, top_ps)
    low, high = got.brackets.unbind(1)
    assert (low <= smallest).all()
    assert (smallest < high).all()
    assert got.counts[..., 0].sum(1).max() < 9001 / 4


@DTYPES
@pytest.mark.parametrize(("top_k", "top_p"), [(40, 1.0), (0, 0.6), (300, 0.7)])
def test_any_bracket_gives_the_right_token(top_k, top_p, dtype, monkeypatch):
    """Also one that the cut is not in: then it is searched in the row."""
    logits = random_rows(7, 4500, 2.0, dtype)
    temperature, min_p, uniform, top_ks, top_ps = wishes(7, top_k, top_p)
    cut = (temperature, min_p, top_ks, top_ps)
    smallest = smallest_kept(logits, *cut)
    top = keys_of(logits).amax(1)
    lowest = torch.full_like(top, int(keys_of(logits).min()) - 5)
    step = (top - smallest) // 3 + 1
    tight = torch.stack([smallest, smallest + 1], 1)
    around = torch.stack([smallest - step, smallest + step], 1)
    open_above = torch.stack([smallest - step, top + 1], 1)
    everything = torch.stack([lowest, top + 1], 1)
    too_high = torch.stack([smallest + step, top + 1], 1)
    too_low = torch.stack([smallest - step, smallest - step // 2], 1)
    beyond = torch.stack([top + 1, top + 2], 1)
    brackets = [tight, around, open_above, everything, too_high, too_low, beyond]
    mixed = torch.stack([bracket[row] for row, bracket in enumerate(brackets)])

    def chosen(*args):
        return gathered_by_torch(logits, mixed, temperature, min_p, most=2048)

    monkeypatch.setattr(triton_sampler, "gather", chosen)
    got = triton_sampler.sample_plain(logits, temperature, min_p, uniform, top_ks, top_ps)
    expected = sampler.sample_plain_torch(logits, temperature, min_p, uniform, top_ks, top_ps)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("limit", "value"), [("LIST", 64), ("MOST", 16)])
def test_more_than_can_be_listed_is_searched_in_the_row(limit, value, monkeypatch):
    module = triton_cut if limit == "LIST" else triton_bracket
    monkeypatch.setattr(module, limit, value)
    logits = random_rows(6, 6001, 0.5, torch.float16)
    temperature, min_p, uniform, top_k, top_p = wishes(6, 0, 1.0)
    top_k[:4] = torch.tensor([3, 30, 300, 3000])
    top_p[2:] = torch.tensor([0.9, 0.5, 0.3, 0.9])
    got = triton_sampler.sample_plain(logits, temperature, min_p, uniform, top_k, top_p)
    expected = sampler.sample_plain_torch(logits, temperature, min_p, uniform, top_k, top_p)
    assert torch.equal(got, expected)


def test_rows_of_one_value():
    """Thousands of tokens at the cut, of which the first are kept."""
    logits = torch.full((3, 9001), 2.5, device=DEVICE)
    temperature, min_p, uniform, top_k, top_p = wishes(3, 0, 1.0)
    top_k[:2] = 5000
    top_p[1:] = 0.5
    uniform[:] = 0.75
    got = triton_sampler.sample_plain(logits, temperature, min_p, uniform, top_k, top_p)
    assert got.tolist() == [3750, 1875, 3375]


def test_equal_logits_beyond_those_that_are_kept():
    """The first 150 of 300 are; likelier tokens follow in the last block."""
    count, vocab_size = 6, 9001
    logits = torch.full((vocab_size,), -20.0, device=DEVICE)
    logits[torch.randperm(vocab_size, device=DEVICE)[:300]] = 1.0
    logits[8900:8920] = 3.0
    temperature, min_p, uniform, top_k, top_p = wishes(count, 170, 1.0)
    uniform[:] = (torch.arange(count, dtype=torch.float64, device=DEVICE) + 0.5) / count
    cut = (temperature, min_p, uniform, top_k, top_p)
    got = triton_sampler.sample_plain(logits.expand(count, -1), *cut)
    expected = sampler.sample_plain_torch(logits.expand(count, -1), *cut)
    assert torch.equal(got, expected)
    assert (got >= 8900).any()
    assert (got < 8900).any()


def test_a_vocabulary_of_151936(monkeypatch):
    """The bracket is so narrow that the list holds what is within."""
    logits = random_rows(2, 151_936, 0.5, torch.float32)
    temperature, min_p, uniform, top_k, top_p = wishes(2, 0, 0.9)
    top_k[0] = 50
    made = []

    def recorded(*args):
        made.append(gather(*args))
        return made[0]

    monkeypatch.setattr(triton_sampler, "gather", recorded)
    got = triton_sampler.sample_plain(logits, temperature, min_p, uniform, top_k, top_p)
    expected = sampler.sample_plain_torch(logits, temperature, min_p, uniform, top_k, top_p)
    assert torch.equal(got, expected)
    counts = made[0].counts[..., 0]
    assert counts.max() <= triton_bracket.MOST
    assert counts.sum(1).max() <= triton_cut.LIST


@pytest.mark.parametrize(("vocab_size", "top_p", "kept"), [(10, 0.1, 1), (10, 0.7, 7), (5, 0.6, 3)])
def test_of_equally_likely_tokens_the_host_and_the_device_keep_as_many(vocab_size, top_p, kept):
    """A share that float32 would round up asks for one token more: it is a float64 on both."""
    uniform = torch.tensor([0.4, 0.999], dtype=torch.float64)
    logits = torch.zeros(2, vocab_size)
    rows = [RowSampling(temperature=1.0, uniform=float(u), top_p=top_p) for u in uniform]
    by_host = [row.token_id for row in sampler.sample(logits, rows)]
    assert by_host == [int(0.4 * kept), kept - 1]
    zeros, ones = torch.zeros(2), torch.ones(2)
    wishes = (ones, zeros, uniform, zeros.int(), torch.full((2,), top_p, dtype=torch.float64))
    assert sampler.sample_plain_torch(logits, *wishes).tolist() == by_host
    there = [x.to(DEVICE) for x in (logits, *wishes)]
    assert triton_sampler.sample_plain(*there).tolist() == by_host
