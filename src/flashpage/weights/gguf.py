"""Reads GGUF files: metadata, and tensors as float32 under their Hugging Face names."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpage.errors import CheckpointError, require
from flashpage.models.config import ModelConfig

# Number in the file, values per block, bytes per block.
_TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q4_K": (12, 256, 144),
    "Q6_K": (14, 256, 210),
}
SUPPORTED_TYPES = tuple(_TYPES)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
# Numbers of the metadata value types, and how struct names them.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file: `shape` is rows first, `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file, memory-mapped: metadata is read at once, tensors when asked for.

    Attributes:
        metadata: key -> number, bool, string, or list of these.
        tensors: name -> `TensorInfo`.

    Raises:
        CheckpointError: not a GGUF file, an unknown version, a tensor type that is not in
            `SUPPORTED_TYPES`, or a file that ends before its contents do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            # Copy on write: torch wants arrays that could be written to.
            self._data = np.memmap(self.path, dtype=np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} can not be read: {error}") from error
        cursor = _Cursor(memoryview(self._data), self.path)
        num_tensors, num_entries = _read_header(cursor)
        self.metadata = _read_metadata(cursor, num_entries)
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{self.path} is one of {self.metadata['split.count']} parts: "
                "merge a split GGUF file into one first"
            )
        self.tensors = _read_tensor_infos(cursor, num_tensors, self.metadata)
        self._hf_names = {_hf_name(name): name for name in self.tensors if name != _ROPE_FACTORS}

    def model_config(self) -> ModelConfig:
        """The structure that the metadata describes."""
        factors = self.read(_ROPE_FACTORS).tolist() if _ROPE_FACTORS in self.tensors else None
        shapes = {name: info.shape for name, info in self.tensors.items()}
        config = ModelConfig.from_gguf(self.metadata, shapes, factors)
        return replace(config, dtype=_FLOATS.get(self.tensors["token_embd.weight"].type_name))

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32."""
        info = self.tensors[name]
        raw = self._data[info.offset : info.offset + info.num_bytes]
        if info.type_name == "F32":
            return torch.from_numpy(raw.view(np.float32).copy()).reshape(info.shape)
        require("gguf", "engine")
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows = raw.reshape(*info.shape[:-1], -1)
        values = dequantize(rows, GGMLQuantizationType[info.type_name])
        return torch.from_numpy(np.asarray(values)).reshape(info.shape)

    def hf_types(self) -> list[tuple[str, str]]:
        """Hugging Face name and type name of every tensor."""
        return [(name, self.tensors[self._hf_names[name]].type_name) for name in self._hf_names]

    def hf_shape(self, hf_name: str) -> tuple[int, ...]:
        """Rows first."""
        return self.tensors[self._hf_names[hf_name]].shape

    def hf_tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Every tensor as Hugging Face checkpoints of this model name and lay it out."""
        for name in self._hf_names:
            yield name, self.hf_tensor(name, config)

    def hf_tensor(self, hf_name: str, config: ModelConfig) -> Tensor:
        """One tensor by its Hugging Face name, dequantised to float32."""
        name = self._hf_names[hf_name]
        return _hf_order(name, self.read(name), config)

    def hf_rows(self, hf_name: str, config: ModelConfig) -> Tensor:
        """The stored rows of a matrix, uint8 `[rows, bytes per row]`, in Hugging Face order."""
        name = self._hf_names[hf_name]
        info = self.tensors[name]
        raw = torch.from_numpy(self._data[info.offset : info.offset + info.num_bytes])
        return _hf_order(name, raw.view(info.shape[0], -1), config)


def _hf_order(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    # llama.cpp rotates neighbouring rows together and stores llama's q and k in that
    # order; for the Qwen family it rotates half-split, as we do.
    if config.architecture == "llama" and ".attn_q." in name:
        return _half_split(tensor, config.num_q_heads)
    if config.architecture == "llama" and ".attn_k." in name:
        return _half_split(tensor, config.num_kv_heads)
    return tensor


class _Cursor:
    """Reads values one after the other; running past the end is a CheckpointError."""

    def __init__(self, data: memoryview, path: str) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def scalar(self, format_: str) -> Any:
        return self._unpack(format_)[0]

    def scalars(self, format_: str, count: int) -> tuple[Any, ...]:
        self.require(count * struct.calcsize(format_))
        return self._unpack(f"<{count}{format_[1:]}")

    def string(self) -> str:
        start = self.position + 8
        end = start + self.scalar("<Q")
        self.require(end - start)
        self.position = end
        try:
            return str(self.data[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path} is damaged: bytes {start} to {end} are not UTF-8 text"
            ) from error

    def strings(self, count: int) -> list[str]:
        """`count` strings one after the other: a vocabulary has a hundred thousand."""
        data, position, size = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                if position > size:
                    break
                found.append(str(data[start:position], "utf-8"))
        except (struct.error, UnicodeDecodeError):
            pass
        if len(found) < count:  # once more from there, for the message that says what is wrong
            self.position = start - 8
            self.string()
        self.position = position
        return found

    def require(self, num_bytes: int) -> None:
        if self.position + num_bytes > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated or damaged: {num_bytes} bytes are needed at offset "
                f"{self.position}, the file has {len(self.data)}"
            )

    def _unpack(self, format_: str) -> tuple[Any, ...]:
        size = struct.calcsize(format_)
        self.require(size)
        values = struct.unpack_from(format_, self.data, self.position)
        self.position += size
        return values


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata entries."""
    if bytes(cursor.data[:4]) != _MAGIC:
        raise CheckpointError(
            f"{cursor.path} is not a GGUF file: it begins with {bytes(cursor.data[:4])!r}"
        )
    cursor.position = 4
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{cursor.path} has GGUF version {version}; known: 2 and 3, little-endian"
        )
    return cursor.scalar("<Q"), cursor.scalar("<Q")


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = _read_value(cursor, key, cursor.scalar("<I"))
    return metadata


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        item_kind, count = cursor.scalar("<I"), cursor.scalar("<Q")
        if item_kind in _SCALARS:
            return list(cursor.scalars(_SCALARS[item_kind], count))
        cursor.require(8 * count)
        if item_kind == _STRING:
            return cursor.strings(count)
        return [_read_value(cursor, key, item_kind) for _ in range(count)]
    raise CheckpointError(f"{cursor.path} is damaged: {key} has the unknown value type {kind}")


def _read_tensor_infos(
    cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]
) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{cursor.path}: general.alignment is {alignment!r}")
    entries = []
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{cursor.path} is damaged: {name} has {num_dims} dimensions")
        dims = cursor.scalars("<Q", num_dims)
        if 0 in dims:
            raise CheckpointError(f"{cursor.path} is damaged: {name} has the dimensions {dims}")
        entries.append((name, dims[::-1], cursor.scalar("<I"), cursor.scalar("<Q")))
    base = math.ceil(cursor.position / alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    for name, shape, type_number, offset in entries:
        type_name, num_bytes = _stored_size(cursor.path, name, shape, type_number)
        cursor.position = base + offset
        cursor.require(num_bytes)
        infos[name] = TensorInfo(name, shape, type_name, base + offset, num_bytes)
    return infos


def _stored_size(path: str, name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
    """Type name and number of bytes of a tensor."""
    found = [name for name, (number, _, _) in _TYPES.items() if number == type_number]
    if not found:
        raise CheckpointError(_unsupported(path, name, type_number))
    type_name = found[0]
    _, block_size, block_bytes = _TYPES[type_name]
    if shape[-1] % block_size:
        raise CheckpointError(
            f"{path} is damaged: rows of {name} have {shape[-1]} values, "
            f"not a multiple of {block_size} as {type_name} needs"
        )
    return type_name, math.prod(shape) // block_size * block_bytes


def _unsupported(path: str, name: str, type_number: int) -> str:
    require("gguf", "engine")
    from gguf import GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_number)
    except ValueError:
        return f"{path}: {name} has the unknown type {type_number}"
    return (
        f"{path}: {name} has type {kind.name}, which is not supported; "
        f"supported: {', '.join(SUPPORTED_TYPES)}"
    )


def _hf_name(name: str) -> str:
    if name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name  # no counterpart: reported as unexpected under the name it has in the file


def _half_split(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from interleaved pairs (0, 1), (2, 3)... to two halves."""
    if tensor.shape[0] % (2 * num_heads):
        return tensor  # of a wrong shape, which assigning it reports
    pairs = tensor.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)
