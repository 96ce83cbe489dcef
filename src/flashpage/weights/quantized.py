"""Builds a decoder whose matrices stay quantised, from GGUF tensors or from floats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from flashpage.errors import CheckpointError
from flashpage.layers.cpu.packing import (
    GROUP,
    PackedWeight,
    allocate,
    can_pack,
    pack_dense,
    pack_gguf,
)
from flashpage.models.config import ModelConfig
from flashpage.models.quantized import VECTORS, QuantizedDecoder, QuantizedLayer, merged
from flashpage.models.registry import build_model
from flashpage.weights.assign import Assignment, checkpoint_slots
from flashpage.weights.gguf import GGUFFile

TYPES = ("q8_0", "q4_0", "q4_1")
"""What floats can be quantised to."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_PACKERS = 2
"""Threads that pack: it is mostly copying, which few of them do as fast as the memory can."""

Item = tuple[str, "Tensor | PackedWeight"]


def why_not_kept(file: GGUFFile, config: ModelConfig) -> str | None:
    """None if all matrices of the file can stay as they are, else which can not."""
    for name, type_name in file.hf_types():
        is_table = name == _EMBEDDING and not config.tie_word_embeddings
        is_vector = name.endswith(("norm.weight", ".bias"))
        if not (is_table or is_vector or can_pack(type_name)):
            return f"{name} is {type_name}"
    return None


def has_blocks(file: GGUFFile) -> bool:
    """Whether matrices of the file come quantised in a way that is kept."""
    return any(can_pack(type_name) for _, type_name in file.hf_types())


@contextmanager
def packing(file: GGUFFile, config: ModelConfig) -> Iterator[Iterator[Item]]:
    """The file's tensors under their Hugging Face names, matrices of blocks packed as they are.

    Threads pack from now on, while the caller does something else, and end with the context.
    """
    types = dict(file.hf_types())
    rooms = _rooms(file, types)

    def pack(name: str) -> PackedWeight:
        pack_gguf(types[name], file.hf_rows(name, config).numpy(), rooms[name])
        return rooms[name]

    with ThreadPoolExecutor(_PACKERS) as pool:
        packed = {name: pool.submit(pack, name) for name in rooms}

        def items() -> Iterator[Item]:
            for name in types:
                future = packed.pop(name, None)
                yield name, file.hf_tensor(name, config) if future is None else future.result()

        try:
            yield items()
        finally:
            pool.shutdown(cancel_futures=True)
            packed.clear()
            rooms.clear()  # what nobody took is not kept by who holds the items


def _rooms(file: GGUFFile, types: Mapping[str, str]) -> dict[str, PackedWeight]:
    """Memory for every matrix that is packed; of those that will be merged, side by side."""
    sizes = {name: _matrix_size(file.hf_shape(name)) for name, t in types.items() if can_pack(t)}
    rooms: dict[str, PackedWeight] = {}
    for name, (_, cols) in sizes.items():
        if name in rooms or not cols:
            continue
        names = [x for x in _merged_with(name) if types.get(x) == types[name]]
        if any(sizes[x][0] % GROUP or sizes[x][1] != cols for x in names):
            names = [name]
        whole = allocate(types[name], sum(sizes[x][0] for x in names), cols)
        first = 0
        for x in names:
            rooms[x] = whole.part(first, sizes[x][0])
            first += sizes[x][0]
    return rooms


def _matrix_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; no columns of what is no matrix."""
    return shape[0], math.prod(shape[1:]) if len(shape) > 1 else 0


def _merged_with(name: str) -> list[str]:
    """The matrices of a matrix's projection, itself among them."""
    for _, room, parts in _PROJECTIONS:
        for part in parts:
            end = f"{room}.{part}.weight"
            if name.endswith(end):
                return [name.removesuffix(end) + f"{room}.{x}.weight" for x in parts]
    return [name]


def assemble(
    config: ModelConfig,
    items: Iterable[Item],
    *,
    type_name: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantizedDecoder:
    """A decoder of these weights.

    Args:
        items: every tensor of the checkpoint; one float tensor is in memory at a time.
        type_name: of `TYPES`, what matrices that come as floats are quantised to.
        dtype: of the KV cache.

    Raises:
        CheckpointError: as `assign_weights`.
    """
    assignment = Assignment(checkpoint_slots(build_model(config, torch.float32, "meta")), config)
    placed: dict[str, PackedWeight | Tensor] = {}
    for raw_name, item in items:
        shape = (item.rows, item.cols) if isinstance(item, PackedWeight) else tuple(item.shape)
        name = assignment.place(raw_name, shape)
        if name is None:
            continue
        if isinstance(item, PackedWeight):
            finite = item.scale_values().abs().amax().isfinite()  # NaN is the largest of all
        else:
            finite = item.isfinite().all()
            is_dense = item.dim() == 1 or (name == _EMBEDDING and type_name is None)
            item = item.detach() if is_dense else pack_dense(item, str(type_name).upper())
            if isinstance(item, Tensor):
                item = item.float() if item.dim() == 1 else item.bfloat16()
        if not finite:
            raise CheckpointError(
                f"weight {raw_name} contains NaN or infinity: the file is damaged"
            )
        placed[name] = item
    assignment.report()
    layers = [_layer(i, placed) for i in range(config.num_layers)]
    embedding = placed[_EMBEDDING]
    head = embedding if config.tie_word_embeddings else placed[_HEAD]
    assert isinstance(head, PackedWeight)
    norm = placed["model.norm.weight"]
    assert isinstance(norm, Tensor)
    return QuantizedDecoder(config, layers, embedding, head, norm, dtype).eval()


def _layer(index: int, placed: dict[str, PackedWeight | Tensor]) -> QuantizedLayer:
    """The tensors of one layer, each projection's together; they are taken out of `placed`."""
    prefix = f"model.layers.{index}."
    layer = QuantizedLayer()
    for projection, room, parts in _PROJECTIONS:
        names = [f"{prefix}{room}.{part}" for part in parts]
        layer.projections[projection] = merged([placed.pop(f"{n}.weight") for n in names])  # type: ignore[misc]
        if f"{names[0]}.bias" in placed:
            bias = torch.cat([placed.pop(f"{n}.bias") for n in names])  # type: ignore[misc]
            layer.vectors[f"{room}.{projection}.bias"] = bias
    for name in VECTORS:
        if prefix + name in placed:
            layer.vectors[name] = placed.pop(prefix + name)  # type: ignore[assignment]
    return layer


_PROJECTIONS = (
    ("qkv_proj", "self_attn", ("q_proj", "k_proj", "v_proj")),
    ("o_proj", "self_attn", ("o_proj",)),
    ("gate_up_proj", "mlp", ("gate_proj", "up_proj")),
    ("down_proj", "mlp", ("down_proj",)),
)
