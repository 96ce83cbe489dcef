"""The decoder with quantised weights on a CPU: one kernel call per step; knows no files or text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpage.attention.cpu.numba_runtime import call, kernels
from flashpage.cache.kv_cache import KVCache
from flashpage.errors import ArgumentError, FlashpageError
from flashpage.layers.attention import AttentionMetadata
from flashpage.layers.cpu import forms
from flashpage.layers.cpu.packing import BLOCK, GROUP, PackedWeight, concatenate
from flashpage.layers.rope import RotaryEmbedding
from flashpage.models.config import ModelConfig

PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""As the kernel numbers them."""

VECTORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.qkv_proj.bias",
    "self_attn.o_proj.bias",
    "mlp.gate_up_proj.bias",
    "mlp.down_proj.bias",
)
"""A layer's float32 vectors, as the kernel numbers them; those that a model lacks stay out."""

MAX_PARTS, _PART_FIELDS = 3, 8
BLOCK_MULTIPLE = 16
"""A page must hold a multiple of so many tokens: 16 keys are the lanes of a vector."""

_KV_TAGS = {torch.float32: (0,), torch.bfloat16: (0, 0)}
_LINEAR, _STEP = "flashpage.layers.cpu.linear", "flashpage.layers.cpu.step"
_SYNC = "flashpage.layers.cpu.sync"
_FIRST_POSITIONS = 512

PATIENCE, _TRIAL = 1 << 28, 1 << 21
"""How often a waiting thread gives the processor away before it gives up: minutes, and a second."""

logger = logging.getLogger("flashpage")


@dataclass
class QuantizedLayer:
    """Weights of one layer.

    projections: name of `PROJECTIONS` -> packed parts, rows one after the other.
    vectors: name of `VECTORS` -> float32 vector.
    """

    projections: dict[str, list[PackedWeight]] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)


def why_not_quantized(config: ModelConfig) -> str | None:
    """None if the kernels serve models of this shape on this machine, else the reason."""
    sizes = (
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("head_dim", config.head_dim),
    )
    for name, size in sizes:
        if size % BLOCK:
            return f"{name} = {size} is not a multiple of {BLOCK}"
    return forms.why_no_form()


class QuantizedDecoder(nn.Module):
    """A decoder of the Llama family whose matrices stay quantised; runs on the CPU.

    Takes and gives what `DecoderModel` does, with hidden states in float32. Activations are
    rounded to 12 bits in blocks of 32 before each product, so that a token's result depends on
    nothing but the token and its context: not on the step, chunk or batch that it is computed in.

    K and V are kept in an order of the kernels' own within each page (`layers.cpu`): pages are not
    for `layers.attention` to read.

    Args:
        config: for which `why_not_quantized` has no objection.
        layers: their weights.
        embedding: `[vocab_size, hidden_size]`, packed or dense.
        head: likewise, packed; the embedding itself if they are tied.
        norm: float32 `[hidden_size]`, of the final norm.
        dtype: of the KV cache, float32 or bfloat16.
        form: of `layers.cpu.forms.NAMES`; None takes the best of this processor.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[QuantizedLayer],
        embedding: PackedWeight | Tensor,
        head: PackedWeight,
        norm: Tensor,
        dtype: torch.dtype = torch.bfloat16,
        form: str | None = None,
    ) -> None:
        super().__init__()
        if dtype not in _KV_TAGS:
            raise ArgumentError(
                f"dtype must be torch.float32 or torch.bfloat16 with quantised weights, got {dtype}"
            )
        self.config = config
        self.dtype = dtype
        self.form = forms.best_form() if form is None else form
        if self.form not in forms.available_forms():
            raise ArgumentError(
                f"form = {form!r} can not be run here: this processor has "
                f"{', '.join(forms.available_forms())}"
            )
        self.layers_ = list(layers)
        self.embedding, self.head, self.norm_weight = embedding, head, norm
        self.rotary = RotaryEmbedding(config.head_dim, config.rope)
        self._cos = self._sin = torch.empty(0, config.head_dim)
        self._weights, self._vectors = _tables(self.layers_)
        # What every step passes on.
        self._tag, self._head_address = forms.tag(self.form), self.head.address()
        self._eps = np.float32(config.rms_norm_eps)
        self._scale = np.float32(config.head_dim**-0.5)
        self._shape = (
            config.hidden_size,
            config.intermediate_size,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self._caches: tuple[KVCache | None, np.ndarray] = (None, np.empty(0, np.int64))

    @property
    def num_bytes(self) -> int:
        """Bytes of all packed matrices."""
        parts = [p for layer in self.layers_ for ps in layer.projections.values() for p in ps]
        tables = {id(x): x for x in (self.embedding, self.head) if isinstance(x, PackedWeight)}
        return sum(part.num_bytes for part in [*parts, *tables.values()])

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """`[T]` token ids and positions -> `[T, hidden_size]` float32, as `DecoderModel.forward`.

        Every token needs a slot. If each sequence has at most one of `rows`, the last layer only
        stores K and V of the others.

        Raises:
            ArgumentError: a cache of another dtype, or whose `block_size` is no multiple of 16, a
                token without a slot, or one that is not in the vocabulary.
        """
        config, threads = self.config, num_threads()
        slots, ids, places = (x.numpy() for x in (metadata.slot_mapping, input_ids, positions))
        low_id, high_id, low_slot, high_slot, high_place = call(
            kernels(_STEP).extremes, threads, ids, slots, places
        )
        self._check_cache(kv_cache, low_slot, high_slot)
        if low_id < 0 or high_id >= config.vocab_size:
            raise ArgumentError(
                f"input_ids must be from 0 to {config.vocab_size - 1}, got {low_id} to {high_id}"
            )
        starts, tables = _sequences(metadata, kv_cache.block_size)
        wanted, wanted_starts = np.arange(len(slots)), starts
        if rows is not None:
            wanted = np.array(rows, np.int64)
            if not _at_most_one_of_each(wanted, starts):
                return self.forward(input_ids, positions, kv_cache, metadata)[wanted]
            wanted_starts = np.searchsorted(wanted, starts)
        x = self._embed(input_ids, threads)
        self._extend_angles(high_place + 1)
        out = torch.empty(len(wanted), config.hidden_size)
        everyone_came = call(
            kernels(_STEP).run,
            threads,
            self._tag,
            _KV_TAGS[self.dtype],
            x,
            slots,
            places,
            starts,
            wanted,
            wanted_starts,
            tables,
            kv_cache.block_size // BLOCK_MULTIPLE,
            self._weights,
            self._vectors,
            self._cache_addresses(kv_cache),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            self.norm_weight.data_ptr(),
            self._eps,
            self._scale,
            self._shape,
            out.data_ptr(),
            threads,
            PATIENCE,
        )
        _check_threads(everyone_came, threads)
        return out

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[R, hidden_size]` -> `[R, vocab_size]` float32."""
        if hidden.dtype != torch.float32 or not hidden.is_contiguous():
            hidden = hidden.float().contiguous()
        rows, size = hidden.shape
        out = torch.empty(rows, self.head.groups * GROUP)
        threads = num_threads()
        if rows:
            everyone_came = call(
                kernels(_LINEAR).linear,
                threads,
                self._tag,
                self._head_address,
                self.head.groups,
                hidden.data_ptr(),
                rows,
                size,
                out.data_ptr(),
                4 * out.stride(0),
                threads,
                PATIENCE,
            )
            _check_threads(everyone_came, threads)
        return out[:, : self.config.vocab_size]

    compute_raw_logits = compute_logits

    def load_kernels(self) -> None:
        """Load the kernels from disk, or compile them: once, before work begins."""
        cache = KVCache(
            self.config.num_layers,
            1,
            BLOCK_MULTIPLE,
            self.config.num_kv_heads,
            self.config.head_dim,
            self.dtype,
        )
        zero = torch.zeros(1, dtype=torch.int64)
        self.compute_logits(self.forward(zero, zero, cache, AttentionMetadata(zero, None, ())))

    def _embed(self, input_ids: Tensor, threads: int) -> np.ndarray:
        """threads: of the kernels before and after, as their number takes time to change."""
        if isinstance(self.embedding, Tensor):
            return F.embedding(input_ids, self.embedding).float().numpy()
        table = self.embedding
        # torch's memory begins at a multiple of 64, as vectors that the kernels store should.
        out = torch.empty(len(input_ids), table.cols).numpy()
        call(kernels(_STEP).embed, threads, table.address(), input_ids.numpy(), out)
        return out

    def _extend_angles(self, count: int) -> None:
        """Have the angles of the first `count` positions at least."""
        have = len(self._cos)
        if count <= have:
            return
        while have < count:
            have = max(2 * have, _FIRST_POSITIONS)
        rotation = self.rotary(torch.arange(have), torch.float32)
        self._cos, self._sin = (x.squeeze(1).contiguous() for x in rotation)

    def _check_cache(self, kv_cache: KVCache, low_slot: int, high_slot: int) -> None:
        if kv_cache.block_size % BLOCK_MULTIPLE:
            raise ArgumentError(
                f"block_size = {kv_cache.block_size} must be a multiple of {BLOCK_MULTIPLE} with "
                "quantised weights"
            )
        if kv_cache.k[0].dtype != self.dtype:
            raise ArgumentError(
                f"the KV cache must have the model's dtype {self.dtype}, got {kv_cache.k[0].dtype}"
            )
        num_slots = kv_cache.num_blocks * kv_cache.block_size
        if low_slot < 0 or high_slot >= num_slots:
            raise ArgumentError(
                f"slot_mapping must name a slot from 0 to {num_slots - 1} for every token, got "
                f"{low_slot} to {high_slot}"
            )

    def _cache_addresses(self, kv_cache: KVCache) -> np.ndarray:
        if self._caches[0] is not kv_cache:
            pairs = [
                (k.data_ptr(), v.data_ptr()) for k, v in zip(kv_cache.k, kv_cache.v, strict=True)
            ]
            self._caches = (kv_cache, np.array(pairs, np.int64))
        return self._caches[1]


@cache
def _usable_threads(wanted: int) -> int:
    """`wanted`, if so many threads run at the same time, or else 1, which is logged."""
    if wanted == 1:
        return 1
    if call(kernels(_SYNC).try_to_meet, wanted, wanted, _TRIAL):
        import numba

        if numba.threading_layer() != "omp":
            logger.warning(
                "numba has the threading layer %s, not omp (OpenMP): a step starts later by some "
                "0.2 ms",
                numba.threading_layer(),
            )
        return wanted
    logger.warning(
        "%d threads do not run at the same time here (OMP_THREAD_LIMIT, OMP_DYNAMIC?): "
        "quantised weights are computed with by one",
        wanted,
    )
    return 1


def num_threads() -> int:
    """torch's number of threads, as far as numba has so many."""
    kernels(_SYNC)
    import numba

    wanted, most = torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS
    if wanted > most:
        _say_fewer(wanted, most)
    return _usable_threads(min(wanted, most))


@cache
def _say_fewer(wanted: int, most: int) -> None:
    logger.warning(
        "threads = %d, of which %d compute with quantised weights: no more than there are "
        "processors, or than NUMBA_NUM_THREADS says",
        wanted,
        most,
    )


def _check_threads(everyone_came: bool, threads: int) -> None:
    if not everyone_came:
        raise FlashpageError(
            f"{threads} threads did not get to run at the same time within minutes; "
            "threads = 1 needs no others"
        )


def _at_most_one_of_each(wanted: np.ndarray, starts: np.ndarray) -> bool:
    """Whether these rows ascend, and are of as many sequences."""
    sequences = np.searchsorted(starts, wanted, side="right")
    inside = (sequences > 0) & (sequences < len(starts))
    return bool(inside.all() and (np.diff(sequences) > 0).all())


class _Sequences(NamedTuple):
    starts: np.ndarray
    """int64 `[num_seqs + 1]`, rows of each sequence"""
    tables: np.ndarray
    """int32 `[num_seqs, max_blocks]`"""


def _sequences(metadata: AttentionMetadata, block_size: int) -> _Sequences:
    """What the kernel needs to know of a step's sequences, in the order of their rows."""
    starts: list[np.ndarray] = []
    tables: list[np.ndarray] = []
    if metadata.decode is not None:
        starts.append(np.arange(metadata.decode.start, metadata.decode.end))
        tables.append(metadata.decode.block_table.numpy())
    slots = metadata.slot_mapping.numpy()
    end = len(slots)
    for batch in metadata.prefill:
        rows = batch.cu_seqlens_q.numpy() + batch.start
        starts.append(rows[:-1])
        if batch.block_table is not None:
            tables.append(batch.block_table.numpy())
        else:  # no context: the slots of the new tokens tell the pages
            width = -(-batch.max_seqlen_q // block_size)
            table = np.zeros((len(rows) - 1, width), np.int32)
            for i in range(len(rows) - 1):
                used = slots[rows[i] : rows[i + 1] : block_size] // block_size
                table[i, : len(used)] = used
            tables.append(table)
    if not starts:  # tokens at position 0, each a sequence
        starts.append(np.arange(end))
        tables.append((slots // block_size).astype(np.int32)[:, None])
    if len(tables) > 1:
        width = max(table.shape[1] for table in tables)
        tables = [np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in tables]
    return _Sequences(
        np.concatenate([*starts, [end]]).astype(np.int64),
        np.ascontiguousarray(np.concatenate(tables)),
    )


def _tables(layers: Sequence[QuantizedLayer]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of all weights, for the kernel."""
    weights = np.zeros((len(layers), len(PROJECTIONS), MAX_PARTS, _PART_FIELDS), np.int64)
    vectors = np.zeros((len(layers), len(VECTORS)), np.int64)
    for i, layer in enumerate(layers):
        for j, name in enumerate(PROJECTIONS):
            column = 0
            for k, part in enumerate(layer.projections[name]):
                weights[i, j, k] = (*part.address(), part.groups, column)
                column += part.rows
        for j, name in enumerate(VECTORS):
            if name in layer.vectors:
                vectors[i, j] = layer.vectors[name].data_ptr()
    return weights, vectors


def merged(parts: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Neighbours of one kind as one matrix, which is multiplied at once."""
    groups: list[list[PackedWeight]] = []
    for part in parts:
        if groups and groups[-1][0].kind == part.kind:
            groups[-1].append(part)
        else:
            groups.append([part])
    return [group[0] if len(group) == 1 else concatenate(group) for group in groups]
