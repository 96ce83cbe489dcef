"""The decoder that the models of the Llama family share; knows nothing about files or text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flashpage.cache.kv_cache import KVCache
from flashpage.layers.attention import AttentionMetadata, PagedAttention
from flashpage.layers.embedding import Embedding
from flashpage.layers.fused import rotate_and_store
from flashpage.layers.linear import Linear, add_norm_linear
from flashpage.layers.norm import RMSNorm
from flashpage.layers.rope import RotaryEmbedding, Rotation
from flashpage.models.config import ModelConfig


class Attention(nn.Module):
    """Self-attention with one fused projection for q, k and v, over the paged cache."""

    def __init__(
        self, config: ModelConfig, layer_index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.num_q_heads = config.num_q_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        q_size = config.num_q_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            q_size + 2 * kv_size,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            q_size, config.hidden_size, bias=config.o_bias, dtype=dtype, device=device
        )
        self.attention = PagedAttention(
            layer_index, config.num_q_heads, config.num_kv_heads, config.head_dim
        )

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        norm: RMSNorm,
        rotation: Rotation,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Attention over `norm(hidden + residual)`, and that sum; all `[T, hidden_size]`.

        hidden may come, and what stands for it goes, in parts: see `Linear.for_norm`.
        """
        qkv, residual = add_norm_linear(hidden, residual, norm, self.qkv_proj)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        layer = self.attention.layer_index
        q, k, v = rotate_and_store(
            qkv,
            self.num_q_heads,
            self.num_kv_heads,
            *self.head_norms(),
            *rotation,
            kv_cache.k[layer],
            kv_cache.v[layer],
            metadata.slot_mapping,
        )
        return self.o_proj.for_norm(self.attention(q, k, v, kv_cache, metadata)), residual

    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights `[head_dim]` of the norms of q's and k's heads, and their epsilon."""
        return None, None, 0.0


class GatedMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            config.hidden_size,
            2 * config.intermediate_size,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(
            config.intermediate_size,
            config.hidden_size,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def forward(self, hidden: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """The feed-forward of `norm(hidden + residual)`, and that sum; all `[T, hidden_size]`."""
        gated, residual = add_norm_linear(hidden, residual, norm, self.gate_up_proj, gated=True)
        return self.down_proj.for_norm(gated), residual


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, attention: Attention, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMlp(config, dtype, device)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        rotation: Rotation,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """`(hidden, residual)`, both `[T, hidden_size]`, to the same of the next layer.

        The stream between layers is `hidden + residual`: each norm adds its two parts itself.
        """
        hidden, residual = self.self_attn(
            hidden, residual, self.input_layernorm, rotation, kv_cache, metadata
        )
        return self.mlp(hidden, residual, self.post_attention_layernorm)


class DecoderModel(nn.Module):
    """Embedding, decoder layers, final norm and head; a subclass names its attention.

    Parameters are named as in Hugging Face checkpoints, except that q, k and v are one `qkv_proj`
    and gate and up one `gate_up_proj`. They are uninitialised until weights/ fills them.
    """

    attention_class: type[Attention] = Attention

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.rotary = RotaryEmbedding(config.head_dim, config.rope, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.attention_class(config, i, dtype, device), dtype, device)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        head_device = "meta" if config.tie_word_embeddings else device
        self.lm_head = Linear(
            config.hidden_size, config.vocab_size, dtype=dtype, device=head_device
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Run the new tokens of one step through all layers.

        Args:
            input_ids: `[T]` int64, the tokens of all sequences one after the other.
            positions: `[T]` int64, the index of each token in its own sequence.
            kv_cache: the pages; those named by `metadata` are written and read.
            metadata: where each token's K and V go, and what each token may attend to.
            rows: tokens, in ascending order, whose result is wanted; None: all.

        Returns:
            `[T, hidden_size]`, after the final norm, or `[len(rows), hidden_size]`.
        """
        hidden = self.embed_tokens(input_ids)
        rotation = self.rotary(positions, self.dtype)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation, kv_cache, metadata)
        hidden = self.norm.add(hidden, residual)[0]
        return hidden if rows is None else hidden[rows]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[R, hidden_size]` -> `[R, vocab_size]` float32."""
        return self.compute_raw_logits(hidden).float()

    def compute_raw_logits(self, hidden: Tensor) -> Tensor:
        """`[R, hidden_size]` -> `[R, vocab_size]` in the model's dtype."""
        return self.lm_head(hidden)

    def prepare(self) -> None:
        """Pack every weight for this processor; call once, after loading (see `Linear.prepare`)."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare()
