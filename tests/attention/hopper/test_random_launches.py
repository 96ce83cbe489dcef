"""A thousand launches of random problems on a Hopper GPU, queued one behind the other: every one
comes to its end and repeats bit for bit. A few of them emulated where there is no GPU. Run it under
a timeout: a deadlock would wait for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashpage import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashpage.attention.triton import runtime
from kernels import DEVICE, ON_GPU, poisoned

__all__ = ["poisoned"]

LAUNCHES = 50 if ON_GPU else 1
"""of each kind, twice"""
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
LONGEST = 3000 if ON_GPU else 150

pytestmark = [
    pytest.mark.usefixtures("poisoned", "hopper_backend"),
    pytest.mark.skipif(
        ON_GPU and runtime.capability(DEVICE) != 90,
        reason="needs compute capability 9.0, or no GPU",
    ),
]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def heads(rng: random.Random) -> tuple[int, int]:
    kv_heads = rng.choice((1, 2, 4))
    return kv_heads * rng.choice((1, 2, 7)), kv_heads


def length(rng: random.Random) -> int:
    return rng.choice(
        (rng.randint(1, LONGEST), rng.randint(1, 2 * LONGEST // 3), rng.randint(1, 130))
    )


def dense(rng: random.Random, head_dim: int) -> list[Tensor]:
    h, hk = heads(rng)
    batch, seqlen_q, seqlen_k = rng.randint(1, 3), length(rng), length(rng)
    q = rand(batch, seqlen_q, h, head_dim)
    return [q, *(rand(batch, seqlen_k, hk, head_dim) for _ in range(2))]


def forward_dense(rng: random.Random, head_dim: int) -> Callable[[], list[Tensor]]:
    inputs, causal = dense(rng, head_dim), rng.random() < 0.5
    return lambda: [flash_attn_func(*inputs, causal=causal)]


def forward_varlen(rng: random.Random, head_dim: int) -> Callable[[], list[Tensor]]:
    h, hk = heads(rng)
    lengths = [(length(rng) // 3, length(rng) // 3) for _ in range(rng.randint(1, 9))]
    cu_q, cu_k = ([0, *accumulate(x)] for x in zip(*lengths, strict=True))
    q, k, v = (
        rand(cu_q[-1], h, head_dim),
        rand(cu_k[-1], hk, head_dim),
        rand(cu_k[-1], hk, head_dim),
    )
    most = [max(x) for x in zip(*lengths, strict=True)]
    bounds, causal = [ints(cu_q), ints(cu_k)], rng.random() < 0.5
    return lambda: [flash_attn_varlen_func(q, k, v, *bounds, *most, causal=causal)]


def pages(
    rng: random.Random, head_dim: int, seqlen_q: int, group: int
) -> Callable[[], list[Tensor]]:
    batch, hk, page = rng.randint(1, 5), rng.choice((1, 2)), rng.choice((16, 64))
    contexts = [seqlen_q + length(rng) for _ in range(batch)]
    width = -(-max(contexts) // page)
    k, v = (rand(batch * width, page, hk, head_dim) for _ in range(2))
    table = torch.randperm(batch * width, device=DEVICE).int().view(batch, width)
    q, used = rand(batch, seqlen_q, hk * group, head_dim), ints(contexts)
    return lambda: [
        flash_attn_with_kvcache(q, k, v, cache_seqlens=used, block_table=table, causal=True)
    ]


def prefill(rng: random.Random, head_dim: int) -> Callable[[], list[Tensor]]:
    return pages(rng, head_dim, rng.randint(65, max(66, LONGEST // 4)), rng.choice((1, 3)))


def decode(rng: random.Random, head_dim: int) -> Callable[[], list[Tensor]]:
    return pages(rng, head_dim, rng.choice((9, 16)), 8)


def backward(
    rng: random.Random, head_dim: int, *, deterministic: bool
) -> Callable[[], list[Tensor]]:
    inputs, causal = [x.requires_grad_() for x in dense(rng, head_dim)], rng.random() < 0.5
    dout = rand(*inputs[0].shape)

    def run() -> list[Tensor]:
        out = flash_attn_func(*inputs, causal=causal, deterministic=deterministic)
        grads = torch.autograd.grad(out, inputs, dout)
        ordered = deterministic or inputs[1].shape[1] <= 1024
        return list(grads if ordered else grads[1:])

    return run


KINDS = {
    "dense": forward_dense,
    "varlen": forward_varlen,
    "prefill": prefill,
    "decode": decode,
    "backward": partial(backward, deterministic=False),
    "backward deterministic": partial(backward, deterministic=True),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_launches(kind: str, head_dim: int) -> None:
    rng = random.Random()
    for _ in range(LAUNCHES):
        one, other = (KINDS[kind](rng, head_dim) for _ in range(2))
        first, _, again = one(), other(), one()
        assert all(x.isfinite().all() for x in first)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
