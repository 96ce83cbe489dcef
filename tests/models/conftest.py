"""Runs models step by step over a paged cache, with no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flashpage.cache.kv_cache import KVCache
from flashpage.layers.attention import SequenceSlice, build_attention_metadata
from flashpage.models.common import DecoderModel

BLOCK_SIZE = 16


class PagedRunner:
    """Sequences with pages of their own, scattered over a pool that is full of NaN at first."""

    def __init__(self, model: DecoderModel, num_sequences: int, max_length: int) -> None:
        config = model.config
        self.model = model
        self.lengths = [0] * num_sequences
        pages_each = -(-max_length // BLOCK_SIZE)
        num_blocks = pages_each * num_sequences + 3
        self.cache = KVCache(
            config.num_layers,
            num_blocks,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            model.dtype,
            "cpu",
        )
        self.cache.fill_(float("nan"))
        order = torch.randperm(num_blocks).tolist()
        self.blocks = [order[i * pages_each : (i + 1) * pages_each] for i in range(num_sequences)]

    def step(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Feed every sequence its next n tokens; the logits of each, `[n, vocab_size]`."""
        new = len(tokens[0])
        slices = [
            SequenceSlice(done, new, blocks)
            for done, blocks in zip(self.lengths, self.blocks, strict=True)
        ]
        metadata = build_attention_metadata(slices, BLOCK_SIZE, "cpu")
        positions = torch.cat([torch.arange(done, done + new) for done in self.lengths])
        with torch.inference_mode():
            flat = torch.tensor([token for row in tokens for token in row])
            hidden = self.model(flat, positions, self.cache, metadata)
            logits = self.model.compute_logits(hidden)
        self.lengths = [done + new for done in self.lengths]
        return list(logits.split(new))


@pytest.fixture
def paged_runner() -> type[PagedRunner]:
    """The class above."""
    return PagedRunner


@pytest.fixture
def logits_in_chunks() -> Callable[[DecoderModel, Sequence[int], int], Tensor]:
    """`(model, token ids, chunk size) -> [len(ids), vocab_size]`."""

    def run(model: DecoderModel, ids: Sequence[int], chunk: int) -> Tensor:
        runner = PagedRunner(model, 1, len(ids))
        parts = [runner.step([ids[i : i + chunk]])[0] for i in range(0, len(ids), chunk)]
        return torch.cat(parts)

    return run


@pytest.fixture
def greedy() -> Callable[[DecoderModel, Sequence[int], int], list[int]]:
    """`(model, prompt ids, n) -> the n most likely tokens, one after the other`."""

    def run(model: DecoderModel, prompt: Sequence[int], n: int) -> list[int]:
        runner = PagedRunner(model, 1, len(prompt) + n)
        tokens: list[int] = []
        step = list(prompt)
        for _ in range(n):
            tokens.append(runner.step([step])[0][-1].argmax().item())
            step = tokens[-1:]
        return tokens

    return run
