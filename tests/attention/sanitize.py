"""Small calls of every kernel of one backend, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python tests/attention/sanitize.py triton
    compute-sanitizer --tool racecheck python tests/attention/sanitize.py hopper dense varlen

Without names of cases it runs all of them. Without the cache of torch's allocator every tensor ends
where its memory ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from flashpage import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashpage.attention import (
    dispatch,
    ops,  # noqa: F401 - defines torch.ops.flashpage
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def dense(
    head_dim: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    backward: bool = True,
    **options: object,
) -> None:
    """Lengths that fill no tile."""
    inputs = [
        randn(batch, n, h, head_dim, dtype=dtype).requires_grad_(backward)
        for n, h in ((130, 4), (150, 2), (150, 2))
    ]
    out = flash_attn_func(*inputs, **options)
    if backward:
        torch.autograd.grad(out, inputs, torch.randn_like(out))


def varlen(dtype: torch.dtype, head_dim: int = 64, **options: object) -> None:
    cu_q, cu_k = ints(0, 70, 70, 131), ints(0, 65, 80, 150)
    inputs = [
        randn(n, h, head_dim, dtype=dtype).requires_grad_()
        for n, h in ((135, 4), (160, 2), (160, 2))
    ]
    out = flash_attn_varlen_func(*inputs, cu_q, cu_k, 70, 70, causal=True, **options)
    torch.autograd.grad(out, inputs, torch.randn_like(out))


def pages(block_size: int, dtype: torch.dtype, head_dim: int = 64) -> None:
    """Chunked prefill, then decode with append and rotary, in one and in many splits."""
    k, v = (randn(12, block_size, 2, head_dim, dtype=dtype) for _ in range(2))
    table = torch.randperm(12, device="cuda").int().view(2, 6)
    n = 4 * block_size - 3
    q = randn(50, 4, head_dim, dtype=dtype)
    flash_attn_varlen_func(
        q, k, v, ints(0, 20, 50), ints(0, n, 2 * n), 30, n, causal=True, block_table=table
    )
    cos, sin = (randn(6 * block_size, 16, dtype=dtype) for _ in range(2))
    new = [randn(2, 3, h, head_dim, dtype=dtype) for h in (4, 2, 2)]
    for num_splits in (1, 5):
        flash_attn_with_kvcache(
            new[0],
            k,
            v,
            new[1],
            new[2],
            cos,
            sin,
            cache_seqlens=ints(n, 2),
            block_table=table,
            causal=True,
            num_splits=num_splits,
        )
    slots = torch.tensor([0, -1, 12 * block_size - 1], device="cuda")
    torch.ops.flashpage.store_kv(new[1][0], new[2][0], k, v, slots)


def triton_dense() -> None:
    for dtype in (BF16, FP32):
        dense(64, dtype, causal=True)
        dense(100, dtype, window_size=(40, 3), softcap=5.0)
    dense(128, BF16)
    dense(64, FP16, dropout_p=0.2, alibi_slopes=torch.rand(4, device="cuda"))


def hopper_dense() -> None:
    for head_dim in (64, 96, 128):
        for deterministic in (False, True):
            dense(head_dim, BF16, causal=True, deterministic=deterministic)
        dense(head_dim, FP16, window_size=(40, 3), softcap=5.0)
    for head_dim in (192, 256):
        dense(head_dim, BF16, backward=False, causal=True)


def hopper_persistent() -> None:
    """More tiles than thread blocks run at once: each takes another one and fetches ahead."""
    for head_dim in (64, 128):
        for deterministic in (False, True):
            dense(head_dim, BF16, batch=80, causal=True, deterministic=deterministic)


def hopper_varlen() -> None:
    for head_dim in (64, 128):
        for deterministic in (False, True):
            varlen(BF16, head_dim, deterministic=deterministic)


CASES: dict[str, dict[str, Callable[[], object]]] = {
    "triton": {
        "dense": triton_dense,
        "varlen": lambda: [varlen(dtype) for dtype in (BF16, FP32)],
        "pages": lambda: [pages(size, dtype) for size in (16, 64) for dtype in (BF16, FP32)],
    },
    "hopper": {
        "dense": hopper_dense,
        "persistent": hopper_persistent,
        "varlen": hopper_varlen,
        "pages": lambda: [pages(size, BF16, d) for size in (16, 64) for d in (64, 128, 256)],
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend", choices=list(CASES))
    parser.add_argument("cases", nargs="*", help="all of them by default")
    args = parser.parse_args()
    cases = CASES[args.backend]
    if unknown := set(args.cases) - set(cases):
        parser.error(f"cases must be among {list(cases)}, got {sorted(unknown)}")
    with dispatch.only(args.backend):
        for name in args.cases or cases:
            cases[name]()
            torch.cuda.synchronize()
            print(f"{args.backend}, {name}: every kernel has run", flush=True)


if __name__ == "__main__":
    main()
