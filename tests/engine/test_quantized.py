"""The engine on quantised weights: bits do not depend on the company, at any temperature."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from flashpage.cache.kv_cache import KVCache
from flashpage.engine.llm import LLM
from flashpage.engine.sampling_params import SamplingParams
from flashpage.errors import ArgumentError
from flashpage.layers.attention import SequenceSlice, build_attention_metadata
from flashpage.layers.cpu import forms
from flashpage.models.quantized import QuantizedDecoder

pytestmark = pytest.mark.skipif(bool(forms.why_no_form()), reason=str(forms.why_no_form()))

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


def tiny(**options) -> LLM:
    llm = LLM(TINY, load_format="dummy", quantize="q8_0", seed=1, **options)
    assert isinstance(llm.engine.model, QuantizedDecoder)
    llm.engine.kv_cache.fill_(torch.nan)
    return llm


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    made = [[rng.randrange(3, 320) for _ in range(n)] for n in (1, 5, 16, 17, 33, 60, 300)]
    return [*made, [*made[5][:40], 7, 8], made[5]]


def params() -> list[SamplingParams]:
    """Greedy, and drawn from nearly flat distributions, where a single bit may change the token."""
    return [
        SamplingParams(temperature=0.0 if i % 2 else 1.5, seed=i, max_tokens=30, ignore_eos=True)
        for i in range(9)
    ]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    llm = tiny(max_num_seqs=1, enable_prefix_caching=False)
    return [llm.generate(p, s)[0].token_ids for p, s in zip(prompts(), params(), strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 9},
        {"max_num_batched_tokens": 33, "max_num_seqs": 3, "block_size": 32},
        {"num_blocks": 24},
        {"num_blocks": 24, "enable_prefix_caching": False, "max_num_batched_tokens": 40},
        {"overlap": True},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_company(options, alone):
    llm = tiny(**options)
    outputs = llm.generate(prompts(), params())
    assert [o.token_ids for o in outputs] == alone
    assert (llm.engine.stats().preemptions > 0) == ("num_blocks" in options)
    hits = llm.engine.stats().prefix_hit_tokens
    again = llm.generate(prompts()[::-1], params()[::-1])
    assert [o.token_ids for o in again] == alone[::-1]
    if llm.engine.config.enable_prefix_caching:
        assert llm.engine.stats().prefix_hit_tokens > hits


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "rows",
    [[0], [39], [2, 40, 41], [40, 43], [], [0, 5, 43], [43, 2], list(range(44))],
    ids=str,
)
def test_rows_whose_result_is_wanted(rows, threads, monkeypatch):
    """They have the same bits as among all, and K and V of all are stored."""
    monkeypatch.setattr("flashpage.models.quantized.num_threads", lambda: threads)
    model = tiny().engine.model
    lengths = (40, 1, 3)
    slices = [SequenceSlice(0, n, [i * 3, i * 3 + 1, i * 3 + 2]) for i, n in enumerate(lengths)]
    metadata = build_attention_metadata(slices, 16, torch.device("cpu"))
    ids = torch.randint(320, (44,))
    positions = torch.cat([torch.arange(n) for n in lengths])
    caches = [KVCache(2, 9, 16, 2, 32, torch.bfloat16) for _ in range(2)]
    for cache in caches:
        cache.fill_(torch.nan)
    everything = model(ids, positions, caches[0], metadata)
    assert everything.isfinite().all()
    assert torch.equal(model(ids, positions, caches[1], metadata, rows), everything[rows])
    for name in ("k", "v"):
        for layers in zip(*(getattr(cache, name) for cache in caches), strict=True):
            assert torch.equal(*(x.nan_to_num(7) for x in layers))


def test_few_rows_among_more_threads():
    """Of which only some are wanted: rows that each thread had for itself are shared at the end."""
    script = """
from engine.test_quantized import prompts, tiny
from flashpage.engine.sampling_params import SamplingParams
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
asked = [[200, 31, 77], [5, 7], [9, 8, 7, 6, 5]]
found = [[tiny(threads=n).generate(p, params)[0].token_ids for p in asked] for n in (1, 3, 4)]
assert found[0] == found[1] == found[2], found
"""
    environment = dict(os.environ, NUMBA_NUM_THREADS="4", OMP_WAIT_POLICY="passive")
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, env=environment)


def test_two_engines_in_one_process(alone):
    engines = [tiny(), tiny(block_size=32)]
    streams = [e.stream(prompts()[5], params()[5]) for e in engines]
    tokens = [[], []]
    for pieces in zip(*streams, strict=True):
        for mine, piece in zip(tokens, pieces, strict=True):
            mine += piece.token_ids
    assert tokens == [alone[5], alone[5]]


def test_pages_must_be_whole_units():
    with pytest.raises(ArgumentError, match="block_size = 8 must be a multiple of 16"):
        tiny(block_size=8)


def test_threads():
    before = torch.get_num_threads()
    try:
        tiny(threads=1)
        assert torch.get_num_threads() == 1
        with pytest.raises(ArgumentError, match="threads = 0 must be an integer from 1"):
            tiny(threads=0)
    finally:
        torch.set_num_threads(before)


def test_bad_weights_fail_the_request_not_the_engine():
    llm = tiny()
    table = llm.engine.model.embedding
    table.scale_values()[: 32 * 3] = torch.nan  # of the tokens 0 to 15
    bad, good = llm.generate([[50, 7, 90], [50, 60]], SamplingParams(temperature=0, max_tokens=5))
    assert bad.finish_reason == "error"
    assert good.finish_reason != "error"


def test_tokens_before_one_that_is_not_a_number_keep_their_page_clean():
    """It stays in the prefix cache when the request is aborted before its logits are seen."""
    # The last token of the page is worked on together with the next.
    llm = tiny(max_num_batched_tokens=15, max_num_seqs=2)
    llm.engine.model.embedding.scale_values()[: 32 * 3] = torch.nan  # of the tokens 0 to 15
    page = list(range(100, 116))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    alone = llm.generate([[*page, 60, 61]], params)[0]
    llm.engine.clear_prefix_cache()
    llm.engine.add_request("bad", [*page, 7, *[90] * 60], params)
    llm.engine.step()
    llm.engine.step()
    llm.engine.abort("bad")
    hits = llm.engine.stats().prefix_hit_tokens
    later = llm.generate([[*page, 60, 61]], params)[0]
    assert llm.engine.stats().prefix_hit_tokens == hits + 16
    assert (later.finish_reason, later.token_ids) == ("length", alone.token_ids)
