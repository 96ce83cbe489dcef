"""Decode steps as CUDA graphs, one for each of a ladder of batch sizes; decides nothing.

A graph holds a whole step: the tokens of the step before, the model, the logits and the choice of
the next tokens. What changes from step to step lies in one buffer, which is filled on the host and
copied at once; lengths and pages are read on the device. Rows that pad a batch to the size of its
graph have slot -1 and no keys: they write nothing and attend to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from flashpage.cache.kv_cache import KVCache
from flashpage.engine.config import EngineConfig
from flashpage.engine.plain_sampling import PlainSampling
from flashpage.engine.request import Sequence
from flashpage.layers.attention import AttentionMetadata, DecodeBatch
from flashpage.layers.sampler import sample_plain


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that have a graph: finer for small ones, where padding costs more."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16)]
    largest = max_num_seqs if max_num_seqs <= 256 else -(-max_num_seqs // 32) * 32
    sizes += range(288, largest + 1, 32)
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


def padded_rows(max_num_seqs: int) -> int:
    """Rows of the largest graph."""
    return ladder(max_num_seqs)[-1]


class Graph(Protocol):
    """Something that does the same work on the same memory again and again."""

    def replay(self) -> None:
        """Do it."""


Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]


def cuda_capture() -> Capture:
    """Makes CUDA graphs of functions; with each, the tensor that a replay leaves its result in.

    The function runs once before, so that every kernel is compiled and loaded. The graphs share
    one pool of memory: no two of them run at a time.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(body: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            body()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph, result

    return capture


@dataclass(frozen=True)
class Inputs:
    """What a step of `size` rows is told; views of one buffer, on the host or on the device.

    source: row of the last step's sampled tokens that this row starts from, -1: `token_ids`.
    """

    uniform: Tensor
    temperature: Tensor
    min_p: Tensor
    source: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    cache_seqlens: Tensor
    block_table: Tensor

    @staticmethod
    def words(size: int, table_width: int) -> int:
        """32-bit words of the buffer."""
        return size * (2 + 7 + table_width)

    @classmethod
    def of(cls, buffer: Tensor, size: int, table_width: int) -> Inputs:
        """The views into an int32 buffer."""
        parts = buffer[: cls.words(size, table_width)].split(
            [2 * size, *[size] * 7, size * table_width]
        )
        return cls(
            parts[0].view(torch.float64),
            parts[1].view(torch.float32),
            parts[2].view(torch.float32),
            *parts[3:8],
            parts[8].view(size, table_width),
        )


class DecodeGraphs:
    """Graphs of `model` over `kv_cache`, captured when a batch first needs them.

    Args:
        sampled: int64, at least `padded_rows(max_num_seqs)`: tokens of the last step, which each
            replay reads and then overwrites with its own.
        capture: makes a graph of a function; tests pass one that calls the function again.
    """

    def __init__(
        self,
        model: nn.Module,
        kv_cache: KVCache,
        config: EngineConfig,
        sampled: Tensor,
        capture: Capture,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._sampled = sampled
        self._capture = capture
        self._sizes = ladder(config.max_num_seqs)
        self._table_width = min(config.num_pages(config.max_model_len), config.num_blocks)
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}
        words = Inputs.words(self._sizes[-1], self._table_width)
        device = sampled.device
        self._buffer = torch.zeros(words, dtype=torch.int32, device=device)
        # Two, in turn: the copy of the last step's may still be under way.
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(2)
        ]

    def replay(self, sequences: list[Sequence], sampling: PlainSampling) -> Tensor:
        """One more token of each sequence.

        Returns:
            logits `[at least len(sequences), vocab_size]` in the model's dtype, valid until the
            next call. The tokens that plain sampling takes are the first rows of `sampled`.
        """
        size = self._sizes[bisect_left(self._sizes, len(sequences))]
        self._hosts.reverse()
        host = self._hosts[0]
        _fill(Inputs.of(host, size, self._table_width), sequences, sampling, self._kv_cache)
        words = Inputs.words(size, self._table_width)
        if size not in self._graphs:
            self._graphs[size] = self._new_graph(size)
        self._buffer[:words].copy_(host[:words], non_blocking=True)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits

    def capture_all(self) -> None:
        """Capture what has not been needed yet, the largest first: its memory serves the others."""
        for size in reversed(self._sizes):
            if size not in self._graphs:
                self._graphs[size] = self._new_graph(size)

    def _new_graph(self, size: int) -> tuple[Graph, Tensor]:
        inputs = Inputs.of(self._buffer, size, self._table_width)
        # What runs before the first replay: rows that pad; the last step's tokens are kept.
        self._buffer.zero_()
        inputs.slots.fill_(-1)
        before = self._sampled.clone()
        result = self._capture(lambda: self._step(inputs))
        self._sampled.copy_(before)
        return result

    def _step(self, x: Inputs) -> Tensor:
        size = len(x.source)
        earlier = self._sampled[x.source.clamp(min=0)]
        input_ids = torch.where(x.source >= 0, earlier, x.token_ids.long())
        decode = DecodeBatch(0, size, x.cache_seqlens, x.block_table)
        metadata = AttentionMetadata(x.slots, decode, ())
        hidden = self._model(input_ids, x.positions, self._kv_cache, metadata)
        logits = self._model.compute_raw_logits(hidden)
        self._sampled[:size].copy_(sample_plain(logits, x.temperature, x.min_p, x.uniform))
        return logits


def _fill(x: Inputs, sequences: list[Sequence], sampling: PlainSampling, cache: KVCache) -> None:
    """Write a step's inputs, the rows that pad included."""
    n = len(sequences)
    block_size = cache.block_size
    computed = np.array([s.num_computed_tokens for s in sequences], dtype=np.int32)
    table = x.block_table.numpy()
    table[n:] = -1
    for row, sequence in zip(table, sequences, strict=False):
        row[: len(sequence.block_ids)] = sequence.block_ids
    pages = table[np.arange(n), computed // block_size]
    columns = (
        (x.temperature, sampling.temperature, 0.0),
        (x.min_p, sampling.min_p, 0.0),
        (x.uniform, sampling.uniform, 0.0),
        (x.source, [s.pending_row if s.num_pending else -1 for s in sequences], -1),
        (x.token_ids, [s.token_ids[-1] for s in sequences], 0),
        (x.positions, computed, 0),
        (x.slots, pages * block_size + computed % block_size, -1),
        (x.cache_seqlens, computed + 1, 0),
    )
    for tensor, values, padding in columns:
        column = tensor.numpy()
        column[:n] = values
        column[n:] = padding
