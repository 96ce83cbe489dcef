"""Whole steps as CUDA graphs, one for each of a ladder of shapes; decides nothing.

A graph holds a step from end to end: the tokens of the step before, the model, the logits and the
choice of the next tokens. What changes from step to step lies in one buffer, which is filled on the
host and copied at once; lengths and pages are read on the device. What pads a step to the shape of
its graph has slot -1 and no keys: it writes nothing and attends to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from flashpage.cache.kv_cache import KVCache
from flashpage.engine.config import EngineConfig
from flashpage.engine.plain_sampling import Penalties, PlainSampling
from flashpage.engine.scheduler import Chunk
from flashpage.layers.attention import AttentionMetadata, DecodeBatch, PrefillBatch
from flashpage.layers.penalties import count_tokens, penalize
from flashpage.layers.sampler import sample_plain


class Shape(NamedTuple):
    """What a graph has room for: decodes (one token after a context), and chunks of prompts."""

    decodes: int
    chunks: int
    chunk_tokens: int

    @property
    def rows(self) -> int:
        """Tokens that are chosen: one per decode, then one per chunk."""
        return self.decodes + self.chunks

    @property
    def tokens(self) -> int:
        """Tokens that are computed: the decodes', then the chunks'."""
        return self.decodes + self.chunk_tokens


FEW_CHUNKS = 64
"""How many chunks a graph has room for up to ..."""
FEW_TOKENS = 2048
"""... so many tokens of theirs; beyond, for as many as sequences can run."""


LONE_TOKENS = (64, 128, 256, 384, 512)
"""Tokens of a lone chunk, in finer rungs: the end of a long prompt among decodes."""


class Ladder:
    """The shapes that have graphs: finer for decodes alone, which are most of all steps."""

    def __init__(self, config: EngineConfig) -> None:
        most = config.max_num_seqs
        alone = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, most + 32, 32)]
        mixed = [16, 64, *range(128, most + 128, 128)]
        self._alone = alone[: bisect_left(alone, most) + 1]
        self._mixed = [0, *mixed[: bisect_left(mixed, most) + 1]]
        budget = config.max_num_batched_tokens
        self._tokens = [n for n in (64, *(256 << i for i in range(30))) if n < budget] + [budget]
        self._lone_tokens = [n for n in LONE_TOKENS if n < budget]
        few = min(FEW_CHUNKS, most)
        self._chunks = [few if n <= FEW_TOKENS and n < budget else most for n in self._tokens]

    def fit(self, decodes: int, chunks: int, chunk_tokens: int) -> Shape:
        """The smallest shape with room for these."""
        if chunks == 0:
            return Shape(self._alone[bisect_left(self._alone, decodes)], 0, 0)
        decodes = self._mixed[bisect_left(self._mixed, decodes)]
        if chunks == 1 and chunk_tokens <= max(self._lone_tokens, default=0):
            return Shape(
                decodes, 1, self._lone_tokens[bisect_left(self._lone_tokens, chunk_tokens)]
            )
        rung = max(bisect_left(self._tokens, chunk_tokens), bisect_left(self._chunks, chunks))
        return Shape(decodes, self._chunks[rung], self._tokens[rung])

    def usual(self) -> list[Shape]:
        """Shapes that most runs need, the largest first."""
        rungs = [
            *reversed(list(zip(self._chunks, self._tokens, strict=True))),
            *((1, tokens) for tokens in reversed(self._lone_tokens)),
        ]
        mixed = [
            Shape(decodes, chunks, tokens)
            for chunks, tokens in rungs
            for decodes in reversed(self._mixed)
        ]
        alone = [Shape(decodes, 0, 0) for decodes in reversed(self._alone)]
        return list(dict.fromkeys(mixed + alone))

    def first(self) -> list[Shape]:
        """The shapes of a first short prompt, and of its decodes."""
        return [self.fit(0, 1, 1), self.fit(1, 0, 0)]

    def distinct(self) -> list[Shape]:
        """Of the usual shapes those whose kernels, nearly always, the others are made of."""
        powers = {1 << i for i in range(16)} | {self._alone[-1]}
        alone = [Shape(decodes, 0, 0) for decodes in self._alone if decodes in powers]
        return alone + [shape for shape in self.usual() if not shape.decodes]

    @property
    def max_rows(self) -> int:
        """Rows of the largest shape."""
        return max(self._alone[-1], self._mixed[-1] + self._chunks[-1])

    @property
    def largest(self) -> list[Shape]:
        """Shapes that bound all others in what they are told."""
        return [
            Shape(self._alone[-1], 0, 0),
            Shape(self._mixed[-1], self._chunks[-1], self._tokens[-1]),
        ]


class Graph(Protocol):
    """Something that does the same work on the same memory again and again."""

    def replay(self) -> None:
        """Do it."""


Capture = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]


def cuda_capture() -> Capture:
    """Makes CUDA graphs of functions; with each, the tensor that a replay leaves its result in.

    The function runs once before, so that every kernel is compiled and loaded. The graphs share
    one pool of memory: no two of them run at a time. And one stream: what torch frees on a stream
    it gives again to that stream only, cuBLAS's workspace included.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()

    def capture(body: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
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
    """What a step is told; views of one buffer: tensors on the device, arrays on the host.

    Per row: uniform and top_p (float64), the five from temperature on (float32), counts_row (of the
    table of counts, 0: no penalties), top_k, last (the row's token). Per token: source (row of the
    last step's chosen tokens that it is, -1: `token_ids`), token_ids, positions, slots. Per decode:
    cache_seqlens, block_table. Per chunk: cu_seqlens_q and _k, chunk_table.
    number (int64): the step's own.
    """

    uniform: Any
    top_p: Any
    number: Any
    temperature: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    counts_row: Any
    top_k: Any
    last: Any
    source: Any
    token_ids: Any
    positions: Any
    slots: Any
    cache_seqlens: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    chunk_table: Any

    @property
    def sampling(self) -> tuple[Any, ...]:
        """In the order of `PlainSampling`."""
        return self.temperature, self.min_p, self.uniform, self.top_k, self.top_p

    @property
    def penalties(self) -> tuple[Any, ...]:
        """In the order of `Penalties`."""
        return self.counts_row, self.repetition, self.presence, self.frequency

    @staticmethod
    def sizes(shape: Shape, table_width: int) -> list[int]:
        """32-bit words of each."""
        ends = shape.chunks + 1 if shape.chunks else 0
        return [
            *[2 * shape.rows] * 2,
            2,
            *[shape.rows] * 8,
            *[shape.tokens] * 4,
            shape.decodes,
            shape.decodes * table_width,
            ends,
            ends,
            shape.chunks * table_width,
        ]

    @classmethod
    def of(cls, buffer: Tensor, shape: Shape, table_width: int) -> Inputs:
        """The views into an int32 buffer."""
        sizes = cls.sizes(shape, table_width)
        parts = list(buffer[: sum(sizes)].split(sizes))
        parts[:2] = (part.view(torch.float64) for part in parts[:2])
        parts[2] = parts[2].view(torch.int64)
        parts[3:8] = (part.view(torch.float32) for part in parts[3:8])
        parts[16] = parts[16].view(shape.decodes, table_width)
        parts[19] = parts[19].view(shape.chunks, table_width)
        return cls(*parts)

    def numpy(self) -> Inputs:
        """The same memory, of the host, as arrays."""
        return Inputs(*(getattr(self, field.name).numpy() for field in fields(self)))


@dataclass(frozen=True)
class _StepGraph:
    """A graph, the hidden states that it leaves, and what is made of the buffers for its shape."""

    graph: Graph
    hidden: Tensor
    inputs: list[Inputs]
    """arrays, one of each host buffer"""
    sources: list[Tensor]
    """of the host buffers, in the same order, what is copied to ..."""
    target: Tensor
    counts: Tensor | None
    """the table of counts, with penalties, and which rows of it the last replay counted in"""
    counts_row: Tensor


class StepGraphs:
    """Graphs of `model` over `kv_cache`, captured when a step first needs them.

    Args:
        sampled: int64 `[ladder.max_rows]`: tokens that the last step chose, which each replay reads
            and then overwrites with its own.
        capture: makes a graph of a function; tests pass one that calls the function again.
    """

    def __init__(
        self,
        model: nn.Module,
        kv_cache: KVCache,
        config: EngineConfig,
        ladder: Ladder,
        sampled: Tensor,
        capture: Capture,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._ladder = ladder
        self._sampled = sampled
        # What the last step that ran found in `sampled`, and its number.
        self._before = sampled.new_zeros(len(sampled) + 1)
        self.number = 0
        """of the step that was asked for last"""
        self._capture = capture
        self.table_width = min(config.num_pages(config.max_model_len), config.num_blocks)
        self._graphs: dict[tuple[Shape, bool], _StepGraph] = {}
        self._last: _StepGraph | None = None
        words = max(sum(Inputs.sizes(s, self.table_width)) for s in ladder.largest)
        device = sampled.device
        self._buffer = torch.zeros(words, dtype=torch.int32, device=device)
        # Two, in turn: the copy of the last step's may still be under way.
        self._turn = 0
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(2)
        ]

    def replay(
        self,
        shape: Shape,
        decodes: list[Chunk],
        chunks: list[Chunk],
        block_table: np.ndarray,
        sampling: PlainSampling,
        penalties: Penalties | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Compute a step of `shape`: `decodes`, those with the longest context first, then
        `chunks`, whose blocks are the rows of `block_table` (`table_width` wide); with penalties
        from the table `counts`, which is always the same (both or none).

        Returns:
            `[shape.rows, hidden_size]`, the last hidden state of decode `i` in row `i`, and of
            chunk `j` in row `shape.decodes + j`; valid until the next call. The tokens that plain
            sampling takes are the same rows of `sampled`.
        """
        key = shape, penalties is not None
        step = self._graphs.get(key)
        if step is None:
            step = self._graphs[key] = self._new_graph(shape, counts)
        self._turn = 1 - self._turn
        inputs = step.inputs[self._turn]
        fill(inputs, decodes, chunks, block_table, sampling, self._kv_cache.block_size)
        if penalties is not None:
            _fill_rows(inputs, inputs.penalties, penalties, len(decodes))
        # Known before it runs: an interrupt may be raised when it does, or just before.
        self._last = step
        self.number += 1
        inputs.number[0] = self.number
        step.target.copy_(step.sources[self._turn], non_blocking=True)
        step.graph.replay()
        return step.hidden

    def capture_usual(self) -> None:
        """Capture what most runs need, the largest first: its memory serves the others."""
        for shape in self._ladder.usual():
            if (shape, False) not in self._graphs:
                self._graphs[shape, False] = self._new_graph(shape, None)

    def run_padding(self, shape: Shape) -> None:
        """A step of nothing but padding, without a graph."""
        with self._padding(shape) as inputs:
            self._step(shape, inputs, None)

    def _new_graph(self, shape: Shape, counts: Tensor | None) -> _StepGraph:
        # What runs before the first replay is a step of padding.
        with self._padding(shape) as inputs:
            graph, hidden = self._capture(lambda: self._step(shape, inputs, counts))
        width = self.table_width
        words = sum(Inputs.sizes(shape, width))
        return _StepGraph(
            graph,
            hidden,
            [Inputs.of(host, shape, width).numpy() for host in self._hosts],
            [host[:words] for host in self._hosts],
            self._buffer[:words],
            counts,
            inputs.counts_row,
        )

    @contextmanager
    def _padding(self, shape: Shape) -> Iterator[Inputs]:
        """Inputs that store nothing and attend to nothing; the last step's tokens are kept."""
        inputs = Inputs.of(self._buffer, shape, self.table_width)
        self._buffer.zero_()
        inputs.slots.fill_(-1)
        before = self._sampled.clone()
        try:
            yield inputs
        finally:
            self._sampled.copy_(before)

    def undo(self, number: int) -> None:
        """Give `sampled` and the counts back what they held after the step of this `number`, which
        was the last or is the one before it, so that what follows it can be repeated. Whether that
        ran is known to the device alone."""
        if self._last is None or self.number == number:
            return
        before, last_run = self._before[:-1], self._before[-1:]
        has_run = last_run == self.number
        if self._last.counts is not None:
            rows = torch.where(has_run, self._last.counts_row, 0)
            count_tokens(self._last.counts, rows, self._sampled[: len(rows)], times=-1)
        self._sampled.copy_(torch.where(has_run, before, self._sampled))
        self.number += 1  # not twice

    def _step(self, shape: Shape, x: Inputs, counts: Tensor | None) -> Tensor:
        torch.cat((self._sampled, x.number), out=self._before)
        # A row without a token (-1) ends its sequence; the host does not know it yet.
        earlier = self._sampled[x.source.clamp(min=0)].clamp(min=0)
        input_ids = torch.where(x.source >= 0, earlier, x.token_ids.long())
        decode = prefill = None
        if shape.decodes:
            decode = DecodeBatch(
                0, shape.decodes, x.cache_seqlens, x.block_table, longest_first=True
            )
        if shape.chunks:
            prefill = PrefillBatch(
                start=shape.decodes,
                end=shape.tokens,
                cu_seqlens_q=x.cu_seqlens_q,
                cu_seqlens_k=x.cu_seqlens_k,
                max_seqlen_q=shape.chunk_tokens,
                max_seqlen_k=self.table_width * self._kv_cache.block_size,
                block_table=x.chunk_table,
            )
        metadata = AttentionMetadata(x.slots, decode, (prefill,) if prefill else ())
        hidden = self._model(input_ids, x.positions, self._kv_cache, metadata)
        if shape.chunks:
            hidden = hidden[x.last]
        logits = self._model.compute_raw_logits(hidden)
        if counts is not None:
            logits = penalize(logits, counts, *x.penalties)
        tokens = sample_plain(logits, *x.sampling)
        if counts is not None:
            count_tokens(counts, x.counts_row, tokens)
        self._sampled[: shape.rows].copy_(tokens)
        return hidden


def fill(
    x: Inputs,
    decodes: list[Chunk],
    chunks: list[Chunk],
    block_table: np.ndarray,
    sampling: PlainSampling,
    block_size: int,
) -> None:
    """Write a step's inputs, arrays, on the host, padding included."""
    _fill_rows(x, x.sampling, sampling, len(decodes))
    for column in (x.source, x.slots):
        column[:] = -1
    for column in (x.token_ids, x.positions, x.cache_seqlens):
        column[:] = 0
    x.block_table[: len(decodes)] = block_table[: len(decodes)]
    x.block_table[len(decodes) :] = -1
    x.chunk_table[: len(chunks)] = block_table[len(decodes) :]
    x.chunk_table[len(chunks) :] = -1
    _fill_decodes(x, decodes, block_size)
    if len(x.chunk_table):
        _fill_chunks(x, chunks, block_size)


def _fill_rows(
    x: Inputs, columns: tuple[np.ndarray, ...], values: tuple[np.ndarray, ...], num_decodes: int
) -> None:
    """Values of the decodes, then of the chunks; 0 for padding."""
    first_chunk = len(x.cache_seqlens)
    num_chunks = len(values[0]) - num_decodes
    for column, of_all in zip(columns, values, strict=True):
        column[:] = 0
        column[:num_decodes] = of_all[:num_decodes]
        column[first_chunk : first_chunk + num_chunks] = of_all[num_decodes:]


def _fill_decodes(x: Inputs, decodes: list[Chunk], block_size: int) -> None:
    if not decodes:
        return
    n = len(decodes)
    sequences = list(map(itemgetter(0), decodes))
    starts = list(map(itemgetter(1), decodes))
    positions = np.array(starts, dtype=np.int32)
    pages = x.block_table[np.arange(n), positions // block_size]
    source = [s.pending_row if s.length > len(s.token_ids) else -1 for s in sequences]
    x.source[:n] = source
    if -1 in source:
        # Not the last token: a step may have had room for just one in the middle of a prompt.
        x.token_ids[:n] = [
            0 if s.num_pending else s.token_ids[start]
            for s, start in zip(sequences, starts, strict=True)
        ]
    x.positions[:n] = positions
    x.slots[:n] = pages * block_size + positions % block_size
    x.cache_seqlens[:n] = positions + 1


def _fill_chunks(x: Inputs, chunks: list[Chunk], block_size: int) -> None:
    cu_q, cu_k, last = x.cu_seqlens_q, x.cu_seqlens_k, x.last
    last[:] = 0
    cu_q[0] = cu_k[0] = 0
    begin = first = len(x.cache_seqlens)
    for i, (chunk, pages) in enumerate(zip(chunks, x.chunk_table, strict=False)):
        end = begin + chunk.num_tokens
        known = chunk.sequence.token_ids[chunk.start : chunk.end]
        x.token_ids[begin : begin + len(known)] = known
        if len(known) < chunk.num_tokens:
            x.source[end - 1] = chunk.sequence.pending_row
        positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
        x.positions[begin:end] = positions
        x.slots[begin:end] = pages[positions // block_size] * block_size + positions % block_size
        cu_q[i + 1] = cu_q[i] + chunk.num_tokens
        cu_k[i + 1] = cu_k[i] + chunk.end
        last[first + i] = end - 1
        begin = end
    cu_q[len(chunks) + 1 :] = cu_q[len(chunks)]
    cu_k[len(chunks) + 1 :] = cu_k[len(chunks)]
    last[:first] = np.arange(first)
