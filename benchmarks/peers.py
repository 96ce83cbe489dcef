"""What we measure against: the attention of torch, and FlashAttention-3 and 4 where installed.

A peer takes q, k, v `[batch, seqlen, heads, head_dim]` and gives out of q's shape; `fa3_paged`, of
attention over pages, has all its tensors given before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
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


def cell_options(description: str) -> argparse.Namespace:
    """Which cells of a table of `head_dim`, masks and lengths to measure on a GPU, and of whom."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--seqlens", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--rounds", type=int, default=7, help="readings, of which the median")
    parser.add_argument("--only", default="", help="names, or parts of them: a|b")
    options = parser.parse_args()
    for name in ("head_dims", "seqlens"):
        setattr(options, name, [int(n) for n in getattr(options, name).split(",")])
    options.masks = options.masks.split(",")
    return options


def chosen(contenders: dict[str, Any], only: str) -> dict[str, Any]:
    """Those whose name contains a part of `only`."""
    parts = only.split("|")
    return {name: x for name, x in contenders.items() if any(part in name for part in parts)}


def print_cell(result: dict[str, Any]) -> None:
    """At once, so that a run that is cut short leaves what it measured."""
    rates = ", ".join(f"{name} {rate:.3g}" for name, rate in result["tflops"].items())
    print(f"{result['case']}: {rates}", flush=True)


BETTER_OF_TWO = "the better of FA3 and FA4"


def print_ratios(results: list[dict[str, Any]], ours: Sequence[str] = ("flashpage",)) -> None:
    """TFLOP/s of `ours` over those of each peer, by head_dim and over all: geometric mean and the
    worst cell."""
    groups = [[d] for d in sorted({r["head_dim"] for r in results})]
    if len(groups) > 1:
        groups.append([d for group in groups for d in group])
    for group in groups:
        cells = [r for r in results if r["head_dim"] in group]
        for mine in ours:
            for peer in (*_peers_of(cells), BETTER_OF_TWO):
                _print_ratio(f"d {', '.join(map(str, group))}", cells, mine, peer)


def _peers_of(cells: list[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for c in cells for name in c["tflops"])
    return [n for n in names if not n.startswith(("flashpage", "hopper", "triton"))]


def _print_ratio(group: str, cells: list[dict[str, Any]], mine: str, peer: str) -> None:
    ratios = {}
    for cell in cells:
        rates = cell["tflops"]
        wanted = ("FA3", "FA4") if peer == BETTER_OF_TWO else (peer,)
        if mine in rates and all(name in rates for name in wanted):
            ratios[cell["case"]] = rates[mine] / max(rates[name] for name in wanted)
    if ratios:
        worst = min(ratios, key=ratios.__getitem__)
        print(
            f"{group}: {mine} {geometric_mean(list(ratios.values())):.3f}x {peer} in geometric "
            f"mean of {len(ratios)}, at least {ratios[worst]:.2f}x ({worst})"
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
