"""What a model looks like: the only reader of Hugging Face configs and of GGUF model metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashpage.errors import CheckpointError
from flashpage.layers.rope import ROPE_KINDS, RopeConfig, yarn_attention_factor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_HF_CLASSES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Fields of relatives of Llama that change the arithmetic, with the values that leave it alone.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "clip_qkv": (),
    "no_rope_layers": ([],),
    "attention_chunk_size": (),
    "use_qk_norm": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "scale_attn_weights": (True,),
}


@dataclass(frozen=True)
class ModelConfig:
    """The structure of a decoder-only transformer of the Llama family.

    Attributes:
        architecture: one of `ARCHITECTURES`.
        max_position_embeddings: longest context, in tokens, that the checkpoint claims.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: whether q and k heads are normalised before the rotary embedding.
        eos_token_ids: every id that ends a text; may be empty.
        dtype: name of the dtype of the checkpoint's weights ("bfloat16"), None if not said.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads",
                     "num_kv_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_q_heads ({self.num_q_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(
                f"head_dim must be even for rotary embedding, got {self.head_dim}"
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """From the contents of `config.json` and, where there is one, `generation_config.json`.

        Raises:
            CheckpointError: unknown architecture, a field missing or of a wrong type, or a field
                that asks for arithmetic that these models do not have.
        """
        architecture = _hf_architecture(config)
        _refuse_other_arithmetic(config, architecture)
        fields = _Fields(config, "config.json")
        num_q_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        default_head_dim = 128 if architecture == "qwen3" else hidden_size // max(num_q_heads, 1)
        attention_bias = fields.boolean("attention_bias", False)
        is_qwen2 = architecture == "qwen2"
        max_positions = fields.integer("max_position_embeddings", 2048)
        rope = _hf_rope(config, max_positions)
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_q_heads),
            head_dim=fields.integer("head_dim", default_head_dim),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=_extended_context(max_positions, rope),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=attention_bias and not is_qwen2,
            mlp_bias=architecture == "llama" and fields.boolean("mlp_bias", False),
            qk_norm=architecture == "qwen3",
            bos_token_id=_first_id(config.get("bos_token_id")),
            eos_token_ids=_ids(
                (generation_config or {}).get("eos_token_id"), config.get("eos_token_id")
            ),
            dtype=config.get("dtype") or config.get("torch_dtype"),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        frequency_factors: Sequence[float] | None = None,
    ) -> ModelConfig:
        """From the metadata of a GGUF file and the shapes of its tensors (for what metadata omits).

        Args:
            shapes: tensor name -> shape, rows first.
            frequency_factors: values of the tensor `rope_freqs.weight`, if there is one.
        """
        architecture = metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"general.architecture is {architecture!r}; known: {', '.join(ARCHITECTURES)}"
            )
        fields = _Fields(metadata, "the GGUF metadata", prefix=f"{architecture}.")
        for key in ("expert_count", "attention.sliding_window", "logit_scale", "attention.scale",
                    "rope.scaling.yarn_log_multiplier"):  # fmt: skip
            if metadata.get(f"{architecture}.{key}"):
                raise CheckpointError(
                    f"{architecture}.{key} = {metadata[f'{architecture}.{key}']!r} is not supported"
                )
        num_q_heads = fields.integer("attention.head_count")
        hidden_size = fields.integer("embedding_length")
        head_dim = fields.integer("attention.key_length", hidden_size // max(num_q_heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := fields.integer(key, head_dim)) != head_dim:
                raise CheckpointError(
                    f"{architecture}.{key} = {value} differs from the head size {head_dim}: "
                    "partial rotary embedding and unequal heads are not supported"
                )
        num_layers = fields.integer("block_count")
        for name in ("token_embd.weight", f"blk.{num_layers - 1}.attn_norm.weight"):
            if name not in shapes:
                raise CheckpointError(
                    f"the GGUF file has no tensor {name}, with {architecture}.block_count "
                    f"= {num_layers}"
                )
        if frequency_factors is not None and len(frequency_factors) != head_dim // 2:
            raise CheckpointError(
                f"rope_freqs.weight has {len(frequency_factors)} values, "
                f"expected head_dim / 2 = {head_dim // 2}"
            )
        max_positions = fields.integer("context_length")
        rope = _gguf_rope(fields, max_positions, frequency_factors)
        return cls(
            architecture=architecture,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            max_position_embeddings=_extended_context(max_positions, rope),
            tie_word_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_gate.bias" in shapes,
            qk_norm=architecture == "qwen3",
            bos_token_id=_first_id(metadata.get("tokenizer.ggml.bos_token_id")),
            eos_token_ids=_ids(
                *(metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))
            ),
        )


@dataclass(frozen=True)
class _Fields:
    """Typed access to a mapping, with errors that name the field and where it was looked for."""

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def integer(self, name: str, default: int | None = None) -> int:
        return self._get(name, int, "an integer", default)

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, (int, float), "a number", default))

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(self.prefix + name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(
                f"{self.prefix}{name} in {self.source} must be true or false, got {value!r}"
            )
        return value

    def _get(self, name: str, kind: Any, words: str, default: Any) -> Any:
        name = self.prefix + name
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.source} has no field {name}")
            return default
        if isinstance(value, bool) or not isinstance(value, kind):
            raise CheckpointError(f"{name} in {self.source} must be {words}, got {value!r}")
        return value


def _hf_architecture(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures") or []
    for name in classes:
        if name in _HF_CLASSES:
            return _HF_CLASSES[name]
    if not classes and config.get("model_type") in ARCHITECTURES:
        return config["model_type"]
    found = (
        f"architectures = {classes!r}" if classes else f"model_type = {config.get('model_type')!r}"
    )
    raise CheckpointError(
        f"config.json says {found}, which is not known; known: {', '.join(_HF_CLASSES)}"
    )


def _refuse_other_arithmetic(config: Mapping[str, Any], architecture: str) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        value = config.get(name)
        if value is not None and value not in neutral:
            raise CheckpointError(f"config.json: {name} = {value!r} is not supported")
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise CheckpointError(f"config.json: layer_types with {sorted(kinds)} is not supported")
    # Qwen's configs always carry a window, which use_sliding_window (checked above) turns on.
    if architecture == "llama" and config.get("sliding_window") is not None:
        raise CheckpointError(
            f"config.json: sliding_window = {config['sliding_window']!r} is not supported"
        )


def _hf_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: the rope parameters must be a dict, got {scaling!r}")
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10000.0
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {scaling['partial_rotary_factor']!r} "
            "is not supported"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"config.json: rope type {kind!r} is not known; known: {', '.join(ROPE_KINDS)}"
        )
    fields = _Fields(scaling, "the rope parameters of config.json")
    original = config.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings"
    )
    if kind == "default":
        return RopeConfig(theta=float(theta))
    factor = _positive(fields, "factor")
    if kind == "linear":
        return RopeConfig(kind, float(theta), factor)
    if kind == "dynamic":
        return RopeConfig(kind, float(theta), factor, max_positions)
    original = int(original or max_positions)
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if not low < high:
            raise CheckpointError(
                f"config.json: low_freq_factor ({low}) must be below high_freq_factor ({high})"
            )
        return RopeConfig(
            kind, float(theta), factor, original, low_freq_factor=low, high_freq_factor=high
        )
    recommended = yarn_attention_factor(
        factor, scaling.get("mscale"), scaling.get("mscale_all_dim")
    )
    return RopeConfig(
        kind,
        float(theta),
        factor,
        original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.boolean("truncate", True),
        attention_factor=fields.number("attention_factor", recommended),
    )


def _gguf_rope(
    fields: _Fields, max_positions: int, frequency_factors: Sequence[float] | None
) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    factors = None if frequency_factors is None else tuple(float(f) for f in frequency_factors)
    kind = fields.values.get(fields.prefix + "rope.scaling.type") or "none"
    if kind == "none" and fields.values.get(fields.prefix + "rope.scale_linear") not in (None, 1.0):
        factor = _positive(fields, "rope.scale_linear")
        return RopeConfig("linear", theta, factor, frequency_factors=factors)
    if kind == "none":
        return RopeConfig(theta=theta, frequency_factors=factors)
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{fields.prefix}rope.scaling.type = {kind!r} is not known; known: none, linear, yarn"
        )
    factor = _positive(fields, "rope.scaling.factor")
    if kind == "linear":
        return RopeConfig("linear", theta, factor, frequency_factors=factors)
    attention_factor = fields.number("rope.scaling.attn_factor", 1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        fields.integer("rope.scaling.original_context_length", max_positions),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor * yarn_attention_factor(factor),
        frequency_factors=factors,
    )


def _extended_context(max_positions: int, rope: RopeConfig) -> int:
    """Configs of these two kinds often still name the context before the extension."""
    if rope.kind in ("dynamic", "yarn"):
        return max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    return max_positions


def _positive(fields: _Fields, name: str) -> float:
    value = fields.number(name)
    if not value > 0:
        raise CheckpointError(f"{fields.prefix}{name} in {fields.source} must be > 0, got {value}")
    return value


def _first_id(value: Any) -> int | None:
    return next(iter(_ids(value)), None)


def _ids(*values: Any) -> tuple[int, ...]:
    """Every id among integers, lists of integers and None; in order, without repeats."""
    flat: list[int] = []
    for value in values:
        flat.extend(value if isinstance(value, list | tuple) else [] if value is None else [value])
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in flat):
        raise CheckpointError(f"token ids must be integers, got {flat!r}")
    return tuple(dict.fromkeys(flat))
