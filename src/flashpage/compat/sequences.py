"""Which tokens of a padded or packed batch belong together: read from masks and from positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flashpage.errors import ArgumentError, UnsupportedError

Sequences = tuple[Tensor, Tensor, int, int]
"""cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, of all rows laid end to end"""


@dataclass(frozen=True)
class Flat:
    """Which rows of a padded batch take part, laid end to end; all on one device."""

    indices: Tensor
    """int64 `[total]` into batch * length"""
    cu_seqlens: Tensor
    """int32 `[batch + 1]`"""
    max_seqlen: int

    @classmethod
    def of(cls, mask: Tensor) -> Flat:
        """The True entries of a bool `[batch, length]`."""
        seqlens = mask.sum(dim=1, dtype=torch.int32)
        cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(mask.flatten().nonzero().flatten(), cu_seqlens, int(seqlens.max()))


@dataclass(frozen=True)
class Padding:
    """What a mask `[batch, width]` means for a number of queries, the last of its columns.

    A causal query is padding if its column is, and so is one in a window; other queries (of an
    encoder, or of a decoder that looks at one) all take part.
    """

    full: bool
    """no padding at all; the fields below are None"""
    leftpad: Tensor | None = None
    """int32 `[batch]` if all padding is on the left"""
    queries: Flat | None = None
    keys: Flat | None = None
    windowed: bool = True
    """False where `keys` has only those in the window, so that no window is left to apply"""

    @classmethod
    def of(cls, mask: Tensor, seqlen_q: int, causal: bool, window: int | None) -> Padding:
        """Read a mask; synchronises with its device.

        Raises:
            ArgumentError: fewer columns than causal queries.
            UnsupportedError: a window over padding between tokens, for more than one query.
        """
        width = mask.shape[1]
        if causal and seqlen_q > width:
            raise ArgumentError(
                f"attention_mask must have a column for each of {seqlen_q} queries, got shape "
                f"{tuple(mask.shape)}"
            )
        if bool(mask.all()):
            return cls(full=True)
        windowed = True
        if window is not None and width > window and _has_gaps(mask):
            # Distances are those of the columns, and shrink when padding is left out.
            if seqlen_q > 1:
                raise UnsupportedError(
                    f"flashpage has no sliding window (here {window}) over padding between tokens "
                    "for several queries at once: pad on the left"
                )
            windowed = False
            mask = mask.clone()
            mask[:, : width - window] = False
        if causal:
            queries = Flat.of(mask[:, width - seqlen_q :])
        elif window is not None and seqlen_q == width:
            # Distances count from the last token: queries must end where their keys end.
            queries = Flat.of(mask)
        elif window is not None:
            raise UnsupportedError(
                f"flashpage has no sliding window (here {window}) over padding between {seqlen_q} "
                f"queries and {width} keys that may all see each other"
            )
        else:
            queries = Flat.of(mask.new_ones(mask.shape[0], seqlen_q))
        leftpad = None
        if windowed and not bool((mask[:, :-1] & ~mask[:, 1:]).any()):
            leftpad = (~mask).sum(dim=1, dtype=torch.int32)
        return cls(False, leftpad, queries, Flat.of(mask), windowed)


def _has_gaps(mask: Tensor) -> bool:
    """Some row has padding between its tokens: its tokens begin more than once."""
    begins = mask & ~F.pad(mask[:, :-1], (1, 0))
    return bool((begins.sum(dim=1) > 1).any())


def packed_rows(position_ids: Tensor, batch: int) -> Sequences | None:
    """Of rows that hold several sequences end to end: one begins where positions do not go on by
    one. None if each row is one sequence."""
    begins = F.pad(position_ids.diff(dim=1) != 1, (1, 0)).expand(batch, -1).clone()
    if not bool(begins.any()):
        return None
    begins[:, 0] = True
    start = begins.flatten().nonzero().flatten().to(torch.int32)
    cu_seqlens = F.pad(start, (0, 1), value=begins.numel())
    max_seqlen = int(cu_seqlens.diff().max())
    return cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
