"""The gated activation of the feed-forward layers; knows no model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` for a fused `[..., 2 * size]` input: gate is the first half, up the second.

    Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU without its projections).

    Returns:
        `[..., size]`, in the dtype of the input.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
