"""The backward of attention alone against this machine's peers.

    python benchmarks/backward.py
    python benchmarks/backward.py --head-dims 64 --masks causal --seqlens 512,1024

On a GPU: bfloat16, B x S = 16384, heads x head_dim = 2048, TFLOP/s at 2.5 times the forward's
work, calls queued ahead of the GPU and contenders in turn; our own kinds of kernels also by name,
and with `deterministic=True` (the peers are not). On a CPU: the shapes of SmolLM2-135M. Ratios are
a peer's time over ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashpage import flash_attn_func
from flashpage.attention import dispatch
from harness import ON_GPU, finish, gpu_medians, interleaved_medians, print_table, randn, setup
from peers import by_name, cell_options, chosen, peers, print_cell, print_ratios, works

TOKENS, WIDTH = 16384, 2048


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attn_func(q, k, v, causal=causal)


def deterministic(name: str) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with dispatch.only(name):
            return flash_attn_func(q, k, v, causal=causal, deterministic=True)

    return attention


def measure(
    name: str,
    inputs: list[Tensor],
    causal: bool,
    flops: float,
    others: dict[str, Any],
    rounds: int,
) -> dict[str, Any]:
    dout = torch.randn_like(inputs[0])

    def backward_of(attention: Any) -> Callable[[], object]:
        out = attention(*inputs, causal)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    contenders = {"flashpage": backward_of(ours)}
    for peer, attention in others.items():
        if works(lambda *a: backward_of(attention)(), *inputs, causal):  # noqa: B023
            contenders[peer] = backward_of(attention)
    medians = gpu_medians if ON_GPU else interleaved_medians
    times = medians(contenders, rounds=rounds)
    tflops = {peer: flops / t / 1e12 for peer, t in times.items()}
    result = {"case": name, "head_dim": inputs[0].shape[-1], "tflops": tflops}
    print_cell(result)
    return result


def cases(options: argparse.Namespace) -> list[tuple[int, bool, int, int, tuple[int, int]]]:
    """(head_dim, causal, batch, seqlen, heads)"""
    if not ON_GPU:
        return [(64, True, 1, s, (9, 3)) for s in (512, 2048)]
    return [
        (d, mask == "causal", TOKENS // s, s, (WIDTH // d, WIDTH // d))
        for d in options.head_dims
        for mask in options.masks
        for s in options.seqlens
    ]


def main() -> None:
    options = cell_options(__doc__.split("\n")[0])
    info = setup()
    others = peers(backward=True)
    results = []
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    for head_dim, causal, batch, seqlen, (h, hk) in cases(options):
        inputs = [randn(batch, seqlen, n, head_dim, dtype=dtype, grad=True) for n in (h, hk, hk)]
        flops = 2.5 * 4 * batch * h * seqlen**2 * head_dim / (2 if causal else 1)
        name = f"d {head_dim}, {'causal' if causal else 'full'}, S {seqlen}"
        contenders = dict(others)
        if ON_GPU and (named := by_name("backward", head_dim=head_dim)):
            contenders |= named | {"hopper deterministic": deterministic("hopper")}
        contenders = chosen(contenders, options.only)
        results.append(measure(name, inputs, causal, flops, contenders, options.rounds))
    names = list(dict.fromkeys(name for r in results for name in r["tflops"]))
    rows = []
    for r in results:
        rates = [f"{r['tflops'][n]:.3g}" if n in r["tflops"] else "-" for n in names]
        rows.append((r["case"], *rates))
    print_table(("TFLOP/s", *names), rows)
    print_ratios(results, ("flashpage", "hopper", "triton", "hopper deterministic"))
    finish("backward", info, results)


if __name__ == "__main__":
    main()
