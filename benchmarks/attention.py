"""Attention on this machine's CPU against torch's `scaled_dot_product_attention`.

    python benchmarks/attention.py

Ratios are torch's time over ours: above 1, ours is faster. Paged decode is compared with the way
one reads pages without a paged kernel: gather them, then call torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from flashpage import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from harness import finish, interleaved_medians, print_table, setup

HEADS, KV_HEADS, DIM = 9, 3, 64  # SmolLM2-135M


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def compare(name: str, ours: Callable[[], Any], torchs: Callable[[], Any]) -> dict[str, Any]:
    times = interleaved_medians({"ours": ours, "torch": torchs})
    return {
        "case": name,
        "ours_ms": times["ours"] * 1e3,
        "torch_ms": times["torch"] * 1e3,
        "ratio": times["torch"] / times["ours"],
    }


def qkv(batch: int, seqlen: int, dtype: torch.dtype, grad: bool = False) -> list[Tensor]:
    return [
        torch.randn(batch, seqlen, h, DIM).to(dtype).requires_grad_(grad)
        for h in (HEADS, KV_HEADS, KV_HEADS)
    ]


def dense(seqlen: int, dtype: torch.dtype) -> dict[str, Any]:
    q, k, v = qkv(1, seqlen, dtype)
    return compare(
        f"dense causal forward, S {seqlen}, {dtype}",
        lambda: flash_attn_func(q, k, v, causal=True),
        lambda: sdpa(q, k, v, causal=True),
    )


def backward(seqlen: int, dtype: torch.dtype) -> dict[str, Any]:
    inputs = qkv(1, seqlen, dtype, grad=True)
    dout = torch.randn(1, seqlen, HEADS, DIM).to(dtype)

    def run(function: Callable[..., Tensor]) -> None:
        torch.autograd.grad(function(*inputs, causal=True), inputs, dout)

    return compare(
        f"dense causal forward + backward, S {seqlen}, {dtype}",
        lambda: run(flash_attn_func),
        lambda: run(sdpa),
    )


def varlen(dtype: torch.dtype) -> dict[str, Any]:
    """32 sequences of 16 to 512 tokens, against padding them all to 512."""
    rng = random.Random(0)
    lengths = [rng.randint(16, 512) for _ in range(32)]
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths), h, DIM).to(dtype) for h in (HEADS, KV_HEADS, KV_HEADS))

    def padded() -> list[Tensor]:
        batch = []
        for x in (q, k, v):
            parts = x.split(lengths)
            batch.append(torch.stack([pad(p, (0, 0, 0, 0, 0, 512 - len(p))) for p in parts]))
        out = sdpa(*batch, causal=True)
        return [out[i, :n] for i, n in enumerate(lengths)]

    return compare(
        f"varlen causal forward, 32 sequences of 16-512, {dtype}",
        lambda: flash_attn_varlen_func(q, k, v, cu, cu, max(lengths), max(lengths), causal=True),
        padded,
    )


def decode(batch: int, context: int, dtype: torch.dtype) -> dict[str, Any]:
    block_size = 16
    num_blocks = batch * context // block_size
    k_pages, v_pages = (
        torch.randn(num_blocks, block_size, KV_HEADS, DIM).to(dtype) for _ in range(2)
    )
    table = torch.randperm(num_blocks).view(batch, -1).int()
    lengths = torch.full((batch,), context, dtype=torch.int32)
    q = torch.randn(batch, 1, HEADS, DIM).to(dtype)
    flat = table.long().flatten()

    def gathered() -> Tensor:
        k, v = (x[flat].view(batch, context, KV_HEADS, DIM) for x in (k_pages, v_pages))
        return sdpa(q, k, v, causal=False)

    result = compare(
        f"paged decode, B {batch}, context {context}, {dtype}",
        lambda: flash_attn_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=lengths, block_table=table, causal=True
        ),
        gathered,
    )
    size = 2 * k_pages.numel() * k_pages.element_size()
    return {**result, "ours_gb_per_s": size / result["ours_ms"] / 1e6}


def main() -> None:
    info = setup()
    single, half = torch.float32, torch.bfloat16
    cases: list[Callable[[], dict[str, Any]]] = [
        lambda: dense(512, single),
        lambda: dense(2048, single),
        lambda: dense(2048, half),
        lambda: backward(2048, single),
        lambda: varlen(single),
        lambda: varlen(half),
        *(
            lambda b=b, c=c, t=t: decode(b, c, t)
            for b, c in ((1, 2048), (8, 512), (32, 2048))
            for t in (single, half)
        ),
    ]
    results = []
    for case in cases:
        results.append(case())
        print(f"  {results[-1]['case']}: {results[-1]['ratio']:.2f}x", flush=True)
    print()
    print_table(
        ("case", "ours ms", "torch ms", "ratio", "GB/s"),
        [
            (
                r["case"],
                f"{r['ours_ms']:.2f}",
                f"{r['torch_ms']:.2f}",
                f"{r['ratio']:.2f}",
                f"{r['ours_gb_per_s']:.1f}" if "ours_gb_per_s" in r else "",
            )
            for r in results
        ],
    )
    finish("attention", info, results)


if __name__ == "__main__":
    main()
