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
    top_k: np.ndarray
    top_p: np.ndarray

    def tensors(self, device: torch.device) -> list[Tensor]:
        """float32, float32, float64, int32 and float32, on the device."""
        return [torch.from_numpy(x).to(device) for x in self]


class Penalties(NamedTuple):
    """One entry per sequence; row 0 of the table of counts: without."""

    rows: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray

    def tensors(self, device: torch.device) -> list[Tensor]:
        """int32 and three times float32, on the device."""
        return [torch.from_numpy(x).to(device) for x in self]


def penalties_of(sequences: list[Sequence], rows: list[int]) -> Penalties:
    """What they ask for, and their rows of the table."""
    params = [sequence.params for sequence in sequences]
    return Penalties(
        np.array(rows, np.int32),
        np.array([p.repetition_penalty for p in params], np.float32),
        np.array([p.presence_penalty for p in params], np.float32),
        np.array([p.frequency_penalty for p in params], np.float32),
    )


def plain_sampling(sequences: list[Sequence]) -> PlainSampling:
    """The same random numbers as `mix_seed` gives one by one, so that no batch changes a draw."""
    count = len(sequences)
    seeds = np.fromiter((s.seed & MASK_64 for s in sequences), np.uint64, count)
    # `num_chosen_tokens`, without a call for each
    draws = np.array(
        [len(s.token_ids) - s.num_prompt_tokens + s.num_pending for s in sequences], np.uint64
    )
    wishes = np.array([s.plain_wishes for s in sequences], np.float64).reshape(count, 4)
    temperature, min_p, top_k, top_p = wishes.T
    return PlainSampling(
        temperature.astype(np.float32),
        min_p.astype(np.float32),
        (mix_seeds(seeds, draws) >> np.uint64(11)) / float(1 << 53),
        top_k.astype(np.int32),
        # What float32 can not hold would be 0, which leaves no token.
        np.maximum(top_p.astype(np.float32), np.finfo(np.float32).tiny),
    )


def mix_seeds(seeds: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """`mix_seed` of every pair, both uint64."""
    with np.errstate(over="ignore"):
        z = seeds + (indexes + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
