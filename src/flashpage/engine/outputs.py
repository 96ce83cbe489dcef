"""What a request gives back: text, tokens, reasons, log-probabilities and timings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """A token's log-probability under the raw logits, and its rank (1 is the likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None


TokenLogprobDict = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of the prompt, as far as it goes.

    Attributes:
        index: 0 to n - 1.
        text: the decoded text; "" without a tokenizer.
        token_ids: the generated tokens, an end-of-text token included.
        finish_reason: "stop" (end-of-text token, stop string or stop token), "length"
            (max_tokens), "abort", "error", or None while it runs.
        stop_reason: the stop string or stop token; None after an end-of-text token, as in vLLM.
        logprobs: per generated token its own and the likeliest tokens' log-probabilities.
        error: what went wrong, when `finish_reason` is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobDict] | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened, in seconds on the clock of `time.perf_counter`, and what they took.

    Attributes:
        pages_used: cache blocks held when the continuations ended, shared ones counted once.
        num_generated_tokens: over all continuations.
    """

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    num_generated_tokens: int = 0
    pages_used: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first generated token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second after the first one; None until there are two."""
        if self.first_token_time is None or self.finish_time is None:
            return None
        seconds = self.finish_time - self.first_token_time
        if self.num_generated_tokens < 2 or seconds <= 0:
            return None
        return (self.num_generated_tokens - 1) / seconds


@dataclass(frozen=True)
class RequestOutput:
    """A request's state after a step; final when `finished`.

    Attributes:
        prompt: the prompt's text, None when it was given as token ids.
        outputs: `n` continuations, by index.
        prompt_logprobs: per prompt token its own and the likeliest tokens' log-probabilities;
            None for the first, which nothing precedes. None as a whole if they were not asked
            for, or the request ended before its prompt was computed.
        num_cached_tokens: prompt tokens that were found in the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobDict | None] | None = None

    @property
    def text(self) -> str:
        """The text of the first continuation."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first continuation."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first continuation ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobDict] | None:
        """The log-probabilities of the first continuation."""
        return self.outputs[0].logprobs


@dataclass(frozen=True)
class StreamPiece:
    """What one step added to one continuation.

    Attributes:
        index: which continuation, 0 to n - 1.
        text: new text, "" while a character or a stop string is still open.
        token_ids: new tokens.
        finish_reason: set on a continuation's last piece.
        output: the whole request's output, final on the last piece of all.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    output: RequestOutput


@dataclass(frozen=True)
class EngineStats:
    """What the engine holds now and has done so far. Sequences are counted: n per request.

    Attributes:
        prefix_lookup_tokens: tokens of sequences that looked for cached pages when they were
            admitted, again after each preemption; 0 without prefix caching.
        prefix_hit_tokens: those of them that were found.
        preempted_tokens: tokens, computed or found, whose pages preemption took away.
        prompt_tokens_computed: tokens of prompts that steps computed, again after a preemption.
        tokens_computed: all tokens that steps computed, generated ones included.
        steps: batches that were launched.
        host_seconds: in steps, without the waiting.
        wait_seconds: in steps, until the device was ready.
    """

    num_running: int
    num_waiting: int
    pages_used: int
    pages_total: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    preempted_tokens: int
    tokens_generated: int
    prompt_tokens_computed: int
    tokens_computed: int
    steps: int
    host_seconds: float
    wait_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds spent in steps."""
        return self.host_seconds + self.wait_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second of stepping; None before the first step."""
        return self.tokens_generated / self.step_seconds if self.step_seconds > 0 else None

    @property
    def prefix_hit_rate(self) -> float | None:
        """Found of looked-up tokens, 0 to 1; None before the first lookup."""
        if self.prefix_lookup_tokens == 0:
            return None
        return self.prefix_hit_tokens / self.prefix_lookup_tokens
