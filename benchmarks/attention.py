"""Forward attention against this machine's peers: dense tables and variable lengths.

    python benchmarks/attention.py
    python benchmarks/attention.py --head-dims 64 --masks causal --seqlens 512,1024

On a GPU: bfloat16, B x S = 16384, heads x head_dim = 2048, TFLOP/s (causal counts half the work),
every contender replayed as a CUDA graph, in turn; the time of Python is a table of its own. Peers
are torch's FlashAttention-2 and cuDNN, FlashAttention-3 and 4 where installed (the packages fa3-fwd
and flash-attn-4), and our own kinds of kernels by name. On a CPU: the shapes of SmolLM2-135M
against torch's `scaled_dot_product_attention`. Ratios are a peer's time over ours: above 1, ours is
faster.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashpage import flash_attn_func, flash_attn_varlen_func
from harness import (
    DEVICE,
    ON_GPU,
    finish,
    graph_medians,
    host_seconds,
    medians,
    print_table,
    randn,
    setup,
)
from peers import by_name, cell_options, chosen, peers, print_cell, print_ratios, sdpa, works

HEADS, KV_HEADS, DIM = 9, 3, 64  # SmolLM2-135M
TOKENS, WIDTH = 16384, 2048


def lengths_of(seed: int, count: int, low: int, high: int) -> tuple[list[int], Tensor]:
    """Random sequence lengths, and their cumulative sums."""
    rng = random.Random(seed)
    lengths = [rng.randint(low, high) for _ in range(count)]
    return lengths, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


# ---------------------------------------------------------------------------------------------
# GPU
# ---------------------------------------------------------------------------------------------


def gpu_dense(
    head_dim: int, causal: bool, seqlen: int, others: dict[str, Any], rounds: int
) -> dict[str, Any]:
    batch, heads = TOKENS // seqlen, WIDTH // head_dim
    q, k, v = (randn(batch, seqlen, heads, head_dim) for _ in range(3))
    contenders = {"flashpage": lambda: flash_attn_func(q, k, v, causal=causal)}
    for name, attention in others.items():
        if works(attention, q, k, v, causal):
            contenders[name] = lambda attention=attention: attention(q, k, v, causal)
    flops = 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
    times = graph_medians(contenders, None, rounds)
    result = {
        "case": f"d {head_dim}, {'causal' if causal else 'full'}, S {seqlen}",
        "head_dim": head_dim,
        "tflops": {name: flops / t / 1e12 for name, t in times.items()},
    }
    print_cell(result)
    return result


def gpu_varlen(head_dim: int, causal: bool) -> dict[str, Any]:
    """Lengths from 1 to 4096 at random, against dense sequences with the same work: as many, each
    of the length whose square is the mean square."""
    heads, count = WIDTH // head_dim, 16
    lengths, cu = lengths_of(0, count, 1, 4096)
    squares = sum(n * n for n in lengths)
    same = round((squares / count) ** 0.5)
    q, k, v = (randn(sum(lengths), heads, head_dim) for _ in range(3))
    dense = [randn(count, same, heads, head_dim) for _ in range(3)]
    longest = max(lengths)
    times = graph_medians(
        {
            "varlen": lambda: flash_attn_varlen_func(
                q, k, v, cu, cu, longest, longest, causal=causal
            ),
            "dense": lambda: flash_attn_func(*dense, causal=causal),
        },
        None,
    )
    work = 4 * heads * head_dim / (2 if causal else 1) / 1e12
    rates = {
        "varlen": squares * work / times["varlen"],
        "dense": count * same**2 * work / times["dense"],
    }
    return {
        "case": f"d {head_dim}, {'causal' if causal else 'full'}, 16 sequences of 1-4096",
        "tflops": rates,
        "ratio": rates["varlen"] / rates["dense"],
    }


def gpu_host(others: dict[str, Any]) -> list[dict[str, Any]]:
    """What Python costs: small inputs, the GPU is never waited for."""
    q, k, v = (randn(1, 64, 8, 128) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    calls = {
        "flashpage": lambda: flash_attn_func(q, k, v, causal=True),
        "flashpage, gradients wanted": lambda: flash_attn_func(*leaves, causal=True),
        **{name: lambda f=f: f(q, k, v, True) for name, f in others.items()},
    }
    return [{"case": name, "us": host_seconds(call) * 1e6} for name, call in calls.items()]


def gpu_main() -> None:
    options = cell_options(__doc__.split("\n")[0])
    info = setup()
    others = peers()
    # Which of our kernels serves a cell by itself is a rule: here each kind is measured in each.
    others = chosen(others | by_name("forward"), options.only)
    results = [
        gpu_dense(head_dim, mask == "causal", seqlen, others, options.rounds)
        for head_dim in options.head_dims
        for mask in options.masks
        for seqlen in options.seqlens
    ]
    names = ["flashpage", *others]
    rows = []
    for r in results:
        rates = [f"{r['tflops'][n]:.0f}" if n in r["tflops"] else "-" for n in names]
        rows.append((r["case"], *rates))
    print_table(("TFLOP/s", *names), rows)
    print_ratios(results, ("flashpage", *by_name("forward")))
    varlen = [gpu_varlen(d, m == "causal") for d in options.head_dims for m in options.masks]
    print_table(
        ("TFLOP/s", "varlen", "dense", "ratio"),
        [
            (
                r["case"],
                f"{r['tflops']['varlen']:.0f}",
                f"{r['tflops']['dense']:.0f}",
                f"{r['ratio']:.2f}",
            )
            for r in varlen
        ],
    )
    host = gpu_host(others)
    print_table(("us until a call returns", "us"), [(r["case"], f"{r['us']:.0f}") for r in host])
    finish("attention", info, results + varlen + host)


# ---------------------------------------------------------------------------------------------
# CPU
# ---------------------------------------------------------------------------------------------


def cpu_case(name: str, contenders: dict[str, Any]) -> dict[str, Any]:
    times = medians(contenders)
    return {
        "case": name,
        "ours_ms": times["ours"] * 1e3,
        "torch_ms": times["torch"] * 1e3,
        "ratio": times["torch"] / times["ours"],
    }


def cpu_dense(seqlen: int, dtype: torch.dtype) -> dict[str, Any]:
    q, k, v = (randn(1, seqlen, h, DIM, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    return cpu_case(
        f"dense causal, S {seqlen}, {dtype}",
        {
            "ours": lambda: flash_attn_func(q, k, v, causal=True),
            "torch": lambda: sdpa(q, k, v, True),
        },
    )


def cpu_varlen(dtype: torch.dtype) -> dict[str, Any]:
    """32 sequences of 16 to 512 tokens, against padding them all to 512."""
    lengths, cu = lengths_of(0, 32, 16, 512)
    q, k, v = (randn(sum(lengths), h, DIM, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS))

    def padded() -> list[Tensor]:
        batch = []
        for x in (q, k, v):
            parts = x.split(lengths)
            batch.append(torch.stack([pad(p, (0, 0, 0, 0, 0, 512 - len(p))) for p in parts]))
        out = sdpa(*batch, True)
        return [out[i, :n] for i, n in enumerate(lengths)]

    longest = max(lengths)
    return cpu_case(
        f"varlen causal, 32 sequences of 16-512, {dtype}",
        {
            "ours": lambda: flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True),
            "torch": padded,
        },
    )


def cpu_main() -> None:
    info = setup()
    single, half = torch.float32, torch.bfloat16
    results = [
        *(cpu_dense(s, t) for s, t in ((512, single), (2048, single), (2048, half))),
        *(cpu_varlen(t) for t in (single, half)),
    ]
    print_table(
        ("case", "ours ms", "torch ms", "ratio"),
        [
            (r["case"], f"{r['ours_ms']:.2f}", f"{r['torch_ms']:.2f}", f"{r['ratio']:.2f}")
            for r in results
        ],
    )
    finish("attention", info, results)


if __name__ == "__main__":
    gpu_main() if ON_GPU else cpu_main()
