"""Quantised weights as the kernels read them, from the blocks of a GGUF file or from floats.

Packed: 16 rows by 32 columns at a time, `[rows / 16, cols / 32]` of them. Four neighbouring columns
of 16 rows are 64 bytes; 4-bit values share a byte with the one 16 columns further. Scales are d and
m of the 16 rows: a weight is `d * value + m`, its value unsigned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Q4, Q8, Q4_WIDE, Q6_WIDE = range(4)
"""Kinds: bits per value, and scales in float16, or in float32 ("wide"); Q6_WIDE keeps a byte per
value, and has scales for each half of a block."""

BLOCK_BYTES = (256, 512, 256, 512)
SCALE_BYTES = (64, 64, 128, 256)
GROUP, BLOCK = 16, 32


@dataclass(frozen=True)
class PackedWeight:
    """A `[rows, cols]` matrix, its rows padded to a multiple of 16 with zeros.

    blocks: uint8 `[groups * num_blocks * BLOCK_BYTES[kind]]`; scales: uint8, alike. Both begin at
    a multiple of 64 bytes.
    """

    kind: int
    rows: int
    cols: int
    blocks: Tensor
    scales: Tensor

    @property
    def groups(self) -> int:
        """Groups of 16 rows."""
        return -(-self.rows // GROUP)

    @property
    def num_blocks(self) -> int:
        """Blocks of 32 columns."""
        return self.cols // BLOCK

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel() + self.scales.numel()

    def address(self) -> tuple[int, int, int, int, int, int]:
        """What the kernels take."""
        return (
            self.blocks.data_ptr(),
            self.scales.data_ptr(),
            self.kind,
            self.num_blocks,
            BLOCK_BYTES[self.kind],
            SCALE_BYTES[self.kind],
        )

    def scale_values(self) -> Tensor:
        """d and m of every block, flat, in the dtype that they are kept in."""
        return self.scales.view(torch.float16 if self.kind in (Q4, Q8) else torch.float32)

    def part(self, first: int, rows: int) -> PackedWeight:
        """`rows` rows from row `first` on, a multiple of 16, in the same memory."""
        group, last = first // GROUP, -(-(first + rows) // GROUP)
        block_bytes, scale_bytes = (
            self.num_blocks * sizes[self.kind] for sizes in (BLOCK_BYTES, SCALE_BYTES)
        )
        return PackedWeight(
            self.kind,
            rows,
            self.cols,
            self.blocks[group * block_bytes : last * block_bytes],
            self.scales[group * scale_bytes : last * scale_bytes],
        )

    def dequantize(self) -> Tensor:
        """float32 `[rows, cols]`: what the packed values stand for."""
        shape = (self.groups, self.num_blocks)
        if BLOCK_BYTES[self.kind] == 512:
            words = self.blocks.numpy().reshape(*shape, 8, GROUP, 4)
        else:
            words = self.blocks.numpy().reshape(*shape, 4, GROUP, 4)
            words = np.concatenate([words & 15, words >> 4], axis=2)
        values = words.transpose(0, 3, 1, 2, 4).reshape(-1, self.num_blocks, BLOCK)
        scale_type = np.float16 if self.kind in (Q4, Q8) else np.float32
        scales = self.scales.numpy().view(scale_type).reshape(*shape, -1, 2, GROUP)
        d, m = (
            scales[..., i, :].transpose(0, 3, 1, 2).reshape(-1, self.num_blocks, scales.shape[2])
            for i in range(2)
        )
        parts = values.reshape(*d.shape, -1).astype(np.float32)
        dense = d[..., None].astype(np.float32) * parts + m[..., None].astype(np.float32)
        return torch.from_numpy(dense.reshape(-1, self.cols)[: self.rows].copy())


def can_pack(type_name: str) -> bool:
    """Whether tensors of this GGUF type are kept quantised."""
    return type_name in _READERS


def allocate(type_name: str, rows: int, cols: int) -> PackedWeight:
    """Memory, not filled, for a matrix of this GGUF type."""
    kind = _KINDS[type_name]
    count = -(-rows // GROUP) * (cols // BLOCK)
    # torch's memory begins at a multiple of 64.
    blocks, scales = (
        torch.empty(count * sizes[kind], dtype=torch.uint8) for sizes in (BLOCK_BYTES, SCALE_BYTES)
    )
    return PackedWeight(kind, rows, cols, blocks, scales)


def pack_gguf(type_name: str, raw: np.ndarray, out: PackedWeight) -> None:
    """Pack rows of a GGUF tensor: exactly its values.

    Args:
        type_name: Q4_0, Q4_1, Q8_0, Q4_K or Q6_K.
        raw: uint8 `[rows, bytes per row]`.
        out: of `allocate`, or a part of it.
    """
    missing = -raw.shape[0] % GROUP
    if missing:
        raw = np.concatenate([raw, np.zeros((missing, raw.shape[1]), np.uint8)])
    with np.errstate(over="ignore", invalid="ignore"):  # who takes the weights looks at scales
        _READERS[type_name](raw, out)


def pack_dense(weight: Tensor, type_name: str) -> PackedWeight:
    """Quantise a float matrix `[rows, cols]` to Q8_0, Q4_0 or Q4_1, cols a multiple of 32.

    Each block of 32 values is rounded as GGUF's reference does: Q8_0 to d = max |x| / 127, Q4_0 to
    d = -(value of the largest magnitude) / 8, Q4_1 to d = (max - min) / 15.
    """
    rows, cols = weight.shape
    x = weight.float().numpy().reshape(rows, cols // BLOCK, BLOCK)
    if rows % GROUP:
        x = np.concatenate([x, np.zeros((-rows % GROUP, *x.shape[1:]), np.float32)])
    if type_name == "Q8_0":
        d, low = np.abs(x).max(axis=-1) / 127, np.zeros(x.shape[:2], np.float32)
        values = np.rint(x * _inverse(d)[..., None]) + 128
        d = d.astype(np.float16)
        m = np.float16(-128) * d
    elif type_name == "Q4_0":
        at = np.abs(x).argmax(axis=-1)[..., None]
        d = np.take_along_axis(x, at, -1)[..., 0] / -8
        values = np.clip(np.floor(x * _inverse(d)[..., None] + 8.5), 0, 15)
        d = d.astype(np.float16)
        m = np.float16(-8) * d
    else:
        low = x.min(axis=-1)
        d = (x.max(axis=-1) - low) / 15
        values = np.clip(np.floor((x - low[..., None]) * _inverse(d)[..., None] + 0.5), 0, 15)
        d, m = d.astype(np.float16), low.astype(np.float16)
    out = allocate(type_name, rows, cols)
    _pack(values.astype(np.uint8), d[..., None], m[..., None], out)
    return out


def concatenate(parts: Sequence[PackedWeight]) -> PackedWeight:
    """The rows of all parts one after the other; all of one kind, rows multiples of 16."""
    first = parts[0]
    return PackedWeight(
        first.kind,
        sum(part.rows for part in parts),
        first.cols,
        _joined([part.blocks for part in parts]),
        _joined([part.scales for part in parts]),
    )


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    """`torch.cat`, without copying if they lie one after the other in the same memory."""
    first = vectors[0]
    memory, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for vector in vectors:
        if vector.untyped_storage().data_ptr() != memory or vector.storage_offset() != end:
            return torch.cat(list(vectors))
        end += vector.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _inverse(d: np.ndarray) -> np.ndarray:
    return np.divide(1, d, out=np.zeros_like(d), where=d != 0)


def _pack(values: np.ndarray, d: np.ndarray, m: np.ndarray, out: PackedWeight) -> None:
    """values uint8 `[N, blocks, 32]`; d and m `[N, blocks, 1 or 2]`."""
    if BLOCK_BYTES[out.kind] == 256:
        values = values[..., :16] | (values[..., 16:] << 4)
    _lay_out(np.ascontiguousarray(values).view(np.uint32), d, m, out)


def _lay_out(words: np.ndarray, d: np.ndarray, m: np.ndarray, out: PackedWeight) -> None:
    """words uint32 `[N, blocks, 4 or 8]`: four columns each; d and m as in `_pack`."""
    padded, num_blocks, num_words = words.shape
    groups = padded // GROUP
    out.blocks.numpy().view(np.uint32).reshape(groups, num_blocks, num_words, GROUP)[...] = (
        words.reshape(groups, GROUP, num_blocks, num_words).transpose(0, 2, 3, 1)
    )
    target = out.scale_values().numpy().reshape(groups, num_blocks, d.shape[2], 2, GROUP)
    for place, source in enumerate((d, m)):
        grouped = source.reshape(groups, GROUP, num_blocks, d.shape[2])
        target[..., place, :] = grouped.transpose(0, 2, 3, 1)


def _halfs(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16)


def _q4_0(raw: np.ndarray, out: PackedWeight) -> None:
    raw = raw.reshape(len(raw), -1, 18)
    d = _halfs(raw[..., :2])
    words = np.ascontiguousarray(raw[..., 2:]).view(np.uint32)
    _lay_out(words, d, np.float16(-8) * d, out)


def _q4_1(raw: np.ndarray, out: PackedWeight) -> None:
    raw = raw.reshape(len(raw), -1, 20)
    words = np.ascontiguousarray(raw).view(np.uint32)[..., 1:]
    _lay_out(words, _halfs(raw[..., :2]), _halfs(raw[..., 2:4]), out)


def _q8_0(raw: np.ndarray, out: PackedWeight) -> None:
    raw = raw.reshape(len(raw), -1, 34)
    d = _halfs(raw[..., :2])
    words = np.ascontiguousarray(raw[..., 2:]).view(np.uint32) ^ np.uint32(0x80808080)
    _lay_out(words, d, np.float16(-128) * d, out)


def _q4_k(raw: np.ndarray, out: PackedWeight) -> None:
    raw = raw.reshape(len(raw), -1, 144)
    d, d_min = (_halfs(raw[..., i : i + 2]).astype(np.float32) for i in (0, 2))
    low, middle, high = (raw[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    least = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    values = raw[..., 16:].reshape(*raw.shape[:2], 4, 1, 32)
    values = np.concatenate([values & 15, values >> 4], axis=-2)
    shape = (len(raw), -1, 1)
    _pack(
        values.reshape(len(raw), -1, BLOCK),
        (d * scale).reshape(shape),
        (-d_min * least).reshape(shape),
        out,
    )


def _q6_k(raw: np.ndarray, out: PackedWeight) -> None:
    raw = raw.reshape(len(raw), -1, 210)
    shape = raw.shape[:2]
    low = raw[..., :128].reshape(*shape, 2, 1, 2, 32)
    high = raw[..., 128:192].reshape(*shape, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-3).reshape(*shape, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    values = low | (((high >> shifts) & 3) << 4)
    d = _halfs(raw[..., 208:]).astype(np.float32) * raw[..., 192:208].view(np.int8)
    d = d.reshape(len(raw), -1, 2)
    _pack(values.reshape(len(raw), -1, BLOCK), d, -32 * d, out)


_READERS: dict[str, Callable[[np.ndarray, PackedWeight], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}

_KINDS = {"Q4_0": Q4, "Q4_1": Q4, "Q8_0": Q8, "Q4_K": Q4_WIDE, "Q6_K": Q6_WIDE}
