"""Tiles of the forward for Hopper: TFLOP/s of each, against those that its table chooses.

    python benchmarks/hopper_tiles.py
    python benchmarks/hopper_tiles.py --head-dims 64 --only immediates

bfloat16, B x S = 16384, heads x head_dim = 2048, each replayed as a CUDA graph, in turn; causal
counts half the work. A variant whose output is not that of the kernels of `triton/`, up to
rounding, is marked WRONG. What was found so far: docs/kernel_notes.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
from harness import DEVICE, ON_GPU, finish, geometric_mean, graph_medians, print_table, randn, setup
from peers import cell_options, chosen, print_cell

TOKENS, WIDTH = 16384, 2048
KNOBS: dict[str, dict[str, Any]] = {
    "no ping-pong": {"ping_pong": False},
    "no lazy rescale": {"lazy": False},
    "a thread block a tile": {"persistent": False},
    "skip": {"skip": True},
    "immediates": {"immediates": True},
    "skip, immediates": {"skip": True, "immediates": True},
    "two stages of V": {"v_stages": 2},
    "three stages of V": {"v_stages": 3},
    "halves": {"halves": True},
    "no halves": {"halves": False},
    "16 MB side by side": {"l2_bytes": 16 * 2**20},
    "32 MB side by side": {"l2_bytes": 32 * 2**20},
}


def variants(head_dim: int) -> dict[str, Any]:
    """Tiles by name: the largest of each head_dim, changed by what the name says."""
    from flashpage.attention.hopper import forward

    short = forward.TILES_64_SHORT
    large = {64: forward.TILES_64, 128: forward.TILES_128, 256: forward.TILES_256}[head_dim]
    large = replace(large, skip=False, immediates=False)
    found = {"large": large, **{name: replace(large, **knob) for name, knob in KNOBS.items()}}
    if head_dim == 64:
        two = replace(large, consumers=2, registers=(240, 24), immediates=True)
        found |= {
            "128 rows": two,
            "128 rows, skip": replace(two, skip=True),
            "128 rows, no lazy rescale": replace(two, lazy=False),
            "64 keys": replace(large, block_n=64, k_stages=6, v_stages=6, immediates=True),
            "64 keys, skip": replace(
                large, block_n=64, k_stages=6, v_stages=6, immediates=True, skip=True
            ),
            "2 blocks of 64 rows": replace(short, block_n=128, blocks=2, registers=(224, 24)),
            "3 blocks of 64 rows": short,
        }
    if head_dim == 128:
        two = replace(short, v_stages=2, blocks=2, registers=(224, 24))
        found["2 blocks of 64 rows"] = two
    return found


def reference(problem: Problem, x: AttentionInputs) -> tuple[Tensor, Tensor]:
    from flashpage.attention.triton.forward import forward

    out, lse, _ = forward(problem, x, False)
    return out, lse


def measure(
    head_dim: int, causal: bool, seqlen: int, tiles: dict[str, Any], rounds: int
) -> dict[str, Any]:
    from flashpage.attention.hopper.forward import launch, tiles_for

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
    tiles = {"table": tiles_for(problem, seqlen, 0), **tiles}
    out, lse = reference(problem, x)
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    wrong = []
    for name, shape in tiles.items():
        outputs[name] = torch.full_like(q, torch.nan), torch.full_like(lse, torch.nan)
        launch(problem, x, *outputs[name], shape)
        mine, my_lse = outputs[name]
        if not (torch.allclose(mine, out, 2e-2, 2e-2) and torch.allclose(my_lse, lse, 1e-4, 1e-4)):
            wrong.append(name)
    calls = {
        name: lambda name=name, shape=shape: launch(problem, x, *outputs[name], shape)
        for name, shape in tiles.items()
    }
    flops = 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
    tflops = {name: flops / t / 1e12 for name, t in graph_medians(calls, None, rounds).items()}
    case = f"d {head_dim}, {'causal' if causal else 'full'}, S {seqlen}"
    result = {"case": case, "head_dim": head_dim, "tflops": tflops, "wrong": wrong}
    print_cell(result)
    if wrong:
        print("  WRONG: " + ", ".join(wrong), flush=True)
    return result


def main() -> None:
    options = cell_options(__doc__.split("\n")[0])
    if not ON_GPU or runtime.capability(torch.device(DEVICE, 0)) != 90:
        raise SystemExit("needs a GPU of compute capability 9.0")
    info = setup()
    results = []
    for head_dim in options.head_dims:
        tiles = chosen(variants(head_dim), options.only)
        for mask in options.masks:
            cells = [
                measure(head_dim, mask == "causal", seqlen, tiles, options.rounds)
                for seqlen in options.seqlens
            ]
            rows = []
            for name in ("table", *tiles):
                rates = [
                    f"{c['tflops'][name]:.0f}{' WRONG' if name in c['wrong'] else ''}"
                    for c in cells
                ]
                ratios = [c["tflops"][name] / c["tflops"]["table"] for c in cells]
                rows.append((name, *rates, f"{geometric_mean(ratios):.2f}"))
            header = (f"d {head_dim}, {mask}", *(f"S {s}" for s in options.seqlens), "mean")
            print_table(header, rows)
            results += cells
    finish("hopper_tiles", info, results)


if __name__ == "__main__":
    main()
