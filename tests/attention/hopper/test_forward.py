"""The forward kernel for Hopper against the oracle: on a Hopper GPU, and without one emulated."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from flashpage import flash_attn_func, flash_attn_varlen_func
from flashpage.attention import dispatch
from flashpage.attention.hopper import forward as hopper
from flashpage.attention.triton import runtime
from kernels import DEVICE, ON_GPU, poisoned
from oracles import assert_as_good, dense, max_error, varlen

__all__ = ["poisoned"]
BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = [
    pytest.mark.usefixtures("poisoned", "hopper_backend"),
    pytest.mark.skipif(
        ON_GPU and runtime.capability(DEVICE) != 90,
        reason="needs compute capability 9.0, or no GPU",
    ),
]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def qkv(batch, seqlen_q, seqlen_k, heads, dtype=BF16):
    h, hk, d = heads
    shapes = (batch, seqlen_q, h, d), (batch, seqlen_k, hk, d), (batch, seqlen_k, hk, d)
    return [torch.randn(s, device=DEVICE).to(dtype) for s in shapes]


def check_dense(q, k, v, **options):
    """Against float64, allowing twice the error of the same formula in the dtype of q."""
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert out.is_contiguous()
    assert out.dtype == q.dtype
    exact_out, exact_lse = dense(q.double(), k.double(), v.double(), **options)
    low_out, _ = dense(q, k, v, **options)
    assert_as_good(out, exact_out, low_out)
    size = exact_lse[torch.isfinite(exact_lse)].abs()
    atol = 1e-5 * max(1.0, float(size.max()) if size.numel() else 0.0)
    assert max_error(lse, exact_lse) <= atol
    return out, lse


# ---------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 300), (300, 1), (0, 5), (5, 0), (128, 128), (129, 257)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_at_the_edge(seqlen_q, seqlen_k, causal):
    check_dense(*qkv(2, seqlen_q, seqlen_k, (4, 2, 64)), causal=causal)


def test_one_key_gives_its_value_bit_for_bit():
    q, k, v = qkv(2, 5, 1, (4, 2, 64), FP16)
    out = flash_attn_func(q * 5, k * 3, v * 3)
    assert torch.equal(out, (v * 3).repeat_interleave(2, dim=2).expand_as(out))


def test_rows_that_see_no_key_are_zero_with_infinite_lse():
    q, k, v = qkv(1, 500, 120, (2, 1, 128))
    out, lse = check_dense(q, k, v, causal=True)
    assert not out[:, :380].any()
    assert torch.equal(lse[:, :, :380], torch.full_like(lse[:, :, :380], torch.inf))


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_scores_of_any_magnitude(offset):
    q, k, v = qkv(1, 40, 270, (2, 2, 64))
    q[..., 0], k[..., 0] = 100.0, offset / 25
    check_dense(q, k, v, causal=True)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 3.0])
def test_any_softmax_scale(scale):
    check_dense(*qkv(1, 40, 270, (2, 1, 64)), softmax_scale=scale, causal=True)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_any_head_dim(head_dim, dtype):
    check_dense(*qkv(1, 140, 270, (2, 1, head_dim), dtype), causal=True)


@pytest.mark.parametrize("heads", [(1, 1, 64), (7, 1, 64), (9, 3, 64), (6, 6, 64)])
def test_any_group_of_heads(heads):
    check_dense(*qkv(2, 33, 165, heads), causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256] if ON_GPU else [128])
@pytest.mark.parametrize("residue", [0, 1, 7, 8, 63, 64, 65, 127])
def test_tails_of_any_length(head_dim, residue):
    q, k, v = qkv(1, 128 + residue, 256 + 127 - residue, (1, 1, head_dim))
    for causal in (False, True):
        check_dense(q, k, v, causal=causal)


def test_maxima_that_grow_by_less_than_a_lazy_step_and_by_more():
    """Scores that rise from the last key to the first: every block moves the maximum."""
    for step in (0.01, 0.3, 3.0):
        q, k, v = qkv(1, 64, 700, (1, 1, 64), FP16)
        q.zero_()[..., 0] = 8.0
        k[..., 0] = torch.linspace(0, -step * 6, 700, device=DEVICE)[None, :, None]
        check_dense(q, k, v)


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (20, 7)},
    {"window_size": (0, 0)},
    {"window_size": (-1, 9)},
    {"window_size": (9, -1)},
    {"window_size": (200, 3), "causal": True},
    {"window_size": (10**9, 10**9)},
    {"softcap": 2.5},
    {"softcap": 1e4, "causal": True},
    {"softcap": 2.0, "window_size": (30, 4)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 450), (450, 200)])
@pytest.mark.parametrize("head_dim", [64, 128] if ON_GPU else [64])
def test_options(options, seqlen_q, seqlen_k, head_dim):
    check_dense(*qkv(2, seqlen_q, seqlen_k, (2, 1, head_dim)), **options)


@pytest.mark.parametrize(
    ("persistent", "ping_pong", "lazy"),
    [(True, True, True), (False, True, False), (True, False, False), (False, False, True)],
)
@pytest.mark.parametrize(
    ("consumers", "block_n", "out_in_q", "skip"),
    [
        (1, 64, False, False),
        (2, 128, False, False),
        (2, 64, True, True),
        (3, 128, False, False),
        (3, 128, False, True),
    ],
)
def test_every_way_of_tiling(
    persistent, ping_pong, lazy, consumers, block_n, out_in_q, skip, monkeypatch
):
    registers, blocks = {1: ((136, 24), 3), 2: ((240, 24), 1), 3: ((160, 32), 1)}[consumers]
    ping_pong = ping_pong and consumers > 1
    tiles = hopper.Tiles(
        consumers=consumers,
        block_n=block_n,
        k_stages=2,
        v_stages=2 + persistent,
        ping_pong=ping_pong,
        lazy=lazy,
        persistent=persistent,
        out_in_q=out_in_q,
        skip=skip,
        immediates=skip,
        halves=lazy,
        registers=registers,
        blocks=blocks,
    )
    monkeypatch.setattr(hopper, "forward_tiles", lambda *args: tiles)
    check_dense(*qkv(1, 300, 400, (3, 1, 64)), causal=True)
    check_dense(*qkv(1, 200, 170, (2, 1, 64)), window_size=(70, 20))
    check_dense(*qkv(1, 200, 300, (1, 1, 64)))


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def test_any_strides():
    """What the accelerator can address and what it can not, each against the contiguous copy."""
    base = [torch.randn(2, 4, 71, 64, device=DEVICE).to(FP16) for _ in range(3)]
    views = [
        [x.transpose(1, 2) for x in base],
        [x.transpose(1, 2)[:, :, :1].expand(-1, -1, 4, -1) for x in base],
        [x.transpose(1, 2)[:, ::2, :, 1:41] for x in base],
        [x.transpose(1, 2)[:, ::2, :, 8:48] for x in base],
        [x.flatten()[1:].unfold(0, 8, 8)[:500].view(1, 500, 1, 8) for x in base],
        list(torch.randn(2, 71, 3, 4, 64, device=DEVICE).to(FP16).unbind(2)),
    ]
    for q, k, v in views:
        out = flash_attn_func(q, k, v, causal=True)
        expected = flash_attn_func(*(x.contiguous() for x in (q, k, v)), causal=True)
        assert max_error(out, expected) < 2e-3


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (110, 3)}], ids=str)
@pytest.mark.parametrize("too_small", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96] if ON_GPU else [96])
def test_varlen(options, too_small, head_dim):
    """Empty sequences, rows after the last, NaN in the next sequence; and a max_seqlen that is
    too small, which changes nothing."""
    cu_q, cu_k = [0, 130, 130, 281, 281, 700], [0, 250, 311, 311, 311, 960]
    q = torch.randn(720, 2, head_dim, device=DEVICE).to(BF16)
    k, v = (torch.randn(970, 1, head_dim, device=DEVICE).to(BF16) for _ in range(2))
    k[960:], v[960:] = torch.nan, torch.nan
    bounds = (17, 17) if too_small else (419, 649)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, ints(*cu_q), ints(*cu_k), *bounds, return_attn_probs=True, **options
    )
    exact_out, exact_lse = varlen(q.double(), k.double(), v.double(), cu_q, cu_k, **options)
    low_out, _ = varlen(q, k, v, cu_q, cu_k, **options)
    assert_as_good(out, exact_out, low_out)
    assert max_error(lse, exact_lse) < 1e-4


def test_neighbours_of_a_sequence_are_neither_read_nor_written():
    """NaN in one sequence stays there."""
    cu = [0, 100, 165, 400]
    q, k, v = (torch.randn(400, 2, 64, device=DEVICE).to(BF16) for _ in range(3))
    out = flash_attn_varlen_func(q, k, v, ints(*cu), ints(*cu), 300, 300, causal=True)
    for i in range(3):
        mine = slice(cu[i], cu[i + 1])
        others = torch.ones(400, dtype=torch.bool)
        others[mine] = False
        poisoned = [x.clone() for x in (q, k, v)]
        for x in poisoned:
            x[others.to(DEVICE)] = torch.nan
        again = flash_attn_varlen_func(*poisoned, ints(*cu), ints(*cu), 300, 300, causal=True)
        assert torch.equal(again[mine], out[mine])


@pytest.mark.parametrize("seed", range(6))
def test_random_lengths(seed):
    rng = random.Random(seed)
    lengths = [(rng.choice([0, 1, 60, 64, 190, 330]), rng.randint(0, 300)) for _ in range(7)]
    cu_q, cu_k = [0], [0]
    for n_q, n_k in lengths:
        cu_q.append(cu_q[-1] + n_q)
        cu_k.append(cu_k[-1] + n_k)
    d = rng.choice([64, 128, 256])
    q = torch.randn(cu_q[-1] + seed, 2, d, device=DEVICE).to(BF16)
    k, v = (torch.randn(cu_k[-1] + 1, 1, d, device=DEVICE).to(BF16) for _ in range(2))
    options = {"causal": seed % 2 == 0, "window_size": rng.choice([(-1, -1), (40, 20)])}
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, ints(*cu_q), ints(*cu_k), 330, 300, return_attn_probs=True, **options
    )
    exact_out, exact_lse = varlen(q.double(), k.double(), v.double(), cu_q, cu_k, **options)
    low_out, _ = varlen(q, k, v, cu_q, cu_k, **options)
    assert_as_good(out, exact_out, low_out)
    assert max_error(lse, exact_lse) < 1e-4


@pytest.mark.parametrize("block_size", [8, 16, 24, 64, 128, 256] if ON_GPU else [16, 24, 256])
@pytest.mark.parametrize("head_dim", [64, 128] if ON_GPU else [128])
def test_pages(block_size, head_dim):
    """Shuffled pages, garbage ids beyond the lengths, NaN in every slot that holds no token."""
    cu_q, cu_k, longest = [0, 140, 141, 141, 260], [0, 300, 463, 464, 764], 300
    q = torch.randn(260, 4, head_dim, device=DEVICE).to(BF16)
    k, v = (torch.randn(cu_k[-1], 2, head_dim, device=DEVICE).to(BF16) for _ in range(2))
    per_sequence = -(-longest // block_size)
    ids = torch.randperm(4 * per_sequence).view(4, per_sequence)
    table = torch.full((4, per_sequence + 2), -(2**31), dtype=torch.int32)
    shape = (4 * per_sequence, block_size, 2, head_dim)
    k_pages, v_pages = (torch.full(shape, torch.nan, device=DEVICE).to(BF16) for _ in range(2))
    for i in range(4):
        n = cu_k[i + 1] - cu_k[i]
        for page in range(-(-n // block_size)):
            table[i, page] = ids[i, page]
            tokens = slice(page * block_size, min((page + 1) * block_size, n))
            for pages, x in ((k_pages, k), (v_pages, v)):
                mine = x[cu_k[i] : cu_k[i + 1]][tokens]
                pages[ids[i, page], : len(mine)] = mine
    for options in ({"causal": True}, {"window_size": (70, 5)}):
        out, lse, _ = flash_attn_varlen_func(
            q, k_pages, v_pages, ints(*cu_q), ints(*cu_k), 140, longest,
            block_table=table.to(DEVICE), return_attn_probs=True, **options,
        )  # fmt: skip
        exact_out, exact_lse = varlen(q.double(), k.double(), v.double(), cu_q, cu_k, **options)
        low_out, _ = varlen(q, k, v, cu_q, cu_k, **options)
        assert_as_good(out, exact_out, low_out)
        assert max_error(lse, exact_lse) < 1e-4


@pytest.mark.gpu
def test_launches_on_two_streams_and_in_graphs_share_no_counter():
    """More tiles than multiprocessors, so that each launch counts; graphs count again."""
    inputs = [qkv(4, 2000, 2000, (8, 2, 128)) for _ in range(2)]
    expected = [flash_attn_func(*x, causal=True) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    graphs, outs = [], []
    for x, stream in zip(inputs, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append(flash_attn_func(*x, causal=True))
        graphs.append(graph)
    for out in outs:
        out.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(10):
        eager = []
        for x, stream, graph in zip(inputs, streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                eager.append(flash_attn_func(*x, causal=True))
        torch.cuda.synchronize()
        for exact, *others in zip(expected, outs, eager, strict=True):
            assert all(torch.equal(exact, other) for other in others)


def test_what_can_not_be_addressed_is_served_by_triton(monkeypatch):
    """And only that."""
    served = []
    monkeypatch.setattr(hopper, "launch", lambda *args: served.append("hopper"))

    def serving(*shape: int, pages: int = 0) -> bool:
        served.clear()
        x = torch.randn(*shape, device=DEVICE).to(FP16)
        if pages:
            table, cu = ints(0, 1).view(1, 2), ints(0, 5)
            flash_attn_varlen_func(x[0, :5], x, x, cu, cu, 5, 5, block_table=table)
        else:
            flash_attn_func(x, x, x)
        return bool(served)

    assert serving(1, 20, 2, 64)
    assert serving(3, 24, 2, 64, pages=1)
    assert not serving(3, 20, 2, 64, pages=1)


def test_says_what_it_does_not_serve():
    def reason(**options):
        dtype = options.pop("dtype", BF16)
        return str(dispatch.backends(DEVICE, dtype, **options))

    assert "forward   hopper     serves" in reason()
    assert "head_dim up to 128 in the backward, not 192" in reason(head_dim=192)
    assert "not torch.float32" in reason(dtype=torch.float32)
    assert "multiple of 8, not 60" in reason(head_dim=60)
    assert "has no ALiBi" in reason(alibi=True)
    assert "has no dropout" in reason(dropout_p=0.1)
