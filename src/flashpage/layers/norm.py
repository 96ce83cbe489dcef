"""Root-mean-square normalisation over the last dimension; knows no model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashpage.layers.fused import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 and returned in the dtype of x.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        weight = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` -> `[..., size]`."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)`, each `[..., size]`, in one pass.

        x may be in parts, as `Linear.for_norm` gives them: `[parts, ..., size]`, float32.
        """
        return add_rms_norm(x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"
