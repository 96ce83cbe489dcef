"""Qwen2: Llama with a bias on q, k and v; Qwen Team, 2024. Structure only."""

from __future__ import annotations

from flashpage.models.common import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """The shared decoder; `config.qkv_bias` is always set for this family."""
