"""Products of a few rows, alone and fused with what stands beside them, against cuBLAS.

    python benchmarks/linear.py [--models Qwen3-0.6B,Llama-3-8B] [--rows 1,2,4,8,16,64,128,256]

bfloat16, a CUDA graph of calls that go around among so many weights that the level-2 cache serves
none of them; us a call, and TB/s of the weight. "product": F.linear, and up to 8 rows
triton_linear.linear, beyond triton_products.product. "with its steps": up to 8 rows the residual
and norm before and SiLU * up after, around F.linear and in one kernel; beyond, what follows the
product: SiLU * up, or (o, down) residual and norm, which add up parts where ours gives parts.
Only on a GPU of compute capability 8.0 and up: elsewhere it says so and ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import DEVICE, ON_GPU, finish, graph_medians, print_table, setup

CALLS = 56
BYTES_BETWEEN = 2**28
"""of other weights are read before a weight is read again: five times the cache of an H200"""


class Product(NamedTuple):
    """A weight `[n, k]`; whether a norm stands before its product (if not, one follows it), and
    whether SiLU * up follows."""

    name: str
    n: int
    k: int
    norm: bool
    gated: bool


def products(hidden: int, q_and_kv: int, attended: int, intermediate: int) -> list[Product]:
    """The four of a layer."""
    return [
        Product("qkv", q_and_kv, hidden, True, False),
        Product("o", hidden, attended, False, False),
        Product("gate_up", 2 * intermediate, hidden, True, True),
        Product("down", hidden, intermediate, False, False),
    ]


MODELS = {
    "Qwen3-0.6B": products(1024, 4096, 2048, 3072),
    "Llama-3-8B": products(4096, 6144, 4096, 14336),
}


MOST_FEW_ROWS = 8
"""rows up to which triton_linear is measured"""


def contenders(product: Product, weights: list[Tensor], num_rows: int) -> dict[str, Callable]:
    few = num_rows <= MOST_FEW_ROWS
    return (of_few_rows if few else of_some_rows)(product, weights, num_rows)


def of_some_rows(product: Product, weights: list[Tensor], num_rows: int) -> dict[str, Callable]:
    from flashpage.layers.triton_kernels import add_rms_norm, silu_and_mul
    from flashpage.layers.triton_products import product as in_parts

    x = torch.randn(num_rows, product.k, device=DEVICE).bfloat16()
    residual = torch.randn(num_rows, product.n, device=DEVICE).bfloat16()
    norm = torch.ones(product.n, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    turn = cycle(weights)

    def norm_after(out: Tensor) -> Tensor:
        return add_rms_norm(out, residual, norm, 1e-6)[0]

    calls: dict[str, Callable] = {
        "cublas": lambda: F.linear(x, next(turn)),
        "triton": lambda: in_parts(x, next(turn), None),
    }
    if product.gated:
        calls["steps"] = lambda: silu_and_mul(F.linear(x, next(turn)))
        calls["fused"] = lambda: in_parts(x, next(turn), None, gated=True)
    elif not product.norm:
        calls["steps"] = lambda: norm_after(F.linear(x, next(turn)))
        calls["fused"] = lambda: norm_after(in_parts(x, next(turn), None))
    return calls


def of_few_rows(product: Product, weights: list[Tensor], num_rows: int) -> dict[str, Callable]:
    from flashpage.layers.triton_kernels import add_rms_norm, silu_and_mul
    from flashpage.layers.triton_linear import add_norm_linear, linear

    x, residual = torch.randn(2, num_rows, product.k, device=DEVICE).bfloat16()
    norm = torch.ones(product.k, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    turn = cycle(weights)

    def steps() -> Tensor:
        out = F.linear(add_rms_norm(x, residual, norm, 1e-6)[0], next(turn))
        return silu_and_mul(out) if product.gated else out

    def fused() -> Tensor:
        return add_norm_linear(x, residual, norm, 1e-6, next(turn), None, gated=product.gated)[0]

    calls: dict[str, Callable] = {
        "cublas": lambda: F.linear(x, next(turn)),
        "triton": lambda: linear(x, next(turn), None),
    }
    return calls | ({"steps": steps, "fused": fused} if product.norm else {})


def measure(model: str, product: Product, rows: list[int]) -> list[dict[str, Any]]:
    size = 2 * product.n * product.k
    count = min(max(BYTES_BETWEEN // size, 2), CALLS)
    weights = [
        torch.randn(product.n, product.k, device=DEVICE).bfloat16() / product.k**0.5
        for _ in range(count)
    ]
    results = []
    for num_rows in rows:
        calls = -(-CALLS // count) * count
        times = graph_medians(contenders(product, weights, num_rows), calls)
        results.append(
            {
                "case": f"{model} {product.name} {product.n} x {product.k}, {num_rows} rows",
                "bytes": size,
                "us": {name: t * 1e6 for name, t in times.items()},
                "tb_per_s": {name: size / t / 1e12 for name, t in times.items()},
            }
        )
    return results


def cells(result: dict[str, Any]) -> tuple[str, ...]:
    names = ("cublas", "triton", "steps", "fused")
    row = [
        f"{result['us'][name]:.2f} ({result['tb_per_s'][name]:.2f})" if name in result["us"] else ""
        for name in names
    ]
    return (result["case"], *row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--rows", default="1,2,4,8,16,64,128,256")
    options = parser.parse_args()
    info = setup()
    if not ON_GPU or torch.cuda.get_device_capability() < (8, 0):
        print("there is no GPU of compute capability 8.0 or more here: nothing to compare")
        finish("linear", info, [])
        return
    rows = [int(n) for n in options.rows.split(",")]
    results = [
        result
        for model in options.models.split(",")
        for product in MODELS[model]
        for result in measure(model, product, rows)
    ]
    header = ("us (TB/s)", "product: cuBLAS", "Triton", "with its steps: cuBLAS", "ours")
    print_table(header, [cells(result) for result in results])
    finish("linear", info, results)


if __name__ == "__main__":
    main()
