"""Linear: the plain product, and the packed one against it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from flashpage.layers.linear import Linear, can_pack, has_fast_bfloat16


def filled(in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = True) -> Linear:
    layer = Linear(in_features, out_features, bias=bias, dtype=dtype)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_affine_map(dtype: torch.dtype, bias: bool) -> None:
    layer = filled(40, 24, dtype, bias=bias)
    x = torch.randn(5, 40, dtype=dtype)
    expected = x.double() @ layer.weight.double().T
    if bias:
        expected += layer.bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-1
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not has_fast_bfloat16(), reason="this CPU has no bfloat16 instructions")
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 256])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_plain(rows: int, bias: bool) -> None:
    """Both round one float32 sum to bfloat16; only the order of the sum may differ."""
    layer = filled(96, 72, torch.bfloat16, bias=bias)
    x = torch.randn(rows, 96, dtype=torch.bfloat16)
    plain = F.linear(x, layer.weight, layer.bias)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    layer.prepare()
    packed = layer(x)
    assert layer.is_packed
    assert packed.dtype == torch.bfloat16
    assert packed.shape == plain.shape
    error = (packed.double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + 1e-6


@pytest.mark.skipif(not has_fast_bfloat16(), reason="this CPU has no bfloat16 instructions")
def test_packing_frees_the_plain_weight() -> None:
    layer = filled(64, 64, torch.bfloat16)
    plain = weakref.ref(layer.weight)
    layer.prepare()
    gc.collect()
    assert plain() is None
    layer.prepare()  # a second call has nothing left to do
    assert layer.is_packed


@pytest.mark.skipif(not has_fast_bfloat16(), reason="this CPU has no bfloat16 instructions")
def test_packing_a_shared_weight_leaves_it_to_the_other() -> None:
    layer = filled(16, 32, torch.bfloat16, bias=False)
    shared = layer.weight
    before = shared.clone()
    layer.prepare()
    assert torch.equal(shared, before)


def test_prepare_keeps_what_can_not_be_packed() -> None:
    layer = filled(8, 8, torch.float64)
    assert not can_pack(layer.weight)
    layer.prepare()
    assert not layer.is_packed
    assert layer.weight is not None


def test_no_rows() -> None:
    layer = filled(8, 4, torch.float32)
    assert layer(torch.empty(0, 8)).shape == (0, 4)
