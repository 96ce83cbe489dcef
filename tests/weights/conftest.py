"""Small models and GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INTER, VOCAB = 4, 2, 64, 256, 512, 680

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture
def tiny_config() -> Callable[..., dict[str, Any]]:
    """`(model_type, **changes) -> contents of a config.json`."""

    def make(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
        classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        return {
            "architectures": [f"{classes[model_type]}ForCausalLM"],
            "model_type": model_type,
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTER,
            "num_hidden_layers": 2,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            **changes,
        }

    return make


@pytest.fixture
def random_state(tiny_config: Any) -> Callable[[str], dict[str, Tensor]]:
    """`architecture -> every weight of a checkpoint of that tiny model, by Hugging Face name`."""
    from flashpage.models.config import ModelConfig
    from flashpage.models.registry import build_model
    from flashpage.weights.assign import checkpoint_slots

    def make(architecture: str) -> dict[str, Tensor]:
        config = ModelConfig.from_hf(tiny_config(architecture))
        slots = checkpoint_slots(build_model(config, torch.float32, "meta"))
        return {name: torch.randn(slot.target.shape) * 0.1 for name, slot in slots.items()}

    return make


def raw_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random blocks of a K-quant, which the gguf package reads but does not write."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.randint(
        0, 256, (*shape[:-1], shape[-1] // block_size, block_bytes), np.uint8
    )
    scale = np.random.uniform(1e-4, 1e-3, blocks.shape[:-1]).astype(np.float16)
    scale_bytes = scale[..., None].view(np.uint8)
    at = slice(0, 2) if kind.name == "Q4_K" else slice(block_bytes - 2, block_bytes)
    blocks[..., at] = scale_bytes
    if kind.name == "Q4_K":
        blocks[..., 2:4] = scale_bytes
    return blocks.reshape(*shape[:-1], -1)


@pytest.fixture
def write_gguf() -> Callable[..., dict[str, Tensor]]:
    """`(path, architecture, state, type name, metadata=..., extra=...) -> the values as stored`.

    Matrices get the type, the rest is F32; llama's q and k are interleaved as in real files.
    """

    def write(
        path: Path,
        architecture: str,
        state: Mapping[str, Tensor],
        type_name: str = "F32",
        metadata: Mapping[str, Any] | None = None,
        extra: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, Tensor]:
        writer = gguf.GGUFWriter(path, architecture)
        _add_structure(writer)
        for key, value in (metadata or {}).items():
            _add_value(writer, key, value)
        stored: dict[str, Tensor] = {}
        for name, tensor in state.items():
            kind = gguf.GGMLQuantizationType[type_name if tensor.dim() == 2 else "F32"]
            if kind.name in ("Q4_K", "Q6_K"):
                raw = raw_blocks(tuple(tensor.shape), kind)
            else:
                raw = gguf.quants.quantize(_interleaved(architecture, name, tensor).numpy(), kind)
            writer.add_tensor(_gguf_name(name), raw, raw_dtype=kind)
            values = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
            stored[name] = _deinterleaved(architecture, name, values.reshape(tensor.shape))
        for name, array in (extra or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return stored

    return write


def _add_structure(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_block_count(2)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def _is_interleaved(architecture: str, name: str) -> bool:
    return architecture == "llama" and (".q_proj." in name or ".k_proj." in name)


def _interleaved(architecture: str, name: str, tensor: Tensor) -> Tensor:
    """Row i of a head's first half and row i of its second half become neighbours."""
    if not _is_interleaved(architecture, name):
        return tensor
    heads = tensor.reshape(-1, HEAD_DIM, *tensor.shape[1:])
    first, second = heads[:, : HEAD_DIM // 2], heads[:, HEAD_DIM // 2 :]
    return torch.stack((first, second), dim=2).reshape(tensor.shape).contiguous()


def _deinterleaved(architecture: str, name: str, tensor: Tensor) -> Tensor:
    if not _is_interleaved(architecture, name):
        return tensor
    heads = tensor.reshape(-1, HEAD_DIM, *tensor.shape[1:])
    return torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).reshape(tensor.shape)


@pytest.fixture
def bpe_metadata() -> Callable[..., dict[str, Any]]:
    """`(pre, **changes) -> GGUF metadata of a small byte-level vocabulary`; cases under "cases"."""

    def make(pre: str, **changes: Any) -> dict[str, Any]:
        data = json.loads((DATA / "tiny_bpe.json").read_text(encoding="utf-8"))
        metadata = {
            "model": "gpt2",
            "pre": pre,
            "tokens": data["tokens"],
            "token_type": data["kinds"],
            "merges": data["merges"],
            "bos_token_id": data["tokens"].index("<|endoftext|>"),
            "eos_token_id": data["tokens"].index("<|im_end|>"),
            **changes,
        }
        return {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}

    return make
