"""The backward of attention alone against this machine's peers.

    python benchmarks/backward.py

On a GPU: bfloat16, B x S = 16384, heads x head_dim = 2048, TFLOP/s at 2.5 times the forward's
work; our own kinds of kernels also by name. On a CPU: the shapes of SmolLM2-135M. Ratios are a
peer's time over ours: above 1, ours is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashpage import flash_attn_func
from harness import ON_GPU, finish, medians, print_table, randn, setup
from peers import by_name, peers, print_ratios, works

TOKENS, WIDTH = 16384, 2048


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attn_func(q, k, v, causal=causal)


def measure(
    name: str,
    inputs: list[Tensor],
    causal: bool,
    flops: float,
    others: dict[str, Any],
) -> dict[str, Any]:
    dout = torch.randn_like(inputs[0])

    def backward_of(attention: Any) -> Callable[[], object]:
        out = attention(*inputs, causal)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    contenders = {"flashpage": backward_of(ours)}
    for peer, attention in others.items():
        if works(lambda *a: backward_of(attention)(), *inputs, causal):  # noqa: B023
            contenders[peer] = backward_of(attention)
    tflops = {peer: flops / t / 1e12 for peer, t in medians(contenders).items()}
    return {"case": name, "head_dim": inputs[0].shape[-1], "tflops": tflops}


def cases() -> list[tuple[int, bool, int, int, tuple[int, int]]]:
    """(head_dim, causal, batch, seqlen, heads)"""
    if not ON_GPU:
        return [(64, True, 1, s, (9, 3)) for s in (512, 2048)]
    return [
        (d, causal, TOKENS // s, s, (WIDTH // d, WIDTH // d))
        for d in (64, 128, 256)
        for causal in (False, True)
        for s in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def main() -> None:
    info = setup()
    others = peers(backward=True)
    results = []
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    for head_dim, causal, batch, seqlen, (h, hk) in cases():
        inputs = [randn(batch, seqlen, n, head_dim, dtype=dtype, grad=True) for n in (h, hk, hk)]
        flops = 2.5 * 4 * batch * h * seqlen**2 * head_dim / (2 if causal else 1)
        name = f"d {head_dim}, {'causal' if causal else 'full'}, S {seqlen}"
        ours_by_name = by_name("backward", head_dim=head_dim) if ON_GPU else {}
        results.append(measure(name, inputs, causal, flops, others | ours_by_name))
    names = list(dict.fromkeys(name for r in results for name in r["tflops"]))
    rows = []
    for r in results:
        rates = [f"{r['tflops'][n]:.3g}" if n in r["tflops"] else "-" for n in names]
        rows.append((r["case"], *rates))
    print_table(("TFLOP/s", *names), rows)
    print_ratios(results)
    finish("backward", info, results)


if __name__ == "__main__":
    main()
