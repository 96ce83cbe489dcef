"""The engine on a GPU: the same greedy tokens in every mode, memory, and a random life."""

from __future__ import annotations

import random

import pytest
import torch

from flashpage.engine.llm import LLM
from flashpage.engine.sampling_params import SamplingParams
from flashpage.errors import ArgumentError

pytestmark = pytest.mark.gpu

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1003,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64}
CONFIGS = pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])


def make_llm(config: dict, **options) -> LLM:
    sizes = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 24, "max_num_batched_tokens": 256}
    arguments = {"load_format": "dummy", "dtype": "float32", "device": "cuda"}
    llm = LLM(config, **(arguments | sizes | options))
    llm.engine.kv_cache.fill_(torch.nan)
    return llm


def requests_of(seed: int, count: int = 30) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 1003) for _ in range(rng.randint(1, 400))] for _ in range(count)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 100), ignore_eos=True)
        for _ in range(count)
    ]
    return prompts, params


@CONFIGS
def test_greedy_tokens_are_the_same_in_every_mode_and_on_the_cpu(config):
    prompts, params = requests_of(1)
    on_cpu = LLM(config, load_format="dummy", dtype="float32", device="cpu", num_blocks=900)
    weights = on_cpu.engine.model.state_dict()
    expected = None
    for options in (
        {},
        {"enforce_eager": True},
        {"overlap": False},
        {"enforce_eager": True, "overlap": False},
        {"num_blocks": 60},
        {"max_num_batched_tokens": 64, "enable_prefix_caching": False, "block_size": 64},
    ):
        llm = make_llm(config, **options)
        tokens = [o.token_ids for o in llm.generate(prompts, params, progress=False)]
        llm.engine.check()
        assert llm.engine.stats().pages_used == 0
        assert (llm.engine.stats().preemptions > 0) == (options.get("num_blocks") == 60)
        expected = expected or tokens
        assert tokens == expected, options
    # The same weights on the CPU: dummy weights differ from device to device.
    model = llm.engine.model
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name])
    _copy_packed(on_cpu.engine.model, model)
    again = [o.token_ids for o in llm.generate(prompts[:8], params[:8], progress=False)]
    cpu = [o.token_ids for o in on_cpu.generate(prompts[:8], params[:8], progress=False)]
    assert again == cpu


def _copy_packed(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Weights that the CPU keeps packed: their product with the identity gives them back."""
    for name, module in source.named_modules():
        if getattr(module, "is_packed", False):
            identity = torch.eye(module.in_features)
            bias = 0 if module.bias is None else module.bias
            target.get_submodule(name).weight.data.copy_((module(identity) - bias).T)


def test_seeds_give_the_same_text_whatever_runs():
    llm = make_llm(QWEN3)
    prompts, _ = requests_of(2, 20)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=40) for i in range(20)]
    together = [o.token_ids for o in llm.generate(prompts, params, progress=False)]
    alone = [
        llm.generate(p, s, progress=False)[0].token_ids
        for p, s in zip(prompts, params, strict=True)
    ]
    assert together == alone


def test_every_kind_of_sampling_beside_plain_ones():
    llm = make_llm(LLAMA)
    prompts, _ = requests_of(3, 12)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 0.0, "logprobs": 2},
    ]
    params = [SamplingParams(max_tokens=30, seed=i, **kinds[i % 6]) for i in range(12)]
    together = llm.generate(prompts, params, progress=False)
    for prompt, wish, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, wish, progress=False)
        assert alone.token_ids == output.token_ids
        assert (output.logprobs is None) == (wish.logprobs is None)


def test_a_cache_that_does_not_fit_says_how_much_there_was():
    with pytest.raises(ArgumentError, match=r"takes \d+ bytes on cuda.*: \d+ bytes are available"):
        make_llm(LLAMA, num_blocks=10**9)
    free = torch.cuda.mem_get_info()[0]
    llm = make_llm(LLAMA, num_blocks=None, max_num_seqs=200_000, max_num_batched_tokens=200_000)
    assert 0.5 * free < free - torch.cuda.mem_get_info()[0] < 0.95 * free
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), progress=False)[0].finished


@pytest.mark.parametrize("seed", range(3))
def test_a_random_life_leaks_nothing(seed):
    rng = random.Random(seed)
    llm = make_llm(QWEN3, num_blocks=100)
    engine = llm.engine
    alive: set[str] = set()
    memory = []
    for i in range(1500):
        if rng.random() < 0.15:
            prompt = [rng.randrange(3, 1003) for _ in range(rng.randint(1, 300))]
            wishes = {"temperature": rng.choice([0.0, 0.7]), "top_p": rng.choice([1.0, 1.0, 0.9])}
            params = SamplingParams(max_tokens=rng.randint(1, 60), n=rng.randint(1, 2), **wishes)
            engine.add_request(str(i), prompt, params)
            alive.add(str(i))
        if alive and rng.random() < 0.03:
            request_id = rng.choice(sorted(alive))
            engine.abort(request_id)
            alive.discard(request_id)
        alive -= {o.request_id for o in engine.step() if o.finished}
        engine.check()
        if i % 500 == 499:
            memory.append(torch.cuda.memory_allocated())
    while engine.has_unfinished():
        alive -= {o.request_id for o in engine.step() if o.finished}
    assert not alive
    assert engine.stats().pages_used == 0
    assert memory[-1] - memory[0] < 64 << 20  # graphs of sizes that came late
