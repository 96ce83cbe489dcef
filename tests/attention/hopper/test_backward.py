"""The backward kernel for Hopper against float64: on a Hopper GPU, and without one emulated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashpage import flash_attn_func, flash_attn_varlen_func
from flashpage.attention.hopper import backward as hopper
from flashpage.attention.triton import runtime
from flashpage.attention.triton.backend import TritonBackend
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


@pytest.fixture(autouse=True)
def any_order(monkeypatch):
    """dQ in the order of the keys only where a test asks for it, whatever the lengths."""
    monkeypatch.setattr(hopper, "ORDERED_KEYS", {64: 0, 128: 0})


def rand(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def make(batch, seqlen_q, seqlen_k, heads, dtype=FP16):
    """q, k, v, dout, dlse"""
    h, hk, d = heads
    q, dout = (rand(batch, seqlen_q, h, d, dtype=dtype) for _ in range(2))
    k, v = (rand(batch, seqlen_k, hk, d, dtype=dtype) for _ in range(2))
    return q, k, v, dout, torch.randn(batch, h, seqlen_q, device=DEVICE)


def gradients(attention, q, k, v, dout, dlse):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves)[:2]
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isinf(), 0.0) * dlse.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, leaves)


def check(tensors, ours, oracle):
    """Against float64, allowing twice the error of the same formula in the dtype of q."""
    q, k, v, dout, dlse = tensors
    grads = gradients(ours, *tensors)
    exact = gradients(oracle, q.double(), k.double(), v.double(), dout, dlse)
    low = gradients(oracle, *tensors)
    for name, grad, e, lo in zip(("dq", "dk", "dv"), grads, exact, low, strict=True):
        assert grad.is_contiguous()
        rounding = torch.finfo(q.dtype).eps * float(e.abs().amax()) if e.numel() else 0.0
        assert_as_good(grad, e, lo, name, atol=1e-5 + rounding)
    return grads


def check_dense(*tensors, deterministic=False, **options):
    return check(
        tensors,
        lambda *x: flash_attn_func(
            *x, deterministic=deterministic, return_attn_probs=True, **options
        ),
        lambda *x: dense(*x, **options),
    )


def check_varlen(cu_q, cu_k, longest, heads, deterministic, spare=(0, 0), **options):
    """`spare` tokens of Q and of K and V come after the last sequence, and are NaN."""
    h, hk, d = heads
    total_q, total_k = cu_q[-1] + spare[0], cu_k[-1] + spare[1]
    q, dout = (rand(total_q, h, d) for _ in range(2))
    k, v = (rand(total_k, hk, d) for _ in range(2))
    dlse = torch.randn(h, total_q, device=DEVICE)
    cu = [torch.tensor(c, dtype=torch.int32, device=DEVICE) for c in (cu_q, cu_k)]
    ends = (cu_q[-1], cu_k[-1], cu_k[-1])
    leaves = [x.clone() for x in (q, k, v)]
    for x, end in zip((*leaves, dout), (*ends, cu_q[-1]), strict=True):
        x[end:] = torch.nan

    def ours(*x):
        return flash_attn_varlen_func(
            *x, *cu, longest, longest, deterministic=deterministic, return_attn_probs=True,
            **options,
        )  # fmt: skip

    def oracle(*x):
        return varlen(*x, cu_q, cu_k, **options)

    grads = gradients(ours, *leaves, dout, dlse)
    dout[cu_q[-1] :] = 0.0
    exact = gradients(oracle, q.double(), k.double(), v.double(), dout, dlse)
    low = gradients(oracle, q, k, v, dout, dlse)
    for name, grad, e, lo in zip(("dq", "dk", "dv"), grads, exact, low, strict=True):
        assert_as_good(grad, e, lo, name, atol=1e-5 + 1e-3 * float(e.abs().amax()))
    assert not any(grad[end:].any() for grad, end in zip(grads, ends, strict=True))


# ---------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 300), (300, 1), (0, 5), (5, 0), (64, 128), (65, 129)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_lengths_at_the_edge(seqlen_q, seqlen_k, deterministic):
    tensors = make(2, seqlen_q, seqlen_k, (2, 1, 128))
    check_dense(*tensors, causal=True, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_and_keys_that_see_nothing_get_zeros(head_dim):
    dq, _, _ = check_dense(*make(1, 300, 130, (1, 1, head_dim)), causal=True)
    assert not dq[:, :170].any()
    _, dk, dv = check_dense(*make(1, 70, 300, (1, 1, head_dim)), window_size=(20, 0))
    assert not dk[:, :210].any()
    assert not dv[:, :210].any()


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_any_head_dim(head_dim, dtype):
    check_dense(*make(1, 140, 170, (2, 1, head_dim), dtype), causal=True)


@pytest.mark.parametrize("heads", [(7, 1, 64), (6, 2, 128), (3, 3, 64)])
def test_any_group_of_heads(heads):
    check_dense(*make(2, 33, 165, heads), causal=True)


@pytest.mark.parametrize("head_dim", [64, 128] if ON_GPU else [128])
@pytest.mark.parametrize("residue", [1, 7, 63, 64, 127])
def test_tails_of_any_length(head_dim, residue):
    check_dense(*make(1, 128 + residue, 256 - residue, (1, 1, head_dim)))


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_scores_of_any_magnitude(offset):
    """A key past the end would have a score of 0, far above all others or far below."""
    q, k, v, dout, dlse = make(1, 40, 150, (1, 1, 64), BF16)
    q[..., 0], k[..., 0] = 100.0, offset / 25
    grads = check_dense(q, k, v, dout, dlse)
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 3.0])
def test_any_softmax_scale(scale):
    check_dense(*make(1, 40, 150, (2, 1, 64)), softmax_scale=scale, causal=True)


def test_without_a_gradient_of_the_lse():
    *tensors, _ = make(1, 70, 150, (2, 1, 64))
    check_dense(*tensors, None)


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
    {"window_size": (150, 3), "causal": True},
    {"window_size": (10**9, 10**9)},
    {"softcap": 2.5},
    {"softcap": 2.0, "window_size": (30, 4)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim"),
    [(150, 300, 128), (300, 150, 64), (300, 150, 128), (150, 300, 64)][: 4 if ON_GPU else 2],
)
def test_options(options, seqlen_q, seqlen_k, head_dim):
    check_dense(*make(1, seqlen_q, seqlen_k, (2, 1, head_dim)), **options)


@pytest.mark.parametrize(
    ("options", "head_dim"), [(OPTIONS[1], 128), (OPTIONS[5], 64), (OPTIONS[-1], 128)], ids=str
)
def test_deterministic(options, head_dim):
    """Every gradient repeats bit for bit, and dK and dV always do."""
    seqlen_q, seqlen_k = (800, 1500) if ON_GPU else (80, 150)
    tensors = make(1, seqlen_q, seqlen_k, (2, 1, head_dim))
    grads = check_dense(*tensors, deterministic=True, **options)

    def run(deterministic):
        return gradients(
            lambda *x: flash_attn_func(
                *x, deterministic=deterministic, return_attn_probs=True, **options
            ),
            *tensors,
        )

    first = run(False)
    for _ in range(200 if ON_GPU else 1):
        assert all(torch.equal(a, b) for a, b in zip(grads, run(True), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first[1:], run(False)[1:], strict=True))


@pytest.mark.parametrize(("seqlen", "head_dim"), [(256, 64), (512, 64), (256, 128)])
def test_few_keys_give_the_bits_of_deterministic(monkeypatch, seqlen, head_dim):
    monkeypatch.setattr(hopper, "ORDERED_KEYS", {64: 512, 128: 256})
    tensors = make(2, seqlen, seqlen, (2, 1, head_dim))

    def run(deterministic):
        return gradients(
            lambda *x: flash_attn_func(
                *x, causal=True, deterministic=deterministic, return_attn_probs=True
            ),
            *tensors,
        )

    expected = run(True)
    for _ in range(20 if ON_GPU else 1):
        assert all(torch.equal(a, b) for a, b in zip(run(False), expected, strict=True))


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def test_any_strides(monkeypatch):
    """What the accelerator can address; a gradient that it can not is copied."""
    monkeypatch.setattr(TritonBackend, "backward", None)
    q, k, v = rand(2, 71, 3, 4, 64).unbind(2)
    dout, dlse = rand(2, 4, 71, 64).transpose(1, 2), torch.randn(2, 4, 71, device=DEVICE)
    check_dense(q, k, v, dout, dlse, causal=True)
    check_dense(q, k, v, rand(1, 1, 1, 1).expand_as(q), None, causal=True)
    check_dense(*(x[:, ::2, :, 8:48] for x in (q, k, v, dout)), None)


def test_what_can_not_be_addressed_is_served_by_triton(monkeypatch):
    monkeypatch.setattr(hopper, "backward", None)
    q, k, v, dout, dlse = make(1, 40, 70, (2, 2, 64))
    k, v = (x[:, :, :1].expand(-1, -1, 2, -1) for x in (k, v))
    check_dense(q, k, v, dout, dlse, causal=True)


VARLEN = [
    (64, False, {}),
    (96, False, {"causal": True}),
    (96, True, {"window_size": (110, 3)}),
    (64, True, {}),
    (96, False, {"window_size": (110, 3)}),
    (128, True, {"causal": True}),
]


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "options"), VARLEN if ON_GPU else VARLEN[:3], ids=str
)
def test_varlen(head_dim, deterministic, options):
    """Empty sequences, a bound that is too small, and NaN after the last sequence."""
    cu_q, cu_k = [0, 130, 130, 171, 171, 300], [0, 150, 211, 211, 211, 360]
    check_varlen(cu_q, cu_k, 17, (2, 1, head_dim), deterministic, (17, 5), **options)


def test_neighbours_of_a_sequence_are_neither_read_nor_written():
    """NaN in one sequence stays there."""
    ends = [0, 100, 165, 300]
    cu = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    tensors = [rand(300, 2, 64) for _ in range(4)]

    def run(q, k, v, dout):
        return gradients(
            lambda *x: flash_attn_varlen_func(
                *x, cu, cu, 135, 135, causal=True, return_attn_probs=True
            ),
            q, k, v, dout, None,
        )  # fmt: skip

    grads = run(*tensors)
    for i in range(3):
        mine = slice(ends[i], ends[i + 1])
        others = torch.ones(300, dtype=torch.bool, device=DEVICE)
        others[mine] = False
        again = run(*(x.masked_fill(others[:, None, None], torch.nan) for x in tensors))
        for a, b in zip(again, grads, strict=True):
            # dQ's sums may come in another order.
            assert max_error(a[mine], b[mine]) <= 2e-3 * float(b.abs().amax())


# ---------------------------------------------------------------------------------------------
# Programs that take block after block of keys
# ---------------------------------------------------------------------------------------------

BUFFERS = [(64, False), (64, True), (128, False), (128, True)]
"""Each has its own buffers (`hopper.buffers`), or its own order."""


@pytest.fixture
def programs(monkeypatch):
    """Call it to have at most so many; memory of counters then holds what it should not."""
    empty = torch.empty

    def used(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(5) if x.dtype == torch.int32 else x

    def limit(count):
        monkeypatch.setattr(runtime, "num_multiprocessors", lambda device: count)
        monkeypatch.setattr(torch, "empty", used)

    return limit


@pytest.mark.parametrize(("head_dim", "deterministic"), BUFFERS)
@pytest.mark.parametrize("count", [1, 5, 1000])
def test_more_and_fewer_programs_than_blocks_of_keys(programs, count, head_dim, deterministic):
    """12 blocks. Emulated, the first of some programs that count takes all, and others none."""
    programs(count)
    tensors = make(2, 140, 270, (2, 2, head_dim))
    check_dense(*tensors, causal=True, deterministic=deterministic)


@pytest.mark.parametrize(("head_dim", "deterministic"), BUFFERS)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2), (5, 1)])
def test_steps_of_a_block_of_keys_need_not_be_even(programs, heads, head_dim, deterministic):
    """Of the buffers of rows and dQ each block of keys begins with another one."""
    programs(1)
    tensors = make(1, 3 * 8192 // head_dim - 5, 300, (*heads, head_dim))
    check_dense(*tensors, deterministic=deterministic)


@pytest.mark.parametrize(("head_dim", "deterministic"), BUFFERS)
def test_many_short_sequences(programs, head_dim, deterministic):
    """Blocks without rows too, also several that come one after the other."""
    programs(2)
    lengths = [
        (1, 1), (3, 130), (0, 140), (0, 128), (0, 300), (65, 1), (2, 0), (0, 5), (130, 127),
        *[(7, 9)] * 5, (0, 1), (129, 140), (1, 260), (0, 0), (64, 64),
    ]  # fmt: skip
    ends = [[sum(n[:i]) for i in range(len(n) + 1)] for n in zip(*lengths, strict=True)]
    check_varlen(*ends, 300, (2, 1, head_dim), deterministic, (70, 200), causal=True)


@pytest.mark.parametrize(("head_dim", "deterministic"), BUFFERS)
def test_a_window_leaves_blocks_of_keys_without_rows(programs, head_dim, deterministic):
    """The first keys are seen by none, the last by some."""
    programs(1)
    tensors = make(2, 60, 700, (2, 1, head_dim))
    check_dense(*tensors, window_size=(90, 0), deterministic=deterministic)


@pytest.mark.parametrize(("head_dim", "deterministic"), BUFFERS)
def test_each_launch_counts_from_the_first_block(programs, head_dim, deterministic):
    programs(2)
    tensors = make(1, 150, 400, (2, 1, head_dim))
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = flash_attn_func(*leaves, causal=True, deterministic=deterministic)
    first, *others = [
        torch.autograd.grad(out, leaves, tensors[3], retain_graph=True) for _ in range(3)
    ]
    for grads in others:
        assert all(torch.equal(a, b) for a, b in zip(first[1:], grads[1:], strict=True))
        assert max_error(grads[0], first[0]) <= 2e-3 * float(first[0].abs().amax())


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "deterministic"), BUFFERS)
def test_launches_on_two_streams_and_in_graphs_share_no_counter(head_dim, deterministic):
    """More blocks than multiprocessors, so that each launch counts; graphs count again."""
    inputs = [make(4, 2000, 2000, (8, 8, head_dim)) for _ in range(2)]

    def run(q, k, v, dout, _):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, causal=True, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, dout)

    expected = [run(*x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    graphs, captured = [], []
    for x, stream in zip(inputs, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured.append(run(*x))
        graphs.append(graph)
    for _ in range(10):
        for grads in captured:
            for grad in grads:
                grad.fill_(torch.nan)
        torch.cuda.synchronize()
        eager = []
        for x, stream, graph in zip(inputs, streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                eager.append(run(*x))
        torch.cuda.synchronize()
        for first, *others in zip(expected, captured, eager, strict=True):
            for grads in others:
                exact = slice(0 if deterministic else 1, 3)
                pairs = zip(first[exact], grads[exact], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
                assert max_error(grads[0], first[0]) <= 2e-3 * float(first[0].abs().amax())
