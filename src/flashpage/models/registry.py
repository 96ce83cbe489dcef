"""From the name of an architecture to its class."""

from __future__ import annotations

import torch

from flashpage.models.common import DecoderModel
from flashpage.models.config import ModelConfig
from flashpage.models.llama import LlamaForCausalLM
from flashpage.models.qwen2 import Qwen2ForCausalLM
from flashpage.models.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES: dict[str, type[DecoderModel]] = {
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecoderModel:
    """The model of `config`, in evaluation mode, its weights allocated but not yet filled."""
    return MODEL_CLASSES[config.architecture](config, dtype, torch.device(device)).eval()
