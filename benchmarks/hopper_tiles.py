"""The knobs of the forward for Hopper, one at a time: TFLOP/s of each, against the table's tiles.

    python benchmarks/hopper_tiles.py
    python benchmarks/hopper_tiles.py --head-dim 64 --only immediates

bfloat16, B x S = 16384, heads x head_dim = 2048, each replayed as a CUDA graph; causal counts half
the work. A variant whose output is not that of the table's tiles, up to rounding, is marked WRONG.
What was found so far: docs/kernel_notes.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
from harness import DEVICE, ON_GPU, finish, geometric_mean, graph_medians, print_table, randn, setup

TOKENS, WIDTH = 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
KNOBS: dict[str, dict[str, Any]] = {
    "no ping-pong": {"ping_pong": False},
    "no lazy rescale": {"lazy": False},
    "a thread block a tile": {"persistent": False},
    "skip": {"skip": True},
    "immediates": {"immediates": True},
    "skip, immediates": {"skip": True, "immediates": True},
}


def variants(head_dim: int) -> dict[str, Any]:
    """Tiles by name, the table's first."""
    from flashpage.attention.hopper.forward import Tiles, forward_tiles

    table = forward_tiles(head_dim)
    found = {"table": table, **{name: replace(table, **knob) for name, knob in KNOBS.items()}}
    if head_dim == 64:
        found["128 rows"] = Tiles(consumers=2, block_n=128, stages=4)
        found["128 rows, immediates"] = replace(found["128 rows"], immediates=True)
    return found


def measure(head_dim: int, causal: bool, seqlen: int, tiles: dict[str, Any]) -> dict[str, Any]:
    from flashpage.attention.hopper.forward import launch

    batch, heads = TOKENS // seqlen, WIDTH // head_dim
    q, k, v = (randn(batch, seqlen, heads, head_dim) for _ in range(3))
    problem = Problem(
        layout="dense",
        device=q.device,
        dtype=q.dtype,
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        window_right=0 if causal else -1,
    )
    x = AttentionInputs(q, k, v, None, None, None, None, None, seqlen, seqlen)
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, chosen in tiles.items():
        lse = torch.full((batch, heads, seqlen), torch.nan, device=q.device)
        outputs[name] = torch.full_like(q, torch.nan), lse
        launch(problem, x, *outputs[name], chosen)
    out, lse = outputs["table"]
    wrong = [
        name
        for name, (other, other_lse) in outputs.items()
        if not (
            torch.allclose(other, out, 2e-2, 2e-2) and torch.allclose(other_lse, lse, 1e-4, 1e-4)
        )
    ]
    calls = {
        name: lambda name=name, chosen=chosen: launch(problem, x, *outputs[name], chosen)
        for name, chosen in tiles.items()
    }
    flops = 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
    tflops = {name: flops / t / 1e12 for name, t in graph_medians(calls).items()}
    case = f"d {head_dim}, {'causal' if causal else 'full'}, S {seqlen}"
    return {"case": case, "head_dim": head_dim, "tflops": tflops, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--head-dim", type=int, choices=(64, 128, 256), help="only this one")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    options = parser.parse_args()
    if not ON_GPU or runtime.capability(torch.device(DEVICE, 0)) != 90:
        raise SystemExit("needs a GPU of compute capability 9.0")
    info = setup()
    results = []
    for head_dim in (64, 128, 256):
        if options.head_dim not in (None, head_dim):
            continue
        tiles = {n: t for n, t in variants(head_dim).items() if n == "table" or options.only in n}
        for causal in (False, True):
            cells = [measure(head_dim, causal, seqlen, tiles) for seqlen in SEQLENS]
            rows = []
            for name in tiles:
                rates = [
                    f"{c['tflops'][name]:.0f}{' WRONG' if name in c['wrong'] else ''}"
                    for c in cells
                ]
                ratios = [c["tflops"][name] / c["tflops"]["table"] for c in cells]
                rows.append((name, *rates, f"{geometric_mean(ratios):.2f}"))
            title = f"d {head_dim}, {'causal' if causal else 'full'}"
            print_table((title, *(f"S {s}" for s in SEQLENS), "mean"), rows)
            results += cells
    finish("hopper_tiles", info, results)


if __name__ == "__main__":
    main()
