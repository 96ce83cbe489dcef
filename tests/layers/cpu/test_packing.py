"""Packed weights are exactly those of the file, or as near to floats as the type allows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from flashpage.layers.cpu import packing

KINDS = {
    "Q4_0": packing.Q4,
    "Q4_1": packing.Q4,
    "Q8_0": packing.Q8,
    "Q4_K": packing.Q4_WIDE,
    "Q6_K": packing.Q6_WIDE,
}


def raw_rows(type_name: str, rows: int, cols: int) -> np.ndarray:
    """Random blocks; those of K-quants, which the gguf package does not write, bit by bit."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name in ("Q4_0", "Q4_1", "Q8_0"):
        return quantize(np.random.randn(rows, cols).astype(np.float32), kind)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.randint(0, 256, (rows, cols // size, num_bytes), np.uint8)
    places = (0, 2) if type_name == "Q4_K" else (208,)
    for at in places:
        d = np.random.uniform(-1e-2, 1e-2, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = d[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def pack(type_name: str, raw: np.ndarray, cols: int) -> packing.PackedWeight:
    out = packing.allocate(type_name, len(raw), cols)
    packing.pack_gguf(type_name, raw, out)
    return out


@pytest.mark.parametrize("rows", [1, 16, 21])
@pytest.mark.parametrize("type_name", KINDS)
def test_blocks_stay_what_they_are(type_name: str, rows: int) -> None:
    assert packing.can_pack(type_name)
    raw = raw_rows(type_name, rows, 512)
    packed = pack(type_name, raw, 512)
    assert (packed.kind, packed.rows, packed.cols) == (KINDS[type_name], rows, 512)
    assert packed.groups == -(-rows // 16)
    assert packed.blocks.data_ptr() % 64 == packed.scales.data_ptr() % 64 == 0
    expected = dequantize(raw, gguf.GGMLQuantizationType[type_name])
    assert np.array_equal(packed.dequantize().numpy(), expected)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q5_K"])
def test_other_types_are_not_packed(type_name: str) -> None:
    assert not packing.can_pack(type_name)


@pytest.mark.parametrize(
    ("type_name", "steps"), [("Q8_0", 2 * 127), ("Q4_0", 16), ("Q4_1", 15)], ids=str
)
def test_floats_are_rounded_to_the_next_step(type_name: str, steps: int) -> None:
    weight = torch.randn(19, 96)
    weight[3, 32:64] = 0
    packed = packing.pack_dense(weight, type_name)
    blocks = weight.reshape(19, 3, 32)
    error = (packed.dequantize() - weight).reshape(19, 3, 32).abs().amax(-1)
    if type_name == "Q4_1":
        step = (blocks.amax(-1) - blocks.amin(-1)) / steps
    else:
        step = 2 * blocks.abs().amax(-1) / steps
    # Half a step, or a whole one at the end of Q4_0's range that lacks a value; float16 scales.
    allowed = step * (1.01 if type_name == "Q4_0" else 0.51) + 2e-3 * blocks.abs().amax(-1)
    assert (error <= allowed).all()
    assert (packed.dequantize()[3, 32:64] == 0).all()
    assert error.max() > 0.3 * step.max(), "nothing was rounded"


def test_parts_become_one_matrix() -> None:
    parts = [pack("Q4_1", raw_rows("Q4_1", rows, 64), 64) for rows in (32, 16, 16)]
    whole = packing.concatenate(parts)
    assert whole.rows == 64
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


@pytest.mark.parametrize("type_name", KINDS)
def test_neighbours_in_memory_become_one_without_copying(type_name: str) -> None:
    room = packing.allocate(type_name, 64, 256)
    parts = [room.part(0, 32), room.part(32, 16), room.part(48, 16)]
    for part in parts:
        packing.pack_gguf(type_name, raw_rows(type_name, part.rows, 256), part)
    whole = packing.concatenate(parts)
    assert whole.address() == room.address()
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    apart = packing.concatenate([parts[0], parts[2]])
    assert apart.blocks.data_ptr() != room.blocks.data_ptr()
    assert torch.equal(apart.dequantize(), whole.dequantize()[[*range(32), *range(48, 64)]])


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_scales_beyond_float16_are_no_warning() -> None:
    """Who takes the weights refuses them, by name."""
    raw = raw_rows("Q8_0", 16, 64)
    raw[3, :2] = np.frombuffer(np.float16(600).tobytes(), np.uint8)
    assert pack("Q8_0", raw, 64).scale_values().isinf().any()
