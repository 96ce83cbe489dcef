"""The engine's sizes, checked once; knows nothing of models or machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashpage.engine.values import show
from flashpage.errors import ArgumentError


def check_size(name: str, value: Any) -> None:
    """Raise `ArgumentError` unless `value` is an integer from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} = {show(value)} must be an integer from 1")


def check_log_stats(value: Any) -> None:
    """Raise `ArgumentError` unless `value` is None or a finite number above 0."""
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ArgumentError(f"log_stats = {show(value)} must be seconds above 0, or None")


def check_seed(value: Any) -> None:
    """Raise `ArgumentError` unless `value` is an integer of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 64:
        raise ArgumentError(f"seed = {show(value)} must be an integer from -2**63 to 2**64 - 1")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of an engine. Raises `ArgumentError` for a value out of its range.

    Attributes:
        num_blocks: pages of the KV cache.
        max_model_len: prompt and generated tokens of one sequence at most.
        block_size: tokens per page.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens computed per step; long prompts are cut into such chunks.
        attention_context: tokens of context at which attention costs a new token as much time as
            all the rest of the model: a chunk with a context counts for more than its tokens
            where it would delay others (see `Scheduler`). None: contexts cost nothing.
        enable_prefix_caching: keep the pages of finished requests for those that begin alike.
        seed: for requests that bring no seed of their own; an integer of 64 bits.
        overlap: schedule and launch a step while the one before it still runs, so that the host's
            work hides behind the device's. A stop that only the text or the token shows is found
            one step late: the token computed in vain is never shown.
        enforce_eager: no CUDA graphs: every kernel of every step is launched by the host.
        log_stats: a line of numbers on stderr every so many seconds of stepping; None: no lines.
        dtype, device: of the KV cache; the model's.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    attention_context: int | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    overlap: bool = False
    enforce_eager: bool = False
    log_stats: float | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "max_model_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
        ):
            check_size(name, getattr(self, name))
        if self.attention_context is not None:
            check_size("attention_context", self.attention_context)
        check_seed(self.seed)
        check_log_stats(self.log_stats)
        for name in ("enable_prefix_caching", "overlap", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} = {show(getattr(self, name))} must be True or False")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ArgumentError(
                f"max_num_batched_tokens = {show(self.max_num_batched_tokens)} is less than "
                f"max_num_seqs = {show(self.max_num_seqs)}: a step must have room for one token of "
                "every running sequence"
            )

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
