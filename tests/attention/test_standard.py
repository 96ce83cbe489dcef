"""The oracle itself: against numbers worked out by hand and against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashpage.attention.standard import standard_attention, visible_mask


def test_worked_example_of_two_queries_and_two_keys():
    q = torch.tensor([[1.0, 0, 2], [0, 1, 1]])[None, :, None]
    k = torch.tensor([[2.0, 1, 0], [1, 1, 2]])[None, :, None]
    v = torch.tensor([[1.0, 0, 1], [0, 2, 1]])[None, :, None]
    result = standard_attention(q, k, v, softmax_scale=1.0)
    assert result.scores[0, 0].tolist() == [[2, 5], [1, 3]]
    assert result.probs[0, 0].mul(100).round().tolist() == [[5, 95], [12, 88]]
    # The example's O is made of the rounded P: 2 * 0.95 = 1.90, where 2 * 0.9526 = 1.9051.
    rounded_out = result.probs[0, 0].mul(100).round().div(100) @ v[0, :, 0]
    expected = torch.tensor([[0.05, 1.90, 1.00], [0.12, 1.76, 1.00]])
    torch.testing.assert_close(rounded_out, expected)
    torch.testing.assert_close(result.out[0, :, 0], expected, atol=0.0052, rtol=0)


def test_causal_is_aligned_to_the_bottom_right():
    assert visible_mask(2, 5, causal=True).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible_mask(5, 2, causal=True).int().tolist() == [
        [0, 0],
        [0, 0],
        [0, 0],
        [1, 0],
        [1, 1],
    ]


@pytest.mark.parametrize("seqlen_q", [1, 3, 6])
@pytest.mark.parametrize("seqlen_k", [1, 4, 6])
@pytest.mark.parametrize("left", [-1, 0, 2, 9])
@pytest.mark.parametrize("right", [-1, 0, 1, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_keys_follow_the_rule(seqlen_q, seqlen_k, left, right, causal):
    mask = visible_mask(seqlen_q, seqlen_k, causal=causal, window_size=(left, right))
    wr = 0 if causal else right
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            diagonal = i + seqlen_k - seqlen_q
            seen = (left < 0 or j >= diagonal - left) and (wr < 0 or j <= diagonal + wr)
            assert bool(mask[i, j]) == seen


def test_equals_torch():
    q, k, v = (torch.randn(2, 7, h, 16, dtype=torch.float64) for h in (6, 2, 2))
    out = standard_attention(q, k, v, causal=True).out
    heads = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_softcap_and_alibi_by_hand():
    q = torch.tensor([[3.0]])[None, :, None]
    k = torch.tensor([[2.0], [-1.0]])[None, :, None]
    v = torch.tensor([[1.0], [0.0]])[None, :, None]
    slopes = torch.tensor([0.5])
    result = standard_attention(q, k, v, softmax_scale=1.0, softcap=4.0, alibi_slopes=slopes)
    t = 4 * torch.tanh(torch.tensor([6.0, -3.0]) / 4) - 0.5 * torch.tensor([1.0, 0.0])
    torch.testing.assert_close(result.scores[0, 0, 0], t)
    torch.testing.assert_close(result.softmax_lse[0, 0, 0], torch.logsumexp(t, 0))
    torch.testing.assert_close(result.out[0, 0, 0, 0], torch.softmax(t, 0)[0])


def test_rows_that_see_no_key():
    q, k, v = (torch.randn(1, n, 2, 4, requires_grad=True) for n in (4, 2, 2))
    result = standard_attention(q, k, v, causal=True)
    assert torch.equal(result.out[:, :2], torch.zeros(1, 2, 2, 4))
    assert torch.all(result.softmax_lse[:, :, :2] == torch.inf)
    result.out.sum().backward()
    assert torch.equal(q.grad[:, :2], torch.zeros(1, 2, 2, 4))
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()


def test_dropout_mask():
    q, k, v = (torch.randn(1, 3, 1, 4, dtype=torch.float64) for _ in range(3))
    keep = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)[None, None]
    result = standard_attention(q, k, v, dropout_p=0.25, dropout_mask=keep)
    plain = standard_attention(q, k, v)
    torch.testing.assert_close(result.softmax_lse, plain.softmax_lse)
    expected = (plain.probs * keep / 0.75)[0, 0] @ v[0, :, 0]
    torch.testing.assert_close(result.out[0, :, 0], expected)
