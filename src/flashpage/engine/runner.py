"""One step on tensors: chunks in, sampled tokens and log-probabilities out; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from flashpage.cache.kv_cache import KVCache
from flashpage.engine.request import Sequence, mix_seed
from flashpage.engine.scheduler import Chunk
from flashpage.layers.attention import (
    SequenceSlice,
    attention_order,
    build_attention_metadata,
)
from flashpage.layers.sampler import (
    RowSampling,
    SampledRow,
    TokenLogprobs,
    gather_logprobs,
    non_finite_rows,
    sample,
)

# Scoring a prompt needs a row of logits per token; a long chunk's are made this many at a time.
SCORED_ROWS = 64


@dataclass(frozen=True)
class ChunkResult:
    """What computing a chunk has shown.

    sampled: the next token, where the chunk reached the end of the known ones.
    prompt_logprobs: for the prompt tokens that were owed and whose logits this chunk has made.
    error: why the sequence can not go on.
    """

    chunk: Chunk
    sampled: SampledRow | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None


class Runner:
    """Runs `model` (`forward` and `compute_logits` as in `flashpage.models`) over `kv_cache`."""

    def __init__(
        self,
        model: nn.Module,
        kv_cache: KVCache,
        device: torch.device | str,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = device
        self._eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def run(self, chunks: SequenceOf[Chunk]) -> list[ChunkResult]:
        """Compute the chunks in one batch. Keeps no state but the cache's content."""
        slices = {chunk: _slice(chunk) for chunk in chunks}
        chunks = sorted(chunks, key=lambda chunk: attention_order(slices[chunk]))
        hidden = self._forward(chunks, [slices[chunk] for chunk in chunks])
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))

        scores = [
            self._score_prompt(chunk, hidden[end - chunk.num_tokens : end])
            for chunk, end in zip(chunks, ends, strict=True)
        ]
        sampling = [
            i
            for i, chunk in enumerate(chunks)
            if chunk.is_last and chunk.sequence.request.max_tokens > 0
        ]
        sampled = self._sample(
            hidden[[ends[i] - 1 for i in sampling]], [chunks[i].sequence for i in sampling]
        )
        rows = dict(zip(sampling, sampled, strict=True))
        results = []
        for i, (chunk, (logprobs, error)) in enumerate(zip(chunks, scores, strict=True)):
            row = rows.get(i)
            if row is not None and row.error is not None:
                row, error = None, row.error
            results.append(ChunkResult(chunk, row, logprobs, error))
        return results

    def _forward(self, chunks: list[Chunk], slices: list[SequenceSlice]) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]` of all chunks, one after the other."""
        token_ids: list[int] = []
        positions: list[int] = []
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
        metadata = build_attention_metadata(slices, self._kv_cache.block_size, self._device)
        return self._model(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            self._kv_cache,
            metadata,
        )

    def _sample(self, hidden: Tensor, sequences: list[Sequence]) -> list[SampledRow]:
        if not sequences:
            return []
        logits = self._model.compute_logits(hidden)
        return sample(logits, [_row_sampling(s, self._eos_token_ids) for s in sequences])

    def _score_prompt(self, chunk: Chunk, hidden: Tensor) -> tuple[list[TokenLogprobs], str | None]:
        """The owed log-probabilities whose logits lie in this chunk, or why there are none."""
        sequence = chunk.sequence
        owed = sequence.next_prompt_logprob
        if owed is None:
            return [], None
        # The token at position p is predicted by the row of position p - 1.
        stop = min(chunk.end + 1, sequence.request.num_prompt_tokens)
        result: list[TokenLogprobs] = []
        for first in range(owed, stop, SCORED_ROWS):
            last = min(first + SCORED_ROWS, stop)
            logits = self._model.compute_logits(
                hidden[first - 1 - chunk.start : last - 1 - chunk.start]
            )
            for row, error in non_finite_rows(logits).items():
                return [], f"{error}, after prompt token {first - 1 + row}"
            targets = torch.tensor(sequence.token_ids[first:last], device=logits.device)
            count = sequence.params.prompt_logprobs or 0
            result += gather_logprobs(logits, targets, [count] * (last - first))
        return result, None


def _slice(chunk: Chunk) -> SequenceSlice:
    return SequenceSlice(
        num_computed_tokens=chunk.start,
        num_new_tokens=chunk.num_tokens,
        block_ids=chunk.sequence.block_ids,
    )


def _row_sampling(sequence: Sequence, eos_token_ids: frozenset[int]) -> RowSampling:
    """The sampler's view of a sequence, from its history alone: no step leaves a trace here."""
    params = sequence.params
    masked: set[int] = set()
    if sequence.num_output_tokens < params.min_tokens:
        masked = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    seen: list[int] = []
    if params.repetition_penalty != 1.0:
        seen = [*sequence.request.prompt_token_set, *sequence.output_counts]
    return RowSampling(
        temperature=0.0 if params.is_greedy else params.temperature,
        uniform=(mix_seed(sequence.seed, sequence.num_output_tokens) >> 11) / (1 << 53),
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        output_counts=sequence.output_counts,
        seen_tokens=seen,
        logit_bias=params.logit_bias,
        masked_tokens=masked,
        num_logprobs=params.logprobs,
    )
