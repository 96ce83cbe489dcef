"""Tiny random models equal transformers' own, whatever the chunks and wherever the pages lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from flashpage.models.common import DecoderModel
from flashpage.weights.load import load_model

Logits = Callable[[DecoderModel, list[int], int], Tensor]

BLOCK_SIZE = 16
VOCAB_SIZE = 151
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 5000.0},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
}


def reference(kind: type, rope: str = "default", **changes: Any) -> PreTrainedModel:
    """A random model of transformers, with norms and biases that are not trivially 1 and 0."""
    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]},
        **changes,
    }
    if kind is not Qwen3Config:  # their hidden size must be a multiple of the heads
        options |= {"hidden_size": 6 * 24} if kind is LlamaConfig else {"hidden_size": 6 * 12}
    if kind is Qwen2Config:
        del options["head_dim"]
    model = AutoModelForCausalLM.from_config(kind(**options)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(0.0, 0.5)
    return model


def loaded(model: PreTrainedModel, directory: Path, **options: Any) -> DecoderModel:
    model.save_pretrained(directory, **options)
    return load_model(directory, dtype="float32").model


def expected(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def random_ids(n: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (n,)).tolist()


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("tied", [False, True])
def test_every_length_and_chunk(
    kind: type, tied: bool, tmp_path: Path, logits_in_chunks: Logits
) -> None:
    theirs = reference(kind, tie_word_embeddings=tied)
    ours = loaded(theirs, tmp_path)
    assert ours.config.tie_word_embeddings == tied
    for length in (1, BLOCK_SIZE, BLOCK_SIZE + 1, 300):
        ids = random_ids(length)
        want = expected(theirs, ids)
        chunks = {1, 7, BLOCK_SIZE, length}
        for chunk in sorted(c for c in chunks if c <= length):
            logits = logits_in_chunks(ours, ids, chunk)
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_batch_mates_do_not_matter(kind: type, tmp_path: Path, paged_runner: Any) -> None:
    theirs = reference(kind)
    ours = loaded(theirs, tmp_path)
    texts = [random_ids(40) for _ in range(3)]
    runner = paged_runner(ours, len(texts), 40)
    steps = [runner.step([text[i:j] for text in texts]) for i, j in ((0, 17), (17, 39), (39, 40))]
    for text, parts in zip(texts, zip(*steps, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts), expected(theirs, text), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope(kind: type, rope: str, tmp_path: Path, logits_in_chunks: Logits) -> None:
    theirs = reference(kind, rope)
    ours = loaded(theirs, tmp_path)
    assert ours.config.rope.kind == ROPES[rope].get("rope_type", rope)
    ids = random_ids(300)
    want = expected(theirs, ids)
    for chunk in (300, 64):
        torch.testing.assert_close(logits_in_chunks(ours, ids, chunk), want, atol=1e-4, rtol=1e-4)


def test_dynamic_rope_beyond_its_context(tmp_path: Path, logits_in_chunks: Logits) -> None:
    """A token sees the base of its own length: what transformers computes token by token."""
    theirs = reference(LlamaConfig, "dynamic", max_position_embeddings=32)
    ours = loaded(theirs, tmp_path)
    assert ours.config.max_position_embeddings == 64
    ids = random_ids(50)
    past, rows = None, []
    with torch.inference_mode():
        for token in ids:
            out = theirs(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            rows.append(out.logits[0, -1])
    for chunk in (1, 7, 50):
        logits = logits_in_chunks(ours, ids, chunk)
        torch.testing.assert_close(logits, torch.stack(rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_biases(kind: type, tmp_path: Path, logits_in_chunks: Logits) -> None:
    changes = {"mlp_bias": True} if kind is LlamaConfig else {}
    theirs = reference(kind, attention_bias=True, **changes)
    ours = loaded(theirs, tmp_path)
    assert ours.config.o_bias
    ids = random_ids(20)
    torch.testing.assert_close(
        logits_in_chunks(ours, ids, 20), expected(theirs, ids), atol=1e-4, rtol=1e-4
    )


def test_many_shards(tmp_path: Path, logits_in_chunks: Logits) -> None:
    theirs = reference(Qwen3Config)
    ours = loaded(theirs, tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids = random_ids(20)
    torch.testing.assert_close(
        logits_in_chunks(ours, ids, 20), expected(theirs, ids), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_bfloat16_is_as_close_as_transformers(
    kind: type, tmp_path: Path, logits_in_chunks: Logits
) -> None:
    """The error against float32 is not larger than twice that of the same formula elsewhere."""
    theirs = reference(kind).bfloat16()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype="bfloat16").model
    ids = random_ids(64)
    low = expected(theirs, ids).float()
    exact = expected(theirs.float(), ids)
    error = (logits_in_chunks(ours, ids, 64) - exact).abs().mean()
    assert error <= 2 * (low - exact).abs().mean()


@pytest.mark.usefixtures("unpacked")
def test_tied_head_shares_its_storage(tmp_path: Path) -> None:
    ours = loaded(reference(LlamaConfig, tie_word_embeddings=True), tmp_path)
    assert ours.lm_head.weight.data_ptr() == ours.embed_tokens.weight.data_ptr()
