"""Configs of both of Hugging Face's generations, and all that must be refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from flashpage.errors import CheckpointError
from flashpage.layers.rope import ROPE_KINDS, RotaryEmbedding
from flashpage.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}

TOKEN_FIELDS = ("bos_token_id", "eos_token_id")
ROPE_FIELDS = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
)


def test_a_plain_config() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert config.architecture == "llama"
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rope.kind, config.rope.theta) == ("default", 500000.0)
    assert [config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm] == [False] * 4
    assert not config.tie_word_embeddings


def test_defaults_of_what_old_configs_lack() -> None:
    old = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rope_theta")}
    config = ModelConfig.from_hf({**old, "head_dim": None})
    assert config.num_kv_heads == 4
    assert config.rope.theta == 10000.0


@pytest.mark.parametrize(
    ("kind", "name", "qkv_bias", "qk_norm", "head_dim"),
    [
        (LlamaConfig, "LlamaForCausalLM", False, False, 128),
        (Qwen2Config, "Qwen2ForCausalLM", True, False, 128),
        (Qwen3Config, "Qwen3ForCausalLM", False, True, 128),
    ],
)
def test_configs_that_transformers_writes(
    kind: type, name: str, qkv_bias: bool, qk_norm: bool, head_dim: int
) -> None:
    config = ModelConfig.from_hf({**kind().to_dict(), "architectures": [name]})
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (qkv_bias, qk_norm, head_dim)
    assert config.o_bias is False


def test_old_and_new_rope_fields_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = {"rope_scaling": {**scaling, "type": "llama3", "original_max_position_embeddings": 128}}
    new = {
        "rope_theta": None,
        "rope_parameters": {
            **scaling,
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "original_max_position_embeddings": 128,
        },
    }
    assert ModelConfig.from_hf({**LLAMA, **old}).rope == ModelConfig.from_hf({**LLAMA, **new}).rope


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 256),
    ],
)
def test_extended_context(rope: dict[str, Any], context: int) -> None:
    config = ModelConfig.from_hf({**LLAMA, "rope_scaling": rope})
    assert config.max_position_embeddings == context


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (None, None, ()),
        (2, None, (2,)),
        ([5, 6], None, (5, 6)),
        (2, {"eos_token_id": [7, 2]}, (7, 2)),
        (2, {"eos_token_id": 9}, (9, 2)),
        (2, {}, (2,)),
    ],
)
def test_eos_ids(own: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": own}, generation).eos_token_ids == expected


class TestRefused:
    @pytest.mark.parametrize(
        "changes",
        [
            {"hidden_act": "gelu"},
            {"sliding_window": 4096},
            {"layer_types": ["full_attention", "sliding_attention"]},
            {"partial_rotary_factor": 0.5},
            {"quantization_config": {"quant_method": "gptq"}},
            {"logits_scaling": 8.0},
            {"final_logit_softcapping": 30.0},
            {"num_local_experts": 8},
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        ],
    )
    def test_other_arithmetic_by_field_and_value(self, changes: dict[str, Any]) -> None:
        (field, value) = next(iter(changes.items()))
        if isinstance(value, dict) and "quant" not in field:
            field, value = list(value.items())[-1 if field == "rope_parameters" else 0]
            field = field.replace("rope_type", "rope type")
        with pytest.raises(CheckpointError) as caught:
            ModelConfig.from_hf({**LLAMA, **changes})
        assert field in str(caught.value)
        last = value[-1] if isinstance(value, list) else value
        assert str(last) in str(caught.value)

    def test_qwen_windows(self) -> None:
        qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
        assert ModelConfig.from_hf({**qwen, "use_sliding_window": False}).architecture == "qwen2"
        assert ModelConfig.from_hf(qwen).architecture == "qwen2"
        with pytest.raises(CheckpointError, match="use_sliding_window = True"):
            ModelConfig.from_hf({**qwen, "use_sliding_window": True})

    @pytest.mark.parametrize(
        "changes",
        [
            {"architectures": ["MambaForCausalLM"]},
            {"architectures": None, "model_type": "gemma"},
            {"architectures": None},
        ],
    )
    def test_unknown_architecture_lists_the_known(self, changes: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match="LlamaForCausalLM, Qwen2ForCausalLM, Qwen3"):
            ModelConfig.from_hf({**LLAMA, **changes})

    @pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
    def test_missing_fields(self, field: str) -> None:
        config = {k: v for k, v in LLAMA.items() if k != field}
        with pytest.raises(CheckpointError, match=f"no field {field}"):
            ModelConfig.from_hf(config)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"vocab_size": "many"}, "vocab_size"),
            ({"vocab_size": True}, "vocab_size"),
            ({"vocab_size": 0}, "vocab_size in config.json must be an integer from 1 to"),
            ({"num_attention_heads": 0}, "num_attention_heads in config.json must be an integer"),
            ({"num_key_value_heads": 3}, "multiple"),
            ({"head_dim": 15}, "even"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
            ({"num_hidden_layers": 2.0}, "num_hidden_layers in config.json must be an integer"),
            ({"vocab_size": 2**31}, "vocab_size in config.json must be an integer"),
            ({"eos_token_id": "</s>"}, "eos_token_id in config.json must be a token id"),
            ({"eos_token_id": [5, 100]}, r"eos_token_id .*from 0 to .*99.*got \[5, 100\]"),
            ({"eos_token_id": -1}, "eos_token_id .*token id.*got -1"),
            ({"bos_token_id": 100}, "bos_token_id in config.json .*got 100"),
            ({"bos_token_id": True}, "bos_token_id in config.json .*got True"),
            ({"architectures": 5}, "architectures in config.json must be a list of strings, got 5"),
            ({"architectures": [[]]}, "architectures in config.json must be a list of strings"),
            ({"architectures": "LlamaForCausalLM"}, "architectures .* must be a list of strings"),
            ({"layer_types": 5}, "layer_types in config.json must be a list of strings, got 5"),
            ({"layer_types": [[]]}, "layer_types in config.json must be a list of strings"),
            ({"dtype": ["float16"]}, "dtype in config.json must be a string"),
            ({"rms_norm_eps": math.nan}, "rms_norm_eps in config.json .*finite.*> 0, got nan"),
            ({"rms_norm_eps": 0}, "rms_norm_eps in config.json .*> 0, got 0"),
            ({"rope_theta": "abc"}, "rope_theta in config.json must be a finite number > 0"),
            ({"rope_theta": [1]}, r"rope_theta in config.json .*got \[1\]"),
            ({"rope_theta": -5}, "rope_theta in config.json .*got -5"),
            ({"rope_theta": 0}, "rope_theta in config.json .*got 0"),
            ({"rope_theta": math.inf}, "rope_theta in config.json .*got inf"),
            ({"rope_theta": 10**400}, "rope_theta in config.json .*got 1000"),
            ({"rope_theta": 1e-300}, "config.json.*angles that are not finite"),
            (
                {"head_dim": 512},
                "head_dim in config.json must be an integer from 1 to 256, got 512",
            ),
            ({"hidden_size": 2048}, "head_dim in config.json .*from 1 to 256, got 512"),
            ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
            ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor.*> 0"),
            ({"rope_scaling": "linear"}, "rope"),
            (
                {
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 2.0,
                        "low_freq_factor": 4.0,
                        "high_freq_factor": 4.0,
                    }
                },
                "low_freq_factor",
            ),
        ],
    )
    def test_values_that_can_not_be(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            ModelConfig.from_hf({**LLAMA, **changes})

    def test_eos_of_the_generation_config(self) -> None:
        with pytest.raises(
            CheckpointError, match=r"eos_token_id in generation_config\.json .*1000"
        ):
            ModelConfig.from_hf(LLAMA, {"eos_token_id": [2, 1000]})

    @pytest.mark.parametrize(
        ("rope", "words"),
        [
            ({"rope_type": 5}, "rope_type in rope_scaling of config.json must be a string, got 5"),
            ({"rope_type": "yarn", "factor": 1e308}, r"factor 1e\+308 .*at most 2147483647"),
            ({"rope_type": "dynamic", "factor": 1e308}, r"factor 1e\+308 .*at most 2147483647"),
            ({"rope_type": "yarn", "factor": math.inf}, "factor in rope_scaling .*got inf"),
            ({"rope_type": "dynamic", "factor": math.inf}, "factor in rope_scaling .*got inf"),
            ({"rope_type": "linear", "factor": 1e-308}, "angles that are not finite"),
            ({"beta_fast": 0}, "beta_fast in rope_scaling .*> 0, got 0"),
            ({"beta_slow": 1e-308}, "angles that are not finite"),
            ({"beta_fast": 1e308}, "angles that are not finite"),
            ({"mscale": "x"}, "mscale in rope_scaling .*got 'x'"),
            (
                {"factor": 5e6, "mscale": 1.7e308, "mscale_all_dim": 1.7e308},
                "attention_factor .*got nan",
            ),
            ({"attention_factor": 1e30}, "attention factor .*at most 100.0, got 1e.30"),
            ({"attention_factor": -1.0}, "attention_factor .*> 0, got -1.0"),
            ({"original_max_position_embeddings": "x"}, "original_max_position_emb.*got 'x'"),
            ({"rope_theta": 1.0}, "angles that are not finite"),
            ({"truncate": 1}, "truncate in rope_scaling .*true or false"),
        ],
    )
    def test_rope_values_that_can_not_be(self, rope: dict[str, Any], words: str) -> None:
        rope = {"rope_type": "yarn", "factor": 4.0, **rope}
        with pytest.raises(CheckpointError, match=words):
            ModelConfig.from_hf({**LLAMA, "rope_scaling": rope})

    def test_dynamic_rope_of_the_smallest_heads(self) -> None:
        rope = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
        assert ModelConfig.from_hf({**LLAMA, **rope, "head_dim": 4}).head_dim == 4
        with pytest.raises(CheckpointError, match="head_dim must be at least 4 for dynamic rope"):
            ModelConfig.from_hf({**LLAMA, **rope, "head_dim": 2})

    @given(
        field=st.sampled_from([*LLAMA, "head_dim", "layer_types", "dtype", *TOKEN_FIELDS]),
        section=st.sampled_from([None, "rope_scaling", "rope_parameters"]),
        rope_type=st.sampled_from(ROPE_KINDS),
        rope_field=st.sampled_from(ROPE_FIELDS),
        value=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values),
            max_leaves=5,
        )
        | st.sampled_from([0, -1, 1e308, 1e-308, 2**63, 10**400, math.inf, math.nan]),
    )
    @settings(deadline=None, max_examples=300)
    def test_any_value_gives_a_config_or_a_reason(
        self, field: str, section: str | None, rope_type: str, rope_field: str, value: Any
    ) -> None:
        config = {**LLAMA}
        if section is None:
            config[field] = value
        else:
            scaling = {"rope_type": rope_type, "factor": 2.0}
            scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, rope_field: value}
            config[section] = scaling
        with contextlib.suppress(CheckpointError):
            loaded = ModelConfig.from_hf(config)
            rotary = RotaryEmbedding(loaded.head_dim, loaded.rope)
            last = torch.tensor([0, loaded.max_position_embeddings - 1])
            assert rotary(last, torch.float32).cos.isfinite().all()
