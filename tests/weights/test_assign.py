"""Every tensor of a checkpoint finds its place, or is named in the error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashpage.errors import CheckpointError
from flashpage.models.common import DecoderModel
from flashpage.models.config import ModelConfig
from flashpage.models.registry import build_model
from flashpage.weights.assign import assign_weights, checkpoint_slots


@pytest.fixture
def model(tiny_config: Any) -> DecoderModel:
    return build_model(ModelConfig.from_hf(tiny_config("llama")), torch.float32)


@pytest.fixture
def state(random_state: Any) -> dict[str, Tensor]:
    return random_state("llama")


def failure(model: DecoderModel, state: dict[str, Tensor]) -> str:
    with pytest.raises(CheckpointError) as caught:
        assign_weights(model, state.items())
    return str(caught.value)


def test_fused_rows_lie_in_order(model: DecoderModel, state: dict[str, Tensor]) -> None:
    assign_weights(model, state.items())
    attention = model.layers[1].self_attn
    parts = [state[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(attention.qkv_proj.weight, torch.cat(parts))
    parts = [state[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(model.layers[1].mlp.gate_up_proj.weight, torch.cat(parts))


def test_every_parameter_is_covered_once(model: DecoderModel) -> None:
    """The slots tile the parameters: as many values, no two at one place."""
    slots = checkpoint_slots(model)
    places = {(id(s.parameter), s.start) for s in slots.values()}
    assert len(places) == len(slots)
    assert sum(s.target.numel() for s in slots.values()) == sum(
        p.numel() for p in model.parameters()
    )


def test_dtype_is_converted(tiny_config: Any, state: dict[str, Tensor]) -> None:
    model = build_model(ModelConfig.from_hf(tiny_config("llama")), torch.bfloat16)
    assign_weights(model, state.items())
    assert torch.equal(model.norm.weight, state["model.norm.weight"].bfloat16())


def test_names_without_prefix(model: DecoderModel, state: dict[str, Tensor]) -> None:
    assign_weights(model, {k.removeprefix("model."): v for k, v in state.items()}.items())
    assert torch.equal(model.norm.weight, state["model.norm.weight"])


def test_harmless_extras(tiny_config: Any, state: dict[str, Tensor]) -> None:
    config = ModelConfig.from_hf(tiny_config("llama", tie_word_embeddings=True))
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    assign_weights(build_model(config, torch.float32), state.items())  # lm_head.weight too


def test_all_problems_in_one_message(model: DecoderModel, state: dict[str, Tensor]) -> None:
    del state["lm_head.weight"]
    state["model.layers.7.mlp.up_proj.weight"] = torch.ones(1)
    state["model.norm.weight"] = torch.ones(5)
    message = failure(model, state)
    assert "missing: lm_head.weight" in message
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in message
    assert "wrong shape: model.norm.weight [5] for [256]" in message


def test_long_lists_are_cut(model: DecoderModel) -> None:
    message = failure(model, {})
    number = len(checkpoint_slots(model))
    assert f"and {number - 10} more" in message
    assert message.count("model.layers.") <= 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(value: float, model: DecoderModel, state: dict[str, Tensor]) -> None:
    state["model.layers.0.self_attn.v_proj.weight"][0, 0] = value
    assert "v_proj.weight contains NaN or infinity" in failure(model, state)


def test_opposite_infinities(model: DecoderModel, state: dict[str, Tensor]) -> None:
    state["model.norm.weight"][:2] = torch.tensor([float("inf"), -float("inf")])
    assert "model.norm.weight contains NaN or infinity" in failure(model, state)


def test_large_but_finite(model: DecoderModel, state: dict[str, Tensor]) -> None:
    """Their sum overflows, they do not."""
    state["model.norm.weight"].fill_(3e38)
    assign_weights(model, state.items())


def test_too_large_for_the_dtype(tiny_config: Any, state: dict[str, Tensor]) -> None:
    model = build_model(ModelConfig.from_hf(tiny_config("llama")), torch.float16)
    state["model.norm.weight"][3] = 1e6
    assert "too large for torch.float16" in failure(model, state)


def test_integers(model: DecoderModel, state: dict[str, Tensor]) -> None:
    state["model.norm.weight"] = torch.ones(256, dtype=torch.int8)
    assert "model.norm.weight has dtype torch.int8" in failure(model, state)
