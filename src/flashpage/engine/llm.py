"""The engine for scripts: a model by name, prompts in, finished texts (or a stream) out."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch

from flashpage.attention.triton.runtime import hash_triton_ahead
from flashpage.cache.kv_cache import KVCache
from flashpage.engine.collector import old_objects_spared
from flashpage.engine.config import EngineConfig, check_log_stats, check_seed, check_size
from flashpage.engine.engine import Engine
from flashpage.engine.interrupt import deferred_interrupt
from flashpage.engine.memory import check_device, choose_num_blocks
from flashpage.engine.outputs import RequestOutput, StreamPiece
from flashpage.engine.progress import Progress
from flashpage.engine.prompts import (
    EncodedPrompt,
    Message,
    Prompt,
    encode_chat,
    encode_prompt,
    split_chats,
    split_prompts,
)
from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.values import show
from flashpage.errors import ArgumentError, RequestError
from flashpage.layers import attention, fused
from flashpage.models.config import ModelConfig
from flashpage.models.quantized import BLOCK_MULTIPLE, QuantizedDecoder
from flashpage.weights.load import LoadedModel, load_model
from flashpage.weights.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Job:
    prompt: EncodedPrompt
    params: SamplingParams


class Defaults(NamedTuple):
    """Sizes that suit a kind of device."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


CPU_DEFAULTS = Defaults(block_size=16, max_num_seqs=32, max_num_batched_tokens=512)
GPU_DEFAULTS = Defaults(block_size=64, max_num_seqs=256, max_num_batched_tokens=8192)


LONG_RUN = 10_000
"""tokens of a call from which on a pause of Python's collector is worth avoiding"""


class LLM:
    """A model, ready to generate; for any number of threads, whose requests then run together.

    Args:
        model: what `flashpage.weights.load.load_model` takes: a directory, a .gguf file, a Hub id,
            a config with `load_format="dummy"`, or None for the default model.
        dtype, load_format, quantize, tokenizer: as in `load_model`.
        device: where the model runs; None takes the GPU if torch finds one.
        block_size: tokens per page of the KV cache; None takes 16, or 64 on a GPU, whose prefill
            reads pages of 64 in one piece.
        num_blocks: pages of the KV cache; else as many as fit into `kv_cache_memory` bytes; else
            enough for `max_num_seqs` full sequences, or a quarter of the available memory (of a
            GPU's free memory, `GPU_MEMORY_SHARE` of `flashpage.engine.memory`).
        max_num_seqs: sequences that run at the same time; None takes 32, or 256 on a GPU.
        max_num_batched_tokens: tokens computed per step; longer prompts are cut into chunks. None
            takes 512, or 8192 on a GPU; while others decode, one prompt takes less (see
            `flashpage.engine.scheduler`).
        max_model_len: prompt and generated tokens of a sequence at most; None takes the model's
            limit, or what the cache can hold if that is less.
        enable_prefix_caching: share the pages of prompts that begin alike.
        enforce_eager: on a GPU, launch every kernel one by one instead of replaying CUDA graphs.
        overlap: prepare a step while the one before it runs; None does so on a GPU.
        log_stats: write a line of numbers to stderr every so many seconds of work: how many run and
            wait, pages, prefix hits, preemptions, tokens/s since the last line. None: never.
        threads: on a CPU, of all engines of this process, as `torch.set_num_threads` sets them;
            None leaves what torch has: the physical cores, or `OMP_NUM_THREADS`.
        seed: for requests without a seed of their own, and for dummy weights; an integer.

    Raises:
        ArgumentError: a size or the seed out of range, a device that can not be used here, or a
            cache that does not fit into memory or is too small for one `max_model_len` sequence.
        CheckpointError, DownloadError: the model can not be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        load_format: str = "auto",
        quantize: str = "auto",
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        overlap: bool | None = None,
        threads: int | None = None,
        log_stats: float | None = None,
        seed: int = 0,
    ) -> None:
        check_seed(seed)
        check_log_stats(log_stats)
        if threads is not None:
            check_size("threads", threads)
            most = max(64, 4 * (os.cpu_count() or 1))
            if threads > most:
                raise ArgumentError(
                    f"threads = {show(threads)} is more than {most}: this machine has "
                    f"{os.cpu_count()} processors"
                )
            torch.set_num_threads(threads)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = check_device(device)
        if device.type == "cuda":
            hash_triton_ahead()
        defaults = GPU_DEFAULTS if device.type == "cuda" else CPU_DEFAULTS
        loaded = load_model(
            model,
            dtype=dtype,
            device=device,
            load_format=load_format,
            quantize=quantize,
            tokenizer=tokenizer,
            seed=seed,
        )
        config = _engine_config(
            loaded,
            device=device,
            block_size=defaults.block_size if block_size is None else block_size,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=defaults.max_num_seqs if max_num_seqs is None else max_num_seqs,
            max_num_batched_tokens=(
                defaults.max_num_batched_tokens
                if max_num_batched_tokens is None
                else max_num_batched_tokens
            ),
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            overlap=device.type == "cuda" if overlap is None else overlap,
            log_stats=log_stats,
            seed=seed,
        )
        self.name = loaded.name
        self.model_config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(loaded.model, loaded.tokenizer, config)
        if isinstance(loaded.model, QuantizedDecoder):
            loaded.model.load_kernels()
        elif device.type == "cpu":
            # Compiling belongs to loading, not into the middle of the first answer.
            fused.load_kernels()
            attention.load_kernels()
        else:
            loaded.model.rotary.tabulate(config.max_model_len, loaded.model.dtype)
        self._ids = count()

    def __repr__(self) -> str:
        config = self.engine.config
        return (
            f"LLM({self.name!r}, dtype={str(config.dtype).removeprefix('torch.')!r}, "
            f"device={str(config.device)!r}, max_model_len={config.max_model_len}, "
            f"num_blocks={config.num_blocks}, block_size={config.block_size})"
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or many; returns their outputs in order.

        Args:
            prompts: a text, token ids (a list of ints), a chat (a list of `{"role", "content"}`),
                or a list of these.
            sampling_params: one for all, or one per prompt. None takes `SamplingParams()`, which
                ends each text after 16 tokens: give `SamplingParams(max_tokens=...)` for more.
            progress: show a bar on stderr; None shows it on a terminal, when it takes long.

        Raises:
            RequestError: a prompt or its parameters can not be served; names the prompt's index,
                and nothing has run.

        A request that fails while it runs (logits that are not numbers) does not raise: its
        `finish_reason` is "error", and the others go on. Ctrl-C aborts all requests of this call.
        A request that is aborted by others through `engine` is returned as far as it came, with
        the `finish_reason` "abort".
        """
        return self._run(self._jobs(split_prompts(prompts), sampling_params), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; otherwise as `generate`.

        Without `sampling_params` an answer is cut after 16 tokens, as there: give
        `SamplingParams(max_tokens=None)` to let the model end it.
        """
        jobs = self._jobs(split_chats(messages), sampling_params, encode=encode_chat)
        return self._run(jobs, progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamPiece]:
        """Continue one prompt; yields what each step adds.

        The pieces' texts joined are the final text: a piece never splits a character, nor shows
        the beginning of a stop string that is then cut. Closing the iterator aborts the request.
        Whoever else steps the `engine` moves the stream on too, and who aborts its request there
        ends it, with the `finish_reason` "abort".

        Without `sampling_params` the text, or the answer to a chat, is cut after 16 tokens, as in
        `generate`: `SamplingParams(max_tokens=None)` lets the model end it.

        Raises:
            RequestError: at once, if the prompt or the parameters can not be served.
        """
        prompts = split_prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"stream takes one prompt, got {len(prompts)}")
        return self._stream(self._jobs(prompts, sampling_params)[0])

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        encode: Any = encode_prompt,
    ) -> list[_Job]:
        """Encode and check everything before anything runs."""
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, (list, tuple)):
            raise RequestError(
                f"sampling_params must be SamplingParams or a list of them, "
                f"not {show(sampling_params)}"
            )
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(sampling_params)} sampling_params: "
                "give one for all or one per prompt"
            )
        jobs = []
        for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            try:
                if not isinstance(params, SamplingParams):
                    raise RequestError(
                        f"sampling_params must be SamplingParams, not {show(params)}"
                    )
                encoded = encode(prompt, self.tokenizer)
                self.engine.check_request(encoded.token_ids, params)
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}") from error
            jobs.append(_Job(encoded, params))
        return jobs

    # A request's outputs come to whoever waits for it through its `on_output`, and not as the
    # result of a step: any caller's step serves all requests, and any caller can abort them.

    def _run(self, jobs: Sequence[_Job], progress: bool | None) -> list[RequestOutput]:
        ids = [f"llm-{next(self._ids)}" for _ in jobs]
        finished: dict[str, RequestOutput] = {}

        def receive(output: RequestOutput) -> None:
            finished[output.request_id] = output

        added: list[str] = []
        limit = self.engine.config.max_model_len
        is_long = sum(job.params.n * (job.params.max_tokens or limit) for job in jobs) >= LONG_RUN
        tokens_before = self.engine.stats().tokens_generated
        try:
            with (
                old_objects_spared() if is_long else nullcontext(),
                Progress(len(ids), progress) as bar,
            ):
                for request_id, job in zip(ids, jobs, strict=True):
                    with deferred_interrupt():
                        self._add(request_id, job, receive, reports_once=True)
                        added.append(request_id)
                while len(finished) < len(ids):
                    self._step()
                    num_tokens = self.engine.stats().tokens_generated - tokens_before
                    bar.update(len(finished), num_tokens)
            return [finished[request_id] for request_id in ids]
        finally:
            for request_id in added:
                if request_id not in finished:
                    self.engine.abort(request_id)

    def _stream(self, job: _Job) -> Iterator[StreamPiece]:
        request_id = f"llm-{next(self._ids)}"
        latest: deque[RequestOutput] = deque(maxlen=1)  # an output holds all that came before
        seen_text = [0] * job.params.n
        seen_tokens = [0] * job.params.n
        ended: set[int] = set()
        finished = False
        self._add(request_id, job, latest.append)
        try:
            while not finished:
                if not latest:
                    self._step()
                    continue
                output = latest.pop()
                finished = output.finished
                for part in output.outputs:
                    text = part.text[seen_text[part.index] :]
                    token_ids = part.token_ids[seen_tokens[part.index] :]
                    reason = None if part.index in ended else part.finish_reason
                    if not (text or token_ids or reason):
                        continue
                    seen_text[part.index] += len(text)
                    seen_tokens[part.index] += len(token_ids)
                    if reason:
                        ended.add(part.index)
                    yield StreamPiece(part.index, text, token_ids, reason, output)
        finally:
            if not (finished or (latest and latest[0].finished)):
                self.engine.abort(request_id)

    def _add(
        self,
        request_id: str,
        job: _Job,
        on_output: Callable[[RequestOutput], None],
        *,
        reports_once: bool = False,
    ) -> None:
        self.engine.add_request(
            request_id,
            job.prompt.token_ids,
            job.params,
            prompt=job.prompt.text,
            on_output=on_output,
            reports_once=reports_once,
        )

    def _step(self) -> None:
        with deferred_interrupt():  # here, so that the engine does not keep the step's outputs
            self.engine.step()


def _engine_config(
    loaded: LoadedModel,
    *,
    device: torch.device,
    block_size: int,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    max_model_len: int | None,
    max_num_seqs: int,
    **options: Any,
) -> EngineConfig:
    """Sizes that suit the model; the cache must hold one sequence of `max_model_len`."""
    check_size("block_size", block_size)
    check_size("max_num_seqs", max_num_seqs)
    for name, value in (
        ("num_blocks", num_blocks),
        ("kv_cache_memory", kv_cache_memory),
        ("max_model_len", max_model_len),
    ):
        if value is not None:
            check_size(name, value)
    if isinstance(loaded.model, QuantizedDecoder) and block_size % BLOCK_MULTIPLE:
        raise ArgumentError(
            f"block_size = {block_size} must be a multiple of {BLOCK_MULTIPLE} with quantised "
            "weights; quantize='none' dequantises them"
        )
    model = loaded.config
    limit = model.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise ArgumentError(
            f"max_model_len = {show(max_model_len)} is more than the {limit} positions "
            f"of {loaded.name}"
        )
    dtype = loaded.model.dtype
    bytes_per_block = KVCache.bytes_per_block(
        model.num_layers, block_size, model.num_kv_heads, model.head_dim, dtype
    )
    num_blocks = choose_num_blocks(
        bytes_per_block=bytes_per_block,
        block_size=block_size,
        max_model_len=max_model_len or limit,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        kv_cache_memory=kv_cache_memory,
        device=device,
    )
    needed = -(-(max_model_len or 1) // block_size)
    if num_blocks < needed:
        raise ArgumentError(
            f"the KV cache has {num_blocks} pages of {show(block_size)} tokens "
            f"({show(bytes_per_block)} bytes each); one sequence of max_model_len = "
            f"{max_model_len or 1} tokens needs {needed}"
        )
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len or min(limit, num_blocks * block_size),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        attention_context=_attention_context(model),
        dtype=dtype,
        device=device,
        **options,
    )


def _attention_context(model: ModelConfig) -> int:
    """Context at which a token's attention takes as long as its products with weights.

    By operations, of which the products do about twice as many in a second (on an H200, for
    chunks of some hundred tokens).
    """
    q_size = model.num_q_heads * model.head_dim
    kv_size = model.num_kv_heads * model.head_dim
    weights = model.hidden_size * (2 * q_size + 2 * kv_size + 3 * model.intermediate_size)
    return max(1, weights // (2 * q_size) // 2)
