"""Graphs of whole steps: ladder, padding, and the same tokens as without them.

Without a GPU a "graph" is a function that is called again: inputs, padding and results lie in the
same memory as for a CUDA graph.
"""

from __future__ import annotations

import gc
import random
import weakref
from array import array

import numpy as np
import pytest
import torch

from flashpage.engine import runner
from flashpage.engine.company import Company
from flashpage.engine.config import EngineConfig
from flashpage.engine.cuda_graph import FEW_CHUNKS, FEW_TOKENS, LONE_TOKENS, Inputs, Ladder, Shape
from flashpage.engine.request import Request
from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.seeds import mix_seed, mix_seeds
from graphs import LLAMA, Again, make_engine, run

QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


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
def test_penalties_beside_prompts_that_are_scored(overlap):
    """Steps that score a prompt have no graph; the tokens they choose are counted all the same."""
    penalised = SamplingParams(
        max_tokens=24, temperature=0.0, presence_penalty=0.5, repetition_penalty=0.5
    )
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)

    def tokens(capture, scores: bool) -> list[int]:
        engine = make_engine(LLAMA, capture, overlap=overlap and capture is not None)
        engine.add_request("penalised", [65] * 20 + [59, 213], penalised)
        last, steps = None, 0
        while engine.has_unfinished():
            steps += 1
            if scores and steps % 3 == 0 and steps < 24:
                engine.add_request(f"scored-{steps}", [7, 8, 9, steps], scored)
            for output in engine.step():
                last = output if output.request_id == "penalised" else last
        return last.token_ids

    assert tokens(Again(), True) == tokens(None, False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_what_has_ended_is_let_go(graphs, overlap):
    engine = make_engine(LLAMA, Again() if graphs else None, overlap=overlap)
    kept = []
    for i in range(8):
        options = {"presence_penalty": 0.5} if i % 2 else {}
        engine.add_request(str(i), [3 + i, 7], SamplingParams(max_tokens=3 + i, **options))
        kept.append(weakref.ref(engine._requests[str(i)]))
    engine.add_request("aborted", [3, 4], SamplingParams(max_tokens=9, presence_penalty=0.5))
    kept.append(weakref.ref(engine._requests["aborted"]))
    engine.step()
    engine.abort("aborted")
    while engine.has_unfinished():
        engine.step()
    gc.collect()
    assert not any(request() is not None for request in kept)


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_no_step_runs_on_when_nobody_is_left(end):
    """One is launched before the last token is known to stop, or before an abort."""
    engine = make_engine(LLAMA, Again(), overlap=True)
    prompt = [5, 6, 7]
    greedy = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    stop = run(engine, [(prompt, SamplingParams(**greedy))])["0"][3]
    engine.add_request("b", prompt, SamplingParams(**greedy, stop_token_ids=[stop]))
    request = weakref.ref(engine._requests["b"])
    while engine.has_unfinished():
        engine.step()
        if end == "abort" and engine._in_flight:
            assert engine.abort("b").finished
    assert not engine._in_flight
    gc.collect()
    assert request() is None


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


def test_the_host_and_the_device_are_told_the_same_wishes():
    """Whether a token is asked for with its log-probability must not change it."""
    rng = random.Random(2)
    wishes = [
        {"temperature": rng.uniform(0.1, 2), "min_p": rng.random(), "top_p": 1 - rng.random()}
        for _ in range(40)
    ]
    wishes += [{"min_p": 1 - 1e-9, "top_p": 0.1}, {"temperature": 1e-9, "top_p": 1 - 1e-9}]
    for i, wish in enumerate(wishes):
        prompt = [7] * rng.randint(1, 30)
        params = SamplingParams(
            **wish, top_k=rng.choice([-1, 0, 5]), seed=rng.randrange(-9, 1 << 70)
        )
        request = Request(
            str(i), None, prompt, params, max_tokens=9, seed=params.seed, tokenizer=None
        )
        (sequence,) = request.sequences
        sequence.token_ids += [8] * rng.randrange(5)
        sequence.length = len(sequence.token_ids)
        by_host = runner._row_sampling(sequence)
        by_device = Company([sequence]).plain_sampling([len(sequence.token_ids)])
        drawn = () if params.is_greedy else ("uniform",)
        for name in (*drawn, "top_p", "min_p", "top_k"):
            assert getattr(by_device, name).item() == getattr(by_host, name), name
        assert by_device.temperature.item() == np.float32(by_host.temperature)


def test_the_table_of_a_company_is_that_of_its_blocks():
    """Whether blocks are added, changed or given back between two steps."""
    rng = random.Random(3)
    params = SamplingParams(max_tokens=9)
    sequences = [
        Request(str(i), None, [1, 2], params, max_tokens=9, seed=0, tokenizer=None).sequences[0]
        for i in range(7)
    ]
    company = Company(sequences)
    width = 6
    for _ in range(300):
        for sequence in rng.sample(sequences, rng.randrange(4)):
            kind = rng.choice(["grow", "swap", "release", "again"])
            block_ids = sequence.block_ids
            if kind == "grow" and len(block_ids) < width:
                block_ids.append(rng.randrange(50))
            elif kind == "swap" and block_ids:
                sequence.block_ids = array("i", [rng.randrange(50), *block_ids[1:]])
            elif kind == "release":
                sequence.block_ids = array("i")
            else:
                sequence.block_ids = block_ids[:]
        table = company.block_table(width)
        expected = [[*s.block_ids, *[-1] * (width - len(s.block_ids))] for s in sequences]
        assert table.tolist() == expected
