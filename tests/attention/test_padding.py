"""Padding helpers: there and back."""

from __future__ import annotations

import torch

from flashpage.attention.padding import pad_input, unpad_input


def test_unpad_and_pad():
    x = torch.randn(3, 5, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    flat, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    assert indices.tolist() == [0, 1, 11, 12, 13, 14]
    assert cu_seqlens.tolist() == [0, 2, 2, 6]
    assert cu_seqlens.dtype == seqused.dtype == torch.int32
    assert max_seqlen == 4
    assert seqused.tolist() == [2, 0, 4]
    assert torch.equal(flat, x[mask.bool()])
    padded = pad_input(flat, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand_as(x).float())


def test_unused_mask_is_kept_but_not_counted():
    x = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)
    flat, _, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask, unused)
    assert flat.shape == (7, 3)
    assert cu_seqlens.tolist() == [0, 3, 7]
    assert max_seqlen == 4
    assert seqused.tolist() == [2, 1]


def test_nothing_left():
    flat, _, cu_seqlens, max_seqlen, _ = unpad_input(torch.ones(2, 3, 4), torch.zeros(2, 3).bool())
    assert flat.shape == (0, 4)
    assert cu_seqlens.tolist() == [0, 0, 0]
    assert max_seqlen == 0
