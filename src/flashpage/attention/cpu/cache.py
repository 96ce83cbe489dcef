"""Writing new keys and values into a KV cache on the CPU, in place, whatever its strides."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.attention.cpu.numba_runtime import call, kernels, why_unavailable
from flashpage.attention.cpu.segments import check_page_ids, checked_leftpad, checked_rows
from flashpage.attention.rotary import rotate
from flashpage.errors import ArgumentError, CacheOverflowError


def append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    rotary_interleaved: bool,
    rotate_q_by_row: bool,
) -> Tensor:
    """Write k (rotated) and v at `cache_seqlens`; returns q rotated, or an empty tensor.

    Shapes and meaning as in `functional.flash_attn_with_kvcache`. cache_leftpad is only checked:
    a call that will raise writes nothing.
    """
    batch, seqlen_new = k.shape[:2]
    checked_leftpad(cache_leftpad, batch)
    start = cache_seqlens.long()
    _check_fits(k_cache, block_table, cache_seqlens, seqlen_new)
    position = start[:, None] + torch.arange(seqlen_new)  # [batch, seqlen_new]
    q_rotated = q.new_empty(0)
    if rotary_cos is not None and rotary_sin is not None:
        k = rotate(k, rotary_cos[position], rotary_sin[position], interleaved=rotary_interleaved)
        step = torch.arange(q.shape[1]) if rotate_q_by_row else torch.zeros(q.shape[1]).long()
        q_position = start[:, None] + step
        if q_position.numel() and int(q_position.max()) >= len(rotary_cos):
            raise ArgumentError(
                f"rotary_cos must have a row for every query: it has {len(rotary_cos)}, and q "
                f"reaches position {int(q_position.max())}"
            )
        q_rotated = rotate(
            q, rotary_cos[q_position], rotary_sin[q_position], interleaved=rotary_interleaved
        )
        q_rotated = q_rotated.contiguous()
    if seqlen_new == 0:
        return q_rotated
    if block_table is None:
        # A cache without pages is one with pages of its whole length: row r is page r.
        page = torch.tensor(checked_rows(batch, k_cache, cache_batch_idx))[:, None]
        slots = page * k_cache.shape[1] + position
    else:
        block_size = k_cache.shape[1]
        page = torch.gather(block_table.long(), 1, position // block_size)
        slots = page * block_size + position % block_size
    _store(k.flatten(0, 1), k_cache, slots.flatten())
    _store(v.flatten(0, 1), v_cache, slots.flatten())
    return q_rotated


def _check_fits(
    k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor, seqlen_new: int
) -> None:
    lengths = cache_seqlens.tolist()
    if min(lengths) < 0:
        raise ArgumentError(f"cache_seqlens must not be negative, got {min(lengths)}")
    longest = max(lengths) + seqlen_new
    if block_table is None:
        capacity, what = k_cache.shape[1], "the cache holds"
    else:
        capacity, what = block_table.shape[1] * k_cache.shape[1], "the pages of block_table hold"
    if longest > capacity:
        raise CacheOverflowError(
            f"{what} {capacity} tokens per sequence, too few for cache_seqlens = {max(lengths)} "
            f"plus {seqlen_new} new"
        )
    if block_table is not None:
        lengths = [n + seqlen_new for n in lengths]
        check_page_ids(block_table, lengths, k_cache.shape[0], k_cache.shape[1])


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`k_cache[slot // block_size, slot % block_size] = k[token]`, same for v; slot -1 is skipped.

    Shapes as in `flashpage.cache.kv_cache.store_kvcache`.
    """
    if slot_mapping.numel() == 0:
        return
    low, high = torch.aminmax(slot_mapping)
    num_blocks, block_size = k_cache.shape[:2]
    if v_cache.shape != k_cache.shape:
        # Checked by the callers of the operator; here it guards memory.
        raise ArgumentError(
            f"v_cache must have the shape of k_cache {tuple(k_cache.shape)}, got "
            f"{tuple(v_cache.shape)}"
        )
    if int(low) < -1 or int(high) >= num_blocks * block_size:
        raise ArgumentError(
            f"slot_mapping must be between -1 and {num_blocks * block_size - 1} for {num_blocks} "
            f"pages of {block_size} tokens, got values from {int(low)} to {int(high)}"
        )
    slots = slot_mapping.long().contiguous()
    _store(k, k_cache, slots)
    _store(v, v_cache, slots)


def _store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Tokens `[num_tokens, num_kv_heads, head_dim]` to their slots, which are checked already."""
    store = _store_torch if _why_not_numba(new, cache) else _store_numba
    store(new, cache, slots)


def _why_not_numba(new: Tensor, cache: Tensor) -> str | None:
    if new.stride(-1) != 1 or cache.stride(-1) != 1:
        return "the kernel copies contiguous heads"
    if new.element_size() % 2:
        return "the kernel copies words of 16 bits"
    return why_unavailable()


def _store_numba(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    words = new.element_size() // 2
    call(
        kernels("flashpage.attention.cpu.numba_kernel").store_tokens,
        1,
        new.data_ptr(),
        cache.data_ptr(),
        slots.numpy(),
        cache.shape[1],
        new.shape[1],
        new.shape[2] * words,
        tuple(stride * words for stride in new.stride()[:2]),
        tuple(stride * words for stride in cache.stride()[:3]),
    )


def _store_torch(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    kept = (slots >= 0).nonzero().flatten()
    slots = slots[kept]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = new[kept]
