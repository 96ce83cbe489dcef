"""flashpage as an attention implementation of transformers: reads what a model asks for, and calls
our functions.

`register()` adds the name "flashpage" to transformers' two public tables: one has functions that
compute attention, the other functions that describe the padding. Descriptions have the form that
transformers uses for its flash implementations: None, or bool `[batch, width]`, True = token, where
the last column belongs to the last query and column j to slot j of the keys.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from flashpage.attention.functional import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flashpage.attention.padding import index_first_axis, pad_input
from flashpage.compat.sequences import Padding, Sequences, packed_rows
from flashpage.errors import ArgumentError, UnsupportedError, require

NAME = "flashpage"

# Up to so many queries a call over a cache is bound by reading it, which the cache function does
# best; with more it is bound by arithmetic, like a prefill.
MAX_STEP = 64

# Arguments by which models ask for something that our functions do not compute.
_NOT_SERVED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias per pair of positions",
    "indices": "attention to chosen keys",
    "block_indices": "attention to chosen blocks of keys",
    "block_table": "continuous batching over block tables",
}

OLDEST = (5, 4)
"""Version of transformers whose attention interface this is."""

T = TypeVar("T")


def register() -> None:
    """Make `attn_implementation="flashpage"` known to transformers; again changes nothing.

    Raises:
        MissingDependencyError: transformers is not installed.
        UnsupportedError: it is older than 5.4.
    """
    transformers = require("transformers", "engine")
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise UnsupportedError(
            f"flashpage needs transformers {'.'.join(map(str, OLDEST))} or newer, found "
            f"{transformers.__version__}"
        )
    transformers.AttentionInterface.register(NAME, Attention())
    transformers.AttentionMaskInterface.register(NAME, padding_of)
    _answer_to_name()
    _refuse_other_models(transformers.PreTrainedModel)


def _refuse_other_models(base: type) -> None:
    """Models with attention code of their own would run without it, and without a causal mask."""
    check = base._check_and_adjust_attn_implementation
    if hasattr(check, NAME):
        return

    @functools.wraps(check)
    def check_ours_too(
        self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> Any:
        if attn_implementation == NAME and not _calls_implementations(self):
            raise UnsupportedError(
                f"{type(self).__name__} has attention code of its own and does not call an "
                'attention implementation: use attn_implementation="eager"'
            )
        return check(self, attn_implementation, *args, **kwargs)

    check_ours_too.flashpage = True
    base._check_and_adjust_attn_implementation = check_ours_too


def _calls_implementations(model: Any) -> bool:
    """The model says so, its module has the table of implementations, or it is made of models."""
    names = {kind.__module__ for kind in type(model).__mro__} - {"transformers.modeling_utils"}
    modules = (sys.modules.get(name) for name in names)
    has_table = any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in modules)
    parts = (getattr(kind, "model_type", "any") for kind in model.config.sub_configs.values())
    return model.is_backend_compatible() or has_table or any(part != "" for part in parts)


def _answer_to_name() -> None:
    """Hand transformers our functions where it looks for those of a flash implementation.

    It takes every name with "flash" in it for one, and unless a package of its list has that name,
    asks this loader of kernels, without which no model could be made.
    """
    from transformers.integrations import hub_kernels

    load = hub_kernels.load_and_register_attn_kernel
    if hasattr(load, NAME):
        return

    @functools.wraps(load)
    def load_or_ours(attn_implementation: str, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation == NAME:
            return load_or_ours.flashpage
        return load(attn_implementation, *args, **kwargs)

    load_or_ours.flashpage = SimpleNamespace(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    hub_kernels.load_and_register_attn_kernel = load_or_ours


# ---------------------------------------------------------------------------------------------
# What a model asks for
# ---------------------------------------------------------------------------------------------


def padding_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The description of one forward pass's padding, made once for all layers.

    Args:
        batch_size, q_length, kv_length: queries, and slots of the keys that the layers will get.
        q_offset, kv_offset: position of the first query, and of the first slot.
        mask_function: what is visible besides padding, as `f(batch, head, query, key)`.
        attention_mask: bool `[batch, positions so far]`, True = token; None means all are.
        use_vmap: the model has joined a function of its own to `mask_function`.
        allow_is_causal_skip: False if `mask_function` may be more than causal.

    Returns:
        None if every slot holds a token, else bool `[batch, width]`, width <= kv_length.

    Raises:
        UnsupportedError: the pattern is not causal, windowed, packed or full.
        ArgumentError: `attention_mask` has fewer columns than there are positions.
    """
    if use_vmap:
        raise UnsupportedError(
            "flashpage serves causal, windowed, packed and full attention, not a mask function of "
            'the model: use attn_implementation="sdpa" or "flex_attention"'
        )
    if "allow_is_bidirectional_skip" in kwargs:  # not causal: queries say nothing about the keys
        return None if attention_mask is None else _unless_full(attention_mask[:, -kv_length:])
    if mask_function is not None and not allow_is_causal_skip and q_length > 1:
        _check_causal(mask_function, batch_size, q_length, q_offset, device)
    end = int(q_offset) + q_length
    width = end - kv_offset
    if attention_mask is None:
        # A static cache has slots that are not filled yet.
        spare = width < kv_length
        return torch.ones(batch_size, width, dtype=torch.bool, device=device) if spare else None
    columns = attention_mask.shape[1]
    if columns >= end:
        attention_mask = attention_mask[:, kv_offset:end]
    elif columns != width:  # a mask of this width has been here before
        raise ArgumentError(
            f"attention_mask must have a column for each of the {end} positions so far, got shape "
            f"{tuple(attention_mask.shape)}"
        )
    return _unless_full(attention_mask) if width == kv_length else attention_mask


def _unless_full(attention_mask: Tensor) -> Tensor | None:
    return None if bool(attention_mask.all()) else attention_mask


def _check_causal(
    mask_function: Callable[..., Tensor],
    batch_size: int,
    q_length: int,
    q_offset: int | Tensor,
    device: torch.device | str,
) -> None:
    """Ask each query for the key after it: tokens of one image, for one, see each other."""
    batch = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(q_length - 1, device=device)[None] + q_offset
    if bool(mask_function(batch, torch.zeros_like(batch), query, query + 1).any()):
        raise UnsupportedError(
            "flashpage serves causal, windowed, packed and full attention, but here some tokens "
            'see later ones: use attn_implementation="sdpa" or "flex_attention"'
        )


# ---------------------------------------------------------------------------------------------
# The attention function
# ---------------------------------------------------------------------------------------------


class Attention:
    """The function that transformers calls in every layer.

    It remembers what it has read from a mask or from positions as long as that tensor lives
    unchanged: the layers of a forward pass share it, so each costs one synchronisation, not one a
    layer.
    """

    def __init__(self) -> None:
        self._read = WeakTensorKeyDictionary()

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        deterministic: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention as a model of transformers asks for it.

        Args:
            module: its `is_causal` counts where the argument is None.
            query: `[batch, num_q_heads, seqlen_q, head_dim]`.
            key, value: `[batch, num_kv_heads, seqlen_k, head_dim]`, not repeated for GQA; value
                may have a smaller head_dim. With a cache, the last seqlen_q of the filled slots
                are those of the queries.
            attention_mask: see the module; None means no padding.
            sliding_window: tokens that a causal query sees, itself included.
            position_ids: `[batch or 1, seqlen_q]`; sequences begin where they do not go on by one.
                Read only without mask and cache.
            cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: all four, int32 and int:
                the batch, row after row, is cut into these sequences.

        Returns:
            `([batch, seqlen_q, num_q_heads, head_dim of value], None)`; zeros at padding.
        """
        _refuse(query, key, value, attention_mask, kwargs)
        q, k, v = _tokens_first(query, key, value)
        if attention_mask is not None:
            # A static cache has slots that are not filled yet.
            k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        options = {"softmax_scale": scaling, "causal": causal, "softcap": softcap or 0.0}
        if sliding_window is not None and k.shape[1] > sliding_window:
            options["window_size"] = (sliding_window - 1, sliding_window - 1)
        training = {
            "dropout_p": dropout,
            "deterministic": bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
        }
        # The cache functions have no gradient and no dropout.
        with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        step = q.shape[1] <= MAX_STEP and q.shape[1] < k.shape[1]
        over_cache = step and dropout == 0.0 and not with_gradient
        given = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        layout = self._layout(q, k, attention_mask, position_ids, given, causal, sliding_window)
        if isinstance(layout, Padding):
            out = _padded(q, k, v, layout, options, training, over_cache)
        elif layout is not None:
            out = _flat(q, k, v, layout, options, training)
        elif over_cache:
            out = flash_attn_with_kvcache(q, *_readable(k, v), **options)
        else:
            out = flash_attn_func(q, k, v, **options, **training)
        return out[..., : value.shape[-1]], None

    def _layout(
        self,
        q: Tensor,
        k: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        given: tuple[Tensor | None, Tensor | None, int | None, int | None],
        causal: bool,
        window: int | None,
    ) -> Padding | Sequences | None:
        """Where the tokens are; None if every row is one sequence without padding."""
        batch, seqlen_q = q.shape[:2]
        if attention_mask is not None:
            padding = self._remembered(
                attention_mask,
                (seqlen_q, causal, window),
                lambda: Padding.of(attention_mask != 0, seqlen_q, causal, window),
            )
            return None if padding.full else padding
        if all(x is not None for x in given):
            return given
        if position_ids is None or not _may_be_packed(position_ids, seqlen_q, k.shape[1]):
            return None
        return self._remembered(position_ids, batch, lambda: packed_rows(position_ids, batch))

    @torch.compiler.disable  # layers may be compiled, reading values is done between them
    def _remembered(self, tensor: Tensor, use: Any, read: Callable[[], T]) -> T:
        """`read()`, or what it gave for this use of the tensor, if that was not written since."""
        # Tensors made under inference_mode do not count how often they were written.
        if tensor.is_inference():
            return read()
        asked = (tensor._version, use)
        known = self._read.get(tensor)
        if known is None or known[0] != asked:
            known = (asked, read())
            self._read[tensor] = known
        return known[1]


def _refuse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    for name, meaning in _NOT_SERVED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"flashpage does not serve {meaning}, which this model asks for by {name}: use "
                'attn_implementation="eager" or "sdpa"'
            )
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions must be False with flashpage, which never has the whole matrix of "
            'attention weights: use attn_implementation="eager"'
        )
    if value.shape[-1] > query.shape[-1]:
        raise UnsupportedError(
            f"value must not have a larger head_dim than query with flashpage, got "
            f"{value.shape[-1]} and {query.shape[-1]}"
        )
    if attention_mask is None:
        return
    if attention_mask.dim() != 2:
        raise UnsupportedError(
            "attention_mask must be None or have shape (batch, seqlen_k) with flashpage, which "
            f"serves no mask per query; got {tuple(attention_mask.shape)}"
        )
    if attention_mask.shape[0] != query.shape[0] or attention_mask.shape[1] > key.shape[2]:
        raise ArgumentError(
            f"attention_mask must have shape (batch, at most seqlen_k) = ({query.shape[0]}, "
            f"{key.shape[2]}), got {tuple(attention_mask.shape)}"
        )


def _tokens_first(*heads_first: Tensor) -> tuple[Tensor, ...]:
    """Views `[batch, seqlen, heads, head_dim]` of one dtype, value padded to the head_dim of q."""
    query, _, value = heads_first
    # Norms and rotations may have left float32 behind; sdpa computes in these dtypes too.
    dtype = value.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    missing = query.shape[-1] - value.shape[-1]
    q, k, v = (x.transpose(1, 2).to(dtype) for x in heads_first)
    return q, k, F.pad(v, (0, missing)) if missing else v


def _readable(*cache: Tensor) -> tuple[Tensor, ...]:
    """The cache functions read where the cache lies, if its last dimension is contiguous."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in cache)


def _may_be_packed(position_ids: Tensor, seqlen_q: int, seqlen_k: int) -> bool:
    """Without looking at values: a decode step, and positions of several kinds, are not."""
    return position_ids.dim() == 2 and 1 < position_ids.shape[1] == seqlen_q == seqlen_k


def _flat(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    options: dict[str, Any],
    training: dict[str, Any],
) -> Tensor:
    """All rows as one line of tokens, cut anew."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = sequences
    out = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)),
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        max_seqlen_q,
        max_seqlen_k,
        **options,
        **training,
    )
    return out.unflatten(0, q.shape[:2])


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Padding,
    options: dict[str, Any],
    training: dict[str, Any],
    over_cache: bool,
) -> Tensor:
    batch, seqlen_q = q.shape[:2]
    if over_cache and padding.leftpad is not None:
        # A step over a cache: copying the tokens out of it would cost more than the step.
        return flash_attn_with_kvcache(
            q, *_readable(k, v), cache_leftpad=padding.leftpad, **options
        )
    if not padding.windowed:
        options = {**options, "window_size": (-1, -1)}
    queries, keys = padding.queries, padding.keys
    assert queries is not None
    assert keys is not None
    out = flash_attn_varlen_func(
        index_first_axis(q.flatten(0, 1), queries.indices),
        index_first_axis(k.flatten(0, 1), keys.indices),
        index_first_axis(v.flatten(0, 1), keys.indices),
        queries.cu_seqlens,
        keys.cu_seqlens,
        queries.max_seqlen,
        keys.max_seqlen,
        **options,
        **training,
    )
    return pad_input(out, queries.indices, batch, seqlen_q)
