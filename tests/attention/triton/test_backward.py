"""The backward kernels against float64 autograd, in Triton's interpreter or on a GPU.

Out and LSE come from the oracle, rounded as a forward would leave them, but for the tests through
the public functions at the end; fresh memory is NaN.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from flashpage import flash_attn_func, flash_attn_varlen_func
from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.problem import Problem, resolve_window
from kernels import DEVICE, DTYPES, ON_GPU, kernels, poisoned
from oracles import assert_as_good, dense, max_error, varlen

pytest.importorskip("triton")

import triton
import triton.language as tl

from flashpage.attention.triton.backward import backward, backward_tiles
from flashpage.attention.triton.score import keep_mask

pytestmark = pytest.mark.usefixtures("poisoned")
__all__ = ["poisoned"]


def rand(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def make(b=2, sq=40, sk=50, h=2, hk=None, d=32, dtype=torch.float32, scale=1.0):
    """q, k, v, dout, dlse of a dense problem."""
    hk = h if hk is None else hk
    q, dout = rand(b, sq, h, d, dtype=dtype, scale=scale), rand(b, sq, h, d, dtype=dtype)
    k, v = rand(b, sk, hk, d, dtype=dtype, scale=scale), rand(b, sk, hk, d, dtype=dtype)
    return q, k, v, dout, rand(b, h, sq)


def oracle(q, k, v, dout, dlse, dtype, cu, **options):
    """`(out, softmax_lse, gradients)` of the plain formula in one dtype."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out, lse = varlen(*leaves, *cu, **options) if cu else dense(*leaves, **options)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isinf(), 0.0) * dlse.to(dtype)).sum()
    return out.detach(), lse.detach(), torch.autograd.grad(loss, leaves)


def run(q, k, v, dout, dlse, out, lse, cu=None, rng_state=None, **options):
    """The kernels, asked as the operator asks them."""
    scale = options.get("softmax_scale")
    left, right = resolve_window(options.get("window_size", (-1, -1)), options.get("causal", False))
    slopes = options.get("alibi_slopes")
    problem = Problem(
        layout="varlen" if cu else "dense",
        device=q.device,
        dtype=q.dtype,
        num_q_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        softmax_scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window_left=left,
        window_right=right,
        softcap=options.get("softcap", 0.0),
        dropout_p=options.get("dropout_p", 0.0),
        has_alibi=slopes is not None,
    )
    if cu:
        longest = [max(b - a for a, b in itertools.pairwise(c)) for c in cu]
        cu = [torch.tensor(c, dtype=torch.int32, device=q.device) for c in cu]
    else:
        longest, cu = [q.shape[1], k.shape[1]], [None, None]
    inputs = AttentionInputs(q, k, v, *cu, None, slopes, rng_state, *longest)
    return backward(problem, inputs, dout, dlse, out, lse)


def check(q, k, v, dout, dlse=None, cu=None, **options):
    """Gradients of the kernels are as good as the formula in the precision of the inputs."""
    tensors = (q, k, v, dout, dlse)
    out, lse, exact = oracle(*tensors, torch.float64, cu, **options)
    _, _, low = oracle(*tensors, q.dtype, cu, **options)
    out = out.to(q.dtype).contiguous()
    grads = run(*tensors, out, lse.float().contiguous(), cu, **options)
    for name, x, grad, e, lo in zip(("dq", "dk", "dv"), (q, k, v), grads, exact, low, strict=True):
        assert grad.shape == x.shape
        assert grad.dtype == x.dtype
        assert grad.is_contiguous()
        # A few values can be lucky in the formula: one rounding of the largest is allowed besides.
        rounding = torch.finfo(q.dtype).eps * float(e.abs().amax()) if e.numel() else 0.0
        assert_as_good(grad, e, lo, name, atol=1e-5 + rounding)
    return grads


# ---------------------------------------------------------------------------------------------
# Nothing to attend to
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sq", "sk", "b"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0)])
def test_empty_dense_inputs_give_zeros(sq, sk, b):
    q, k, v, dout, dlse = make(b, sq, sk)
    lse = torch.full((b, 2, sq), torch.inf, device=DEVICE)
    for x, grad in zip((q, k, v), run(q, k, v, dout, dlse, torch.zeros_like(q), lse), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (2, 1)], ids=str)
def test_rows_without_keys(dtype, window):
    """More queries than keys, so that the first rows see nothing."""
    dq, _, _ = check(*make(1, 75, 40, dtype=dtype), window_size=window)
    assert not dq[:, : 35 - window[1]].any()


CU = [
    ([0, 0, 33, 40, 40, 75], [0, 20, 20, 70, 70, 75]),  # no queries, no keys, neither
    ([0, 1, 2, 3], [0, 70, 71, 71]),
    ([0, 0], [0, 40]),
    ([0, 40], [0, 0]),
]


@pytest.mark.parametrize("dtype", DTYPES[:2])  # pointers, descriptors
@pytest.mark.parametrize("tail", [0, 37])
@pytest.mark.parametrize("cu", CU, ids=str)
def test_varlen_with_empty_sequences_and_a_tail_of_nan(cu, tail, dtype):
    q, dout = (rand(cu[0][-1] + tail, 2, 32, dtype=dtype) for _ in range(2))
    k, v = (rand(cu[1][-1] + tail, 2, 32, dtype=dtype) for _ in range(2))
    tensors = (q, k, v, dout, rand(2, len(q)))
    out, lse, exact = oracle(*tensors, torch.float64, cu, causal=True)
    _, _, low = oracle(*tensors, dtype, cu, causal=True)
    out, lse = out.to(dtype), lse.float()
    for x, end in ((q, cu[0]), (dout, cu[0]), (out, cu[0]), (k, cu[1]), (v, cu[1])):
        x[end[-1] :] = torch.nan
    grads = run(*tensors, out, lse, cu, causal=True)
    for name, grad, e, lo in zip(("dq", "dk", "dv"), grads, exact, low, strict=True):
        assert_as_good(grad, e, lo, name)


def test_all_tokens_are_tail():
    q, k = rand(70, 2, 16), rand(90, 2, 16)
    cu = ([0, 0, 0], [0, 0, 0])
    lse = torch.full((2, 70), torch.inf, device=DEVICE)
    for x, grad in zip((q, k, k), run(q, k, k, q, None, q, lse, cu), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


# ---------------------------------------------------------------------------------------------
# Masks and options
# ---------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (10, 0)},
    {"window_size": (0, 0)},
    {"window_size": (35, 7)},
    {"window_size": (-1, 9)},
    {"window_size": (9, -1)},
    {"window_size": (2**31 - 1, 2**31 - 1)},
    {"softcap": 3.0},
    {"softcap": 0.5, "causal": True},
    {"softmax_scale": -0.3, "causal": True},
    {"softmax_scale": 0.0},
    {"alibi": 1, "causal": True},
    {"alibi": 2, "softcap": 5.0, "window_size": (20, 5)},
]


def with_slopes(options, b, h):
    options = dict(options)
    kind = options.pop("alibi", 0)
    if kind:
        options["alibi_slopes"] = torch.rand((h,) if kind == 1 else (b, h), device=DEVICE)
    return options


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("sq", "sk"), [(70, 70), (33, 90)])
def test_options_dense(sq, sk, options):
    check(*make(1, sq, sk, 2, 1), **with_slopes(options, 1, 2))


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_options_varlen(options):
    cu = ([0, 40, 73], [0, 67, 100])
    q, dout, k, v = (rand(n, 2, 16) for n in (73, 73, 100, 100))
    check(q, k, v, dout, rand(2, 73), cu, **with_slopes(options, 2, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 8, 40, 59, 64, 111, 128, 256])
def test_head_dims(d, dtype):
    check(*make(1, 20, 35, 1, d=d, dtype=dtype), causal=True)


@pytest.mark.parametrize(("h", "hk"), [(4, 4), (6, 2), (5, 1)])
def test_grouped_heads(h, hk):
    check(*make(2, 20, 33, h, hk, 16), causal=True)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 130), (130, 1), (64, 128), (150, 200)])
def test_lengths_around_the_tiles(sq, sk, dtype):
    for causal in (False, True):
        check(*make(1, sq, sk, 1, dtype=dtype), causal=causal)


@pytest.mark.parametrize("seed", range(6))
def test_random_problems(seed):
    seed += 1000 * random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    hk, group = rng.choice([(1, 1), (2, 1), (1, 3)])
    d = rng.choice([8, 16, 24, 33, 48])
    options = with_slopes(rng.choice(OPTIONS), 3, hk * group)
    lengths = [[rng.choice([0, 1, 5, 31, 32, 40]) for _ in range(3)] for _ in range(2)]
    cu = tuple([sum(x[:i]) for i in range(4)] for x in lengths)
    total_q, total_k = (c[-1] + rng.choice([1, 9]) for c in cu)
    q, dout = (rand(total_q, hk * group, d) for _ in range(2))
    k, v = (rand(total_k, hk, d) for _ in range(2))
    dlse = rng.choice([None, rand(hk * group, total_q)])
    check(q, k, v, dout, dlse, cu, **options)


# ---------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-2000.0, 2000.0])
def test_scores_of_any_magnitude(offset):
    """Every logit near the offset: exp of it is 0 or infinite, also for keys past the end."""
    q, k, v, dout, dlse = make(1, 40, 45, 1, d=16)
    q[..., 0], k[..., 0] = offset, 4.0
    q[..., 1:] *= 0.5
    out, lse, exact = oracle(q, k, v, dout, dlse, torch.float64, None)
    assert lse.abs().min() > 1500
    grads = run(q, k, v, dout, dlse, out.float().contiguous(), lse.float().contiguous())
    for name, grad, e in zip(("dq", "dk", "dv"), grads, exact, strict=True):
        assert max_error(grad, e) < 2e-3 * e.abs().max(), name


def test_gradient_of_the_lse_alone():
    q, k, v, dout, _ = make(1)
    dlse = rand(1, 1, 1).expand(1, 2, 40)  # as from lse.sum()
    _, _, dv = check(q, k, v, torch.zeros_like(dout), dlse)
    assert not dv.any()


@pytest.mark.parametrize("dtype", DTYPES[:2])  # pointers, descriptors
def test_sequences_do_not_see_each_other(dtype):
    """NaN in one sequence stays there, though a tile reaches into the next one."""
    cu = ([0, 20, 55, 75], [0, 30, 62, 100])
    q, dout, k, v = (rand(n, 1, 16, dtype=dtype) for n in (75, 75, 100, 100))
    tensors = (q, k, v, dout, None)
    out, lse, _ = oracle(*tensors, torch.float64, cu)
    out, lse = out.to(dtype), lse.float()
    expected = run(*tensors, out, lse, cu)
    for x, c in ((q, cu[0]), (dout, cu[0]), (out, cu[0]), (k, cu[1]), (v, cu[1])):
        x[c[1] : c[2]] = torch.nan
    lse[:, cu[0][1] : cu[0][2]] = torch.nan
    actual = run(*tensors, out, lse, cu)
    for grad, e, c in zip(actual, expected, (cu[0], cu[1], cu[1]), strict=True):
        assert torch.equal(grad[: c[1]], e[: c[1]])
        assert torch.equal(grad[c[2] :], e[c[2] :])
        assert grad[c[1] : c[2]].isnan().any()


@triton.jit
def _keep_kernel(rng_state, out, p, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    stream = tl.program_id(0)
    keep = keep_mask(rng_state, stream, rows, cols, p)
    tl.store(out + (stream * ROWS + rows) * COLS + cols, keep.to(tl.int8))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 4)}], ids=str)
def test_dropout(options):
    tensors = make(2, 40, 50, 4, 2, 16)
    rng_state = torch.tensor([random.getrandbits(60), 12345], device=DEVICE)
    keep = torch.zeros(2 * 4, 64, 64, dtype=torch.int8, device=DEVICE)
    _keep_kernel[(8,)](rng_state, keep, 0.3, 64, 64)
    mask = keep.bool().unflatten(0, (2, 4))[:, :, :40, :50]
    assert 0.6 < mask.float().mean() < 0.8
    out, lse, exact = oracle(
        *tensors, torch.float64, None, dropout_p=0.3, dropout_mask=mask, **options
    )
    out, lse = out.float().contiguous(), lse.float().contiguous()
    grads = run(*tensors, out, lse, rng_state=rng_state, dropout_p=0.3, **options)
    for name, grad, e in zip(("dq", "dk", "dv"), grads, exact, strict=True):
        assert max_error(grad, e) < 1e-5, name


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


def layouts(x):
    """The same values with other strides."""
    b, s, h, d = x.shape
    packed = x.new_full((b, s, 3, h, d), torch.nan)
    packed[:, :, 1] = x
    odd = x.new_full((b, s, h, d + 1), torch.nan)[..., 1:]  # nothing is aligned
    odd.copy_(x)
    yield "packed", packed[:, :, 1]
    yield "heads first", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "batch second", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "odd", odd


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_strides(dtype):
    q, k, v, dout, _ = make(2, 33, 40, 2, dtype=dtype)
    out, lse, _ = oracle(q, k, v, dout, None, torch.float64, None, causal=True)
    out, lse = out.to(dtype).contiguous(), lse.float().contiguous()
    expected = run(q, k, v, dout, None, out, lse, causal=True)
    for views in zip(*(layouts(x) for x in (q, k, v, dout)), strict=True):
        grads = run(*(x for _, x in views), None, out, lse, causal=True)
        for grad, e in zip(grads, expected, strict=True):
            assert grad.is_contiguous()
            assert max_error(grad, e) < (1e-5 if dtype == torch.float32 else 4e-3), views[0][0]


def test_expanded_inputs():
    """One key head and one batch seen as several, with strides of 0."""
    q, _, _, dout, dlse = make(2, 20, 20, 2, d=16)
    k, v = (rand(1, 20, 1, 16).expand(2, 20, 2, 16) for _ in range(2))
    check(q, k, v, dout, dlse)


@pytest.mark.parametrize("far", [2**30 + 64, 2**31 + 64])
def test_strides_beyond_32_bits(far):
    """Batches that lie far apart; the memory between is never touched."""
    batch = 2**31 // far + 2
    q, k, v, dout, _ = make(batch, 20, 20, 1, d=16, dtype=torch.float16)
    out, lse, _ = oracle(q, k, v, dout, None, torch.float64, None)
    out, lse = out.half().contiguous(), lse.float().contiguous()
    expected = run(q, k, v, dout, None, out, lse)
    storage = torch.zeros(0, dtype=torch.float16, device=DEVICE)
    storage.untyped_storage().resize_(2 * ((batch - 1) * far + 2 * 320))
    apart = [torch.as_strided(storage, q.shape, (far, 16, 16, 1), 320 * i) for i in range(2)]
    for pair in ((0, 3), (1, 2)):  # q and dout, then k and v
        tensors = [q, k, v, dout]
        for i, view in zip(pair, apart, strict=True):
            view.copy_(tensors[i])
            tensors[i] = view
        grads = run(*tensors, None, out, lse)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeatable(dtype):
    size = 1500 if ON_GPU else 40
    q, k, v, dout, dlse = make(1, size, size, 4, 2, dtype=dtype)
    out, lse, _ = oracle(q, k, v, dout, dlse, torch.float64, None)
    out, lse = out.to(dtype).contiguous(), lse.float().contiguous()
    first = run(q, k, v, dout, dlse, out, lse)
    for _ in range(20 if ON_GPU else 2):
        again = run(q, k, v, dout, dlse, out, lse)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_more_sequences_and_heads_than_a_grid_dimension():
    for b, h in ((70_000, 1), (1, 70_000)):
        check(*make(b, 3, 5, h, d=16, dtype=torch.float16), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_tile_on_a_gpu(d, options):
    """Long enough for every loop of the main tiles."""
    for sq, sk in ((512, 512), (777, 1000), (600, 300)):
        tensors = make(2, sq, sk, 4, 2, d, dtype=torch.bfloat16)
        check(*tensors, **with_slopes(options, 2, 4))


@pytest.mark.parametrize("capability", [0, 75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_each_other(capability, itemsize):
    for block_d in (16, 32, 64, 128, 256):
        for causal, dropout in itertools.product((False, True), repeat=2):
            of_dq, of_dkdv = backward_tiles(capability, block_d, itemsize, causal, dropout)
            assert of_dq.block_m % of_dkdv.block_m == 0  # rows are padded by the first


# ---------------------------------------------------------------------------------------------
# Through the public functions: forward and backward kernels agree
# ---------------------------------------------------------------------------------------------


def leaves_of(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 5)}], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_autograd_of_out_and_lse(dropout_p, options):
    q, k, v, dout, dlse = make(2, 40, 70, 4, 2, 24)
    leaves = leaves_of(q, k, v)
    with kernels():
        out, lse, shown = flash_attn_func(*leaves, dropout_p, return_attn_probs=True, **options)
        loss = (out * dout).sum() + (lse * dlse).sum()
        grads = torch.autograd.grad(loss, leaves)
    kept = {}
    if dropout_p:
        assert (shown < 0).any()
        kept = {"dropout_p": dropout_p, "dropout_mask": shown[:, :, :40, :70] >= 0}
    exact_out, exact_lse, exact = oracle(
        q, k, v, dout, dlse, torch.float64, None, **kept, **options
    )
    assert max_error(out, exact_out) < 1e-5
    assert max_error(lse, exact_lse) < 1e-5
    for name, grad, e in zip(("dq", "dk", "dv"), grads, exact, strict=True):
        assert max_error(grad, e) < 1e-5, name


@pytest.mark.parametrize("bounds", [(1, 1), (17, 200), (1000, 1000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2])  # pointers, descriptors
def test_bounds_of_the_lengths_are_only_a_hint(dtype, bounds):
    """Too small or too large, with tails: every row is there once."""
    lengths = [[0, 1, 150, 0, 33, 2, 1, 64], [3, 0, 140, 7, 65, 1, 0, 129]]
    cu = [list(itertools.accumulate(x, initial=0)) for x in lengths]
    total_q, total_k = cu[0][-1] + 70, cu[1][-1] + 150
    q, dout = (rand(total_q, 2, 16, dtype=dtype) for _ in range(2))
    k, v = (rand(total_k, 1, 16, dtype=dtype) for _ in range(2))
    leaves = leaves_of(q, k, v)
    cu_seqlens = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in cu]
    with kernels():
        out = flash_attn_varlen_func(*leaves, *cu_seqlens, *bounds, causal=True)
        grads = torch.autograd.grad(out, leaves, dout)
    tensors = (q, k, v, dout, None)
    exact_out, _, exact = oracle(*tensors, torch.float64, cu, causal=True)
    low_out, _, low = oracle(*tensors, dtype, cu, causal=True)
    assert_as_good(out, exact_out, low_out)
    for name, grad, e, lo in zip(("dq", "dk", "dv"), grads, exact, low, strict=True):
        assert_as_good(grad, e, lo, name)
