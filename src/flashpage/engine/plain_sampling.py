"""What plain sampling (temperature and min_p alone) needs of each sequence, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashpage.engine.request import MASK_64, Sequence


class PlainSampling(NamedTuple):
    """One entry per sequence; `uniform` is the random number of its next draw, in [0, 1)."""

    temperature: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """float32, float32 and float64, on the device."""
        temperature, min_p, uniform = (torch.from_numpy(x).to(device) for x in self)
        return temperature, min_p, uniform


def plain_sampling(sequences: list[Sequence]) -> PlainSampling:
    """The same random numbers as `mix_seed` gives one by one, so that no batch changes a draw."""
    count = len(sequences)
    seeds = np.fromiter((s.seed & MASK_64 for s in sequences), np.uint64, count)
    # `num_chosen_tokens`, without a call for each
    draws = np.array(
        [len(s.token_ids) - s.num_prompt_tokens + s.num_pending for s in sequences], np.uint64
    )
    return PlainSampling(
        np.array([s.temperature for s in sequences], np.float32),
        np.array([s.params.min_p for s in sequences], np.float32),
        (mix_seeds(seeds, draws) >> np.uint64(11)) / float(1 << 53),
    )


def mix_seeds(seeds: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """`mix_seed` of every pair, both uint64."""
    with np.errstate(over="ignore"):
        z = seeds + (indexes + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
