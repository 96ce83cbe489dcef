"""CUDA graphs where there is no GPU: a function that does the same work on the same memory; and
engines with them."""

from __future__ import annotations

import torch

from flashpage.engine.config import EngineConfig
from flashpage.engine.engine import Engine
from flashpage.engine.runner import Runner
from flashpage.weights.load import load_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


class Again:
    """Stands in for a CUDA graph; counts what it does."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, body):
        self.captured += 1
        result = body().clone()

        class Graph:
            def replay(graph) -> None:
                self.replayed += 1
                result.copy_(body())

        return Graph(), result


def make_engine(config: dict, capture=None, **options) -> Engine:
    model = load_model(config, load_format="dummy", dtype="float32", seed=3).model
    sizes = {"num_blocks": 300, "block_size": 4, "max_model_len": 128, "max_num_seqs": 11}
    sizes |= {"max_num_batched_tokens": 40} | options
    engine = Engine(model, None, EngineConfig(**sizes))
    engine.kv_cache.fill_(torch.nan)
    if capture is not None:
        engine._runner = Runner(model, engine.kv_cache, engine.config, capture=capture)
    return engine


def run(engine: Engine, requests, error=(), num_errors: int = 0) -> dict[str, list[int]]:
    """Each request's tokens; steps that raise `error` are repeated, `num_errors` of them."""
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    tokens, errors = {}, 0
    for _ in range(2000):
        if not engine.has_unfinished():
            break
        try:
            outputs = engine.step()
        except error:
            errors += 1
            continue
        for output in outputs:
            if output.finished:
                assert output.finish_reason in ("length", "stop"), output.outputs[0].error
                tokens[output.request_id] = output.token_ids
        engine.check()
    assert engine.stats().pages_used == 0
    assert errors == num_errors
    return tokens


def steps(engine: Engine):
    """Every output, until nothing is left to do; interrupted steps are repeated."""
    while engine.has_unfinished():
        try:
            yield from engine.step()
        except KeyboardInterrupt:
            continue
