"""What we measure against: the attention of torch, and FlashAttention-3 and 4 where installed.

A peer takes q, k, v `[batch, seqlen, heads, head_dim]` and gives out of q's shape; `fa3_paged`, of
attention over pages, has all its tensors given before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashpage import flash_attn_func
from flashpage.attention import dispatch
from flashpage.attention.problem import Function
from harness import ON_GPU, geometric_mean

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention; gradients flow."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(
        *heads, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2)


def _torch(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, causal)

    return attention


def _fa3() -> Attention:
    from fa3_fwd_interface import flash_attn_func

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return attention


def _fa4() -> Attention:
    from flash_attn.cute import flash_attn_func

    return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)[0]


def peers(*, backward: bool = False) -> dict[str, Attention]:
    """The peers of this machine by name; those that are not installed are printed."""
    if not ON_GPU:
        return {"torch": sdpa}
    found = {
        "FA2 (torch)": _torch(SDPBackend.FLASH_ATTENTION),
        "cuDNN (torch)": _torch(SDPBackend.CUDNN_ATTENTION),
    }
    for name, load in (("FA3", _fa3), ("FA4", _fa4)):
        if backward and name == "FA3":
            continue  # the wheel has no backward
        try:
            found[name] = load()
        except ImportError as error:
            print(f"{name} is not installed, so not measured: {error}")
    return found


def fa3_paged(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor
) -> Callable[[], Tensor]:
    """FlashAttention-3 over pages, as vLLM builds it in and calls it: `[batch, seqlen_q, heads,
    head_dim]` of queries at the end of `lengths` keys, causal. Its plan of the work is made here,
    once, as an engine makes it once for all layers. ImportError where it is not installed.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    batch, seqlen_q, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k.shape
    max_keys = table.shape[1] * block_size
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    plan = get_scheduler_metadata(
        batch,
        seqlen_q,
        max_keys,
        heads,
        kv_heads,
        head_dim,
        lengths,
        qkv_dtype=q.dtype,
        cu_seqlens_q=starts,
        page_size=block_size,
        causal=True,
    )
    flat = q.flatten(0, 1)
    out = torch.empty_like(flat)

    def call() -> Tensor:
        flash_attn_varlen_func(
            flat,
            k,
            v,
            seqlen_q,
            starts,
            max_keys,
            seqused_k=lengths,
            causal=True,
            block_table=table,
            out=out,
            scheduler_metadata=plan,
            fa_version=3,
        )
        return out.view_as(q)

    return call


def by_name(function: Function, **options: Any) -> dict[str, Attention]:
    """Our own kernels by the names of `flashpage.backends`, where this GPU has several kinds: those
    that the rule of `dispatch` chooses from."""
    found = {}
    for name in ("hopper", "triton"):
        with dispatch.only(name):
            report = dispatch.backends("cuda", torch.bfloat16, **options)
        if report.serving(function) == name:
            found[name] = _named(name)
    return found if len(found) > 1 else {}


def _named(name: str) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with dispatch.only(name):
            return flash_attn_func(q, k, v, causal=causal)

    return attention


def print_ratios(results: list[dict[str, Any]]) -> None:
    """flashpage's TFLOP/s over those of each other contender, by head_dim: geometric mean and the
    worst cell."""
    for head_dim in sorted({r["head_dim"] for r in results}):
        cells = [r["tflops"] for r in results if r["head_dim"] == head_dim]
        for name in dict.fromkeys(name for c in cells for name in c if name != "flashpage"):
            ratios = [c["flashpage"] / c[name] for c in cells if name in c]
            print(
                f"d {head_dim}: {geometric_mean(ratios):.2f}x {name} in geometric mean of "
                f"{len(ratios)}, at least {min(ratios):.2f}x"
            )


def works(attention: Attention, *args: Tensor | bool) -> bool:
    """A peer may refuse a shape."""
    try:
        attention(*args)  # type: ignore[arg-type]
        if ON_GPU:
            torch.cuda.synchronize()
    except Exception as error:
        print(f"  refused: {str(error).splitlines()[0][:80]}")
        return False
    return True
