"""What we measure against: the attention of torch, and FlashAttention-3 and 4 where installed.

A peer takes q, k, v `[batch, seqlen, heads, head_dim]` and gives out of q's shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from harness import ON_GPU

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
