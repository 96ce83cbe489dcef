"""Attention over pages: decode of one token per sequence, and prefill in chunks.

    python benchmarks/paged.py

On a GPU: bfloat16, head_dim 128, every decode replayed as a CUDA graph; us, and TB/s of K and V
read. On a CPU: the shapes of SmolLM2-135M, against gathering the pages and calling torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashpage import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from harness import (
    DEVICE,
    ON_GPU,
    finish,
    graph_medians,
    interleaved_medians,
    print_table,
    randn,
    setup,
)
from peers import sdpa

KV_HEADS, DIM = 8, 128
GPU_CASES = (
    (1, 1024), (1, 16384), (1, 131072), (8, 4096), (64, 1024), (64, 8192), (256, 1024), (256, 4096),
)  # fmt: skip


def pages(
    batch: int, context: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and a table of shuffled pages."""
    num_blocks = batch * -(-context // block_size)
    k, v = (randn(num_blocks, block_size, heads, dim, dtype=dtype) for _ in range(2))
    table = torch.randperm(num_blocks, device=DEVICE).view(batch, -1).int()
    return k, v, table


def decode_call(
    batch: int, context: int, block_size: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    k, v, table = pages(batch, context, block_size, heads[1], dim, dtype)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    q = randn(batch, 1, heads[0], dim, dtype=dtype)

    def call() -> Tensor:
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    return call, (q, k, v, table)


# ---------------------------------------------------------------------------------------------
# GPU
# ---------------------------------------------------------------------------------------------


def gpu_decode(batch: int, context: int, heads: int, block_size: int) -> dict[str, Any]:
    call, _ = decode_call(batch, context, block_size, (heads, KV_HEADS), DIM, torch.bfloat16)
    seconds = graph_medians({"decode": call})["decode"]
    size = 2 * 2 * batch * context * KV_HEADS * DIM
    return {
        "case": f"B {batch}, context {context}, {heads}/{KV_HEADS} heads, pages of {block_size}",
        "us": seconds * 1e6,
        "tb_per_s": size / seconds / 1e12,
    }


def gpu_chunk(new: int, keys: int, heads: int, block_size: int) -> dict[str, Any]:
    """The last `new` of `keys` tokens are queries: one chunk of a long prompt."""
    k, v, table = pages(1, keys, block_size, KV_HEADS, DIM, torch.bfloat16)
    q = randn(new, heads, DIM)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (new, keys))
    flat = [x[table[0].long()].reshape(1, -1, KV_HEADS, DIM)[:, :keys].contiguous() for x in (k, v)]
    times = graph_medians(
        {
            "pages": lambda: flash_attn_varlen_func(
                q, k, v, cu_q, cu_k, new, keys, causal=True, block_table=table
            ),
            "dense": lambda: flash_attn_func(q[None], *flat, causal=True),
        }
    )
    flops = 4 * heads * DIM * (new * (keys - new) + new * (new + 1) / 2)
    rates = {name: flops / t / 1e12 for name, t in times.items()}
    return {"case": f"q {new} over {keys} keys, {heads}/8, pages of {block_size}", **rates}


def gpu_main() -> None:
    info = setup()
    results = [
        gpu_decode(batch, context, heads, block_size)
        for heads in (16, 32, 64)
        for block_size in (16, 256)
        for batch, context in GPU_CASES
    ]
    print_table(
        ("decode", "us", "TB/s"),
        [(r["case"], f"{r['us']:.1f}", f"{r['tb_per_s']:.2f}") for r in results],
    )
    chunks = [
        gpu_chunk(new, keys, heads, block_size)
        for heads in (16, 32)
        for new, keys in ((2048, 2048), (2048, 10240), (8192, 8192))
        for block_size in (16, 256)
    ]
    print_table(
        ("chunked prefill, causal, TFLOP/s", "pages", "dense"),
        [(r["case"], f"{r['pages']:.0f}", f"{r['dense']:.0f}") for r in chunks],
    )
    finish("paged", info, results + chunks)


# ---------------------------------------------------------------------------------------------
# CPU
# ---------------------------------------------------------------------------------------------


def cpu_decode(batch: int, context: int, dtype: torch.dtype) -> dict[str, Any]:
    call, (q, k_pages, v_pages, table) = decode_call(batch, context, 16, (9, 3), 64, dtype)
    flat = table.long().flatten()

    def gathered() -> Tensor:
        k, v = (x[flat].view(batch, context, 3, 64) for x in (k_pages, v_pages))
        return sdpa(q, k, v, False)

    times = interleaved_medians({"ours": call, "gather": gathered})
    size = 2 * k_pages.numel() * k_pages.element_size()
    return {
        "case": f"B {batch}, context {context}, {dtype}",
        "ours_ms": times["ours"] * 1e3,
        "torch_ms": times["gather"] * 1e3,
        "ratio": times["gather"] / times["ours"],
        "ours_gb_per_s": size / times["ours"] / 1e9,
    }


def cpu_main() -> None:
    info = setup()
    results = [
        cpu_decode(batch, context, dtype)
        for batch, context in ((1, 2048), (8, 512), (32, 2048))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    print_table(
        ("decode over pages of 16", "ours ms", "gather + torch ms", "ratio", "GB/s"),
        [
            (
                r["case"],
                f"{r['ours_ms']:.2f}",
                f"{r['torch_ms']:.2f}",
                f"{r['ratio']:.2f}",
                f"{r['ours_gb_per_s']:.1f}",
            )
            for r in results
        ],
    )
    finish("paged", info, results)


if __name__ == "__main__":
    gpu_main() if ON_GPU else cpu_main()
