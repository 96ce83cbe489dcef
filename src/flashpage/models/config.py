"""What a model looks like: the only reader of Hugging Face configs and of GGUF model metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashpage.attention.problem import MAX_HEAD_DIM
from flashpage.errors import CheckpointError
from flashpage.layers.rope import (
    ROPE_KINDS,
    RopeConfig,
    inverse_frequencies,
    yarn_attention_factor,
)
from flashpage.models.fields import MAX_INTEGER, Fields, shown

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_HF_CLASSES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Scores grow by its square and would overflow. What yarn recommends stays below 4.
_MAX_ATTENTION_FACTOR = 100.0

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

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """From the contents of `config.json` and, where there is one, `generation_config.json`.

        Raises:
            CheckpointError: unknown architecture, a field missing or of a wrong type, or a field
                that asks for arithmetic that these models do not have.
        """
        fields = Fields(config, "config.json")
        generation = Fields(generation_config or {}, "generation_config.json")
        architecture = _hf_architecture(fields)
        _refuse_other_arithmetic(fields, architecture)
        vocab_size = fields.integer("vocab_size")
        num_q_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_q_heads
        attention_bias = fields.boolean("attention_bias", False)
        is_qwen2 = architecture == "qwen2"
        max_positions = fields.integer("max_position_embeddings", 2048)
        rope = _hf_rope(fields, max_positions)
        eos_ids = [part.token_ids("eos_token_id", vocab_size) for part in (generation, fields)]
        structure = cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_q_heads),
            head_dim=fields.integer("head_dim", default_head_dim, high=MAX_HEAD_DIM),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=_extended_context(max_positions, rope, fields),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=attention_bias and not is_qwen2,
            mlp_bias=architecture == "llama" and fields.boolean("mlp_bias", False),
            qk_norm=architecture == "qwen3",
            bos_token_id=_first(fields.token_ids("bos_token_id", vocab_size)),
            eos_token_ids=_joined(eos_ids),
            dtype=fields.string("dtype") or fields.string("torch_dtype"),
        )
        return _checked(structure, fields)

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
                f"general.architecture is {shown(architecture)}; known: {', '.join(ARCHITECTURES)}"
            )
        fields = Fields(metadata, "the GGUF metadata", prefix=f"{architecture}.")
        vocabulary = Fields(metadata, "the GGUF metadata", prefix="tokenizer.ggml.")
        for key in ("expert_count", "attention.sliding_window", "logit_scale", "attention.scale",
                    "rope.scaling.yarn_log_multiplier"):  # fmt: skip
            if value := fields.get(key):
                raise CheckpointError(f"{architecture}.{key} = {shown(value)} is not supported")
        num_q_heads = fields.integer("attention.head_count")
        hidden_size = fields.integer("embedding_length")
        head_dim = fields.integer(
            "attention.key_length", hidden_size // num_q_heads, high=MAX_HEAD_DIM
        )
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
        vocab_size = shapes["token_embd.weight"][0]
        eos_ids = [
            vocabulary.token_ids(f"{kind}_token_id", vocab_size) for kind in ("eos", "eot", "eom")
        ]
        structure = cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            max_position_embeddings=_extended_context(max_positions, rope, fields),
            tie_word_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_gate.bias" in shapes,
            qk_norm=architecture == "qwen3",
            bos_token_id=_first(vocabulary.token_ids("bos_token_id", vocab_size)),
            eos_token_ids=_joined(eos_ids),
        )
        return _checked(structure, fields)


def _hf_architecture(fields: Fields) -> str:
    classes, model_type = fields.strings("architectures"), fields.string("model_type")
    for name in classes:
        if name in _HF_CLASSES:
            return _HF_CLASSES[name]
    if not classes and model_type in ARCHITECTURES:
        return model_type
    found = f"architectures = {list(classes)}" if classes else f"model_type = {model_type!r}"
    raise CheckpointError(
        f"{fields.source} says {found}, which is not known; known: {', '.join(_HF_CLASSES)}"
    )


def _refuse_other_arithmetic(fields: Fields, architecture: str) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise CheckpointError(f"{fields.source}: {name} = {shown(value)} is not supported")
    kinds = sorted(set(fields.strings("layer_types")))
    if kinds not in ([], ["full_attention"]):
        raise CheckpointError(f"{fields.source}: layer_types with {kinds} is not supported")
    # Qwen's configs always carry a window, which use_sliding_window (checked above) turns on.
    window = fields.get("sliding_window")
    if architecture == "llama" and window is not None:
        raise CheckpointError(f"{fields.source}: sliding_window = {shown(window)} is not supported")


def _hf_rope(fields: Fields, max_positions: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    scaling = fields.section("rope_parameters")
    if not scaling.values:
        scaling = fields.section("rope_scaling")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError(
            f"{fields.source}: partial_rotary_factor = "
            f"{shown(scaling.get('partial_rotary_factor'))} is not supported"
        )
    kind = scaling.string("rope_type") or scaling.string("type") or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{fields.source}: rope type {kind!r} is not known; known: {', '.join(ROPE_KINDS)}"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = scaling.number("factor")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "dynamic":
        return RopeConfig(kind, theta, factor, max_positions)
    name = "original_max_position_embeddings"
    original = fields.integer(name, scaling.integer(name, max_positions))
    if kind == "llama3":
        low = scaling.number("low_freq_factor", allow_zero=True)
        high = scaling.number("high_freq_factor")
        if not low < high:
            raise CheckpointError(
                f"{fields.source}: low_freq_factor ({low}) must be below high_freq_factor ({high})"
            )
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    # 0 stands for "not given", in the published configs too.
    mscale, mscale_all_dim = (
        scaling.number(name, 0.0, allow_zero=True) for name in ("mscale", "mscale_all_dim")
    )
    recommended = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.boolean("truncate", True),
        attention_factor=scaling.number("attention_factor", recommended),
    )


def _gguf_rope(
    fields: Fields, max_positions: int, frequency_factors: Sequence[float] | None
) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    factors = None if frequency_factors is None else tuple(float(f) for f in frequency_factors)
    kind = fields.string("rope.scaling.type") or "none"
    if kind == "none":
        factor = fields.number("rope.scale_linear", 1.0)
        kind = "default" if factor == 1.0 else "linear"
        return RopeConfig(kind, theta, factor, frequency_factors=factors)
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{fields.prefix}rope.scaling.type = {kind!r} is not known; known: none, linear, yarn"
        )
    factor = fields.number("rope.scaling.factor")
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


def _extended_context(max_positions: int, rope: RopeConfig, fields: Fields) -> int:
    """Configs of these two kinds often still name the context before the extension."""
    if rope.kind not in ("dynamic", "yarn"):
        return max_positions
    extended = rope.original_max_position_embeddings * rope.factor
    if not extended <= MAX_INTEGER:
        raise CheckpointError(
            f"the rope factor {rope.factor} in {fields.source} extends the context of "
            f"{rope.original_max_position_embeddings} to {extended:g} positions; "
            f"at most {MAX_INTEGER} are supported"
        )
    return max(max_positions, int(extended))


def _checked(config: ModelConfig, fields: Fields) -> ModelConfig:
    """The config, after the rules that single fields can not show to be kept."""
    if config.num_q_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{fields.source}: the number of query heads ({config.num_q_heads}) must be a "
            f"multiple of the number of key/value heads ({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise CheckpointError(
            f"{fields.source}: head_dim must be even for rotary embedding, got {config.head_dim}"
        )
    if config.rope.kind == "dynamic" and config.head_dim < 4:
        raise CheckpointError(
            f"{fields.source}: head_dim must be at least 4 for dynamic rope, got {config.head_dim}"
        )
    if not 0 < config.rope.attention_factor <= _MAX_ATTENTION_FACTOR:
        raise CheckpointError(
            f"{fields.source}: the attention factor of rope must be > 0 and at most "
            f"{_MAX_ATTENTION_FACTOR}, got {config.rope.attention_factor}"
        )
    if not _has_finite_angles(config):
        raise CheckpointError(
            f"{fields.source}: these rope parameters give angles that are not finite: {config.rope}"
        )
    return config


def _has_finite_angles(config: ModelConfig) -> bool:
    """Each parameter is in its range, but powers and quotients of extreme ones may not be."""
    try:
        frequencies = inverse_frequencies(config.head_dim, config.rope)
    except (ArithmeticError, ValueError):
        return False
    angles = frequencies * config.max_position_embeddings
    return bool(angles.isfinite().all())


def _first(ids: Sequence[int]) -> int | None:
    return ids[0] if ids else None


def _joined(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Every id once, in order."""
    return tuple(dict.fromkeys(i for ids in lists for i in ids))
