"""Qwen3: Llama with normalised q and k heads; Qwen Team, 2025. Structure only."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.layers.norm import RMSNorm
from flashpage.models.common import Attention, DecoderModel
from flashpage.models.config import ModelConfig


class Qwen3Attention(Attention):
    """Attention whose q and k heads are normalised, each over head_dim, before they are rotated."""

    def __init__(
        self, config: ModelConfig, layer_index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, layer_index, dtype, device)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights `[head_dim]` of the norms of q's and k's heads, and their epsilon."""
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps


class Qwen3ForCausalLM(DecoderModel):
    """The shared decoder around `Qwen3Attention`."""

    attention_class = Qwen3Attention
