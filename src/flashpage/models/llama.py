"""Llama: RMSNorm, rotary grouped-query attention, SwiGLU; Touvron et al., 2023. Structure only."""

from __future__ import annotations

from flashpage.models.common import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """The shared decoder as it is; biases and tied heads follow the config."""
