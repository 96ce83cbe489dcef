"""Which row of the device's table of token counts belongs to which sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashpage.engine.request import Sequence
from flashpage.layers.penalties import PROMPT


class _Owner(NamedTuple):
    sequence: Sequence
    generation: int

    @property
    def keeps_it(self) -> bool:
        """False once it has ended, or was preempted: it is counted anew when it runs again."""
        sequence = self.sequence
        return sequence.is_running and self.generation == sequence.generation


class TokenCounts:
    """The counts that penalties of running sequences look at, allocated when first needed.

    A sequence is counted by the host when it gets its row, from then on by the steps themselves, on
    the device (`penalties.count_tokens`): no choice waits for the host to learn of a token.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        # Row 0 is nobody's.
        self.table = torch.zeros(max_num_seqs + 1, vocab_size, dtype=torch.int32, device=device)
        self._owners: list[_Owner | None] = [None] * max_num_seqs

    def row_of(self, sequence: Sequence) -> int:
        """The row of a running sequence, which is in time: what follows on the device finds it."""
        row = sequence.counts_row
        if row > 0:
            owner = self._owners[row - 1]
            if owner is not None and owner.sequence is sequence and owner.keeps_it:
                return row
        row = 1 + next(
            i for i, owner in enumerate(self._owners) if owner is None or not owner.keeps_it
        )
        # Nobody's until all is counted: that may fail half-way, and is repeated then.
        self._owners[row - 1] = None
        self._count(self.table[row], sequence)
        self._owners[row - 1] = _Owner(sequence, sequence.generation)
        sequence.counts_row = row
        return row

    def forget(self, sequence: Sequence) -> None:
        """Hold a sequence that has ended no longer."""
        row = sequence.counts_row
        owner = self._owners[row - 1] if row > 0 else None
        if owner is not None and owner.sequence is sequence:
            self._owners[row - 1] = None

    def _count(self, counts: Tensor, sequence: Sequence) -> None:
        assert sequence.num_pending == 0, "a token that the host does not know was not counted"
        counts.zero_()
        prompt = sorted(sequence.request.prompt_token_set)
        counts[torch.tensor(prompt, device=counts.device)] = PROMPT
        if sequence.output_counts:
            tokens, times = zip(*sequence.output_counts.items(), strict=True)
            counts[torch.tensor(tokens, device=counts.device)] += torch.tensor(
                times, dtype=counts.dtype, device=counts.device
            )
