"""Random weights of a sane scale, for a model that exists only as a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashpage.models.common import DecoderModel
from flashpage.weights.assign import checkpoint_slots

_STANDARD_DEVIATION = 0.02

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
}
"""Structures that are known by name, for measuring without a download."""


def dummy_tensors(
    model: DecoderModel, seed: int, device: torch.device | str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """A float32 tensor for every name of the model's checkpoint, the same for a seed and a kind of
    device: they are made on `device`, or else where the model is.

    Norm weights are 1, biases and matrices normal with standard deviation 0.02: what transformers
    initialises these models with, so activations and logits keep an ordinary scale.
    """
    device = torch.device(device or model.embed_tokens.weight.device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, slot in checkpoint_slots(model).items():
        shape = slot.target.shape
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, device=device)
        else:
            weights = torch.randn(shape, generator=generator, device=device)
            yield name, weights.mul_(_STANDARD_DEVIATION)
