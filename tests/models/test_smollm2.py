"""The default model, a real one: greedy tokens equal those of transformers with its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from flashpage.engine.llm import LLM
from flashpage.engine.sampling_params import SamplingParams
from flashpage.layers.cpu import forms
from flashpage.models.common import DecoderModel
from flashpage.models.quantized import QuantizedDecoder
from flashpage.weights.gguf import GGUFFile
from flashpage.weights.load import LoadedModel, load_model
from flashpage.weights.quantized import assemble

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "def fibonacci(n):",
    "List three prime numbers and explain why they are prime.",
    "Übersetze ins Englische: Guten Morgen, wie geht es dir?",
)
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def ours(smollm2_path: os.PathLike[str]) -> LoadedModel:
    return load_model(smollm2_path, dtype="float32")


@pytest.fixture(scope="module")
def theirs(smollm2_path: os.PathLike[str]) -> LlamaForCausalLM:
    """Built from the file with nothing of ours: the gguf package reads, this maps the names."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in GGUFReader(smollm2_path).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        *layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):  # rows 0, 2, 4... of a head are its first half
            heads = values.reshape(-1, 64, 576)
            values = torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).reshape(-1, 576)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        state[f"{prefix}{names[part]}.weight"] = values
    model = LlamaForCausalLM(config).eval()
    report = model.load_state_dict(state, strict=False)
    assert report.missing_keys == ["lm_head.weight"]
    assert not report.unexpected_keys
    model.tie_weights()
    return model


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_tokens_equal_transformers(
    question: str,
    ours: LoadedModel,
    theirs: LlamaForCausalLM,
    greedy: Callable[[DecoderModel, list[int], int], list[int]],
) -> None:
    """Every token is transformers' most likely one after the tokens before it: the same text."""
    text = ours.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    prompt = ours.tokenizer.encode(text, add_special_tokens=False)
    tokens = greedy(ours.model, prompt, NEW_TOKENS)
    assert len(tokens) == NEW_TOKENS
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt + tokens])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_writes_sense(
    ours: LoadedModel, greedy: Callable[[DecoderModel, list[int], int], list[int]]
) -> None:
    text = ours.tokenizer.apply_chat_template([{"role": "user", "content": QUESTIONS[0]}])
    tokens = greedy(ours.model, ours.tokenizer.encode(text, add_special_tokens=False), 12)
    assert "Paris" in ours.tokenizer.decode(tokens)
    assert ours.config.eos_token_ids[0] == 2


@pytest.mark.skipif(bool(forms.why_no_form()), reason=str(forms.why_no_form()))
@pytest.mark.parametrize("quantize", ["auto", "q8_0"])
def test_quantised_weights_say_nearly_the_same(
    quantize: str,
    ours: LoadedModel,
    smollm2_path: os.PathLike[str],
    logits_in_chunks: Callable[..., torch.Tensor],
) -> None:
    """The file's own blocks, and its values quantised again to Q8_0: 500 tokens of a licence."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    ids = ours.tokenizer.encode(text, add_special_tokens=False)[:500]
    if quantize == "auto":
        model = load_model(smollm2_path).model
    else:
        file = GGUFFile(smollm2_path)
        model = assemble(ours.config, file.hf_tensors(ours.config), type_name=quantize)
    assert isinstance(model, QuantizedDecoder)
    expected = logits_in_chunks(ours.model, ids, 500).log_softmax(-1)
    actual = logits_in_chunks(model, ids, 500).log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1).mean()
    assert 0 < divergence < (0.0005 if quantize == "auto" else 0.005)


@pytest.mark.skipif(bool(forms.why_no_form()), reason=str(forms.why_no_form()))
def test_quantised_weights_write_the_text_of_float32(
    ours: LoadedModel,
    smollm2_path: os.PathLike[str],
    logits_in_chunks: Callable[..., torch.Tensor],
) -> None:
    """The engine with the file's own blocks, all questions at once: 32 tokens of each."""
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    texts = map(ours.tokenizer.apply_chat_template, chats)
    prompts = [ours.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    llm = LLM(smollm2_path, max_model_len=256)
    assert isinstance(llm.engine.model, QuantizedDecoder)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = logits_in_chunks(ours.model, prompt + output.token_ids, 256)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output.token_ids
