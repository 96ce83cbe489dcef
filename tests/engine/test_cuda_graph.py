"""Graphs of whole steps: ladder, padding, and the same tokens as without them.

Without a GPU a "graph" is a function that is called again: inputs, padding and results lie in the
same memory as for a CUDA graph.
"""

from __future__ import annotations

import contextlib
import random
import time

import numpy as np
import pytest
import torch

from flashpage.engine import runner
from flashpage.engine.config import EngineConfig
from flashpage.engine.cuda_graph import FEW_CHUNKS, FEW_TOKENS, LONE_TOKENS, Inputs, Ladder, Shape
from flashpage.engine.engine import Engine
from flashpage.engine.runner import Runner
from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.seeds import mix_seed, mix_seeds
from flashpage.engine.token_counts import TokenCounts
from flashpage.errors import RequestError
from flashpage.weights.load import load_model
from graphs import Again

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
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


def make_engine(config: dict, capture=None, **options) -> Engine:
    model = load_model(config, load_format="dummy", dtype="float32", seed=3).model
    sizes = {"num_blocks": 300, "block_size": 4, "max_model_len": 128, "max_num_seqs": 11}
    sizes |= {"max_num_batched_tokens": 40} | options
    engine = Engine(model, None, EngineConfig(**sizes))
    engine.kv_cache.fill_(torch.nan)
    if capture is not None:
        engine._runner = Runner(
            model, engine.kv_cache, engine.config, engine.eos_token_ids, capture=capture
        )
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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("num_blocks", [300, 30])  # 30: preemption
def test_the_same_tokens_as_without_graphs(config, overlap, num_blocks):
    rng = random.Random(num_blocks + overlap)
    requests = []
    for i in range(14):
        prompt = [rng.randrange(3, 301) for _ in range(rng.randint(1, 50))]
        options = [
            {"temperature": 0.0},
            {"temperature": 0.9, "min_p": 0.01},
            {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2},
            {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.3},
            {"temperature": 0.8, "top_k": 6, "logprobs": 1, "frequency_penalty": 0.5},
            {"temperature": 1.1, "top_k": 9, "min_tokens": 3, "repetition_penalty": 1.1},
            {"temperature": 1.5, "top_p": 1e-50},  # nothing that float32 can hold
        ][i % 7 if rng.random() < 0.8 else 0]
        length = rng.randint(3, 40)
        requests.append((prompt, SamplingParams(max_tokens=length, seed=i, **options)))
    expected = run(make_engine(config), requests)
    capture = Again()
    engine = make_engine(config, capture, overlap=overlap, num_blocks=num_blocks)
    assert run(engine, requests) == expected
    assert capture.captured > 3
    # Every step, those with chunks of prompts too.
    assert capture.replayed == engine.stats().steps
    assert (engine.stats().preemptions > 0) == (num_blocks == 30)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [3, 4])
def test_prompts_in_chunks_of_one_token(budget, overlap):
    """Where decodes leave room for one token, it may lie in the middle of a prompt."""
    rng = random.Random(budget)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [[rng.randrange(3, 301) for _ in range(length)] for length in (5, 9, 14, 3, 22)]
    requests = [(prompt, params) for prompt in prompts]
    expected = run(make_engine(LLAMA), requests)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": budget, "overlap": overlap}
    assert run(make_engine(LLAMA, Again(), **options), requests) == expected


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_logits_that_are_not_numbers_end_their_request_alone(graphs, overlap):
    """With overlap, a step after the missing token has been launched when the host learns of it."""
    capture = Again() if graphs else None
    engine = make_engine(LLAMA, capture, overlap=overlap)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    prompts = [[5 + i] * (3 + 7 * i) for i in range(5)]
    expected = run(engine, [(prompt, params) for prompt in prompts])
    engine.model.embed_tokens.weight.data[300] = torch.nan
    for i, prompt in enumerate(prompts):
        engine.add_request(f"bad {i}", [*prompt, 300], params)
        engine.add_request(str(i), prompt, params)
    finished = {}
    for _ in range(100):
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check()
    assert len(finished) == 10
    for i in range(5):
        assert finished[f"bad {i}"].finish_reason == "error"
        assert finished[str(i)].token_ids == expected[str(i)]
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_after_its_replay_can_be_repeated(error, overlap, monkeypatch):
    """The replay has chosen tokens over those that the repeated step reads."""
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    scored = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    penalized = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **PENALIZED)
    requests = [([5, 6, 7], plain), ([8, 9], scored), ([10], plain), ([11] * 3, penalized)]
    expected = run(make_engine(LLAMA), requests)
    for failing in (1, 2, 5, 9):
        engine = make_engine(LLAMA, Again(), overlap=overlap)
        model, calls = engine.model, [0]
        compute = model.compute_logits

        def compute_logits(hidden, calls=calls, compute=compute, failing=failing):
            calls[0] += 1
            if calls[0] == failing:
                raise error
            return compute(hidden)

        monkeypatch.setattr(model, "compute_logits", compute_logits)
        assert run(engine, requests, error, num_errors=1) == expected


PENALIZED = {"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.1}


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["sample", "plain_sampling", "count_tokens", "_Fetched"])
def test_a_step_with_overlap_that_fails_while_it_chooses_can_be_repeated(
    name, with_graphs, monkeypatch
):
    """Wherever it fails: the device may have been told of tokens already."""
    plain = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    scored = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1)
    penalized = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, **PENALIZED)
    requests = [([5, 6, 7], plain), ([8, 9], scored), ([10], plain), ([11] * 3, penalized)]
    expected = run(make_engine(LLAMA), requests)
    whole = getattr(runner, name)
    for failing in (1, 2, 5):
        calls = [0]

        def fail(*args, calls=calls, failing=failing):
            calls[0] += 1
            if calls[0] == failing:
                raise KeyboardInterrupt
            return whole(*args)

        engine = make_engine(LLAMA, Again() if with_graphs else None, overlap=True)
        monkeypatch.setattr(runner, name, fail)
        # With graphs the tokens of a step are counted within it.
        num_errors = 0 if with_graphs and name == "count_tokens" else 1
        assert run(engine, requests, KeyboardInterrupt, num_errors) == expected
        monkeypatch.setattr(runner, name, whole)


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
def test_counts_that_fail_half_way_are_no_ones(with_graphs, monkeypatch):
    """A row that had another owner, and was not counted to its end, is counted again."""
    params = SamplingParams(max_tokens=15, temperature=0.0, ignore_eos=True, **PENALIZED)
    expected = run(make_engine(LLAMA), [([8, 9], params)])
    engine = make_engine(LLAMA, Again() if with_graphs else None, overlap=True)
    run(engine, [([5, 6, 7] * 5, params)])
    count, calls = TokenCounts._count, [0]

    def fail_once(self, counts, sequence):
        calls[0] += 1
        if calls[0] == 1:
            raise MemoryError
        count(self, counts, sequence)

    monkeypatch.setattr(TokenCounts, "_count", fail_once)
    assert run(engine, [([8, 9], params)], MemoryError, num_errors=1) == expected


@pytest.mark.parametrize("bad_calls", [{1}, {2}, {1, 3}, {2, 4}, {3, 5}], ids=str)
def test_outputs_outlive_interrupted_waits(bad_calls, monkeypatch):
    """Two waits that are interrupted leave two steps under way: both report."""
    interrupt_waits(monkeypatch, bad_calls)
    requests = [
        ([5 + i], SamplingParams(max_tokens=2 + i, temperature=0.0, ignore_eos=True))
        for i in range(3)
    ]
    engine = make_engine(LLAMA, Again(), overlap=True)
    tokens = run(engine, requests, KeyboardInterrupt, num_errors=len(bad_calls))
    assert {name: len(ids) for name, ids in tokens.items()} == {"0": 2, "1": 3, "2": 4}


class Interrupted(Again):
    """One replay is interrupted as it begins, or as it returns; each replay and call is counted."""

    def __init__(self, number: int, has_run: bool) -> None:
        super().__init__()
        self.number, self.has_run, self.asked = number, has_run, 0

    def __call__(self, body):
        inner, result = super().__call__(body)

        class Graph:
            def replay(graph) -> None:
                self.asked += 1
                if self.asked != self.number:
                    inner.replay()
                    return
                if self.has_run:
                    inner.replay()
                raise KeyboardInterrupt

        return Graph(), result


@pytest.mark.parametrize("has_run", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 8))
def test_a_replay_that_is_interrupted_can_be_repeated(number, has_run):
    """The host can not tell whether it ran: an interrupt is raised when a call returns."""
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    penalized = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **PENALIZED)
    requests = [([5, 6, 7], plain), ([8, 9], penalized), ([10], plain)]
    expected = run(make_engine(LLAMA), requests)
    engine = make_engine(LLAMA, Interrupted(number, has_run), overlap=True)
    assert run(engine, requests, KeyboardInterrupt, num_errors=1) == expected


def interrupt_waits(monkeypatch, bad_calls: set[int]) -> None:
    wait, calls = runner._Fetched.wait, [0]

    def interrupted(self):
        calls[0] += 1
        if calls[0] in bad_calls:
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(runner._Fetched, "wait", interrupted)


def steps(engine: Engine):
    """Every output, until nothing is left to do; interrupted steps are repeated."""
    while engine.has_unfinished():
        try:
            yield from engine.step()
        except KeyboardInterrupt:
            continue


def test_what_an_interrupted_wait_leaves_is_delivered(monkeypatch):
    """Even where the request's end was found in the interrupted step."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    stop = run(make_engine(LLAMA), [([5, 6, 7], params)])["0"][3]
    stopping = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=[stop])
    num_left = 0
    for first in range(1, 6):
        engine = make_engine(LLAMA, Again(), overlap=True)
        with monkeypatch.context() as patch:
            interrupt_waits(patch, {first, first + 2})
            engine.add_request("a", [5, 6, 7], stopping)
            outputs = []
            while engine.has_unfinished():
                try:
                    outputs += engine.step()
                except KeyboardInterrupt:
                    if not engine._requests:
                        num_left += 1
                        with pytest.raises(RequestError, match="in use"):
                            engine.add_request("a", [8], stopping)
        assert [output.finish_reason for output in outputs if output.finished] == ["stop"]
    assert num_left > 0


def test_an_abort_leaves_nothing_behind(monkeypatch):
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for first in (1, 2, 3):
        engine = make_engine(LLAMA, Again(), overlap=True)
        engine.add_request("a", [5, 6, 7], params)
        with monkeypatch.context() as patch:
            interrupt_waits(patch, {first, first + 2})
            for _ in range(6):
                with contextlib.suppress(KeyboardInterrupt):
                    engine.step()
                if engine._undelivered:
                    break
        assert engine._undelivered
        assert engine.abort("a").finished
        engine.add_request("a", [50, 51], params)
        assert all(output.prompt_token_ids == [50, 51] for output in steps(engine))


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
def test_a_scored_prompt_whose_wait_is_interrupted_holds_its_promises(with_graphs, monkeypatch):
    engine = make_engine(LLAMA, Again() if with_graphs else None)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=0))
    with monkeypatch.context() as patch:
        patch.setattr(runner.Launch, "wait", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check()
    assert [output.finish_reason for output in engine.step()] == ["length"]


def test_waiting_is_told_from_work_in_interrupted_steps_too(monkeypatch):
    engine = make_engine(LLAMA, Again(), overlap=True)
    scored = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    engine.add_request("plain", [5], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.add_request("scored", [6], scored)
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    calls = [0]

    def wait(self):
        clock[0] += 1.0
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner._Fetched, "wait", wait)
    list(steps(engine))
    stats = engine.stats()
    assert stats.wait_seconds == stats.step_seconds == calls[0] > 3
    assert stats.host_seconds == 0.0


def test_a_capture_that_fails_changes_no_token():
    class Failing(Again):
        def __call__(self, body):
            result = super().__call__(body)
            if self.captured in (2, 3):
                raise MemoryError
            return result

    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    requests = [([5 + i] * (1 + 9 * i), params) for i in range(4)]
    expected = run(make_engine(LLAMA), requests)
    engine = make_engine(LLAMA, Failing(), overlap=True, max_num_batched_tokens=16)
    assert run(engine, requests, MemoryError, num_errors=2) == expected


def test_rows_that_pad_write_nothing():
    capture = Again()
    engine = make_engine(LLAMA, capture, max_num_seqs=3, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    run(engine, [([5, 6, 7 + i], params) for i in range(3)])
    assert capture.replayed == 4
    # Three sequences in graphs of four rows; the last of a sequence's tokens is never computed.
    for x in (*engine.kv_cache.k, *engine.kv_cache.v):
        assert int((~x.isnan()).all(dim=(2, 3)).sum()) == 3 * (3 + 4 - 1)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 24, 100, 129, 256, 257, 300, 1000])
@pytest.mark.parametrize("budget", [1000, 1024, 5000])
def test_ladder(most, budget):
    config = EngineConfig(
        num_blocks=9, max_model_len=99, max_num_seqs=most, max_num_batched_tokens=budget
    )
    ladder = Ladder(config)
    rng = random.Random(most)
    for n in range(1, most + 1):
        shape = ladder.fit(n, 0, 0)
        assert shape.rows == shape.tokens == shape.decodes <= ladder.max_rows
        assert n <= shape.decodes <= min(max(2 * n, 8), n + 31)
    for _ in range(200):
        decodes = rng.randint(0, most)
        chunks = rng.choice([1, rng.randint(1, min(FEW_CHUNKS, most)), rng.randint(1, most)])
        tokens = rng.randint(chunks, budget)
        shape = ladder.fit(decodes, chunks, tokens)
        assert shape.decodes >= decodes
        assert shape.chunks >= chunks
        assert max(tokens, 64) <= shape.chunk_tokens
        most_tokens = max(2 * tokens, 256)
        if chunks > FEW_CHUNKS:
            most_tokens = max(most_tokens, 2 * FEW_TOKENS)
        assert shape.chunk_tokens <= most_tokens
        if chunks == 1 and tokens <= LONE_TOKENS[-1]:
            assert shape.chunks == 1
            assert shape.chunk_tokens <= max(2 * tokens, 64)
        assert shape.chunk_tokens <= budget
        assert shape.rows <= ladder.max_rows
    usual = ladder.usual()
    assert len(usual) == len(set(usual))
    words = max(sum(Inputs.sizes(shape, 5)) for shape in ladder.largest)
    assert all(sum(Inputs.sizes(shape, 5)) <= words for shape in usual)


@pytest.mark.parametrize("shape", [Shape(5, 0, 0), Shape(0, 1, 64), Shape(4, 8, 100)])
def test_inputs_share_one_buffer_without_overlapping(shape):
    sizes = Inputs.sizes(shape, 7)
    buffer = torch.zeros(sum(sizes), dtype=torch.int32)
    inputs = Inputs.of(buffer, shape, 7)
    parts = list(vars(inputs).values())
    for number, part in enumerate(parts, start=1):
        part.fill_(number)
    for number, part in enumerate(parts, start=1):
        assert (part == number).all()
    assert inputs.uniform.dtype == torch.float64
    assert inputs.block_table.shape == (shape.decodes, 7)
    assert inputs.chunk_table.shape == (shape.chunks, 7)
    assert sum(p.numel() * p.element_size() for p in parts) == buffer.numel() * 4


def test_seeds_are_mixed_as_one_by_one():
    rng = random.Random(1)
    seeds = [rng.randrange(1 << 64) for _ in range(50)] + [0, (1 << 64) - 1]
    indexes = [rng.randrange(1 << 20) for _ in seeds]
    mixed = mix_seeds(np.array(seeds, np.uint64), np.array(indexes, np.uint64))
    assert mixed.tolist() == [mix_seed(s, i) for s, i in zip(seeds, indexes, strict=True)]
