"""Qwen3: Llama with normalised q and k heads; Qwen Team, 2025. Structure only."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.layers.norm import RMSNorm
from flashpage.layers.rope import Rotation, apply_rope
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

    def rotate(self, qk: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """`[T, num_q_heads + num_kv_heads, head_dim]` -> q and k, ready for the scores."""
        q, k = qk.split((self.num_q_heads, self.num_kv_heads), dim=1)
        return apply_rope(self.q_norm(q), rotation), apply_rope(self.k_norm(k), rotation)


class Qwen3ForCausalLM(DecoderModel):
    """The shared decoder around `Qwen3Attention`."""

    attention_class = Qwen3Attention
