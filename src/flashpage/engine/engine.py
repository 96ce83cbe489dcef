"""The step-level engine for servers: requests in, one step at a time, outputs out.

`step = schedule -> launch -> wait -> postprocess`. With `overlap` a step waits for the one before
it, which ran meanwhile, and leaves its own running. Threads take turns: whoever adds or aborts a
request while another thread steps waits for the step's end.

What can go wrong in a step: an exception in the model leaves every request as it was before the
step, to be stepped again. Logits that are not numbers, or a tokenizer that raises when it decodes
what a request generated, end that request alone with an error, and the other requests of the step
get their tokens. After that only code of this package runs, none of which raises. Ctrl-C waits for
the end of the step; where the program handles it itself, a handler that raises must do so between
steps too.
"""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from operator import index as as_int
from typing import Any, TypeVar, cast

import numpy as np
from torch import nn

from flashpage.engine.config import EngineConfig
from flashpage.engine.detokenizer import Decoder
from flashpage.engine.interrupt import deferred_interrupt
from flashpage.engine.memory import allocate_kv_cache
from flashpage.engine.outputs import EngineStats, FinishReason, RequestOutput
from flashpage.engine.postprocess import append_token, flush_text, logprob_dict
from flashpage.engine.request import Request, Sequence
from flashpage.engine.runner import Launch, Note, Runner, StepResult
from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.scheduler import Scheduler
from flashpage.engine.seeds import mix_seed
from flashpage.engine.stats_log import StatsLog
from flashpage.engine.values import show
from flashpage.errors import RequestError

Method = TypeVar("Method", bound=Callable[..., Any])


def _in_turn(method: Method) -> Method:
    """One thread at a time."""

    @functools.wraps(method)
    def call(self: Engine, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return cast("Method", call)


class Engine:
    """Runs many requests at once on one paged KV cache.

    Args:
        model: a module as in `flashpage.models` (`config`, `forward`, `compute_logits`).
        tokenizer: gives outputs their text; None leaves it empty (and refuses stop strings).
        config: sizes and limits.

    Raises:
        ArgumentError: the KV cache does not fit into memory.
    """

    def __init__(self, model: nn.Module, tokenizer: Decoder | None, config: EngineConfig) -> None:
        self._turn = threading.RLock()
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size: int = model.config.vocab_size
        # Loading refuses end tokens that the model has no logit for; nor may they stop an engine.
        self.eos_token_ids = frozenset(
            token_id for token_id in model.config.eos_token_ids if 0 <= token_id < self.vocab_size
        )
        self.model = model
        self.kv_cache = allocate_kv_cache(model.config, config)
        self._scheduler = Scheduler(config)
        self._runner = Runner(model, self.kv_cache, config)
        self._runner.compile_ahead()
        self._in_flight: deque[Launch] = deque()
        # Of a step that was interrupted while it waited for another: the next one returns them.
        self._undelivered: list[RequestOutput] = []
        self._requests: dict[str, Request] = {}
        self._stepwise: dict[str, Request] = {}  # of them, those that may wait for their own steps
        self._num_requests = 0
        self._num_generated = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._stats_log = None if config.log_stats is None else StatsLog(config.log_stats)

    @_in_turn
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        sampling_params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        reports_once: bool = False,
    ) -> None:
        """Queue a request.

        Args:
            request_id: names it until it has ended.
            prompt_token_ids: ids of the model's vocabulary; they are copied.
            sampling_params: None takes the defaults (so at most 16 tokens).
            prompt: the prompt's text, only handed back in the output.
            on_output: called with every output of the request, whoever steps or aborts; must
                neither raise nor use the engine.
            reports_once: make an output only when the request ends, not at every token.

        Raises `RequestError`, and changes nothing, if the id is in use or `check_request` objects.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id = {show(request_id)} must be a string")
        if request_id in self._requests or self._is_undelivered(request_id):
            raise RequestError(f"request_id = {request_id!r} is in use by an unfinished request")
        params = SamplingParams() if sampling_params is None else sampling_params
        token_ids, max_tokens = self.check_request(prompt_token_ids, params)
        seed = mix_seed(self.config.seed, self._num_requests)
        try:
            request = Request(
                request_id,
                prompt,
                token_ids,
                params,
                max_tokens=max_tokens,
                seed=seed if params.seed is None else params.seed,
                tokenizer=self.tokenizer,
                eos_token_ids=self.eos_token_ids,
                on_output=on_output,
                reports_once=reports_once,
            )
        except Exception as error:  # whatever a tokenizer raises: it decodes the prompt's end
            raise RequestError(f"the tokenizer can not decode the prompt: {show(error)}") from error
        self._num_requests += 1
        self._requests[request_id] = request
        if request.waits_for_steps:
            self._stepwise[request_id] = request
        self._scheduler.add(request.sequences[:1])

    def check_request(
        self, prompt_token_ids: SequenceOf[int], params: SamplingParams
    ) -> tuple[list[int], int]:
        """The prompt as a list of ints and the tokens to generate at most, or `RequestError`.

        Refused are what is not a sequence of ids or not `SamplingParams`, an empty prompt, ids
        outside the vocabulary, and what can never fit into `max_model_len` or the cache's pages,
        with the numbers.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, not {show(params)}")
        token_ids = self._check_token_ids("prompt_token_ids", prompt_token_ids)
        if not token_ids:
            raise RequestError("the prompt is empty: it needs at least one token")
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        for token_id in params.logit_bias:
            if token_id >= self.vocab_size:
                raise RequestError(
                    f"logit_bias[{show(token_id)}]: not a token of the vocabulary (an integer from "
                    f"0 to {self.vocab_size - 1})"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.vocab_size:
                raise RequestError(
                    f"{name} = {show(count)} is more than the {self.vocab_size} tokens"
                )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(f"stop = {show(params.stop)} needs an engine with a tokenizer")
        return token_ids, self._check_length(len(token_ids), params)

    @_in_turn
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free its pages at once.

        Returns what it had generated, or None if there is no such unfinished request.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._stepwise.pop(request_id, None)
        for sequence in request.sequences:
            if not sequence.is_finished:
                self._finish_early(sequence, "abort")
        self._undelivered = [x for x in self._undelivered if x.request_id != request_id]
        self._collect(num_running_on=len(self._in_flight))
        return request.report()

    @_in_turn
    def step(self) -> list[RequestOutput]:
        """Compute one batch; returns the requests that gained a token or ended.

        With `overlap` they come from the step before: the first one returns nothing. Ctrl-C is
        raised when the step is done, its outputs are returned by the next one then; a second
        Ctrl-C is raised at once.
        """
        with deferred_interrupt():
            began = time.perf_counter()
            try:
                self._step()
            finally:
                self._step_seconds += time.perf_counter() - began
        if self._stats_log is not None and self._stats_log.is_due(self._step_seconds):
            self._stats_log.write(self.stats())
        outputs, self._undelivered = self._undelivered, []
        return outputs

    @_in_turn
    def warm_up(self) -> None:
        """Compile and load every kernel and capture every CUDA graph now rather than when a
        request first needs them. Does nothing on a CPU."""
        self._runner.warm_up()

    @_in_turn
    def clear_prefix_cache(self) -> None:
        """Forget which pages hold which tokens, so that no later request can share them."""
        if self._scheduler.prefix_cache is not None:
            self._scheduler.prefix_cache.clear()

    def has_unfinished(self) -> bool:
        """Whether a step would do something, or return what an interrupted one has left."""
        return bool(self._requests or self._undelivered)

    def stats(self) -> EngineStats:
        """What the engine holds and has done so far, to be read as often as one likes."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            pages_used=scheduler.pool.num_used,
            pages_total=scheduler.pool.num_blocks,
            prefix_lookup_tokens=scheduler.num_lookup_tokens,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            preemptions=scheduler.num_preemptions,
            preempted_tokens=scheduler.num_preempted_tokens,
            tokens_generated=self._num_generated,
            prompt_tokens_computed=scheduler.num_computed_prompt_tokens,
            tokens_computed=scheduler.num_computed_tokens,
            steps=self._num_steps,
            host_seconds=self._step_seconds - self._runner.wait_seconds,
            wait_seconds=self._runner.wait_seconds,
        )

    @_in_turn
    def check(self) -> None:
        """Prove the engine's promises about its pages; `AssertionError` if one is broken."""
        self._scheduler.check()
        queued = [*self._scheduler.running, *self._scheduler.waiting.values()]
        expected = [
            sequence
            for request in self._requests.values()
            for sequence in request.sequences
            if not sequence.is_finished and sequence not in request.siblings_waiting
        ]
        assert sorted(map(id, queued)) == sorted(map(id, expected)), "a sequence is lost or left"

    def _may_go_ahead(self) -> bool:
        """Whether the next step can be launched before the results of the one that runs are here:
        no choice depends on a pending token, and no prompt is being scored."""
        return not any(
            s.is_running
            and ((s.num_pending and request.waits_for_tokens) or s.next_prompt_logprob is not None)
            for request in self._stepwise.values()
            for s in request.sequences
        )

    def _step(self) -> None:
        overlap = self.config.overlap
        launched = False
        if not self._in_flight or (overlap and len(self._in_flight) == 1 and self._may_go_ahead()):
            launched = self._launch()
        self._collect(num_running_on=1 if overlap and launched else 0)

    def _collect(self, num_running_on: int) -> None:
        """Wait for all steps but so many; where nobody is left, for what was launched in vain too,
        which would keep the last requests alive until another comes."""
        while len(self._in_flight) > (num_running_on if self._requests else 0):
            result = self._runner.wait(self._in_flight[0])
            self._in_flight.popleft()
            self._undelivered += self._postprocess(result)

    def _is_undelivered(self, request_id: str) -> bool:
        return any(output.request_id == request_id for output in self._undelivered)

    def _launch(self) -> bool:
        """Schedule and launch a step; False if there is nothing to compute."""
        chunks = self._scheduler.schedule()
        if not chunks:
            return False
        launch = self._runner.launch(chunks)
        self._in_flight.append(launch)
        self._num_steps += 1
        self._scheduler.launched(chunks)
        for row, sequence in zip(launch.rows, launch.sampling, strict=True):
            sequence.length += 1
            sequence.pending_row = row
        return True

    def _postprocess(self, result: StepResult) -> list[RequestOutput]:
        reported: dict[str, Request] = {}
        finished: set[str] = set()
        block_size, notes = self.config.block_size, result.notes
        # Everything of a token in one body: there are hundreds in a step.
        for i, (chunk, token_id) in enumerate(zip(result.chunks, result.token_ids, strict=True)):
            sequence, start, end, is_last, _ = chunk
            if sequence.finish_reason is not None:
                continue  # it ended while this step ran
            if end // block_size > start // block_size:  # a block is full that was not before
                self._scheduler.commit(chunk)
            error = None
            ends_prompt = is_last and start < sequence.num_prompt_tokens
            try:
                if notes and i in notes:
                    error = notes[i].error
                    self._take_note(sequence, notes[i])
                if error is None and token_id is not None:
                    if ends_prompt and sequence.request.first_token_time is None:
                        sequence.request.first_token_time = time.perf_counter()
                    self._num_generated += 1
                    append_token(sequence, token_id)
            except Exception as raised:  # whatever a tokenizer raises when it decodes
                error = error or f"the tokenizer can not decode its tokens: {show(raised)}"
            if error is not None:
                self._fail(sequence, error)
            else:
                if ends_prompt:
                    self._scheduler.add_first(sequence.request.siblings_waiting)
                    sequence.request.siblings_waiting = []
                if is_last and token_id is None:
                    sequence.finish_reason = "length"
                if sequence.finish_reason is not None:
                    self._finish(sequence, sequence.finish_reason)
            has_ended = sequence.finish_reason is not None
            if has_ended and sequence.request.is_finished:
                finished.add(sequence.request.request_id)
                reported[sequence.request.request_id] = sequence.request
            elif not sequence.reports_once and (is_last or has_ended):
                reported[sequence.request.request_id] = sequence.request
        for request_id in finished:
            del self._requests[request_id]
            self._stepwise.pop(request_id, None)
        return [request.report() for request in reported.values()]

    def _take_note(self, sequence: Sequence, note: Note) -> None:
        if sequence.request.prompt_logprobs is not None:
            sequence.request.prompt_logprobs += [
                logprob_dict(row, self.tokenizer) for row in note.prompt_logprobs
            ]
        if note.error is None and note.logprobs is not None:
            sequence.logprobs.append(logprob_dict(note.logprobs, self.tokenizer))

    def _fail(self, sequence: Sequence, error: str) -> None:
        """End a sequence, and siblings that would compute the same prompt, with an error."""
        request = sequence.request
        for failed in (sequence, *request.siblings_waiting):
            failed.error = f"request {request.request_id!r} failed: {error}"
            self._finish_early(failed, "error")
        request.siblings_waiting = []

    def _finish_early(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence that would go on, with all of its text that can be had."""
        with suppress(Exception):  # whatever a tokenizer raises when it decodes
            flush_text(sequence)
        sequence.stop_reason = None
        self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        request = sequence.request
        request.page_ids.update(sequence.block_ids)
        self._scheduler.remove(sequence, poisoned=reason == "error")
        self._runner.forget(sequence)
        if request.is_finished:
            request.finish_time = time.perf_counter()

    def _check_token_ids(self, name: str, token_ids: SequenceOf[int]) -> list[int]:
        # Tensors and arrays are welcome; bytes would pass as ids, and a set has no order.
        if isinstance(token_ids, (str, bytes, Mapping, Set)):
            items = None
        else:
            try:
                items = list(token_ids)
            except TypeError:  # also of a tensor without dimensions
                items = None
        if items is None:
            raise RequestError(f"{name} = {show(token_ids)} must be a sequence of token ids")
        # The usual case at the speed of C: a long prompt is not to delay the steps of others.
        if set(map(type, items)) == {int} and _are_below(items, self.vocab_size):
            return items
        checked: list[int] = []
        for position, token_id in enumerate(items):
            try:
                value = -1 if isinstance(token_id, bool) else as_int(token_id)
            except TypeError:
                value = -1
            if not 0 <= value < self.vocab_size:
                raise RequestError(
                    f"{name}[{position}] = {show(token_id)} is not a token of the vocabulary "
                    f"(an integer from 0 to {self.vocab_size - 1})"
                )
            checked.append(value)
        return checked

    def _check_length(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Tokens to generate at most; `RequestError` if they can never fit."""
        config = self.config
        # The last generated token is never computed, so it needs no place in the cache.
        capacity = config.num_blocks * config.block_size + 1
        limit = min(config.max_model_len, capacity)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = limit - num_prompt_tokens
            if max_tokens < max(params.min_tokens, 1):
                raise RequestError(
                    f"a prompt of {num_prompt_tokens} tokens leaves no room for "
                    f"{show(max(params.min_tokens, 1))} more: the limit is {limit} tokens "
                    f"(max_model_len = {config.max_model_len}, cache of {config.num_blocks} pages "
                    f"of {config.block_size} tokens)"
                )
        total = num_prompt_tokens + max_tokens
        if total > config.max_model_len:
            raise RequestError(
                f"{num_prompt_tokens} prompt tokens + max_tokens = {show(max_tokens)} make "
                f"{show(total)}: "
                f"more than max_model_len = {config.max_model_len} (cache of {config.num_blocks} "
                f"pages of {config.block_size} tokens)"
            )
        pages = config.num_pages(num_prompt_tokens + max(max_tokens - 1, 0))
        if pages > config.num_blocks:
            raise RequestError(
                f"{num_prompt_tokens} prompt tokens + max_tokens = {max_tokens} need {pages} pages "
                f"of {config.block_size} tokens: the cache has {config.num_blocks}"
            )
        return max_tokens


def _are_below(items: list[int], bound: int) -> bool:
    """Whether all of them, at least one, are from 0 to bound - 1; three times as fast as min and
    max."""
    try:
        values = array("I", items)
    except OverflowError:
        return False
    return int(np.frombuffer(values, np.dtype("I")).max()) < bound
