"""The tensors of the paged KV cache, one pair per layer, and how tokens are written to them.

Knows nothing of who owns which page: that is `block_pool`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.attention import ops  # noqa: F401 - defines torch.ops.flashpage
from flashpage.attention.problem import check_not_expanded
from flashpage.errors import ArgumentError


class KVCache:
    """`k[layer]` and `v[layer]`, each `[num_blocks, block_size, num_kv_heads, head_dim]`.

    The memory is not initialised: slots that hold no token are never read into a result.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ArgumentError(f"{name} must be at least 1, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one page takes in all layers, K and V."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    def fill_(self, value: float) -> None:
        """Set every slot of every layer (tests poison the pool with NaN)."""
        for x in (*self.k, *self.v):
            x.fill_(value)


def store_kvcache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value to its slot, in place.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]`, dtype of the caches.
        k_cache, v_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, any strides.
        slot_mapping: int32 or int64 `[num_tokens]`, `block * block_size + offset`; a token with
            slot -1 is not written.

    Raises:
        ArgumentError: a shape or dtype does not fit, or (seen on the CPU only) a slot is out of
            range.
    """
    if k.dim() != 3 or k.shape != v.shape:
        raise ArgumentError(
            f"k and v must both have shape (num_tokens, num_kv_heads, head_dim), got "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.shape[2:] != k.shape[1:]:
            raise ArgumentError(
                f"{name} must have shape (num_blocks, block_size, {k.shape[1]}, {k.shape[2]}), "
                f"got {tuple(cache.shape)}"
            )
        if cache.device != k.device or slot_mapping.device != k.device or v.device != k.device:
            raise ArgumentError(
                f"k, v, {name} and slot_mapping must be on one device, got {k.device}, "
                f"{v.device}, {cache.device} and {slot_mapping.device}"
            )
        check_not_expanded(name, cache)
        if cache.dtype != k.dtype or v.dtype != k.dtype:
            raise ArgumentError(
                f"k, v and {name} must have the same dtype, got {k.dtype}, {v.dtype} and "
                f"{cache.dtype}"
            )
    if v_cache.shape != k_cache.shape:
        raise ArgumentError(
            f"k_cache and v_cache must have the same shape, got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"slot_mapping must be int32 or int64 of shape (num_tokens,) = ({k.shape[0]},), got "
            f"{slot_mapping.dtype} of {tuple(slot_mapping.shape)}"
        )
    torch.ops.flashpage.store_kv(k, v, k_cache, v_cache, slot_mapping)
