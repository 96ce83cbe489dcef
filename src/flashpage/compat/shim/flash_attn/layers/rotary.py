"""`flash_attn.layers.rotary`: rotary embedding of q, k and packed tensors, and its module.

Sources: Su et al. 2021 (RoFormer), Sun et al. 2022 (XPos), and the behaviour of flash-attn 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashpage.attention.rotary import apply_rotary_emb, rotate
from flashpage.errors import ArgumentError

apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Rotate x `[batch, seqlen, heads, head_dim]` by one row of cos and sin per token.

    Args:
        cos, sin: `[seqlen, rotary_dim / 2]` or `[batch, seqlen, rotary_dim / 2]`.
        interleaved: pairs (0, 1), (2, 3), ... if True, the two halves if False.
    """
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ArgumentError(
            f"rotary_dim must be at most head_dim: cos has {cos.shape[-1]} columns, so rotary_dim "
            f"= {2 * cos.shape[-1]}, but x has head_dim = {x.shape[-1]}"
        )
    return rotate(x, cos, sin, interleaved=interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate Q and K inside a packed tensor, in place; differentiable.

    Args:
        qkv: `[batch, seqlen, 3, heads, head_dim]`, or with `num_heads_q`
            `[batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim]`.
        cos, sin: `[max_position, rotary_dim / 2]`.
        cos_k, sin_k: other tables for K (XPos); None means those of Q.
        seqlen_offsets: position of each sequence's first token, an int or int `[batch]`.

    Returns:
        qkv.
    """
    q, k = _rotated_parts(qkv, num_heads_q)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    cos_k = cos if cos_k is None else cos_k
    sin_k = sin if sin_k is None else sin_k
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate K inside kv `[batch, seqlen, 2, heads, head_dim]`, in place; differentiable.

    Others: see `apply_rotary_emb_qkv_`. Returns kv.
    """
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ArgumentError(
            f"kv must have shape (batch, seqlen, 2, heads, head_dim), got {tuple(kv.shape)}"
        )
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def _rotated_parts(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views of Q and of K in a packed tensor."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1]
    if qkv.dim() == 4 and num_heads_q is not None:
        num_kv_heads, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if num_kv_heads > 0 and not odd:
            return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_kv_heads]
    raise ArgumentError(
        "qkv must have shape (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, "
        f"seqlen, num_heads_q + 2 * num_kv_heads, head_dim); got {tuple(qkv.shape)} and "
        f"num_heads_q = {num_heads_q}"
    )


class RotaryEmbedding(nn.Module):
    """Rotary embedding that makes its tables by itself, as long as they are needed.

    Args:
        dim: rotary_dim, the number of features that are rotated.
        base: frequency i is `base ** (-2 i / dim)`.
        interleaved: pairs (0, 1), (2, 3), ... if True, the two halves if False.
        scale_base: None, or the length over which XPos lets scores decay (512 is usual).
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        self.register_buffer("inv_freq", self._inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._scale(device)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: tuple[Tensor, ...] = ()

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q and k in place.

        Args:
            qkv: `[batch, seqlen, 3, heads, head_dim]`, or with num_heads_q
                `[batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim]`; with `kv` it is q,
                `[batch, seqlen, heads, head_dim]`.
            kv: `[batch, seqlen_k, 2, num_kv_heads, head_dim]`.
            seqlen_offset: position of each sequence's first token, an int or int `[batch]`.
            max_seqlen: length of the tables; needed with a tensor `seqlen_offset` only to spare a
                synchronisation.

        Returns:
            qkv; or with kv `(q, kv)`.
        """
        seqlen = qkv.shape[1] if kv is None else max(qkv.shape[1], kv.shape[1])
        if max_seqlen is None:
            last = seqlen_offset.max() if isinstance(seqlen_offset, Tensor) else seqlen_offset
            max_seqlen = seqlen + int(last)
        cos, sin, cos_k, sin_k = self._tables_of(max_seqlen, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _even_features(self, device: torch.device | str | None) -> Tensor:
        return torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)

    def _inv_freq(self, device: torch.device | str | None) -> Tensor:
        return self.base ** (-self._even_features(device) / self.dim)

    def _scale(self, device: torch.device | str | None) -> Tensor:
        return (self._even_features(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _tables_of(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple:
        """cos, sin of q, and cos, sin of k: each at least `[seqlen, dim / 2]`."""
        if self._tables:
            cos = self._tables[0]
            # Tables made under inference_mode can not be saved for a backward.
            usable = not (cos.is_inference() and torch.is_grad_enabled())
            if len(cos) >= seqlen and cos.device == device and cos.dtype == dtype and usable:
                return self._tables
        # In float32 whatever the module was cast to: positions need all its digits.
        cast = self.inv_freq.dtype != torch.float32
        inv_freq = self._inv_freq(device) if cast else self.inv_freq.to(device)
        t = torch.arange(seqlen, dtype=torch.float32, device=device)
        angles = torch.outer(t, inv_freq)
        cos, sin = angles.cos(), angles.sin()
        tables = (cos, sin, cos, sin)
        if self.scale_base is not None:
            scale = self._scale(device) if cast else self.scale.to(device)
            # Only powers of differences of positions reach the scores; the middle keeps them small.
            scale = scale ** ((t - seqlen // 2) / self.scale_base)[:, None]
            tables = (cos * scale, sin * scale, cos / scale, sin / scale)
        self._tables = tuple(table.to(dtype) for table in tables)
        return self._tables
