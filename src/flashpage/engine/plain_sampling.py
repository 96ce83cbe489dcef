"""What the device is told of sampling: packed once for each sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.seeds import MASK_64

MAX_TOP_K = 2**31 - 1
"""What an int32 holds; no vocabulary is larger."""
MIN_TOP_P = 1e-290
"""Times the weight of a row, at least 1, no zero."""

WISHES = np.dtype(
    [
        ("seed", np.uint64),
        ("num_prompt_tokens", np.int64),
        ("top_p", np.float64),
        *(
            (name, np.float32)
            for name in ("temperature", "min_p", "repetition", "presence", "frequency")
        ),
        ("top_k", np.int32),
    ],
    align=True,
)


class PlainSampling(NamedTuple):
    """One entry per sequence: float32, float32, float64, int32 and float64; `uniform` is the random
    number of its next draw, in [0, 1)."""

    temperature: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray


class Penalties(NamedTuple):
    """One entry per sequence: int32 and three times float32; row 0 of the table of counts: none."""

    rows: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray


def pack_wishes(params: SamplingParams, seed: int, num_prompt_tokens: int) -> bytes:
    """What never changes of a sequence's sampling: to join is the fastest way to an array."""
    wishes = np.zeros(1, WISHES)
    wishes["seed"] = seed & MASK_64
    wishes["num_prompt_tokens"] = num_prompt_tokens
    wishes["temperature"] = 0.0 if params.is_greedy else params.temperature
    wishes["min_p"] = params.min_p
    # A share of nothing would leave no token.
    wishes["top_p"] = max(params.top_p, MIN_TOP_P)
    wishes["top_k"] = min(max(params.top_k, 0), MAX_TOP_K)
    wishes["repetition"] = params.repetition_penalty
    wishes["presence"] = params.presence_penalty
    wishes["frequency"] = params.frequency_penalty
    return wishes.tobytes()


def to_device(columns: PlainSampling | Penalties, device: torch.device) -> list[Tensor]:
    """Each column as a tensor."""
    return [torch.from_numpy(column.copy()).to(device) for column in columns]
