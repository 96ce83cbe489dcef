"""One step on tensors: chunks in, sampled tokens and log-probabilities out; decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from flashpage.attention.triton.runtime import can_compile_ahead, compiling_ahead, on_device
from flashpage.cache.kv_cache import KVCache
from flashpage.engine.company import Company
from flashpage.engine.config import EngineConfig
from flashpage.engine.cuda_graph import Capture, Ladder, Shape, StepGraphs, cuda_capture
from flashpage.engine.plain_sampling import Penalties, to_device
from flashpage.engine.request import Sequence
from flashpage.engine.scheduler import Chunk
from flashpage.engine.seeds import mix_seed, uniform
from flashpage.engine.token_counts import TokenCounts
from flashpage.layers.attention import (
    SequenceSlice,
    attention_order,
    build_attention_metadata,
)
from flashpage.layers.linear import FEW_ROWS
from flashpage.layers.penalties import count_tokens, penalize
from flashpage.layers.sampler import (
    RowSampling,
    TokenLogprobs,
    gather_logprobs,
    non_finite_rows,
    sample,
    sample_plain,
)

# Scoring a prompt needs a row of logits per token; a long chunk's are made this many at a time.
SCORED_ROWS = 64

_sequence_of, _start_of, _end_of, _is_last = map(itemgetter, range(4))  # of chunks


class Note(NamedTuple):
    """What a chunk has shown beside a token.

    logprobs: what was asked about the token.
    prompt_logprobs: for the prompt tokens that were owed and whose logits this chunk has made.
    error: why the sequence can not go on.
    """

    logprobs: TokenLogprobs | None = None
    prompt_logprobs: SequenceOf[TokenLogprobs] = ()
    error: str | None = None


class Choice(NamedTuple):
    """The tokens of a step, one per sequence that samples; by index, what few have beside it."""

    token_ids: list[int]
    notes: dict[int, Note]


class Sampled(Protocol):
    """The tokens of a step, some time after it was launched."""

    def wait(self) -> None:
        """Return when they are there."""

    def choice(self) -> Choice:
        """What they are, after `wait`."""


class StepResult(NamedTuple):
    """What computing the chunks has shown, in columns, as there is a token of each of hundreds.

    token_ids: of each chunk the token after it; None where none was to be chosen, -1 with an error.
    notes: by index of the chunk, for the few that have one.
    """

    chunks: list[Chunk]
    token_ids: SequenceOf[int | None]
    notes: dict[int, Note]


@dataclass(frozen=True)
class Launch:
    """A step that the device computes; `wait` for what it shows."""

    chunks: list[Chunk]
    samples: list[bool]
    """whether the token after each chunk is chosen"""
    sampling: list[Sequence]
    """for whom, in the order of their chunks"""
    rows: list[int]
    """where the device keeps each one's token"""
    sampled: Sampled
    scores: dict[int, Note]
    """by index of the chunk, what is known before: of prompts that are scored"""

    def wait(self) -> None:
        """Return when the device is done."""
        self.sampled.wait()

    def result(self) -> StepResult:
        """What it has shown, after `wait`."""
        choice = self.sampled.choice()
        token_ids: SequenceOf[int | None] = choice.token_ids
        places: SequenceOf[int] = range(len(self.chunks))
        if len(self.sampling) < len(self.chunks):
            places = list(compress(places, self.samples))
            by_place = dict(zip(places, choice.token_ids, strict=True))
            token_ids = [by_place.get(i) for i in range(len(self.chunks))]
        notes = dict(self.scores)
        for i, note in choice.notes.items():
            scores = notes.get(places[i], Note())
            error = note.error or scores.error
            notes[places[i]] = Note(note.logprobs, scores.prompt_logprobs, error)
        return StepResult(self.chunks, token_ids, notes)


class Runner:
    """Runs `model` (a module as in `flashpage.models`) over `kv_cache`.

    Args:
        capture: makes the graphs of decode steps; None: CUDA graphs on a GPU, unless
            `enforce_eager`, and none elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        kv_cache: KVCache,
        config: EngineConfig,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._config = config
        self._device = torch.device(config.device)
        self._ladder = Ladder(config)
        self.wait_seconds = 0.0
        """spent until the device was ready, in all calls"""
        self._counts: TokenCounts | None = None  # when the first penalty is asked for
        self._company = Company([])
        # The tokens of the last step, which the next one may start from before the host knows them.
        self._sampled = torch.zeros(self._ladder.max_rows, dtype=torch.int64, device=self._device)
        # Where the host finds them, in turn: two steps are under way at most.
        self._fetched: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        if self._device.type == "cuda":
            for _ in range(3):
                buffer = torch.empty(len(self._sampled), dtype=torch.int64, pin_memory=True)
                self._fetched.append((buffer, torch.cuda.Event()))
        if capture is None and self._device.type == "cuda" and not config.enforce_eager:
            with on_device(self._device):
                capture = cuda_capture()
        self._graphs = (
            StepGraphs(model, kv_cache, config, self._ladder, self._sampled, capture)
            if capture
            else None
        )

    @torch.inference_mode()
    def launch(self, chunks: SequenceOf[Chunk]) -> Launch:
        """Begin to compute the chunks in one batch.

        On a CPU they are computed when this returns. Keeps nothing but the cache's content and the
        last step's tokens on the device.
        """
        with on_device(self._device):
            return self._launch(chunks)

    def _launch(self, chunks: SequenceOf[Chunk]) -> Launch:
        if self._graphs is not None and not any(
            s.scores_prompt and s.next_prompt_logprob is not None for s in map(_sequence_of, chunks)
        ):
            decodes: list[Chunk] = []
            others: list[Chunk] = []
            for chunk in chunks:
                _, start, end, _, _ = chunk
                (decodes if 0 < start == end - 1 else others).append(chunk)
            # Longest contexts first: what a GPU begins last is to be short, lest all wait for it.
            decodes.sort(key=_start_of, reverse=True)
            shape = self._ladder.fit(len(decodes), len(others), sum(c.num_tokens for c in others))
            return self._replay(self._graphs, shape, decodes, others)
        slices = {chunk: _slice(chunk) for chunk in chunks}
        chunks = sorted(chunks, key=lambda chunk: attention_order(slices[chunk]))
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        sampled_here = [chunk.is_last and chunk.sequence.generates for chunk in chunks]
        rows = [end - 1 for end in compress(ends, sampled_here)]
        sampling = list(compress(chunks, sampled_here))
        scored = [i for i, c in enumerate(chunks) if c.sequence.next_prompt_logprob is not None]
        # Of a row each they are all rows, in order.
        some = len(rows) < ends[-1]
        wanted = rows if some and not scored else None
        hidden = self._forward(chunks, [slices[chunk] for chunk in chunks], wanted)
        scores = {
            i: self._score_prompt(chunks[i], hidden[ends[i] - chunks[i].num_tokens : ends[i]])
            for i in scored
        }
        chosen = hidden[rows] if some and scored else hidden
        sampled = self._sample(chosen, sampling)
        sequences = [chunk.sequence for chunk in sampling]
        return Launch(chunks, sampled_here, sequences, list(range(len(rows))), sampled, scores)

    def wait(self, launch: Launch) -> StepResult:
        """What a step has shown, when the device is done with it."""
        with self._waiting():
            launch.wait()
        return launch.result()

    def forget(self, sequence: Sequence) -> None:
        """Keep nothing of a sequence that has ended; a step that runs may still have it."""
        self._company = Company([])
        if self._counts is not None:
            self._counts.forget(sequence)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.wait_seconds += time.perf_counter() - began

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """Compile what a first short prompt and its decodes need, kernel beside kernel."""
        with on_device(self._device):
            if self._graphs is not None:
                self._compile_steps(self._graphs, self._ladder.first())
            elif can_compile_ahead(self._device):
                with compiling_ahead(self._device):
                    for context, num_tokens in ((0, FEW_ROWS), (0, 64), (FEW_ROWS, 1)):
                        self._run_padding(context, num_tokens)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run what steps are made of once, on tokens that are not stored; not on a CPU."""
        if self._device.type != "cuda":
            return
        with on_device(self._device):
            if self._graphs is not None:
                self._compile_steps(self._graphs, self._ladder.distinct())
            for context in (0, 1):  # fresh keys, and keys in pages
                self._run_padding(context, self._config.max_num_batched_tokens)
            if self._graphs is not None:
                self._graphs.capture_usual()
            torch.cuda.synchronize()

    def _compile_steps(self, graphs: StepGraphs, shapes: list[Shape]) -> None:
        """Compile what these shapes need, kernel beside kernel, where that can be done."""
        if can_compile_ahead(self._device):
            with compiling_ahead(self._device):
                for shape in shapes:
                    graphs.run_padding(shape)

    def _run_padding(self, context: int, num_tokens: int) -> None:
        """A chunk of one sequence that stores nothing, and the choice of its next token."""
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        pages = [0] * self._config.num_pages(context + num_tokens)
        metadata = build_attention_metadata(
            [SequenceSlice(context, num_tokens, pages)], self._kv_cache.block_size, self._device
        )
        metadata.slot_mapping.fill_(-1)
        hidden = self._model(ids, torch.zeros_like(ids), self._kv_cache, metadata)
        logits = self._model.compute_logits(hidden[-1:])
        nothing = torch.zeros(1, device=self._device)
        double = nothing.double()
        sample_plain(logits, nothing, nothing, double, nothing.int(), double)

    def _replay(
        self, graphs: StepGraphs, shape: Shape, decodes: list[Chunk], others: list[Chunk]
    ) -> Launch:
        chunks = decodes + others
        row_of = [*range(len(decodes)), *range(shape.decodes, shape.decodes + len(others))]
        every = list(map(_sequence_of, chunks))
        company = self._company_of(every)
        sampled_here = list(map(_is_last, chunks))
        if not company.all_generate:
            sampled_here = [a and s.generates for a, s in zip(sampled_here, every, strict=True)]
        rows = list(compress(row_of, sampled_here))
        sequences = list(compress(every, sampled_here))
        sampling = company.plain_sampling(list(map(_end_of, chunks)))
        penalties = self._penalties(company, sampled_here)
        counts = None if penalties is None else self._token_counts().table
        with self._repeatable(partial(graphs.undo, graphs.number)):
            table = company.block_table(graphs.table_width)
            hidden = graphs.replay(shape, decodes, others, table, sampling, penalties, counts)
            by_host = self._by_host(company, sequences)
            if by_host:
                logits = self._model.compute_logits(hidden[[rows[i] for i in by_host]])
                sampled = self._choose(logits, sequences, rows, by_host)
            else:
                sampled = self._fetch(sequences, rows)
        return Launch(chunks, sampled_here, sequences, rows, sampled, {})

    def _forward(
        self, chunks: list[Chunk], slices: list[SequenceSlice], rows: list[int] | None
    ) -> Tensor:
        """Hidden states of all chunks, one after the other: of these rows, None: `[num_tokens,
        hidden_size]`."""
        token_ids: list[int] = []
        positions: list[int] = []
        pending: list[tuple[int, int]] = []
        for chunk in chunks:
            known = chunk.sequence.token_ids
            token_ids += known[chunk.start : chunk.end]
            if chunk.end > len(known):
                pending.append((len(token_ids), chunk.sequence.pending_row))
                token_ids.append(0)
            positions += range(chunk.start, chunk.end)
        metadata = build_attention_metadata(slices, self._kv_cache.block_size, self._device)
        input_ids = torch.tensor(token_ids, device=self._device)
        if pending:
            places, sampled_rows = torch.tensor(pending, device=self._device).unbind(1)
            # A row without a token (-1) ends its sequence; the host does not know it yet.
            input_ids[places] = self._sampled[sampled_rows].clamp(min=0)
        return self._model(
            input_ids, torch.tensor(positions, device=self._device), self._kv_cache, metadata, rows
        )

    def _sample(self, hidden: Tensor, chunks: list[Chunk]) -> Sampled:
        if not chunks:
            return _Here(Choice([], {}))
        sequences = [chunk.sequence for chunk in chunks]
        logits = self._model.compute_logits(hidden)
        places = list(range(len(sequences)))
        if self._device.type == "cpu" and not self._config.overlap and self._graphs is None:
            return self._choose(logits, sequences, places, places)
        company = self._company_of(sequences)
        penalties = self._penalties(company, [True] * len(sequences))
        if penalties is not None:
            rows, *amounts = to_device(penalties, self._device)
            logits = penalize(logits, self._token_counts().table, rows, *amounts)
        sampling = company.plain_sampling([chunk.end for chunk in chunks])
        tokens = sample_plain(logits, *to_device(sampling, self._device))
        by_host = self._by_host(company, sequences)
        before = self._sampled.clone()
        with self._repeatable(lambda: self._sampled.copy_(before)):
            self._sampled[: len(sequences)].copy_(tokens)
            if by_host:
                sampled = self._choose(logits[by_host], sequences, places, by_host)
            else:
                sampled = self._fetch(sequences, places)
            if penalties is not None:
                count_tokens(self._token_counts().table, rows, tokens)
        return sampled

    @contextmanager
    def _repeatable(self, undo: Callable[[], object]) -> Iterator[None]:
        """If the block fails, all is as it was before it, for the step to be repeated."""
        fetched = list(self._fetched)
        try:
            yield
        except BaseException:  # Ctrl-C too
            # The next step may not take the memory that the one under way is still read from.
            self._fetched = deque(fetched)
            undo()
            raise

    def _company_of(self, sequences: list[Sequence]) -> Company:
        if sequences != self._company.sequences:
            self._company = Company(sequences)
        return self._company

    def _penalties(self, company: Company, is_sampled: list[bool]) -> Penalties | None:
        """What the device is told of penalties, if there are any."""
        if not company.is_penalized:
            return None
        counts = self._token_counts()
        rows = [
            counts.row_of(sequence) if sampled and sequence.is_penalized else 0
            for sequence, sampled in zip(company.sequences, is_sampled, strict=True)
        ]
        return company.penalties(rows)

    def _token_counts(self) -> TokenCounts:
        if self._counts is None:
            vocab_size = self._model.config.vocab_size
            self._counts = TokenCounts(self._config.max_num_seqs, vocab_size, self._device)
        return self._counts

    @staticmethod
    def _by_host(company: Company, sampling: list[Sequence]) -> list[int]:
        """Those of `sampling` whose token is not chosen on the device."""
        if company.is_plain:
            return []
        return [
            i
            for i, s in enumerate(sampling)
            if not s.is_plain or s.num_chosen_tokens < s.params.min_tokens
        ]

    def _choose(
        self, logits: Tensor, sequences: list[Sequence], places: list[int], by_host: list[int]
    ) -> Sampled:
        """Any kind of sampling for those in `by_host`, whose logits these are, finished when this
        returns.

        The device has chosen for the rest, and is told these tokens too, in their `places`.
        """
        wishes = [_row_sampling(sequences[i]) for i in by_host]
        if self._device.type == "cuda":
            with self._waiting():
                torch.cuda.current_stream().synchronize()
        chosen = sample(logits, wishes)
        if len(by_host) == len(sequences) and not self._config.overlap:
            choice = Choice([-1] * len(by_host), {})
        else:
            tokens = torch.tensor([max(row.token_id, 0) for row in chosen], device=self._device)
            self._sampled[[places[i] for i in by_host]] = tokens
            sampled = self._fetch(sequences, places)
            with self._waiting():
                sampled.wait()
            choice = sampled.choice()
        for i, row in zip(by_host, chosen, strict=True):
            choice.token_ids[i] = row.token_id
            choice.notes[i] = Note(row.logprobs, error=row.error)
        return _Here(choice)

    def _fetch(self, sequences: list[Sequence], rows: list[int]) -> Sampled:
        """Send the tokens of plain sampling to the host."""
        count = rows[-1] + 1 if rows else 0
        tokens = self._sampled[:count]
        if self._device.type == "cpu":
            return _Fetched(tokens.clone(), None, sequences, rows)
        self._fetched.rotate()
        buffer, event = self._fetched[0]
        host = buffer[:count]
        host.copy_(tokens, non_blocking=True)
        event.record()
        return _Fetched(host, event, sequences, rows)

    def _score_prompt(self, chunk: Chunk, hidden: Tensor) -> Note:
        """The owed log-probabilities whose logits lie in this chunk, or why there are none."""
        sequence = chunk.sequence
        owed = sequence.next_prompt_logprob
        assert owed is not None
        # The token at position p is predicted by the row of position p - 1.
        stop = min(chunk.end + 1, sequence.request.num_prompt_tokens)
        result: list[TokenLogprobs] = []
        for first in range(owed, stop, SCORED_ROWS):
            last = min(first + SCORED_ROWS, stop)
            logits = self._model.compute_logits(
                hidden[first - 1 - chunk.start : last - 1 - chunk.start]
            )
            for row, error in non_finite_rows(logits).items():
                return Note(error=f"{error}, after prompt token {first - 1 + row}")
            targets = torch.tensor(sequence.token_ids[first:last], device=logits.device)
            count = sequence.params.prompt_logprobs or 0
            result += gather_logprobs(logits, targets, [count] * (last - first))
        return Note(prompt_logprobs=result)


@dataclass(frozen=True)
class _Here:
    """Tokens that the host has."""

    chosen: Choice

    def wait(self) -> None:
        pass

    def choice(self) -> Choice:
        return self.chosen


@dataclass(frozen=True)
class _Fetched:
    """Tokens on their way to the host's memory, there after `event`."""

    tokens: Tensor
    event: torch.cuda.Event | None
    sequences: list[Sequence]
    rows: list[int]

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def choice(self) -> Choice:
        token_ids = self.tokens.tolist()
        if len(self.rows) < len(token_ids):
            token_ids = [token_ids[row] for row in self.rows]
        errors = {}
        if min(token_ids, default=0) < 0:
            errors = {
                i: Note(error=_no_token(self.sequences[i]))
                for i, token_id in enumerate(token_ids)
                if token_id < 0
            }
        return Choice(token_ids, errors)


def _no_token(sequence: Sequence) -> str:
    reason = "the model's logits are not finite"
    params = sequence.params
    if not params.is_greedy:
        reason += (
            f", or temperature = {params.temperature} and min_p = {params.min_p} leave no "
            "distribution to draw from"
        )
    return reason


def _slice(chunk: Chunk) -> SequenceSlice:
    return SequenceSlice(
        num_computed_tokens=chunk.start,
        num_new_tokens=chunk.num_tokens,
        block_ids=chunk.sequence.block_ids,
    )


def _row_sampling(sequence: Sequence) -> RowSampling:
    """The sampler's view of a sequence, from its history alone: no step leaves a trace here."""
    params = sequence.params
    may_not_end = sequence.num_chosen_tokens < params.min_tokens
    drawn = 0.0  # nobody draws for a greedy one
    if not params.is_greedy:
        drawn = uniform(mix_seed(sequence.seed, sequence.num_chosen_tokens))
    seen: list[int] = []
    if params.repetition_penalty != 1.0:
        seen = [*sequence.request.prompt_token_set, *sequence.output_counts]
    return RowSampling(
        temperature=0.0 if params.is_greedy else params.temperature,
        uniform=drawn,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=float(np.float32(params.min_p)),  # as on the device
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        output_counts=sequence.output_counts,
        seen_tokens=seen,
        logit_bias=params.logit_bias,
        masked_tokens=sequence.end_token_ids if may_not_end else frozenset(),
        num_logprobs=params.logprobs,
    )
