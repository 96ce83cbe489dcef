"""RMSNorm against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from flashpage.layers.norm import RMSNorm


@pytest.mark.parametrize("shape", [(1, 16), (7, 16), (3, 5, 16), (0, 16)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_formula(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    norm = RMSNorm(16, 1e-5, dtype=dtype)
    norm.weight.data.normal_(1.0, 0.2)
    x = (torch.randn(shape) * 3).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    result = norm(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


def test_sixteen_bits_do_not_overflow_inside() -> None:
    """The mean of squares of these values is beyond float16; the result is 1."""
    norm = RMSNorm(8, 1e-6, dtype=torch.float16)
    norm.weight.data.fill_(1.0)
    result = norm(torch.full((2, 8), 60000.0, dtype=torch.float16))
    torch.testing.assert_close(result, torch.ones(2, 8, dtype=torch.float16))


def test_eps_decides_at_zero() -> None:
    norm = RMSNorm(4, 1e-6)
    norm.weight.data.fill_(1.0)
    assert torch.equal(norm(torch.zeros(1, 4)), torch.zeros(1, 4))
