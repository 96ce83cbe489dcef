"""Which weights stay quantised when a model is loaded, and that nothing is lost on the way."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpage.errors import ArgumentError, CheckpointError
from flashpage.layers.cpu import forms
from flashpage.layers.cpu.packing import PackedWeight
from flashpage.models.common import DecoderModel
from flashpage.models.quantized import QuantizedDecoder
from flashpage.weights import load
from flashpage.weights.load import load_model

pytestmark = pytest.mark.skipif(bool(forms.why_no_form()), reason=str(forms.why_no_form()))
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def rows(parts: list[PackedWeight]) -> torch.Tensor:
    return torch.cat([part.dequantize() for part in parts])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_a_gguf_file_keeps_its_blocks(
    architecture: str, type_name: str, tmp_path: Path, random_state: Any, write_gguf: Any
) -> None:
    path = tmp_path / "m.gguf"
    stored = write_gguf(path, architecture, random_state(architecture), type_name)
    model = load_model(path).model
    assert isinstance(model, QuantizedDecoder)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.embedding.dequantize(), stored.pop("model.embed_tokens.weight"))
    assert torch.equal(model.head.dequantize(), stored.pop("lm_head.weight"))
    assert torch.equal(model.norm_weight, stored.pop("model.norm.weight"))
    for i, layer in enumerate(model.layers_):
        prefix = f"model.layers.{i}"
        for projection, names in (
            ("qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("o_proj", ("self_attn.o_proj",)),
            ("gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
            ("down_proj", ("mlp.down_proj",)),
        ):
            expected = torch.cat([stored.pop(f"{prefix}.{name}.weight") for name in names])
            assert torch.equal(rows(layer.projections[projection]), expected)
        if architecture == "qwen2":
            bias = [stored.pop(f"{prefix}.self_attn.{x}_proj.bias") for x in "qkv"]
            assert torch.equal(layer.vectors.pop("self_attn.qkv_proj.bias"), torch.cat(bias))
        for name, vector in layer.vectors.items():
            assert torch.equal(vector, stored.pop(f"{prefix}.{name}"))
    assert not stored, "not in the model"


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantize": "none"}], ids=str)
def test_a_dtype_or_none_dequantises(
    options: dict[str, str], tmp_path: Path, random_state: Any, write_gguf: Any
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", random_state("llama"), "Q4_1")
    assert isinstance(load_model(tmp_path / "m.gguf", **options).model, DecoderModel)


def test_what_can_not_stay_is_said(
    tmp_path: Path, random_state: Any, write_gguf: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", random_state("llama"), "F16")
    assert isinstance(load_model(tmp_path / "m.gguf").model, DecoderModel)
    assert "the weights of m are dequantised: " in caplog.text
    assert "is F16" in caplog.text


@pytest.mark.parametrize("type_name", ["Q4_1", "F16"])
def test_what_quantize_leaves_as_it_is_is_said(
    type_name: str, tmp_path: Path, random_state: Any, write_gguf: Any, caplog: Any
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", random_state("llama"), type_name)
    load_model(tmp_path / "m.gguf", quantize="q8_0")
    said = "quantize = 'q8_0' is for matrices of floats: those that m has in blocks stay"
    assert (said in caplog.text) == (type_name == "Q4_1")


@pytest.mark.parametrize("where", ["file", "machine"])
def test_nothing_packed_is_held_while_weights_are_dequantised(
    where: str, tmp_path: Path, random_state: Any, write_gguf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is known before packing begins, or after."""
    write_gguf(tmp_path / "m.gguf", "llama", random_state("llama"), "Q4_1")
    owner, name = {
        "file": (load.quantized, "why_not_kept"),
        "machine": (load, "why_not_quantized"),
    }[where]
    monkeypatch.setattr(owner, name, lambda *_: "it is not to be")
    dense, held = load._dense, []

    def counted(*args: Any) -> DecoderModel:
        gc.collect()
        held.append(sum(type(x) is PackedWeight for x in gc.get_objects()))
        return dense(*args)

    monkeypatch.setattr(load, "_dense", counted)
    before = sum(type(x) is PackedWeight for x in gc.get_objects())
    assert isinstance(load_model(tmp_path / "m.gguf").model, DecoderModel)
    assert held == [before]


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0", "q4_1"])
def test_floats_are_quantised_when_asked(quantize: str, tiny_config: Any) -> None:
    options = {"load_format": "dummy", "seed": 3}
    dense = load_model(tiny_config(), dtype="float32", quantize="none", **options).model
    model = load_model(tiny_config(), dtype="float32", quantize=quantize, **options).model
    assert isinstance(model, QuantizedDecoder)
    assert model.dtype == torch.float32
    expected = dense.embed_tokens.weight
    error = (model.embedding.dequantize() - expected).abs().max()
    assert 0 < error < expected.abs().max() * (0.005 if quantize == "q8_0" else 0.13)


def test_a_safetensors_model_is_not_quantised_unasked(tiny_config: Any) -> None:
    assert isinstance(load_model(tiny_config(), load_format="dummy").model, DecoderModel)


def test_choices_that_can_not_be(tiny_config: Any) -> None:
    with pytest.raises(ArgumentError, match="quantize must be one of .* got 'q3'"):
        load_model(tiny_config(), load_format="dummy", quantize="q3")
    with pytest.raises(ArgumentError, match="quantize = 'q8_0' can not be had here: head_dim = 48"):
        load_model(tiny_config(head_dim=48), load_format="dummy", quantize="q8_0")
    with pytest.raises(ArgumentError, match="dtype must be torch.float32 or torch.bfloat16"):
        load_model(tiny_config(), load_format="dummy", quantize="q8_0", dtype="float16")


def test_missing_tensors_and_damaged_scales(
    tmp_path: Path, random_state: Any, write_gguf: Any
) -> None:
    path, state = tmp_path / "m.gguf", random_state("qwen3")
    del state["model.layers.1.self_attn.k_norm.weight"]
    del state["model.layers.0.mlp.up_proj.weight"]
    write_gguf(path, "qwen3", state, "Q8_0")
    with pytest.raises(CheckpointError, match=r"missing: .*0\.mlp\.up_proj.*1\.self_attn\.k_norm"):
        load_model(path)
    state = random_state("qwen3")
    state["model.layers.0.mlp.up_proj.weight"][5, 7] = torch.inf
    with pytest.warns(RuntimeWarning):  # of the gguf package, which writes it
        write_gguf(path, "qwen3", state, "Q8_0")
    with pytest.raises(CheckpointError, match=r"up_proj.weight contains NaN or infinity"):
        load_model(path)
