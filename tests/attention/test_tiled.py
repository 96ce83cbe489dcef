"""The two loop orders against worked examples and the oracle."""

from __future__ import annotations

import pytest
import torch

from flashpage.attention.standard import standard_attention
from flashpage.attention.tiled import Step, fa1_attention, fa2_attention

ORDERS = pytest.mark.parametrize("order", [fa1_attention, fa2_attention])


@ORDERS
def test_worked_example_in_one_block(order):
    q = torch.tensor([[1.0, 0, 2], [0, 1, 1]])
    k = torch.tensor([[2.0, 1, 0], [1, 1, 2]])
    v = torch.tensor([[1.0, 0, 1], [0, 2, 1]])
    steps: list[Step] = []
    result = order(q, k, v, block_size_k=2, softmax_scale=1.0, recorder=steps.append)
    assert steps[0].s.tolist() == [[2, 5], [1, 3]]
    p = torch.exp(steps[0].s - steps[0].m[:, None]) / steps[0].l[:, None]
    assert p.mul(100).round().tolist() == [[5, 95], [12, 88]]
    # The example's O is made of the rounded P: 2 * 0.95 = 1.90, where 2 * 0.9526 = 1.9051.
    expected = torch.tensor([[0.05, 1.90, 1.00], [0.12, 1.76, 1.00]])
    torch.testing.assert_close(p.mul(100).round().div(100) @ v, expected)
    torch.testing.assert_close(result.out, expected, atol=0.0052, rtol=0)
    assert [round(x, 4) for x in result.out.flatten().tolist()] == [
        *(0.0474, 1.9051, 1.0),
        *(0.1192, 1.7616, 1.0),
    ]


# Scores of two queries with four keys, one key in each block; q = identity picks rows of K^T.
SCORES = torch.tensor([[1.0, 3, 0, 2], [2, 4, 1, 0]])
Q, K = torch.eye(2), SCORES.T.contiguous()
V = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0]])
M_L = [
    [(1, 1.0000), (3, 1.1353), (3, 1.1851), (3, 1.5530)],
    [(2, 1.0000), (4, 1.1353), (4, 1.1851), (4, 1.2034)],
]
OUT = [[0.5930, 0.6760], [0.1843, 0.8723]]


def test_worked_example_fa2_order():
    steps: list[Step] = []
    result = fa2_attention(
        Q, K, V, block_size_k=1, num_workers=2, softmax_scale=1.0, recorder=steps.append
    )
    assert [(s.worker, s.key_block) for s in steps] == [(w, b) for w in range(2) for b in range(4)]
    for s in steps:
        assert s.rows == range(s.worker, s.worker + 1)  # each worker owns one query row
        m, l = M_L[s.worker][s.key_block]  # noqa: E741
        assert s.s.tolist() == [[SCORES[s.worker, s.key_block].item()]]
        assert s.m.item() == m
        assert round(s.l.item(), 4) == l
    for worker in range(2):
        last = steps[4 * worker + 3]
        assert [round(x, 4) for x in last.o[0].tolist()] == OUT[worker]
    torch.testing.assert_close(result.out, torch.tensor(OUT), atol=5e-5, rtol=0)
    assert result.num_reductions == 0


def test_worked_example_fa1_order():
    steps: list[Step] = []
    result = fa1_attention(
        Q, K, V, block_size_k=1, num_workers=2, softmax_scale=1.0, recorder=steps.append
    )
    assert len(steps) == 8  # two workers, four key blocks
    for s in steps:
        assert s.rows == range(2)  # every worker holds all rows, and a part of the keys
        for row in range(2):
            m, l = M_L[row][s.key_block]  # noqa: E741
            assert s.m[row].item() == m
            assert round(s.l[row].item(), 4) == l
    torch.testing.assert_close(result.out, torch.tensor(OUT), atol=5e-5, rtol=0)
    assert result.num_reductions == 4


@ORDERS
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("block_size_k", [1, 4, 7, 64])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 13), (8, 32), (3, 1), (7, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_oracle(order, num_workers, block_size_k, seqlen_q, seqlen_k, causal):
    q, k, v = (torch.randn(n, 8, dtype=torch.float64) for n in (seqlen_q, seqlen_k, seqlen_k))
    result = order(q, k, v, block_size_k=block_size_k, num_workers=num_workers, causal=causal)
    expected = standard_attention(*(x[None, :, None] for x in (q, k, v)), causal=causal)
    torch.testing.assert_close(result.out, expected.out[0, :, 0])
    torch.testing.assert_close(result.softmax_lse, expected.softmax_lse[0, 0])


@ORDERS
def test_what_the_steps_say_holds_together(order):
    """Each step follows from the one before by the formula at the top of the file."""
    q, k, v = (torch.randn(n, 8, dtype=torch.float64) for n in (5, 11, 11))
    steps: list[Step] = []
    order(q, k, v, block_size_k=4, num_workers=2, causal=True, recorder=steps.append)
    before: dict[int, Step] = {}
    for s in steps:
        assert s.s.shape == (len(s.rows), len(s.keys))
        visible = torch.tensor([[j <= i + 6 for j in s.keys] for i in s.rows])
        torch.testing.assert_close(s.s.isfinite(), visible)
        last = before.get(s.worker)
        assert torch.equal(s.m_before, torch.full_like(s.m, -torch.inf) if last is None else last.m)
        torch.testing.assert_close(s.rescale, torch.exp(s.m_before - s.m))
        before[s.worker] = s


def test_fa2_workers_stop_where_they_see_nothing():
    q, k, v = (torch.randn(8, 4, dtype=torch.float64) for _ in range(3))
    steps: list[Step] = []
    fa2_attention(q, k, v, block_size_k=2, num_workers=4, causal=True, recorder=steps.append)
    walked = [(s.worker, s.key_block) for s in steps]
    assert walked == [(w, b) for w in range(4) for b in range(w + 1)]


def test_scores_of_any_magnitude():
    q, k, v = (torch.randn(4, 8, dtype=torch.float64) for _ in range(3))
    for shift in (-1e6, 1e6):
        big = torch.cat((q, torch.full((4, 1), shift, dtype=torch.float64)), dim=1)
        keys = torch.cat((k, torch.ones(4, 1, dtype=torch.float64)), dim=1)
        out = fa2_attention(big, keys, v, block_size_k=2, softmax_scale=1.0).out
        plain = fa2_attention(q, k, v, block_size_k=2, softmax_scale=1.0).out
        torch.testing.assert_close(out, plain, atol=1e-8, rtol=0)
