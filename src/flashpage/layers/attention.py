"""The engine's attention layer: through the right door to keys and values that are in the pages.

`AttentionMetadata` says, once per step and for all layers, where each token's K and V go and
which pages each sequence reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from flashpage.attention.functional import flash_attn_varlen_func, flash_attn_with_kvcache
from flashpage.cache.kv_cache import KVCache, store_kvcache


@dataclass(frozen=True)
class DecodeBatch:
    """Sequences with one new token after a context: `flash_attn_with_kvcache`."""

    start: int
    end: int
    """token rows `start:end`, one per sequence"""
    cache_seqlens: Tensor
    """int32 `[end - start]`, keys to attend to, the new one included"""
    block_table: Tensor
    """int32 `[end - start, max_blocks]`"""
    longest_first: bool = False
    """the sequences are sorted: those that a GPU begins last are short"""


MANY_PAIRS = 512
"""(sequence, kv head) pairs, sorted by length, from which on a GPU is busy to the end without
splitting any of them (measured on an H200; unsorted, some would run on alone)"""


@dataclass(frozen=True)
class PrefillBatch:
    """Sequences with new tokens in a chunk: `flash_attn_varlen_func`."""

    start: int
    end: int
    """token rows `start:end` of all sequences together"""
    cu_seqlens_q: Tensor
    """int32 `[num_seqs + 1]`, new tokens"""
    cu_seqlens_k: Tensor
    """int32 `[num_seqs + 1]`, context and new tokens"""
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: Tensor | None
    """int32 `[num_seqs, max_blocks]`; None if no sequence has a context, so that the new K and V
    are all there is to read"""


@dataclass(frozen=True)
class AttentionMetadata:
    slot_mapping: Tensor
    """int64 `[num_tokens]`, slot of each token in the cache, -1 = do not store"""
    decode: DecodeBatch | None
    prefill: tuple[PrefillBatch, ...]


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's part in a step."""

    num_computed_tokens: int
    """tokens whose K and V are in the pages already"""
    num_new_tokens: int
    """tokens that this step computes, >= 1"""
    block_ids: Sequence[int]
    """pages of the sequence, in order; they hold at least computed + new tokens"""


DECODE, CHUNK, FRESH = range(3)


def attention_order(sequence: SequenceSlice) -> int:
    """Sort key of the sequences in a step: decodes, then chunks with a context, then fresh ones.

    One new token after a context is a decode even if it ends a prompt: one query is one query.
    """
    if sequence.num_computed_tokens == 0:
        return FRESH
    return DECODE if sequence.num_new_tokens == 1 else CHUNK


def build_attention_metadata(
    sequences: Sequence[SequenceSlice], block_size: int, device: torch.device | str = "cpu"
) -> AttentionMetadata:
    """Metadata for tokens that lie flat in the order of `sequences`.

    Args:
        sequences: sorted by `attention_order`.
        block_size: tokens per page.
    """
    kinds = [attention_order(s) for s in sequences]
    assert kinds == sorted(kinds), "sequences must be sorted by attention_order"
    slots: list[int] = []
    for s in sequences:
        stop = s.num_computed_tokens + s.num_new_tokens
        assert stop <= len(s.block_ids) * block_size, "a sequence must own pages for its tokens"
        for position in range(s.num_computed_tokens, stop):
            slots.append(s.block_ids[position // block_size] * block_size + position % block_size)

    groups = [[s for s, kind in zip(sequences, kinds, strict=True) if kind == k] for k in range(3)]
    starts = list(accumulate((sum(s.num_new_tokens for s in g) for g in groups), initial=0))
    decode = None
    if groups[DECODE]:
        decode = DecodeBatch(
            start=0,
            end=starts[1],
            cache_seqlens=torch.tensor(
                [s.num_computed_tokens + 1 for s in groups[DECODE]],
                dtype=torch.int32,
                device=device,
            ),
            block_table=_block_table(groups[DECODE], block_size, device),
        )
    prefill = tuple(
        _prefill_batch(groups[kind], starts[kind], block_size, device, paged=kind == CHUNK)
        for kind in (CHUNK, FRESH)
        if groups[kind]
    )
    return AttentionMetadata(torch.tensor(slots, dtype=torch.int64, device=device), decode, prefill)


def _prefill_batch(
    group: list[SequenceSlice],
    start: int,
    block_size: int,
    device: torch.device | str,
    *,
    paged: bool,
) -> PrefillBatch:
    lengths_q = [s.num_new_tokens for s in group]
    lengths_k = [s.num_computed_tokens + s.num_new_tokens for s in group]
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (lengths_q, lengths_k)
    )
    table = _block_table(group, block_size, device) if paged else None
    end = start + sum(lengths_q)
    return PrefillBatch(start, end, cu_q, cu_k, max(lengths_q), max(lengths_k), table)


def _block_table(group: list[SequenceSlice], block_size: int, device: torch.device | str) -> Tensor:
    """Pages in use, padded on the right with -1, which is never read."""
    rows = []
    for s in group:
        used = -(-(s.num_computed_tokens + s.num_new_tokens) // block_size)
        rows.append(list(s.block_ids[:used]))
    width = max(len(row) for row in rows)
    padded = [row + [-1] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device)


class PagedAttention(nn.Module):
    """Causal attention of one model layer over the paged cache. Has no weights."""

    def __init__(
        self,
        layer_index: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.softmax_scale = softmax_scale

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend.

        Args:
            q: `[num_tokens, num_q_heads, head_dim]`, position embedding applied.
            k, v: `[num_tokens, num_kv_heads, head_dim]`, in the cache already.

        Returns:
            `[num_tokens, num_q_heads * head_dim]`.
        """
        k_cache, v_cache = kv_cache.k[self.layer_index], kv_cache.v[self.layer_index]
        parts = []
        if metadata.decode is not None:
            d = metadata.decode
            many = d.longest_first and (d.end - d.start) * self.num_kv_heads >= MANY_PAIRS
            out = flash_attn_with_kvcache(
                q[d.start : d.end, None],
                k_cache,
                v_cache,
                cache_seqlens=d.cache_seqlens,
                block_table=d.block_table,
                softmax_scale=self.softmax_scale,
                causal=True,
                num_splits=1 if many else 0,
            )
            parts.append(out.squeeze(1))
        for p in metadata.prefill:
            paged = p.block_table is not None
            parts.append(
                flash_attn_varlen_func(
                    q[p.start : p.end],
                    k_cache if paged else k[p.start : p.end],
                    v_cache if paged else v[p.start : p.end],
                    p.cu_seqlens_q,
                    p.cu_seqlens_k,
                    p.max_seqlen_q,
                    p.max_seqlen_k,
                    softmax_scale=self.softmax_scale,
                    causal=True,
                    block_table=p.block_table,
                )
            )
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def load_kernels() -> None:
    """Load the CPU kernels of the cache from disk, or compile them: once, before work begins."""
    token = torch.zeros(1, 1, 1)
    cache = torch.zeros(1, 1, 1, 1)
    store_kvcache(token, token, cache, cache.clone(), torch.zeros(1, dtype=torch.int64))
    flash_attn_with_kvcache(cache, cache, cache)
