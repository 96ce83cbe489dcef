"""One small call of every kernel, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python tests/attention/triton/sanitize.py
    compute-sanitizer --tool racecheck python tests/attention/triton/sanitize.py

Without the cache of torch's allocator every tensor ends where its memory ends.
"""

from __future__ import annotations

import torch

from flashpage import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashpage.attention import ops  # noqa: F401 - defines torch.ops.flashpage

DTYPES = (torch.bfloat16, torch.float32)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def dense(head_dim: int, dtype: torch.dtype, **options: object) -> None:
    """Forward and backward; lengths that fill no tile."""
    inputs = [
        randn(1, n, h, head_dim, dtype=dtype).requires_grad_()
        for n, h in ((130, 4), (150, 2), (150, 2))
    ]
    out = flash_attn_func(*inputs, **options)
    torch.autograd.grad(out, inputs, torch.randn_like(out))


def varlen(dtype: torch.dtype) -> None:
    cu_q, cu_k = ints(0, 70, 70, 131), ints(0, 65, 80, 150)
    inputs = [
        randn(n, h, 64, dtype=dtype).requires_grad_() for n, h in ((135, 4), (160, 2), (160, 2))
    ]
    out = flash_attn_varlen_func(*inputs, cu_q, cu_k, 70, 70, causal=True)
    torch.autograd.grad(out, inputs, torch.randn_like(out))


def pages(block_size: int, dtype: torch.dtype) -> None:
    """Chunked prefill, then decode with append and rotary, in one and in many splits."""
    k, v = (randn(12, block_size, 2, 64, dtype=dtype) for _ in range(2))
    table = torch.randperm(12, device="cuda").int().view(2, 6)
    n = 4 * block_size - 3
    q = randn(50, 4, 64, dtype=dtype)
    flash_attn_varlen_func(
        q, k, v, ints(0, 20, 50), ints(0, n, 2 * n), 30, n, causal=True, block_table=table
    )
    cos, sin = (randn(6 * block_size, 16, dtype=dtype) for _ in range(2))
    new = [randn(2, 3, h, 64, dtype=dtype) for h in (4, 2, 2)]
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


def main() -> None:
    for dtype in DTYPES:
        dense(64, dtype, causal=True)
        dense(100, dtype, window_size=(40, 3), softcap=5.0)
        varlen(dtype)
        pages(16, dtype)
        pages(64, dtype)
    dense(128, torch.bfloat16)
    dense(64, torch.float16, dropout_p=0.2, alibi_slopes=torch.rand(4, device="cuda"))
    torch.cuda.synchronize()
    print("every kernel has run")


if __name__ == "__main__":
    main()
