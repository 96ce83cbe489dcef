"""Random weights of a sane scale, for a model that exists only as a config."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashpage.models.common import DecoderModel
from flashpage.weights.assign import checkpoint_slots

_STANDARD_DEVIATION = 0.02


def dummy_tensors(model: DecoderModel, seed: int) -> Iterator[tuple[str, Tensor]]:
    """A float32 tensor on the CPU for every name of the model's checkpoint, the same for a seed.

    Norm weights are 1, biases and matrices normal with standard deviation 0.02: what transformers
    initialises these models with, so activations and logits keep an ordinary scale.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, slot in checkpoint_slots(model).items():
        shape = slot.target.shape
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        else:
            yield name, torch.randn(shape, generator=generator) * _STANDARD_DEVIATION
