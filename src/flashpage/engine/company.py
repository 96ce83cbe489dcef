"""What a step asks of its sequences all at once: they are hundreds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

import numpy as np

from flashpage.engine.plain_sampling import WISHES, Penalties, PlainSampling
from flashpage.engine.request import Sequence
from flashpage.engine.seeds import mix_seeds, uniform

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
        wishes = np.frombuffer(b"".join([s.wishes for s in sequences]), WISHES)
        self._of = {name: np.ascontiguousarray(wishes[name]) for name in WISHES.names}
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
