"""The decoder with quantised weights, against the dense one with the same weights."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flashpage.cache.kv_cache import KVCache
from flashpage.errors import ArgumentError
from flashpage.layers.attention import SequenceSlice, build_attention_metadata
from flashpage.layers.cpu import forms
from flashpage.layers.cpu.packing import PackedWeight, pack_dense
from flashpage.models import quantized
from flashpage.models.common import DecoderModel
from flashpage.models.config import ModelConfig
from flashpage.models.quantized import QuantizedDecoder, why_not_quantized
from flashpage.models.registry import build_model
from flashpage.weights.assign import assign_weights, checkpoint_slots
from flashpage.weights.quantized import assemble

pytestmark = pytest.mark.skipif(bool(forms.why_no_form()), reason=str(forms.why_no_form()))

KINDS = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
}


def config_of(kind: str, **changes: object) -> ModelConfig:
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return ModelConfig.from_hf(
        {
            "architectures": [f"{classes[kind]}ForCausalLM"],
            "model_type": kind,
            "vocab_size": 301,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            **KINDS[kind],
            **changes,
        }
    )


def both(
    kind: str, type_name: str = "q8_0", dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[QuantizedDecoder, DecoderModel]:
    """The same weights, quantised and as the floats that they stand for."""
    config = config_of(kind, **changes)
    slots = checkpoint_slots(build_model(config, torch.float32, "meta"))
    items: dict[str, Tensor | PackedWeight] = {}
    dense: dict[str, Tensor] = {}
    for name, slot in slots.items():
        shape = slot.target.shape
        tensor = torch.randn(shape) * 0.15 + (1 if "norm" in name else 0)
        if len(shape) == 2:
            items[name] = pack_dense(tensor, type_name.upper())
            dense[name] = items[name].dequantize()
        else:
            items[name] = dense[name] = tensor
    reference = build_model(config, torch.float32)
    assign_weights(reference, dense.items())
    return assemble(config, items.items(), dtype=dtype), reference


@pytest.mark.parametrize("type_name", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dense_model(
    kind: str, type_name: str, logits_in_chunks: Callable[..., Tensor]
) -> None:
    """Up to the rounding of activations to 12 bits, some 0.03 %."""
    model, reference = both(kind, type_name)
    ids = [random.randrange(301) for _ in range(70)]
    actual, expected = (logits_in_chunks(m, ids, 70) for m in (model, reference))
    assert actual.shape == (70, 301)
    error = (actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 0.004
    worse = assemble_without_rotation(model)
    broken = logits_in_chunks(worse, ids, 70)
    assert (broken - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt() > 0.15


def assemble_without_rotation(model: QuantizedDecoder) -> QuantizedDecoder:
    """The same model with a mistake, which the comparison above must see."""
    model.rotary.inv_freq.zero_()
    model._cos = model._sin = torch.empty(0, model.config.head_dim)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_chunks(
    kind: str, dtype: torch.dtype, logits_in_chunks: Callable[..., Tensor]
) -> None:
    model, _ = both(kind, dtype=dtype)
    ids = [random.randrange(301) for _ in range(300)]
    whole = logits_in_chunks(model, ids, 300)
    assert whole.isfinite().all()
    for chunk in (1, 7, 16, 100):
        assert torch.equal(logits_in_chunks(model, ids, chunk), whole), chunk


def mixed_step(
    model: QuantizedDecoder, sequences: Sequence[Sequence[int]], done: Sequence[int]
) -> list[Tensor]:
    """Logits of what follows the first `done` tokens of each sequence, all in one step."""
    config, block_size = model.config, 32
    pages = [list(range(8 * i, 8 * i + 8))[::-1] for i in range(len(sequences))]
    cache = KVCache(
        config.num_layers, 8 * len(sequences), block_size, config.num_kv_heads, config.head_dim,
        model.dtype,
    )  # fmt: skip
    cache.fill_(torch.nan)

    def run(parts: list[tuple[int, int, int]]) -> Tensor:
        slices = [SequenceSlice(start, stop - start, pages[i]) for i, start, stop in parts]
        ids = [t for i, start, stop in parts for t in sequences[i][start:stop]]
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
        metadata = build_attention_metadata(slices, block_size)
        return model.compute_logits(model(torch.tensor(ids), positions, cache, metadata))

    for i, count in enumerate(done):
        if count:
            run([(i, 0, count)])
    parts = [(i, count, len(sequences[i])) for i, count in enumerate(done)]
    return list(run(parts).split([stop - start for _, start, stop in parts]))


def test_bits_do_not_depend_on_batch_mates() -> None:
    """Decodes, chunks with a context and fresh prompts in one step."""
    model, _ = both("llama", dtype=torch.bfloat16)
    lengths, done = (41, 200, 130, 90, 1, 33), (40, 199, 99, 17, 0, 0)
    sequences = [[random.randrange(301) for _ in range(n)] for n in lengths]
    together = mixed_step(model, sequences, done)
    for i in range(len(sequences)):
        alone = mixed_step(model, [sequences[i]], [done[i]])[0]
        assert torch.equal(alone, together[i])


def test_every_form_gives_the_same_bits(logits_in_chunks: Callable[..., Tensor]) -> None:
    model, _ = both("qwen3", "q4_1")
    ids = [random.randrange(301) for _ in range(40)]
    expected = logits_in_chunks(model, ids, 25)
    names = [name for name in forms.available_forms()[1:] if name != "portable"]
    for name in names[-1:]:  # a whole step takes a while to compile
        model.form = name
        assert torch.equal(logits_in_chunks(model, ids, 25), expected), name


def test_pages_and_slots_that_can_not_be() -> None:
    model, _ = both("qwen2")
    config = model.config

    def step(
        block_size: int = 16, dtype: torch.dtype = torch.float32, token: int = 3, slot: int = 0
    ):
        cache = KVCache(
            config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim, dtype
        )
        metadata = build_attention_metadata([SequenceSlice(0, 1, [1])], block_size)
        metadata.slot_mapping[0] += slot
        return model(torch.tensor([token]), torch.zeros(1, dtype=torch.int64), cache, metadata)

    assert step().shape == (1, 96)
    with pytest.raises(ArgumentError, match="block_size = 24 must be a multiple of 16"):
        step(block_size=24)
    with pytest.raises(ArgumentError, match="must have the model's dtype torch.float32, got"):
        step(dtype=torch.bfloat16)
    for slot in (-17, 16):
        with pytest.raises(ArgumentError, match="slot_mapping must name a slot"):
            step(slot=slot)
    for token in (-1, 301):
        with pytest.raises(ArgumentError, match="input_ids must be from 0 to 300"):
            step(token=token)


def test_shapes_that_are_not_served() -> None:
    assert why_not_quantized(config_of("llama")) is None
    reason = why_not_quantized(config_of("llama", head_dim=80))
    assert reason == "head_dim = 80 is not a multiple of 32"
    assert "hidden_size = 100" in str(why_not_quantized(config_of("qwen3", hidden_size=100)))


def test_neighbours_of_one_kind_are_one_matrix() -> None:
    parts = [pack_dense(torch.randn(16, 32), t) for t in ("Q4_0", "Q4_1", "Q8_0", "Q8_0")]
    assert [part.rows for part in quantized.merged(parts)] == [32, 32]
    assert [part.rows for part in quantized.merged(parts[1:3])] == [16, 16]


@pytest.mark.parametrize(
    ("variable", "value", "threads", "said"),
    [
        ("OMP_THREAD_LIMIT", "1", 1, "2 threads do not run at the same time here"),
        ("NUMBA_NUM_THREADS", "1", 1, "threads = 2, of which 1 compute with quantised weights"),
        ("NUMBA_THREADING_LAYER", "workqueue", 2, "the threading layer workqueue, not omp"),
    ],
)
def test_threads_that_are_not_to_be_had(variable: str, value: str, threads: int, said: str) -> None:
    script = (
        "import torch; torch.set_num_threads(2)\n"
        "from flashpage.models.quantized import num_threads\n"
        f"assert num_threads() == {threads}, num_threads()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"NUMBA_NUM_THREADS": "2", variable: value}
    environment.pop("OMP_NUM_THREADS", None)
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert said in result.stderr
