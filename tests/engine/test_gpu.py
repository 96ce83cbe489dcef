"""The engine on a GPU: the same greedy tokens in every mode and as elsewhere, and memory."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flashpage import workloads
from flashpage.cache.kv_cache import KVCache
from flashpage.engine.llm import LLM
from flashpage.engine.sampling_params import SamplingParams
from flashpage.errors import ArgumentError
from flashpage.layers import fused
from flashpage.layers.attention import SequenceSlice, build_attention_metadata
from flashpage.models.common import DecoderModel
from flashpage.weights.dummy import CONFIGS, dummy_tensors
from flashpage.weights.load import load_model
from flashpage.workloads import Options

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
BOTH = pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])


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


@BOTH
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_another_device_than_the_current_one(options):
    prompts, _ = requests_of(4, 16)
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40) for i in range(16)]
    tokens = []
    for device in ("cuda:0", "cuda:1"):
        llm = make_llm(QWEN3, device=device, **options)
        llm.engine.warm_up()
        tokens.append([o.token_ids for o in llm.generate(prompts, params, progress=False)])
        assert torch.cuda.current_device() == 0
    assert tokens[0] == tokens[1]


def test_every_kind_of_sampling_beside_plain_ones():
    llm = make_llm(LLAMA)
    prompts, _ = requests_of(3, 12)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
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


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_the_first_tokens_find_their_kernels_compiled(options, monkeypatch):
    """The engine compiles them all at once when it is made, and nothing serially later."""
    import triton

    compiled: list[str] = []

    def record(*, repr: str, **kwargs) -> None:
        compiled.append(repr.split("[")[0])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", record)
    # A size of its own: no other test has compiled its kernels in this process.
    size = 264 if options else 280
    llm = make_llm(QWEN3 | {"hidden_size": size, "intermediate_size": 2 * size}, **options)
    assert {"_linear_kernel", "_add_rms_norm_kernel"} <= set(compiled)
    compiled.clear()
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompt = [5, 6, 7] if options else list(range(3, 23))
    (output,) = llm.generate([prompt], params, progress=False)
    assert len(output.token_ids) == 3
    assert compiled == []


def test_without_fused_kernels_the_same_greedy_tokens():
    prompts, params = requests_of(4)
    expected = [o.token_ids for o in make_llm(QWEN3).generate(prompts, params, progress=False)]
    for options in ({}, {"enforce_eager": True}):
        with fused.without_kernels():
            outputs = make_llm(QWEN3, **options).generate(prompts, params, progress=False)
        assert [o.token_ids for o in outputs] == expected


def test_page_pressure_changes_no_greedy_token():
    """The workload of `flashpage bench pressure`, on a small model in float32."""
    options = Options(
        model=QWEN3 | {"vocab_size": 10100},  # type: ignore[arg-type] - LLM takes a config too
        load_format="dummy",
        dtype="float32",
        device="cuda",
        scale=0.25,
        engine={"block_size": 16},
    )
    (row,) = workloads.pressure(options)
    assert row["finished"] == row["requests"] == 64
    assert row["preemptions"] > 0
    assert row["recomputed_tokens"] > 0
    assert row["equal_tokens"] == row["equal_requests"] == 1.0


def test_logits_of_qwen3_in_bfloat16_are_as_close_as_transformers():
    """The whole of Qwen3-0.6B with random weights: errors against float32, prompt and decodes."""
    error, their_error = bfloat16_errors(CONFIGS["qwen3-0.6b"], "cuda", prompt=192, decodes=16)
    assert 0 < error <= 1.5 * their_error


def bfloat16_errors(config: dict, device: str, *, prompt: int, decodes: int) -> tuple[float, float]:
    """Mean absolute error of the logits of a bfloat16 model, ours and that of transformers."""
    ours = load_model(config, load_format="dummy", dtype="bfloat16", device=device, seed=5).model
    fields = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    with torch.device(device):
        theirs = Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
    state = {name: tensor.bfloat16() for name, tensor in dummy_tensors(ours, 5)}
    report = theirs.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()

    rng = random.Random(5)
    ids = [rng.randrange(ours.config.vocab_size) for _ in range(prompt + decodes)]
    logits = logits_over_pages(ours, ids, prompt)
    batch = torch.tensor([ids], device=device)
    with torch.inference_mode():
        exact = theirs(batch).logits[0]
        # The weights alone: `theirs.bfloat16()` would also round the rotary frequencies.
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16()
        low = theirs(batch).logits[0].float()
    assert exact.std() > 0.1
    return (logits - exact).abs().mean().item(), (low - exact).abs().mean().item()


@torch.inference_mode()
def logits_over_pages(model: DecoderModel, ids: list[int], prompt: int) -> torch.Tensor:
    """`[len(ids), vocab_size]`: the prompt in two chunks, then token by token."""
    config, device = model.config, model.embed_tokens.weight.device
    num_blocks = -(-len(ids) // 64) + 2
    sizes = (config.num_layers, num_blocks, 64, config.num_kv_heads, config.head_dim)
    cache = KVCache(*sizes, model.dtype, device)
    cache.fill_(torch.nan)
    pages = random.Random(6).sample(range(num_blocks), num_blocks)
    rows = []
    steps = [0, prompt // 3, *range(prompt, len(ids) + 1)]
    for start, end in pairwise(steps):
        metadata = build_attention_metadata([SequenceSlice(start, end - start, pages)], 64, device)
        tokens = torch.tensor(ids[start:end], device=device)
        hidden = model(tokens, torch.arange(start, end, device=device), cache, metadata)
        rows.append(model.compute_logits(hidden))
    return torch.cat(rows)


def test_smollm2_writes_the_same_text_as_on_the_cpu(smollm2_path):
    """Real weights in float32. Without a network, have the model's file in `FLASHPAGE_CACHE`."""
    on_gpu, on_cpu = (texts_of(smollm2_path, device) for device in ("cuda", "cpu"))
    assert on_gpu == on_cpu


def texts_of(path: os.PathLike[str], device: str) -> list[tuple[str, list[int]]]:
    """Greedy answers, in one batch."""
    llm = LLM(path, dtype="float32", device=device, num_blocks=200, max_model_len=256)
    questions = (
        "What is the capital of France?",
        "Write a short poem about the sea.",
        "def fibonacci(n):",
        "List three prime numbers and explain why they are prime.",
        "Übersetze ins Englische: Guten Morgen, wie geht es dir?",
    )
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    outputs = llm.chat(chats, params, progress=False)
    return [(output.text, output.token_ids) for output in outputs]
