"""SwiGLU's activation against its formula."""

from __future__ import annotations

import pytest
import torch

from flashpage.layers.activation import silu_and_mul


@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (0, 8)])
def test_silu_and_mul(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    before = x.clone()
    gate, up = x[..., :4], x[..., 4:]
    torch.testing.assert_close(silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)
    assert torch.equal(x, before)
