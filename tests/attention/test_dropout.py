"""Dropout: one mask in forward, backward and S_dmask; its rate; its seed."""

from __future__ import annotations

import pytest
import torch

from flashpage import flash_attn_func, flash_attn_varlen_func
from flashpage.attention.cpu.blocks import Piece, keep_mask
from flashpage.attention.problem import Problem
from flashpage.attention.standard import standard_attention
from oracles import assert_as_good


def qkv(dtype, sq=33, sk=50, batch=2):
    shapes = ((batch, sq, 4, 16), (batch, sk, 2, 16), (batch, sk, 2, 16))
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.17, 0.9])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 4)}], ids=str)
def test_s_dmask_reveals_the_mask_of_forward_and_backward(dtype, p, options):
    inputs = qkv(dtype)
    out, lse, s_dmask = flash_attn_func(*inputs, p, return_attn_probs=True, **options)
    assert s_dmask.shape == (2, 4, 128, 128)
    assert s_dmask.dtype == dtype
    keep = s_dmask[:, :, :33, :50] >= 0

    def oracle(tensors):
        return standard_attention(*tensors, dropout_p=p, dropout_mask=keep, **options)

    precise = [x.detach().double().requires_grad_() for x in inputs]
    rough = [x.detach().clone().requires_grad_() for x in inputs]
    exact, low = oracle(precise), oracle(rough)
    assert_as_good(out, exact.out, low.out)
    assert_as_good(lse, exact.softmax_lse, low.softmax_lse, "lse")
    magnitude = torch.exp(exact.scores - exact.scores.amax(-1, keepdim=True)).nan_to_num()
    torch.testing.assert_close(
        s_dmask[:, :, :33, :50].abs().double().where(magnitude > 0, 0), magnitude,
        atol=2e-2, rtol=2e-2,
    )  # fmt: skip
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    exact_grads = torch.autograd.grad(exact.out, precise, dout.double())
    low_grads = torch.autograd.grad(low.out, rough, dout)
    for i, (grad, e, lo) in enumerate(zip(grads, exact_grads, low_grads, strict=True)):
        assert_as_good(grad, e, lo, f"gradient {i}")


@pytest.mark.parametrize("p", [0.05, 0.17, 0.5])
def test_rate(p):
    q, k, v = qkv(torch.float32, 128, 256)
    _, _, s_dmask = flash_attn_func(q, k, v, p, return_attn_probs=True)
    assert abs((s_dmask < 0).float().mean().item() - p) < 0.01
    by_row = (s_dmask < 0).float().mean(-1)
    assert by_row.std().item() < 2.5 * (p * (1 - p) / 256) ** 0.5
    # No two heads or sequences share a mask.
    masks = (s_dmask < 0).flatten(0, 1).flatten(1).float()
    centred = masks - masks.mean(1, keepdim=True)
    correlation = torch.corrcoef(centred) - torch.eye(len(masks))
    assert correlation.abs().max() < 0.05


def test_seed():
    inputs = qkv(torch.float32)

    def run():
        out = flash_attn_func(*inputs, 0.3)
        return out, *torch.autograd.grad(out.sum(), inputs)

    torch.manual_seed(5)
    first, second = run(), run()
    torch.manual_seed(5)
    again = run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])  # each call draws anew


def test_mask_does_not_depend_on_the_block():
    problem = Problem("dense", torch.device("cpu"), torch.float32, 3, 1, 8, 1.0, dropout_p=0.4)
    piece = Piece(problem, 64, 64, None, torch.tensor([3, 4]), 7)
    whole = keep_mask(range(64), range(64), 2, piece)
    part = keep_mask(range(10, 21), range(30, 64), 1, piece.narrow(1, 2))
    assert torch.equal(part, whole[1:, :, 10:21, 30:])


def test_varlen():
    lengths_q, lengths_k = [5, 0, 20], [9, 3, 31]
    cu_q, cu_k = torch.tensor([0, 5, 5, 25]).int(), torch.tensor([0, 9, 12, 43]).int()
    q = torch.randn(25, 4, 16, requires_grad=True)
    k, v = (torch.randn(43, 2, 16, requires_grad=True) for _ in range(2))
    out, _, s_dmask = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 20, 31, 0.3, causal=True, return_attn_probs=True
    )
    assert s_dmask.shape == (3, 4, 128, 128)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for i in (0, 2):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        keep = s_dmask[i : i + 1, :, : lengths_q[i], : lengths_k[i]] >= 0
        parts = [x.detach()[None].requires_grad_() for x in (q[rows], k[keys], v[keys])]
        expected = standard_attention(*parts, causal=True, dropout_p=0.3, dropout_mask=keep).out
        torch.testing.assert_close(out[rows], expected[0], atol=1e-5, rtol=1e-5)
        wanted = torch.autograd.grad(expected, parts, dout[None, rows])
        for grad, e, at in zip(grads, wanted, (rows, keys, keys), strict=True):
            torch.testing.assert_close(grad[at], e[0], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="max_seqlen_k must be at least the longest"):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 30, 0.3, return_attn_probs=True)
