"""A user's request and its sequences: what is known, computed and generated; decides nothing."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from flashpage.cache.prefix import PrefixNode
from flashpage.engine.detokenizer import Decoder, IncrementalDetokenizer, StopMatcher
from flashpage.engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobDict,
)
from flashpage.engine.plain_sampling import pack_wishes
from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.seeds import mix_seed


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a request's prompt: the unit that is scheduled.

    The scheduler owns the first group of fields, the engine the rest. The keys and values of
    `token_ids[:num_computed_tokens]` lie in the pages `block_ids`; the tokens after them are still
    to be computed, whether they came from the user or from the model. Preemption resets only
    pages and what was computed: what was generated stays.

    Of hundreds of sequences every step asks a dozen things, after a wait in which they have left
    the processor's caches: hence slots, side by side, and what is asked of a request kept here too.
    """

    request: Request
    index: int
    seed: int
    token_ids: list[int]

    is_running: bool = False  # in the scheduler's list, which is too long to search per token
    num_computed_tokens: int = 0  # those of a step that is still running count as computed
    num_committed_tokens: int = 0  # when the prefix cache was last told of full blocks
    length: int = field(init=False)  # tokens, those of steps that were not waited for included
    pending_row: int = -1  # where the last of these steps leaves its token
    generation: int = 0  # how often its pages were given back
    # Only grows: where it changes otherwise it is a new array.
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    num_hit_blocks: int = 0  # the first blocks, whose content others computed
    cache_chain: list[PrefixNode] = field(default_factory=list)  # nodes of the first blocks

    finish_reason: FinishReason | None = None
    # Never changed.
    params: SamplingParams = field(init=False)
    is_plain: bool = field(init=False)
    is_penalized: bool = field(init=False)
    looks_back: bool = field(init=False)
    generates: bool = field(init=False)
    scores_prompt: bool = field(init=False)
    reports_once: bool = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    # In tokens, the prompt's included: before it has more than the one no token ends it.
    min_length: int = field(init=False)
    max_length: int = field(init=False)
    wishes: bytes = field(init=False)

    text: str = ""
    # What penalties look at, if there are any; kept as the tokens come, so that a step costs what
    # it changes.
    output_counts: dict[int, int] = field(default_factory=dict)
    counts_row: int = 0  # where the device counts them, see `TokenCounts`
    logprobs: list[TokenLogprobDict] = field(default_factory=list)
    detokenizer: IncrementalDetokenizer | None = None
    stop_matcher: StopMatcher | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.length = len(self.token_ids)
        self.params = params = request.params
        self.is_plain = request.is_plain
        self.looks_back = request.looks_back
        self.is_penalized = self.is_plain and self.looks_back
        self.scores_prompt = params.prompt_logprobs is not None
        self.reports_once = request.reports_once
        self.generates = request.max_tokens > 0
        self.end_token_ids = request.end_token_ids
        self.num_prompt_tokens = request.num_prompt_tokens
        self.min_length = self.num_prompt_tokens + params.min_tokens
        self.max_length = self.num_prompt_tokens + request.max_tokens
        self.wishes = pack_wishes(params, self.seed, self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens of steps that were launched and have not been waited for."""
        return self.length - len(self.token_ids)

    @property
    def num_chosen_tokens(self) -> int:
        """Generated tokens, pending ones included."""
        return self.length - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, a pending one included, whose keys and values are not in the cache."""
        return self.length - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None

    @property
    def next_prompt_logprob(self) -> int | None:
        """The first prompt token whose log-probability is still owed, or None if none is.

        The first continuation reports for all: their prompt is the same.
        """
        reported = self.request.prompt_logprobs
        if reported is None:
            return None
        if self.index > 0 or len(reported) >= self.request.num_prompt_tokens:
            return None
        return len(reported)

    @property
    def num_skippable_tokens(self) -> int:
        """How many tokens need not be computed if they are cached.

        At least the last one is computed, for its logits; so are all whose logits are still owed.
        """
        owed = self.next_prompt_logprob
        return self.num_tokens - 1 if owed is None else owed - 1

    def output(self) -> CompletionOutput:
        """A snapshot for the user."""
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids[self.request.num_prompt_tokens :],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            error=self.error,
        )


class Request:
    """What a user asked for, and the `n` sequences that answer it."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        tokenizer: Decoder | None,
        eos_token_ids: frozenset[int] = frozenset(),
        on_output: Callable[[RequestOutput], None] | None = None,
        reports_once: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.max_tokens = max_tokens
        self.end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.end_token_ids |= eos_token_ids
        self.on_output = on_output
        self.reports_once = reports_once
        self.prompt_logprobs: list[TokenLogprobDict | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.num_cached_tokens: int | None = None  # known once the first sequence is admitted
        self.page_ids: set[int] = set()
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.sequences = [
            self._new_sequence(index, seed if index == 0 else mix_seed(seed, index), tokenizer)
            for index in range(params.n)
        ]
        # The first sequence computes the prompt; the others enter when its pages can be shared.
        self.siblings_waiting = self.sequences[1:]

    @cached_property
    def prompt_token_set(self) -> frozenset[int]:
        """The different tokens of the prompt."""
        return frozenset(self.prompt_token_ids)

    @cached_property
    def looks_back(self) -> bool:
        """Whether choosing a token needs the tokens that were generated before it."""
        p = self.params
        return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the device chooses tokens by itself: by temperature, min_p, top_k, top_p and
        penalties, where nothing is reported."""
        p = self.params
        return not (
            p.logit_bias or p.logprobs is not None or (self.looks_back and p.min_tokens > 0)
        )

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the host chooses each token, and looks at those before it."""
        return self.looks_back and not self.is_plain

    @property
    def waits_for_steps(self) -> bool:
        """Whether its next step may not be told before the one that runs is done."""
        return self.waits_for_tokens or self.params.prompt_logprobs is not None

    @property
    def is_finished(self) -> bool:
        """Whether all sequences are finished."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def report(self) -> RequestOutput:
        """A snapshot, which `on_output` gets too."""
        output = self.output()
        if self.on_output is not None:
            self.on_output(output)
        return output

    def output(self) -> RequestOutput:
        """A snapshot for the user."""
        scores = self.prompt_logprobs
        if scores is not None and len(scores) < self.num_prompt_tokens:
            scores = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.is_finished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finish_time=self.finish_time,
                num_generated_tokens=sum(s.num_output_tokens for s in self.sequences),
                pages_used=len(self.page_ids),
            ),
            num_cached_tokens=self.num_cached_tokens or 0,
            prompt_logprobs=scores,
        )

    def _new_sequence(self, index: int, seed: int, tokenizer: Decoder | None) -> Sequence:
        sequence = Sequence(self, index, seed, list(self.prompt_token_ids))
        if tokenizer is not None:
            sequence.detokenizer = IncrementalDetokenizer(
                tokenizer, self.params.skip_special_tokens, context=self.prompt_token_ids
            )
            sequence.stop_matcher = StopMatcher(
                self.params.stop_strings, self.params.include_stop_str_in_output
            )
        return sequence
