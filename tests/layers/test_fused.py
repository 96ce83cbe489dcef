"""The fused steps: against their formulas, and each kernel against its twin in torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flashpage.attention.cpu.numba_runtime import why_unavailable
from flashpage.layers import fused

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 2e-6),
        (torch.bfloat16, 1.6e-2),
        (torch.float16, 2e-3),
        (torch.float64, 1e-12),
    ],
)
# One row, several, enough for several threads; sizes that are no multiple of a vector.
SHAPES = pytest.mark.parametrize("shape", [(1, 16), (7, 22), (3, 5, 16), (70, 514), (0, 16)])


def randn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@DTYPES
@SHAPES
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = randn(shape, dtype), randn(shape, dtype), randn(shape[-1:], dtype)
    before = x.clone(), residual.clone()
    out, total = fused.add_rms_norm(x, residual, weight, 1e-5)
    assert out.dtype == total.dtype == dtype
    assert torch.equal(total, x + residual)  # rounded as torch rounds
    wide = total.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(out, expected, tolerance)
    close(fused.rms_norm(total, weight, 1e-5), expected, tolerance)
    close(out, fused.add_rms_norm_torch(x, residual, weight, 1e-5)[0], tolerance)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@DTYPES
@SHAPES
def test_silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x = randn(shape, dtype)
    before = x.clone()
    out = fused.silu_and_mul(x)
    gate, up = x.double().chunk(2, dim=-1)
    close(out, gate / (1 + torch.exp(-gate)) * up, tolerance)
    close(out, fused.silu_and_mul_torch(x), 2 * tolerance)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_of_extreme_values(dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 1e30, -1e30, 88.0, -88.0, -200.0, torch.inf, torch.nan])
    out = fused.silu_and_mul(torch.cat((gate, torch.ones(9)))[None].to(dtype))[0]
    expected = torch.nn.functional.silu(gate.to(dtype).double())
    close(out[:-1], expected[:-1], 1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert torch.isnan(out[-1])


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 3, 8), (5, 4, 22), (90, 12, 64), (0, 2, 8)]
)
@pytest.mark.parametrize("strided", [False, True])
def test_rope(
    dtype: torch.dtype, tolerance: float, tokens: int, heads: int, dim: int, strided: bool
) -> None:
    rows = randn((tokens, heads + 2, dim), dtype)
    x = rows[:, :heads] if strided else rows[:, :heads].contiguous()
    angle = torch.rand(tokens, 1, dim // 2, dtype=torch.float64) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    out = fused.rope(x, cos, sin)
    assert out.is_contiguous()
    a, b = x.double().chunk(2, dim=-1)
    c, s = cos.double()[..., : dim // 2], sin.double()[..., dim // 2 :]
    close(out, torch.cat((a * c - b * s, b * c + a * s), -1), 3 * tolerance)
    close(out, fused.rope_torch(x, cos, sin), 3 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_stay(dtype: torch.dtype) -> None:
    """A poisoned row must be seen as such, and must not reach its neighbours."""
    x = torch.ones(3, 8).to(dtype)
    x[1, 2] = torch.nan
    out, total = fused.add_rms_norm(x, torch.zeros_like(x), torch.ones(8).to(dtype), 1e-6)
    assert torch.isnan(out[1]).all()
    assert torch.equal(torch.isnan(total), torch.isnan(x))
    assert torch.isfinite(out[[0, 2]]).all()
    assert torch.isfinite(fused.silu_and_mul(x)[[0, 2]]).all()
    assert torch.isnan(fused.silu_and_mul(x)[1, 2])


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Bit for bit, whatever the number of rows: greedy tokens must not depend on the batch."""
    x, residual = torch.randn(50, 576), torch.randn(50, 576)
    weight = torch.randn(576)
    out, total = fused.add_rms_norm(x, residual, weight, 1e-5)
    one_out, one_total = fused.add_rms_norm(x[7:8], residual[7:8], weight, 1e-5)
    assert torch.equal(out[7:8], one_out)
    assert torch.equal(total[7:8], one_total)
    assert torch.equal(fused.silu_and_mul(x)[7:8], fused.silu_and_mul(x[7:8]))


def test_without_kernels_everything_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what the twins give, no kernel called; elsewhere and afterwards they are."""
    called: list[bool] = []
    call = fused.call
    monkeypatch.setattr(fused, "call", lambda *a: called.append(True) or call(*a))
    x, residual, weight = torch.randn(7, 22), torch.randn(7, 22), torch.randn(22)
    cos, sin = torch.randn(2, 7, 1, 8)
    heads = torch.randn(7, 3, 8)

    def everything() -> list[Tensor]:
        return [
            fused.rms_norm(x, weight, 1e-5),
            *fused.add_rms_norm(x, residual, weight, 1e-5),
            fused.silu_and_mul(x),
            fused.rope(heads, cos, sin),
        ]

    twins = [
        fused.rms_norm_torch(x, weight, 1e-5),
        *fused.add_rms_norm_torch(x, residual, weight, 1e-5),
        fused.silu_and_mul_torch(x),
        fused.rope_torch(heads, cos, sin),
    ]
    with fused.without_kernels():
        outs = everything()
        assert not called
        with ThreadPoolExecutor(1) as other_thread:
            assert other_thread.submit(fused.kernels_enabled).result()
    assert all(torch.equal(out, twin) for out, twin in zip(outs, twins, strict=True))
    with pytest.raises(ZeroDivisionError), fused.without_kernels():
        raise ZeroDivisionError
    everything()
    assert bool(called) == (why_unavailable() is None)


def test_gradients_go_through_torch() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    fused.silu_and_mul(x).sum().backward()
    assert x.grad is not None
