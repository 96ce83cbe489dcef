"""Attention over pages: decode of one token per sequence and of several, and prefill in chunks.

    python benchmarks/paged.py [--only decode|prefill]

On a GPU: bfloat16, head_dim 128, every decode replayed as a CUDA graph; us, and TB/s of K and V
read; beside FlashAttention-3 where vLLM's `vllm.vllm_flash_attn` can be imported. On a CPU: the
shapes of SmolLM2-135M, against gathering the pages and calling torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashpage import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from harness import (
    DEVICE,
    ON_GPU,
    finish,
    geometric_mean,
    graph_medians,
    interleaved_medians,
    print_table,
    randn,
    setup,
)
from peers import fa3_paged, sdpa

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


def decode_inputs(
    batch: int,
    context: int,
    block_size: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    seqlen_q: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, K and V in pages, lengths and table."""
    k, v, table = pages(batch, context, block_size, heads[1], dim, dtype)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    return randn(batch, seqlen_q, heads[0], dim, dtype=dtype), k, v, lengths, table


def ours(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Callable[[], Tensor]:
    return lambda: flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, block_table=table, causal=True
    )


# ---------------------------------------------------------------------------------------------
# GPU
# ---------------------------------------------------------------------------------------------


def gpu_decode(
    batch: int, context: int, heads: int, block_size: int, seqlen_q: int, fa3: bool
) -> dict[str, Any]:
    inputs = decode_inputs(
        batch, context, block_size, (heads, KV_HEADS), DIM, torch.bfloat16, seqlen_q
    )
    contenders = {"us": ours(*inputs)}
    if fa3:
        contenders["fa3_us"] = fa3_paged(*inputs)
        contenders["fa3_us"]().fill_(torch.nan)  # its plan must serve a second call as well
        torch.testing.assert_close(*(call() for call in contenders.values()), atol=0.02, rtol=0.02)
    times = {name: t * 1e6 for name, t in graph_medians(contenders).items()}
    size = 2 * 2 * batch * context * KV_HEADS * DIM
    queries = f", {seqlen_q} queries" if seqlen_q > 1 else ""
    return {
        "case": f"B {batch}, context {context}{queries}, {heads}/{KV_HEADS} heads, "
        f"pages of {block_size}",
        **times,
        "tb_per_s": size / times["us"] / 1e6,
    }


def has_fa3() -> bool:
    """FlashAttention-3 of vLLM runs here; why not is printed."""
    try:
        fa3_paged(*decode_inputs(1, 16, 16, (8, 8), DIM, torch.bfloat16))()
    except (ImportError, RuntimeError, AttributeError) as error:
        print(f"FA3 over pages does not run, so is not measured: {str(error).splitlines()[0]}")
        return False
    return True


def against_fa3(results: list[dict[str, Any]]) -> dict[str, Any]:
    """How much faster than FlashAttention-3, in geometric mean and in the worst cell."""
    ratios = [r["fa3_us"] / r["us"] for r in results]
    return {"cells": len(ratios), "geometric_mean": geometric_mean(ratios), "lowest": min(ratios)}


def against_one(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Several queries against one, at the same keys: the times' largest quotient."""
    one = results[0]["us"]
    return {"case": results[0]["case"], "most": max(r["us"] / one for r in results)}


def print_decodes(title: str, results: list[dict[str, Any]]) -> None:
    rows = []
    for r in results:
        row = [r["case"], f"{r['us']:.1f}", f"{r['tb_per_s']:.2f}"]
        if "fa3_us" in r:
            row += [f"{r['fa3_us']:.1f}", f"{r['fa3_us'] / r['us']:.2f}"]
        rows.append(row)
    print_table((title, "us", "TB/s", "FA3 us", "ratio")[: len(rows[0])], rows)


def gpu_decodes(fa3: bool) -> list[dict[str, Any]]:
    """One query a sequence, then several."""
    single = [
        gpu_decode(batch, context, heads, block_size, 1, fa3)
        for heads in (16, 32, 64)
        for block_size in (16, 256)
        for batch, context in GPU_CASES
    ]
    print_decodes("decode", single)
    several = [
        [gpu_decode(batch, context, heads, block_size, n, fa3) for n in (1, 2, 4, 8, 16)]
        for heads in (16, 32, 64)
        for batch, context, block_size in ((8, 16384, 16), (64, 4096, 256))
    ]
    print_decodes("several queries", [r for rows in several for r in rows])
    summaries = [against_one(rows) for rows in several]
    for summary in summaries:
        print(f"{summary['case']}: up to 16 queries take at most {summary['most']:.2f}x")
    if fa3:
        for block_size in (16, 256):
            cells = [r for r in single if r["case"].endswith(f"of {block_size}")]
            summary = {"case": f"FA3, one query, pages of {block_size}"} | against_fa3(cells)
            summaries.append(summary)
            print(
                f"pages of {block_size}: {summary['geometric_mean']:.3f}x FA3 in geometric mean of "
                f"{summary['cells']}, at least {summary['lowest']:.3f}x"
            )
    return [*single, *(r for rows in several for r in rows), *summaries]


def gpu_chunk(new: int, keys: int, heads: int, block_size: int, fa3: bool) -> dict[str, Any]:
    """The last `new` of `keys` tokens are queries: one chunk of a long prompt."""
    q, k, v, lengths, table = decode_inputs(
        1, keys, block_size, (heads, KV_HEADS), DIM, torch.bfloat16, new
    )
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (new, keys))
    flat = [x[table[0].long()].reshape(1, -1, KV_HEADS, DIM)[:, :keys].contiguous() for x in (k, v)]
    contenders: dict[str, Callable[[], Tensor]] = {
        "pages": lambda: flash_attn_varlen_func(
            q[0], k, v, cu_q, cu_k, new, keys, causal=True, block_table=table
        ),
        "dense": lambda: flash_attn_func(q, *flat, causal=True),
    }
    if fa3:
        contenders["FA3 pages"] = fa3_paged(q, k, v, lengths, table)
    times = graph_medians(contenders)
    flops = 4 * heads * DIM * (new * (keys - new) + new * (new + 1) / 2)
    rates = {name: flops / t / 1e12 for name, t in times.items()}
    return {"case": f"q {new} over {keys} keys, {heads}/8, pages of {block_size}", **rates}


def gpu_chunks(fa3: bool) -> list[dict[str, Any]]:
    chunks = [
        gpu_chunk(new, keys, heads, block_size, fa3)
        for heads in (16, 32)
        for new, keys in ((2048, 2048), (2048, 10240), (8192, 8192))
        for block_size in (16, 256)
    ]
    names = [name for name in chunks[0] if name != "case"]
    print_table(
        ("chunked prefill, causal, TFLOP/s", *names),
        [(c["case"], *(f"{c[name]:.0f}" for name in names)) for c in chunks],
    )
    return chunks


def gpu_main(only: str | None) -> None:
    info = setup()
    fa3 = has_fa3()
    results = gpu_decodes(fa3) if only != "prefill" else []
    results += gpu_chunks(fa3) if only != "decode" else []
    finish("paged", info, results)


# ---------------------------------------------------------------------------------------------
# CPU
# ---------------------------------------------------------------------------------------------


def cpu_decode(batch: int, context: int, dtype: torch.dtype) -> dict[str, Any]:
    inputs = decode_inputs(batch, context, 16, (9, 3), 64, dtype)
    q, k_pages, v_pages, _, table = inputs
    flat = table.long().flatten()

    def gathered() -> Tensor:
        k, v = (x[flat].view(batch, context, 3, 64) for x in (k_pages, v_pages))
        return sdpa(q, k, v, False)

    times = interleaved_medians({"ours": ours(*inputs), "gather": gathered})
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("decode", "prefill"), help="half of it, on a GPU")
    only = parser.parse_args().only
    gpu_main(only) if ON_GPU else cpu_main()


if __name__ == "__main__":
    main()
