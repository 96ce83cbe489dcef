"""Engines for CPUs behind one interface, for `cpu.py`: what is not installed is not there.

A peer is `load(path, threads, max_seqs, max_len) -> run`, and `run(prompts, new_tokens)` continues
lists of token ids greedily, past any end token, and returns `(seconds until all had their first
token, seconds from then to the last token)`.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

Prompts = Sequence[Sequence[int]]
Run = Callable[[Prompts, int], tuple[float, float]]

_KEPT: list[object] = []
"""What libraries may call back, which must live as long as the process."""


def flashpage(path: str, threads: int, max_seqs: int, max_len: int) -> Run:
    from flashpage.start import let_threads_sleep

    let_threads_sleep()  # as the command line does
    from flashpage import LLM, SamplingParams

    llm = LLM(
        path,
        threads=threads,
        max_num_seqs=max_seqs,
        max_model_len=max_len,
        enable_prefix_caching=False,
    )

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, float]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        outputs = llm.generate([list(p) for p in prompts], params, progress=False)
        started = min(o.metrics.arrival_time for o in outputs)
        first = max(o.metrics.first_token_time for o in outputs)
        assert all(len(o.token_ids) == new_tokens for o in outputs)
        return first - started, max(o.metrics.finish_time for o in outputs) - first

    return run


def llama_cpp(path: str, threads: int, max_seqs: int, max_len: int) -> Run:
    import llama_cpp as lib
    import numpy as np

    if not _KEPT:
        _KEPT.append(lib.llama_log_callback(lambda *_: None))
        lib.llama_log_set(_KEPT[0], None)
    lib.llama_backend_init()
    how = lib.llama_model_default_params()
    # Its repacked weights (AMX among them) crash some builds: LLAMA_NO_REPACK=1 does without.
    how.use_extra_bufts = not os.environ.get("LLAMA_NO_REPACK")
    model = lib.llama_model_load_from_file(path.encode(), how)
    options = lib.llama_context_default_params()
    options.n_ctx = max_seqs * max_len
    options.n_batch = options.n_ubatch = 512
    options.n_seq_max = max_seqs
    options.n_threads = options.n_threads_batch = threads
    context = lib.llama_init_from_model(model, options)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(512, 0, 1)

    def decode(entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """(sequence, position, token, wants logits) of each; the likeliest tokens of the last."""
        batch.n_tokens = len(entries)
        for i, (sequence, position, token, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert lib.llama_decode(context, batch) == 0
        found = []
        for i, entry in enumerate(entries):
            if entry[3]:
                row = lib.llama_get_logits_ith(context, i)
                pointer = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
                found.append(int(np.ctypeslib.as_array(pointer, (vocabulary,)).argmax()))
        return found

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, float]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        entries = [
            (i, at, token, at == len(prompt) - 1)
            for i, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        began = time.perf_counter()
        tokens: list[int] = []
        for start in range(0, len(entries), 512):
            tokens += decode(entries[start : start + 512])
        first = time.perf_counter()
        for n in range(new_tokens - 1):
            tokens = decode([(i, len(prompts[i]) + n, t, True) for i, t in enumerate(tokens)])
        return first - began, time.perf_counter() - first

    return run


def openvino(path: str, threads: int, max_seqs: int, max_len: int) -> Run:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = max_seqs
    scheduler.max_num_batched_tokens = max(512, max_seqs)
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 2  # GB
    pipeline = genai.LLMPipeline(
        path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
    )

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, float]:
        options = genai.GenerationConfig()
        options.max_new_tokens = options.min_new_tokens = new_tokens
        options.ignore_eos = True
        options.do_sample = False
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        metrics = pipeline.generate(inputs, options).perf_metrics
        first = metrics.get_ttft().mean / 1e3
        return first, metrics.get_generate_duration().mean / 1e3 - first

    return run


def transformers_model(path: str, dtype: Any) -> Any:
    """transformers' model of a Llama-type GGUF file, with its weights dequantised to dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from flashpage.weights.gguf import GGUFFile

    file = GGUFFile(path)
    ours = file.model_config()
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_q_heads,
        num_key_value_heads=ours.num_kv_heads,
        rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope.theta},
        max_position_embeddings=ours.max_position_embeddings,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(dict(file.hf_tensors(ours)), strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.to(dtype).eval()


def transformers(path: str, threads: int, max_seqs: int, max_len: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    model = transformers_model(path, torch.bfloat16)

    def run(prompts: Prompts, new_tokens: int) -> tuple[float, float]:
        ids = torch.tensor(prompts)
        seconds = []
        for count in (1, new_tokens):
            began = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            seconds.append(time.perf_counter() - began)
        return seconds[0], max(seconds[1] - seconds[0], 0.0)

    return run


PEERS = {
    "flashpage": flashpage,
    "llama.cpp": llama_cpp,
    "openvino": openvino,
    "transformers": transformers,
}
