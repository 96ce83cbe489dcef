"""The six differentiable functions on the CPU against the oracle: options, layouts, edges."""

from __future__ import annotations

import inspect
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashpage
from flashpage import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashpage.errors import ArgumentError, UnsupportedError
from oracles import assert_as_good, dense, max_error, varlen

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3)},
    "left": {"window_size": (4, -1)},
    "right": {"window_size": (-1, 2)},
    "diagonal": {"window_size": (0, 0)},
    "causal_window": {"causal": True, "window_size": (6, -1)},
    "wide_window": {"window_size": (1000, 1000)},
    "softcap": {"softcap": 2.5},
    "scale": {"softmax_scale": 0.7},
    "negative_scale": {"softmax_scale": -0.4, "causal": True},
    "zero_scale": {"softmax_scale": 0.0},
}


def make_qkv(dtype, *shapes, requires_grad=True):
    return [torch.randn(s).to(dtype).requires_grad_(requires_grad) for s in shapes]


def check(function, oracle, inputs, options, with_lse_gradient=False):
    """Forward, LSE and all gradients of `function(*inputs)` against `oracle(*inputs)`."""
    out, lse, s_dmask = function(*inputs, return_attn_probs=True, **options)
    assert out.dtype == inputs[0].dtype
    assert lse.dtype == (torch.float64 if out.dtype == torch.float64 else torch.float32)
    assert s_dmask.shape == (0,)
    precise = [x.detach().double().requires_grad_() for x in inputs]
    exact, exact_lse = oracle(*precise, **options)
    rough = [x.detach().clone().requires_grad_() for x in inputs]
    low, low_lse = oracle(*rough, **options)
    assert_as_good(out, exact, low)
    assert_as_good(lse, exact_lse, low_lse, "lse")

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    finite = torch.isfinite(exact_lse)

    def loss(o, softmax_lse):
        value = (o * dout.to(o.dtype)).sum()
        if with_lse_gradient:
            value = value + (softmax_lse[finite] * dlse[finite].to(softmax_lse.dtype)).sum()
        return value

    grads = torch.autograd.grad(loss(out, lse), inputs)
    exact_grads = torch.autograd.grad(loss(exact, exact_lse), precise)
    low_grads = torch.autograd.grad(loss(low, low_lse), rough)
    atol = 1e-5 + rounding_of_ds(*inputs, dout, options.get("softmax_scale"))
    for i, (grad, e, lo) in enumerate(zip(grads, exact_grads, low_grads, strict=True)):
        assert grad.dtype == inputs[i].dtype
        assert_as_good(grad, e, lo, f"gradient {i}", atol)


def rounding_of_ds(q, k, v, dout, scale):
    """What dS = P * (dO V^T - rowsum(dO * O)) may lose in dQ and dK where the two terms cancel,
    as with a single key: the oracle's softmax backward subtracts a number from itself there."""
    if not q.numel() or not k.numel():
        return 0.0
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    term = float(dout.abs().sum(-1).max() * v.detach().abs().max())
    return (
        torch.finfo(torch.float32).eps
        * term
        * scale
        * float(max(q.detach().abs().max(), k.detach().abs().max()))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(24, 24), (7, 30), (30, 7)])
@pytest.mark.parametrize("with_lse_gradient", [False, True])
def test_dense(dtype, name, lengths, with_lse_gradient):
    sq, sk = lengths
    inputs = make_qkv(dtype, (2, sq, 6, 20), (2, sk, 2, 20), (2, sk, 2, 20))
    check(flash_attn_func, dense, inputs, OPTIONS[name], with_lse_gradient)


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_alibi(per_batch, causal, softcap):
    slopes = torch.rand(2, 6) if per_batch else torch.rand(6)
    inputs = make_qkv(torch.float32, (2, 9, 6, 8), (2, 14, 3, 8), (2, 14, 3, 8))
    options = {"alibi_slopes": slopes, "causal": causal, "softcap": softcap}
    check(flash_attn_func, dense, inputs, options)


@pytest.mark.parametrize("head_dim", [1, 3, 8, 59, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (71, 1), (9, 3), (5, 5)])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0, "causal": True}], ids=["torch", "blocks"])
def test_heads_and_head_dims(head_dim, heads, options):
    h, hk = heads
    inputs = make_qkv(torch.float32, (1, 5, h, head_dim), *[(1, 6, hk, head_dim)] * 2)
    check(flash_attn_func, dense, inputs, options)


@pytest.mark.parametrize("options", [{}, {"window_size": (40, 20)}], ids=["torch", "blocks"])
@pytest.mark.parametrize("lengths", [(129, 1025), (513, 130), (1, 700), (700, 1)])
def test_lengths_around_block_sizes(options, lengths):
    sq, sk = lengths
    inputs = make_qkv(torch.float32, (2, sq, 2, 16), *[(2, sk, 1, 16)] * 2)
    check(flash_attn_func, dense, inputs, {"causal": True, **options})


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3, 1e12])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 2)}], ids=str)
def test_scores_of_any_magnitude(magnitude, options):
    """All logits of a row very negative, or huge: only differences between them count."""
    q = torch.rand(1, 8, 2, 16, dtype=torch.float64).add(0.5)
    k = torch.rand(1, 12, 2, 16, dtype=torch.float64).sub(2.0).mul(magnitude)
    v = torch.randn(1, 12, 2, 16, dtype=torch.float64)
    exact, exact_lse = dense(q, k, v, **options)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)
    single = [x.float() for x in (q, k, v)]
    low, _ = dense(*single, **options)
    assert_as_good(flash_attn_func(*single, **options), exact, low)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradcheck_like_agreement_of_both_paths(dtype):
    """A window that hides nothing goes through torch's kernel, one key short of it does not."""
    inputs = make_qkv(dtype, *[(2, 20, 2, 8)] * 3)
    whole = flash_attn_func(*inputs, window_size=(19, 19))
    assert max_error(whole, flash_attn_func(*inputs)) == 0.0
    check(flash_attn_func, dense, inputs, {"window_size": (18, 19)})


def test_gradcheck():
    inputs = make_qkv(torch.float64, (1, 3, 2, 4), (1, 5, 1, 4), (1, 5, 1, 4))
    for options in ({"causal": True}, {"softcap": 1.5, "window_size": (2, 1)}):
        assert torch.autograd.gradcheck(
            lambda *x, o=options: flash_attn_func(*x, return_attn_probs=True, **o)[:2], inputs
        )


# ---------------------------------------------------------------------------------------------
# Layouts and strides
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_functions_equal_the_unpacked_one(dtype):
    qkv = torch.randn(2, 10, 3, 4, 8).to(dtype).requires_grad_()
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv.unbind(2))
    kv = qkv.detach()[:, :, 1:].clone().requires_grad_()
    dout = torch.randn(2, 10, 4, 8).to(dtype)
    expected = flash_attn_func(q, k, v, causal=True)
    expected.backward(dout)
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    out.backward(dout)
    assert torch.equal(out, expected)
    assert torch.equal(qkv.grad, torch.stack((q.grad, k.grad, v.grad), dim=2))
    q2 = q.detach().clone().requires_grad_()
    out = flash_attn_kvpacked_func(q2, kv, causal=True)
    out.backward(dout)
    assert torch.equal(out, expected)
    assert torch.equal(q2.grad, q.grad)
    assert torch.equal(kv.grad, torch.stack((k.grad, v.grad), dim=2))


def test_varlen_packed_functions_equal_the_unpacked_one():
    qkv = torch.randn(12, 3, 4, 8, requires_grad=True)
    cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    expected = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 7, 7, causal=True)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True), expected)
    q, kv = qkv[:, 0], qkv[:, 1:]
    out = flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7, causal=True)
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    (same,) = torch.autograd.grad(expected.sum(), qkv)
    assert torch.equal(grad, same)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["torch", "blocks"])
def test_any_strides(options):
    def same(views, copies):
        out, expected = (flash_attn_func(*x, **options) for x in (views, copies))
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)

    contiguous = make_qkv(torch.float32, *[(2, 9, 4, 8)] * 3, requires_grad=False)
    same([x.transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous], contiguous)
    same([torch.randn(2, 18, 5, 8)[:, ::2, :4].copy_(x) for x in contiguous], contiguous)
    last = [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in contiguous]
    assert last[0].stride(-1) != 1
    same(last, contiguous)
    for one in (
        [x[:1].expand(2, -1, -1, -1) for x in contiguous],
        [x[:, :, :1].expand(-1, -1, 4, -1) for x in contiguous],
        [x[:, :1].expand(-1, 9, -1, -1) for x in contiguous],
    ):
        same(one, [x.contiguous() for x in one])


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["torch", "blocks"])
def test_gradients_through_strides(options):
    base = make_qkv(torch.float32, *[(2, 4, 9, 8)] * 3)
    out = flash_attn_func(*(x.transpose(1, 2) for x in base), **options)
    dout = torch.randn(9, 4, 4, 8)[:, ::2].transpose(0, 1)
    grads = torch.autograd.grad(out, base, dout)
    copies = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in base]
    expected = torch.autograd.grad(dense(*copies, **options)[0], copies, dout.contiguous())
    for grad, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, e.transpose(1, 2), atol=1e-5, rtol=1e-4)
    # An expanded dout, as from out.sum(), has no stride at all.
    (dq,) = torch.autograd.grad(flash_attn_func(*copies, **options).sum(), copies[:1])
    (expected_dq,) = torch.autograd.grad(dense(*copies, **options)[0].sum(), copies[:1])
    torch.testing.assert_close(dq, expected_dq, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------------------------------
# Varlen
# ---------------------------------------------------------------------------------------------


def cumulative(lengths):
    return [0, *accumulate(lengths)]


def call_varlen(q, k, v, *, cu_q, cu_k, **options):
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k)]
    bounds = [max(b - a for a, b in pairwise(x)) for x in (cu_q, cu_k)]
    return flash_attn_varlen_func(q, k, v, *tensors, *bounds, **options)


VARLEN = {
    "mixed": ([3, 0, 9, 1, 4], [5, 6, 0, 1, 2]),
    "equal": ([4, 4, 4], [4, 4, 4]),
    "all_empty": ([0, 0], [0, 0]),
    "no_keys": ([2, 3], [0, 0]),
    "no_queries": ([0, 0], [2, 3]),
    "one": ([6], [8]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", VARLEN)
@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap"])
@pytest.mark.parametrize("tail", [0, 3])
def test_varlen(dtype, case, name, tail):
    lengths_q, lengths_k = VARLEN[case]
    cu = {"cu_q": cumulative(lengths_q), "cu_k": cumulative(lengths_k)}
    total_q, total_k = cu["cu_q"][-1] + tail, cu["cu_k"][-1] + tail
    inputs = make_qkv(dtype, (total_q, 4, 8), (total_k, 2, 8), (total_k, 2, 8))
    check(call_varlen, varlen, inputs, {**cu, **OPTIONS[name]}, with_lse_gradient=True)


def test_varlen_alibi_per_sequence():
    cu = {"cu_q": [0, 3, 3, 8], "cu_k": [0, 4, 6, 12]}
    inputs = make_qkv(torch.float32, (8, 4, 8), (12, 2, 8), (12, 2, 8))
    check(call_varlen, varlen, inputs, {**cu, "alibi_slopes": torch.rand(3, 4), "causal": True})


def test_tail_tokens_are_zeros_and_get_zero_gradients():
    q, k, v = make_qkv(torch.float32, (9, 2, 8), (11, 2, 8), (11, 2, 8))
    with torch.no_grad():
        for x, used in ((q, 6), (k, 7), (v, 7)):
            x[used:] = torch.nan
    out, lse, _ = call_varlen(q, k, v, cu_q=[0, 2, 6], cu_k=[0, 3, 7], return_attn_probs=True)
    assert torch.equal(out[6:], torch.zeros(3, 2, 8))
    assert torch.all(lse[:, 6:] == torch.inf)
    out.sum().backward()
    assert torch.equal(q.grad[6:], torch.zeros(3, 2, 8))
    assert torch.equal(k.grad[7:], torch.zeros(4, 2, 8))
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


def test_max_seqlen_is_only_a_bound():
    q, k, v = make_qkv(torch.float32, *[(10, 2, 8)] * 3, requires_grad=False)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 6, 6, causal=True)
    for bound in (0, 1, 1000):
        assert torch.equal(
            flash_attn_varlen_func(q, k, v, cu, cu, bound, bound, causal=True), expected
        )


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (3, 1)}, {"softcap": 2.0}])
def test_varlen_over_pages(block_size, dtype, options):
    lengths_q, lengths_k = [3, 0, 1, 5, 4], [7, 4, 20, 5, 0]
    used = [-(-n // block_size) for n in lengths_k]
    num_blocks = sum(used) + 2
    ids = torch.randperm(num_blocks).tolist()
    table = torch.full((5, max(used) + 1), 2**31 - 1, dtype=torch.int32)  # garbage where unused
    k, v = (torch.randn(sum(lengths_k), 2, 8).to(dtype) for _ in range(2))
    pages_k, pages_v = (torch.full((num_blocks, block_size, 2, 8), torch.nan).to(dtype),) * 2
    pages_v = pages_v.clone()
    token = 0
    for i, n in enumerate(lengths_k):
        table[i, : used[i]] = torch.tensor([ids.pop() for _ in range(used[i])])
        for t in range(n):
            place = (int(table[i, t // block_size]), t % block_size)
            pages_k[place], pages_v[place] = k[token], v[token]
            token += 1
    q = torch.randn(sum(lengths_q), 4, 8).to(dtype)
    cu = {"cu_q": cumulative(lengths_q), "cu_k": cumulative(lengths_k)}
    out = call_varlen(q, pages_k, pages_v, block_table=table, **cu, **options)
    exact, _ = varlen(q.double(), k.double(), v.double(), **cu, **options)
    assert_as_good(out, exact, varlen(q, k, v, **cu, **options)[0])


def test_no_backward_over_pages():
    q = torch.randn(2, 2, 8, requires_grad=True)
    pages = torch.randn(3, 4, 2, 8)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    table = torch.tensor([[1]], dtype=torch.int32)
    out = flash_attn_varlen_func(q, pages, pages, cu, cu, 2, 2, block_table=table)
    with pytest.raises(NotImplementedError, match="block_table has no backward"):
        out.sum().backward()


# ---------------------------------------------------------------------------------------------
# Empty inputs, many sequences, poisoned outputs
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"softcap": 1.0, "causal": True}], ids=["torch", "blocks"])
@pytest.mark.parametrize(("sq", "sk"), [(0, 4), (4, 0), (0, 0)])
def test_empty(options, sq, sk):
    q, k, v = make_qkv(torch.float32, (2, sq, 2, 8), (2, sk, 2, 8), (2, sk, 2, 8))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert torch.equal(out, torch.zeros(2, sq, 2, 8))
    assert torch.equal(lse, torch.full((2, 2, sq), torch.inf))
    out.sum().backward()
    for x in (q, k, v):
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_more_than_65535_sequences_and_heads():
    n = 65_600
    q, k, v = make_qkv(torch.float32, *[(n, 1, 1, 4)] * 3, requires_grad=False)
    assert torch.equal(flash_attn_func(q, k, v), v)
    heads = [x.view(1, 1, n, 4) for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*heads, softcap=1.0), heads[2])
    cu = torch.arange(n + 1, dtype=torch.int32)
    flat = [x.view(n, 1, 4) for x in (q, k, v)]
    assert torch.equal(flash_attn_varlen_func(*flat, cu, cu, 1, 1), flat[2])


@pytest.mark.parametrize("name", ["causal", "window", "softcap"])
def test_forward_is_repeatable_bit_for_bit(name):
    inputs = make_qkv(torch.bfloat16, (2, 300, 4, 32), *[(2, 310, 2, 32)] * 2)
    dout = torch.randn(2, 300, 4, 32).bfloat16()

    def run():
        out = flash_attn_func(*inputs, deterministic=True, **OPTIONS[name])
        return out, *torch.autograd.grad(out, inputs, dout)

    first = run()
    for _ in range(3):
        torch.empty(10**6).fill_(torch.nan)  # poison what the allocator hands out next
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


# ---------------------------------------------------------------------------------------------
# Autograd manners
# ---------------------------------------------------------------------------------------------


def test_double_backward_raises():
    inputs = make_qkv(torch.float32, *[(1, 4, 2, 8)] * 3)
    (dq,) = torch.autograd.grad(flash_attn_func(*inputs).sum(), inputs[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


def test_gradient_of_the_lse_alone():
    inputs = make_qkv(torch.float64, *[(1, 4, 2, 8)] * 3)
    _, lse, _ = flash_attn_func(*inputs, return_attn_probs=True, causal=True)
    grads = torch.autograd.grad(lse.sum(), inputs[:2])
    expected = torch.autograd.grad(dense(*inputs, causal=True)[1].sum(), inputs[:2])
    for grad, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, e)


def test_nothing_is_kept_without_grad():
    inputs = make_qkv(torch.float32, *[(1, 4, 2, 8)] * 3)
    with torch.no_grad():
        assert not flash_attn_func(*inputs).requires_grad


# ---------------------------------------------------------------------------------------------
# Random problems
# ---------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    group, num_kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    window = st.integers(-1, 30)
    options = {
        "causal": draw(st.booleans()),
        "window_size": (draw(window), draw(window)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.1, 1.0, -1.0])),
    }
    lengths = st.lists(st.integers(0, 40), min_size=1, max_size=4)
    lengths_q = draw(lengths)
    lengths_k = [draw(st.integers(0, 40)) for _ in lengths_q]
    shape = (group * num_kv_heads, num_kv_heads, draw(st.sampled_from([1, 8, 20, 64])))
    return lengths_q, lengths_k, shape, draw(st.booleans()), options, draw(st.integers(0, 2**32))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_random_problems(problem):
    lengths_q, lengths_k, (h, hk, d), alibi, options, seed = problem
    torch.manual_seed(seed)
    if alibi:
        options = {**options, "alibi_slopes": torch.rand(h)}
    cu = {"cu_q": cumulative(lengths_q), "cu_k": cumulative(lengths_k)}
    total_q, total_k = cu["cu_q"][-1], cu["cu_k"][-1]
    inputs = make_qkv(torch.float32, (total_q, h, d), (total_k, hk, d), (total_k, hk, d))
    check(call_varlen, varlen, inputs, {**cu, **options}, with_lse_gradient=True)


# ---------------------------------------------------------------------------------------------
# The surface
# ---------------------------------------------------------------------------------------------


def test_signatures_are_those_of_flash_attn():
    common = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
    common = [*common.split(), "return_attn_probs"]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    expected = {
        "flash_attn_func": ["q", "k", "v", *common],
        "flash_attn_kvpacked_func": ["q", "kv", *common],
        "flash_attn_qkvpacked_func": ["qkv", *common],
        "flash_attn_varlen_func": ["q", "k", "v", *lengths, *common, "block_table"],
        "flash_attn_varlen_kvpacked_func": ["q", "kv", *lengths, *common],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *common],
        "flash_attn_with_kvcache": [
            "q",
            "k_cache",
            "v_cache",
            "k",
            "v",
            "rotary_cos",
            "rotary_sin",
            "cache_seqlens",
            "cache_batch_idx",
            "cache_leftpad",
            "block_table",
            "softmax_scale",
            "causal",
            "window_size",
            "softcap",
            "rotary_interleaved",
            "alibi_slopes",
            "num_splits",
            "return_softmax_lse",
        ],
    }
    for name, parameters in expected.items():
        signature = inspect.signature(getattr(flashpage, name))
        assert list(signature.parameters) == parameters
    defaults = inspect.signature(flashpage.flash_attn_with_kvcache).parameters
    assert defaults["rotary_interleaved"].default is True
    assert defaults["num_splits"].default == 0
    assert inspect.signature(flash_attn_func).parameters["window_size"].default == (-1, -1)


def test_window_size_may_be_a_tensor():
    inputs = make_qkv(torch.float32, *[(1, 9, 2, 8)] * 3, requires_grad=False)
    expected = flash_attn_func(*inputs, window_size=(3, 1))
    assert torch.equal(flash_attn_func(*inputs, window_size=torch.tensor([3, 1])), expected)
    assert torch.equal(flash_attn_func(*inputs, window_size=[3, 1]), expected)


def test_every_public_name_exists():
    for name in flashpage.__all__:
        assert getattr(flashpage, name) is not None
    assert set(flashpage._HOME_OF) | {"__version__"} == set(flashpage.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flashpage.nothing


def test_forward_mode_derivatives_are_refused():
    q, tangent = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    with pytest.raises(UnsupportedError, match="forward-mode.*q has a tangent"):
        torch.func.jvp(lambda x: flashpage.flash_attn_func(x, x, x), (q,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        with pytest.raises(UnsupportedError, match="forward-mode.*v has a tangent"):
            flashpage.flash_attn_func(q, q, dual)
        assert flashpage.flash_attn_func(q, q, q).shape == q.shape


def test_dropout_that_is_one_in_float32_is_refused():
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ArgumentError, match="dropout_p must be in"):
        flashpage.flash_attn_func(q, q, q, dropout_p=1.0 - 2.0**-26)
