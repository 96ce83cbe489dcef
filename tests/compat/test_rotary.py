"""`flash_attn.layers.rotary` and `flash_attn.ops.triton.rotary` of the shim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashpage.attention.rotary import apply_rotary_emb
from flashpage.errors import ArgumentError

pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.parametrize("interleaved", [False, True]),
]

BATCH, SEQLEN, HEAD_DIM = 2, 5, 10


def tables(rotary_dim: int = 8, positions: int = 16) -> tuple[Tensor, Tensor]:
    angles = torch.randn(positions, rotary_dim // 2)
    return angles.cos(), angles.sin()


@pytest.fixture(params=[3, "per sequence"])
def offsets(request: pytest.FixtureRequest) -> int | Tensor:
    return request.param if request.param == 3 else torch.tensor([0, 7])


def test_torch_form(interleaved: bool):
    from flash_attn.layers.rotary import apply_rotary_emb_func, apply_rotary_emb_torch

    x, (cos, sin) = torch.randn(BATCH, SEQLEN, 3, HEAD_DIM), tables(positions=SEQLEN)
    expected = apply_rotary_emb_func(x, cos, sin, interleaved)
    assert torch.equal(apply_rotary_emb_torch(x, cos, sin, interleaved), expected)
    rows = [t.expand(BATCH, -1, -1) for t in (cos, sin)]
    assert torch.equal(apply_rotary_emb_torch(x, *rows, interleaved), expected)
    with pytest.raises(ArgumentError, match="rotary_dim = 12.*head_dim = 10"):
        apply_rotary_emb_torch(x, *tables(12, SEQLEN), interleaved)


@pytest.mark.parametrize("own_tables_for_k", [False, True])
@pytest.mark.parametrize("num_kv_heads", [None, 1, 2])
def test_qkv(interleaved: bool, offsets: int | Tensor, num_kv_heads: int | None, own_tables_for_k):
    from flash_attn.layers.rotary import apply_rotary_emb_qkv_

    q_tables = tables()
    k_tables = tables() if own_tables_for_k else q_tables
    if num_kv_heads is None:
        leaf = torch.randn(BATCH, SEQLEN, 3, 4, HEAD_DIM, requires_grad=True)
        q, k, v = leaf.unbind(2)
        num_heads_q = None
    else:
        num_heads_q = 4
        leaf = torch.randn(BATCH, SEQLEN, 4 + 2 * num_kv_heads, HEAD_DIM, requires_grad=True)
        q, k, v = leaf.split([4, num_kv_heads, num_kv_heads], dim=2)
    rotated = (
        apply_rotary_emb(q, *q_tables, interleaved, seqlen_offsets=offsets),
        apply_rotary_emb(k, *k_tables, interleaved, seqlen_offsets=offsets),
        v,
    )
    expected = torch.stack(rotated, 2) if num_kv_heads is None else torch.cat(rotated, 2)
    given = leaf.clone()
    others = k_tables if own_tables_for_k else (None, None)
    result = apply_rotary_emb_qkv_(given, *q_tables, *others, interleaved, offsets, num_heads_q)
    assert result is given
    assert torch.equal(result, expected)
    dout = torch.randn_like(expected)
    (grad,) = torch.autograd.grad(result, leaf, dout)
    (expected_grad,) = torch.autograd.grad(expected, leaf, dout)
    torch.testing.assert_close(grad, expected_grad)


def test_kv(interleaved: bool, offsets: int | Tensor):
    from flash_attn.layers.rotary import apply_rotary_emb_kv_

    leaf, (cos, sin) = torch.randn(BATCH, SEQLEN, 2, 3, HEAD_DIM, requires_grad=True), tables()
    kv = leaf.clone()
    assert apply_rotary_emb_kv_(kv, cos, sin, interleaved, offsets) is kv
    expected = apply_rotary_emb(leaf[:, :, 0], cos, sin, interleaved, seqlen_offsets=offsets)
    assert torch.equal(kv[:, :, 0], expected)
    assert torch.equal(kv[:, :, 1], leaf[:, :, 1])
    (grad,) = torch.autograd.grad(kv.square().sum(), leaf)
    torch.testing.assert_close(grad, 2 * leaf)  # a rotation keeps lengths


def test_shapes_are_checked(interleaved: bool):
    from flash_attn.layers.rotary import apply_rotary_emb_kv_, apply_rotary_emb_qkv_

    cos, sin = tables()
    with pytest.raises(ArgumentError, match=r"qkv must have shape.*num_heads_q = None"):
        apply_rotary_emb_qkv_(torch.randn(1, 2, 6, 8), cos, sin, interleaved=interleaved)
    with pytest.raises(ArgumentError, match="num_heads_q = 3"):
        apply_rotary_emb_qkv_(torch.randn(1, 2, 6, 8), cos, sin, num_heads_q=3)
    with pytest.raises(ArgumentError, match="kv must have shape"):
        apply_rotary_emb_kv_(torch.randn(1, 2, 3, 4, 8), cos, sin)


def test_without_autograd(interleaved: bool, offsets: int | Tensor):
    from flash_attn.ops.triton.rotary import apply_rotary

    x, (cos, sin) = torch.randn(BATCH, SEQLEN, 3, HEAD_DIM, requires_grad=True), tables()
    out = apply_rotary(x, cos, sin, offsets, interleaved=interleaved)
    expected = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    assert torch.equal(out, expected)
    assert not out.requires_grad
    back = apply_rotary(out, cos, sin, offsets, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, x.detach())
    y = x.detach().clone()
    assert apply_rotary(y, cos, sin, offsets, interleaved=interleaved, inplace=True) is y
    assert torch.equal(y, out)


def test_module(interleaved: bool):
    """Against tables written out; they grow as needed, and are made anew for another dtype."""
    from flash_attn.layers.rotary import RotaryEmbedding

    rotary = RotaryEmbedding(8, base=500.0, interleaved=interleaved)
    for offset, dtype in ((0, torch.float32), (6, torch.float32), (2, torch.float16)):
        qkv = torch.randn(BATCH, SEQLEN, 3, 4, HEAD_DIM, dtype=dtype)
        angles = torch.arange(11)[:, None] / 500.0 ** (torch.arange(0, 8, 2) / 8)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        q, k = (
            apply_rotary_emb(qkv[:, :, i], cos, sin, interleaved, seqlen_offsets=offset)
            for i in (0, 1)
        )
        out = rotary(qkv.clone(), seqlen_offset=offset)
        torch.testing.assert_close(out[:, :, 0], q)
        torch.testing.assert_close(out[:, :, 1], k)
        assert torch.equal(out[:, :, 2], qkv[:, :, 2])
        q_out, kv_out = rotary(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=offset)
        torch.testing.assert_close(q_out, q)
        torch.testing.assert_close(kv_out[:, :, 0], k)
        assert torch.equal(kv_out[:, :, 1], qkv[:, :, 2])


def test_module_with_offsets_per_sequence(interleaved: bool):
    from flash_attn.layers.rotary import RotaryEmbedding

    rotary = RotaryEmbedding(HEAD_DIM, interleaved=interleaved)
    qkv = torch.randn(BATCH, SEQLEN, 3, 4, HEAD_DIM)
    out = rotary(qkv.clone(), seqlen_offset=torch.tensor([0, 7]))
    assert torch.equal(out[:1], rotary(qkv[:1].clone()))
    assert torch.equal(out[1:], rotary(qkv[1:].clone(), seqlen_offset=7))


def test_module_is_cast_with_its_model(interleaved: bool):
    """Low precision reaches the tables' values, not the positions."""
    from flash_attn.layers.rotary import RotaryEmbedding

    qkv = torch.randn(1, 300, 3, 1, 8).half()
    cast = RotaryEmbedding(8, interleaved=interleaved, scale_base=512).half()
    kept = RotaryEmbedding(8, interleaved=interleaved, scale_base=512)
    torch.testing.assert_close(cast(qkv.clone()), kept(qkv.clone()))


def test_xpos_scores_depend_on_distance_only(interleaved: bool):
    from flash_attn.layers.rotary import RotaryEmbedding

    rotary = RotaryEmbedding(8, interleaved=interleaved, scale_base=16)
    qkv = torch.randn(1, 1, 3, 1, 8).expand(1, 12, 3, 1, 8).clone()
    q, k, _ = rotary(qkv)[0, :, :, 0].unbind(1)
    scores = q @ k.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
    plain = RotaryEmbedding(8, interleaved=interleaved)
    q, k, _ = plain(qkv.clone())[0, :, :, 0].unbind(1)
    assert not torch.allclose(scores, q @ k.T)


def test_tables_of_inference_mode_are_not_trained_with(interleaved: bool):
    from flash_attn.layers.rotary import RotaryEmbedding

    rotary = RotaryEmbedding(8, interleaved=interleaved)
    with torch.inference_mode():
        rotary(torch.randn(1, 4, 3, 1, 8))
    leaf = torch.randn(1, 4, 3, 1, 8, requires_grad=True)
    rotary(leaf.clone()).square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach())
