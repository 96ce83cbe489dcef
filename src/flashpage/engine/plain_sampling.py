"""What the device is told of sampling: packed once for each sequence, gathered in every step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.seeds import MASK_64, mix_seeds, uniform

if TYPE_CHECKING:
    from flashpage.engine.request import Sequence

MAX_TOP_K = 2**31 - 1
"""What an int32 holds; no vocabulary is larger."""
MIN_TOP_P = 1e-290
"""Times the weight of a row, at least 1, no zero."""

_Wishes = np.dtype(
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
    wishes = np.zeros(1, _Wishes)
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


_block_ids_of = attrgetter("block_ids")


class Company:
    """Sequences that are in a step together, and what never changes of them, gathered once: those
    that decode together mostly do so for many steps."""

    def __init__(self, sequences: SequenceOf[Sequence]) -> None:
        self.sequences = sequences
        self.all_generate = all(s.generates for s in sequences)
        self.is_penalized = any(s.is_penalized for s in sequences)
        self.is_plain = all(s.is_plain and not s.params.min_tokens for s in sequences)
        """whether the device chooses all of their tokens"""
        wishes = np.frombuffer(b"".join([s.wishes for s in sequences]), _Wishes)
        self._of = {name: np.ascontiguousarray(wishes[name]) for name in _Wishes.names}
        self._block_ids: list[array[int]] = []
        self._num_blocks = self._table = np.zeros(0, np.int32)

    def block_table(self, width: int) -> np.ndarray:
        """int32 `[len(sequences), width]`, -1 where a sequence has no block; valid until the next
        call, which mostly finds a few new blocks only."""
        block_ids = list(map(_block_ids_of, self.sequences))
        num_blocks = np.array(list(map(len, block_ids)), np.int32)
        if block_ids == self._block_ids:  # the same arrays, which only grow
            for i in np.flatnonzero(num_blocks != self._num_blocks):
                first = self._num_blocks[i]
                self._table[i, first : num_blocks[i]] = block_ids[i][first:]
        else:
            table = np.full((len(block_ids), width), -1, np.int32)
            # All rows at once: one by one they would take a third of the time of filling a step.
            joined = np.frombuffer(b"".join(block_ids), np.int32)
            table[np.arange(width) < num_blocks[:, None]] = joined
            self._block_ids, self._table = block_ids, table
        self._num_blocks = num_blocks
        return self._table

    def plain_sampling(self, ends: SequenceOf[int]) -> PlainSampling:
        """For the tokens at the places `ends` of the sequences.

        The random numbers are those that `mix_seed` gives one by one, so that no batch changes a
        draw.
        """
        of = self._of
        draws = np.array(ends, np.int64) - of["num_prompt_tokens"]
        drawn = uniform(mix_seeds(of["seed"], draws.view(np.uint64)))
        return PlainSampling(of["temperature"], of["min_p"], drawn, of["top_k"], of["top_p"])

    def penalties(self, rows: list[int]) -> Penalties:
        """What they ask for, and their rows of the table."""
        of = self._of
        rows_of = np.array(rows, np.int32)
        return Penalties(rows_of, of["repetition"], of["presence"], of["frequency"])


def to_device(columns: PlainSampling | Penalties, device: torch.device) -> list[Tensor]:
    """Each column as a tensor."""
    return [torch.from_numpy(column.copy()).to(device) for column in columns]
