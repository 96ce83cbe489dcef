"""Rotary embedding against a loop over pairs."""

from __future__ import annotations

import pytest
import torch

from flashpage.attention.rotary import apply_rotary_emb
from flashpage.errors import ArgumentError
from oracles import rotate_slowly


def table(rows, columns, dtype=torch.float32):
    angle = torch.rand(rows, columns) * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rotary_dim", [2, 8, 12])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([4, 0])], ids=str)
def test_dense(interleaved, dtype, rotary_dim, offsets):
    x = torch.randn(2, 5, 3, 12).to(dtype)
    cos, sin = table(9, rotary_dim // 2, dtype)
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    assert out.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    for b in range(2):
        for t in range(5):
            p = t + int(offsets[b] if isinstance(offsets, torch.Tensor) else offsets)
            expected = rotate_slowly(
                x[b, t].to(wide), cos[p].to(wide), sin[p].to(wide), interleaved
            )
            torch.testing.assert_close(out[b, t], expected.to(dtype))


def test_varlen_equals_dense():
    x = torch.randn(9, 2, 8)
    cos, sin = table(10, 4)
    cu = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    offsets = torch.tensor([1, 0, 5])
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=4)
    for a, b, offset in ((0, 4, 1), (4, 7, 5)):
        expected = apply_rotary_emb(x[None, a:b], cos, sin, seqlen_offsets=offset)
        torch.testing.assert_close(out[a:b], expected[0])
    assert out.shape == x.shape


def test_inplace_and_gradient():
    x = torch.randn(1, 3, 2, 8)
    cos, sin = table(3, 4)
    expected = apply_rotary_emb(x, cos, sin)
    y = x.clone()
    assert apply_rotary_emb(y, cos, sin, inplace=True) is y
    assert torch.equal(y, expected)
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: apply_rotary_emb(x, cos.double(), sin.double(), True), x
    )


def test_refused():
    x = torch.randn(2, 5, 3, 8)
    cos, sin = table(9, 4)
    with pytest.raises(ArgumentError, match="reach positions 5 to 9.*9 rows"):
        apply_rotary_emb(x, cos, sin, seqlen_offsets=5)
    with pytest.raises(ArgumentError, match="rotary_dim = 18.*head_dim = 8"):
        apply_rotary_emb(x, *table(9, 9))
    with pytest.raises(ArgumentError, match="same|both"):
        apply_rotary_emb(x, cos, sin[:, :2])
    with pytest.raises(ArgumentError, match="x must have shape"):
        apply_rotary_emb(x[0], cos, sin)
    with pytest.raises(ArgumentError, match="x must have shape"):
        apply_rotary_emb(x, cos, sin, cu_seqlens=torch.tensor([0, 5]))
