"""What the options of `flashpage trace` ask for, as data of `explain/steps.py`; shows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from flashpage.errors import ArgumentError
from flashpage.explain.steps import (
    PagedDecode,
    SequenceMap,
    TraceProblem,
    map_sequences,
    paged_decode,
    random_problem,
    worked_examples,
)

Shown: TypeAlias = TraceProblem | SequenceMap | PagedDecode
"""what one view shows: the walk of the tiles, the map of a pack, or the pages of a decode"""

DEFAULT_VARLEN = (3, 1, 5)
DEFAULT_PAGED = (11, 10)
DEFAULT_SHARED = 8


def read_options(
    *, varlen: bool = False, paged: bool = False, seqlens: str | None = None, **options: int | None
) -> list[Shown]:
    """What is to be shown, one entry or more; None is an option not given.

    Args:
        varlen, paged: the map of cu_seqlens, or the pages of a decode, instead of tiles.
        seqlens: lengths between commas, for these two.
        options: `seqlen_q`, `seqlen_k`, `head_dim`, `block_size`, `workers`, `causal`, `seed`,
            `shared`. With none of them the worked examples are shown.

    Raises:
        ArgumentError: a value out of range, or an option that does not belong to what is shown.
    """
    if varlen and paged:
        raise ArgumentError("varlen and paged must be asked for one at a time, got both")
    given = {name: value for name, value in options.items() if value is not None}
    if seqlens is not None:
        given["seqlens"] = _parse_lengths(seqlens)
    if varlen:
        _check_options("with varlen", given, ("seqlens", "causal"))
        lengths = given.pop("seqlens", DEFAULT_VARLEN)
        return [map_sequences(lengths, causal=bool(given.get("causal")))]
    elif paged:
        _check_options("with paged", given, ("seqlens", "block_size", "head_dim", "shared", "seed"))
        shared = given.pop("shared", 0 if "seqlens" in given else DEFAULT_SHARED)
        lengths = given.pop("seqlens", DEFAULT_PAGED)
        return [paged_decode(lengths, num_shared_tokens=shared, **given)]
    else:
        names = ("seqlen_q", "seqlen_k", "head_dim", "block_size", "workers", "causal", "seed")
        _check_options("without varlen and paged", given, names)
        new_names = {"block_size": "block_size_k", "workers": "num_workers"}
        own = {new_names.get(name, name): value for name, value in given.items()}
        return [random_problem(**own)] if own else list(worked_examples())


def _parse_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.split(","))
    except ValueError:
        raise ArgumentError(
            f"seqlens must be lengths between commas such as 3,1,5, got {text!r}"
        ) from None


def _check_options(what: str, given: dict[str, object], allowed: Sequence[str]) -> None:
    for name, value in given.items():
        if name not in allowed:
            raise ArgumentError(
                f"{name} must be left out {what}, got {value}; what counts is {', '.join(allowed)}"
            )
