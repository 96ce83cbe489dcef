"""What only a GPU can show: random problems in every dtype, sizes beyond 2^31 elements and 65,535
sequences, streams, devices, CUDA graphs, torch.compile, no synchronisation, no respecialisation."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

import flashpage
from flashpage import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashpage.cache.kv_cache import store_kvcache
from kernels import BACKENDS, kernels
from oracles import assert_as_good, dense, max_error, varlen

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def chosen_backends():
    with kernels():
        yield


# Nearly every problem compiles kernels: several processes with fewer each are faster.
EXAMPLES = int(os.environ.get("FLASHPAGE_TEST_EXAMPLES", "200"))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Tensor:
    return torch.randn(*shape, device="cuda", **kwargs).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


# ---------------------------------------------------------------------------------------------
# Random problems
# ---------------------------------------------------------------------------------------------


@st.composite
def problems(draw) -> dict[str, Any]:
    group, hk = draw(st.sampled_from([1, 2, 3, 4, 7, 8])), draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window_size": draw(
            st.sampled_from([(-1, -1)] * 3 + [(37, 5), (0, 0), (-1, 60), (60, -1)])
        ),
        "softcap": draw(st.sampled_from([0.0, 0.0, 15.0])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.3, -0.2])),
    }
    return {
        "lengths": draw(
            st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=4)
        ),
        # Not every head_dim: each compiles kernels of its own.
        "heads": (group * hk, hk, draw(st.sampled_from([1, 24, 64, 80, 111, 128, 192, 256]))),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        "alibi": draw(st.sampled_from([0, 0, 1, 2])),
        "options": options,
        "seed": draw(st.integers(0, 2**31)),
    }


def gradients(function, inputs, dout, dlse, **options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, lse = function(*inputs, **options)[:2]
    finite = torch.isfinite(lse)
    loss = (out * dout.to(out.dtype)).sum() + (lse[finite] * dlse.to(lse.dtype)[finite]).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False
)
@given(problems())
def test_random_problems_forward_and_backward(p):
    torch.manual_seed(p["seed"])
    h, hk, d = p["heads"]
    dtype, options = p["dtype"], p["options"]
    cu_q, cu_k = ([0], [0])
    for n_q, n_k in p["lengths"]:
        cu_q.append(cu_q[-1] + n_q)
        cu_k.append(cu_k[-1] + n_k)
    if p["alibi"]:
        slopes = torch.rand(len(p["lengths"]), h, device="cuda")
        options = {**options, "alibi_slopes": slopes[0] if p["alibi"] == 1 else slopes}
    q, dout = (randn(cu_q[-1] + 3, h, d, dtype=dtype) for _ in range(2))
    k, v = (randn(cu_k[-1] + 2, hk, d, dtype=dtype) for _ in range(2))
    dlse = torch.randn(h, q.shape[0], device="cuda")

    def ours(q, k, v, **options):
        bounds = (max(n for n, _ in p["lengths"]), max(n for _, n in p["lengths"]))
        return flash_attn_varlen_func(
            q, k, v, ints(*cu_q), ints(*cu_k), *bounds, return_attn_probs=True, **options
        )

    def oracle(q, k, v, **options):
        return varlen(q, k, v, cu_q, cu_k, **options)

    actual = gradients(ours, (q, k, v), dout, dlse, **options)
    exact = gradients(oracle, [x.double() for x in (q, k, v)], dout, dlse, **options)
    low = gradients(oracle, (q, k, v), dout, dlse, **options)
    scale = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for name, a, e, lo in zip(("out", "lse", "dq", "dk", "dv"), actual, exact, low, strict=True):
        finite = e[torch.isfinite(e)].abs()
        size = max(1.0, float(finite.max())) if finite.numel() else 1.0
        atol = 1e-5 * size if name == "lse" else (scale if name[0] == "d" else 1e-5) * size
        assert_as_good(a, e, lo, name, atol=atol)


# ---------------------------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------------------------

FAR = 2**31 + 2**20


def far_apart(x: Tensor) -> Tensor:
    """The same values with the first dimension's stride beyond 2^31 elements."""
    flat = torch.empty(FAR * (x.shape[0] - 1) + x[0].numel(), dtype=x.dtype, device="cuda")
    view = flat.as_strided(x.shape, (FAR, *x[0].stride()))
    return view.copy_(x)


def test_strides_beyond_2_31_elements():
    q, k, v = randn(2, 130, 4, 64), randn(2, 150, 2, 64), randn(2, 150, 2, 64)
    dout = randn(2, 130, 4, 64)
    far = [far_apart(x) for x in (q, k, v)]
    near = [x.clone().requires_grad_() for x in (q, k, v)]
    far = [x.requires_grad_() for x in far]
    a, b = flash_attn_func(*far, causal=True), flash_attn_func(*near, causal=True)
    assert max_error(a, b) < 1e-2
    for x, y in zip(
        torch.autograd.grad(a, far, far_apart(dout)),
        torch.autograd.grad(b, near, dout),
        strict=True,
    ):
        assert max_error(x, y) < 2e-2


def test_pool_beyond_2_31_elements():
    num_blocks, block_size, hk, d = 2**31 // (64 * 4 * 128) + 40, 64, 4, 128
    pages = torch.zeros(num_blocks, block_size, hk, d, dtype=torch.bfloat16, device="cuda")
    values = torch.zeros_like(pages)
    k, v, q = randn(2, 130, hk, d), randn(2, 130, hk, d), randn(2, 1, 8, d)
    table = torch.arange(num_blocks - 6, num_blocks, device="cuda").int().view(2, 3)
    out = flash_attn_with_kvcache(
        q, pages, values, k, v, cache_seqlens=ints(0, 0), block_table=table, causal=True
    )
    expected, _ = dense(q.double(), k.double(), v.double())
    assert max_error(out, expected) < 1e-2
    slots = torch.arange((num_blocks - 6) * block_size, num_blocks * block_size, device="cuda")
    new = randn(len(slots), hk, d)
    store_kvcache(new, new, pages, values, slots)
    assert torch.equal(pages[-6:].flatten(0, 1), new)
    assert not pages[:-6].any()
    out = flash_attn_varlen_func(
        q[:, 0], pages, values, ints(0, 1, 2), ints(0, 130, 280), 1, 150, block_table=table
    )
    assert torch.isfinite(out).all()


def test_more_than_65535_sequences():
    n = 70_000
    q, k, v = randn(n, 2, 2, 16), randn(n, 3, 1, 16), randn(n, 3, 1, 16)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*inputs, causal=True)
    grads = torch.autograd.grad(out.sum(), inputs)
    cu_q, cu_k = (torch.arange(n + 1, device="cuda").int() * m for m in (2, 3))
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in inputs]
    flat_out = flash_attn_varlen_func(*flat, cu_q, cu_k, 2, 3, causal=True)
    assert torch.equal(out.flatten(0, 1), flat_out)
    flat_grads = torch.autograd.grad(flat_out.sum(), flat)
    for a, b in zip(grads, flat_grads, strict=True):
        assert max_error(a.flatten(0, 1), b) < 3e-2
    for part in (slice(0, 50), slice(n - 50, n)):
        exact, _ = dense(*(x[part].detach().double() for x in inputs), causal=True)
        assert max_error(out[part], exact) < 3e-2
    decoded = flash_attn_with_kvcache(q[:, :1], k.detach(), v.detach())
    exact, _ = dense(*(x[-50:].detach().double() for x in (q[:, :1], k, v)))
    assert max_error(decoded[-50:], exact) < 3e-2


def test_more_than_65535_heads():
    q, k, v = randn(1, 2, 66_000, 16), randn(1, 3, 33_000, 16), randn(1, 3, 33_000, 16)
    out = flash_attn_func(q, k, v)
    exact, _ = dense(q[:, :, -20:].double(), *(x[:, :, -10:].double() for x in (k, v)))
    assert max_error(out[:, :, -20:], exact) < 3e-2
    assert max_error(flash_attn_with_kvcache(q, k, v)[:, :, -20:], exact) < 3e-2


# ---------------------------------------------------------------------------------------------
# The seven functions as torch sees them
# ---------------------------------------------------------------------------------------------


def calls() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    cu = ints(0, 20, 64)
    q, kv, qkv = randn(2, 32, 4, 64), randn(2, 32, 2, 2, 64), randn(2, 32, 3, 4, 64)
    k, v = kv.unbind(2)
    flat = [x.flatten(0, 1) for x in (q, k, v, kv, qkv)]
    cache = randn(8, 16, 2, 64), randn(8, 16, 2, 64)
    table = torch.arange(8, device="cuda").int().view(2, 4)
    cos, sin = randn(64, 16), randn(64, 16)
    options = {"causal": True}
    return {
        "func": (flash_attn_func, (q, k, v), options),
        "kvpacked": (flash_attn_kvpacked_func, (q, kv), options),
        "qkvpacked": (flash_attn_qkvpacked_func, (qkv,), options),
        "varlen": (flash_attn_varlen_func, (*flat[:3], cu, cu, 44, 44), options),
        "varlen_kvpacked": (
            flash_attn_varlen_kvpacked_func, (flat[0], flat[3], cu, cu, 44, 44), options,
        ),
        "varlen_qkvpacked": (flash_attn_varlen_qkvpacked_func, (flat[4], cu, 44), options),
        "kvcache": (
            flash_attn_with_kvcache,
            (q[:, :2], *cache, k[:, :2], v[:, :2]),
            {**options, "rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": ints(5, 33),
             "block_table": table},
        ),
    }  # fmt: skip


NAMES = (
    "func", "kvpacked", "qkvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked", "kvcache",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_graph_break(name):
    function, args, options = calls()[name]
    fresh = [x.clone() if isinstance(x, Tensor) else x for x in args]

    def run(*args):
        return function(*args, **options) * 2

    assert torch.equal(torch.compile(run, fullgraph=True)(*fresh), run(*args))


@pytest.mark.parametrize("name", NAMES)
def test_no_synchronisation(name):
    function, args, options = calls()[name]
    expected = function(*args, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = function(*args, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_replays_with_other_data(name):
    function, args, options = calls()[name]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(*args, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = function(*args, **options)
    stream.synchronize()
    for x in args:
        if isinstance(x, Tensor):
            x.copy_(torch.randn(x.shape, device="cuda") if x.is_floating_point() else x)
    if name.startswith("varlen"):
        for x in args:
            if isinstance(x, Tensor) and x.dtype == torch.int32:
                x.copy_(ints(0, 31, 60))
    if name == "kvcache":
        options["cache_seqlens"].copy_(ints(61, 0))
        options["block_table"].copy_(options["block_table"].flip(0).clone())
    graph.replay()
    torch.cuda.synchronize()
    replayed = out.clone()
    assert torch.equal(replayed, function(*args, **options))


def test_a_captured_graph_replays_the_backward():
    inputs = [randn(2, 70, h, 64).requires_grad_() for h in (4, 2, 2)]
    dout = randn(2, 70, 4, 64)

    def run():
        return torch.autograd.grad(flash_attn_func(*inputs, causal=True), inputs, dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            grads = run()
    with torch.no_grad():
        for x in (*inputs, dout):
            x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip([g.clone() for g in grads], run(), strict=True):
        assert torch.equal(a, b)


def test_operators_pass_opcheck():
    q, k, v = (randn(2, 33, h, 64, dtype=torch.float16) for h in (4, 2, 2))
    ops = torch.ops.flashpage
    options = (0.3, -1, 0, 0.0, 0.0)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    dense_rest = (None, None, None, None, None, 33, 33, *options, False, False)
    opcheck(ops.forward, (*inputs, *dense_rest))
    out, lse, _ = ops.forward(q, k, v, *dense_rest)
    rest = (None, None, None, None, 33, 33, *options, True)
    opcheck(ops.backward, (out.clone(), lse.clone(), q, k, v, out, lse, *rest))
    pages, table, lengths = randn(8, 16, 2, 64), ints(0, 1, 2, 3).view(2, 2), ints(5, 31)
    more = (lengths, 0, table, None, None, None, 0.3, -1, 0, 0.0, 0)
    opcheck(ops.decode, (randn(2, 1, 4, 64), pages, pages.clone(), *more))
    cos, sin = randn(40, 16), randn(40, 16)
    new = (randn(2, 1, 4, 64), randn(2, 1, 2, 64), randn(2, 1, 2, 64))
    opcheck(
        ops.append_kv,
        (*new, pages, pages.clone(), lengths, cos, sin, table, None, None, True, True),
    )
    slots = torch.tensor([3, -1, 100], device="cuda")
    token = randn(3, 2, 64)
    opcheck(ops.store_kv, (token, token.clone(), pages, pages.clone(), slots))


def test_a_side_stream_is_used():
    q, k, v = (randn(4, 2048, 16, 64) for _ in range(3))
    expected = flash_attn_func(q + 1, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        out = flash_attn_func(q + 1, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    for name, (function, args, options) in calls().items():
        there = [x.to("cuda:1") if isinstance(x, Tensor) else x for x in args]
        moved = {n: x.to("cuda:1") if isinstance(x, Tensor) else x for n, x in options.items()}
        assert torch.cuda.current_device() == 0
        out = function(*there, **moved)
        assert out.device == torch.device("cuda:1")
        assert torch.equal(out.cpu(), function(*args, **options).cpu()), name


def test_bits_repeat():
    inputs = [randn(4, 333, h, 64).requires_grad_() for h in (8, 2, 2)]
    dout = randn(4, 333, 8, 64)
    first = None
    for _ in range(50):
        torch.manual_seed(3)
        out, lse, _ = flash_attn_func(*inputs, 0.17, causal=True, return_attn_probs=True)
        result = [out, lse, *torch.autograd.grad(out, inputs, dout)]
        first = first or result
        for a, b in zip(result, first, strict=True):
            assert torch.equal(a, b)


def test_lengths_make_no_new_kernels():
    from flashpage.attention.triton import backward, cache, decode, forward

    def compiled() -> int:
        modules = [backward, cache, decode, forward]
        if "hopper" in BACKENDS:
            from flashpage.attention.hopper import backward as hopper_backward
            from flashpage.attention.hopper import forward as hopper_forward

            modules += [hopper_backward, hopper_forward]
        kernels = {
            id(x): x for module in modules for x in vars(module).values()
            if hasattr(x, "device_caches")
        }  # fmt: skip
        return sum(len(c[0]) for x in kernels.values() for c in x.device_caches.values())

    def use(n: int, batch: int) -> None:
        inputs = [randn(batch, n, h, 64).requires_grad_() for h in (4, 2, 2)]
        torch.autograd.grad(flash_attn_func(*inputs, causal=True).sum(), inputs)
        flat = [x.detach().flatten(0, 1).requires_grad_() for x in inputs]
        cu = torch.arange(batch + 1, device="cuda").int() * n
        out = flash_attn_varlen_func(*flat, cu, cu, n, n, causal=True)
        torch.autograd.grad(out.sum(), flat)
        blocks = -(-n // 16) + 1
        pages = randn(batch * blocks, 16, 2, 64), randn(batch * blocks, 16, 2, 64)
        table = torch.arange(batch * blocks, device="cuda").int().view(batch, blocks)
        new = [x.detach()[:, :1].contiguous() for x in inputs]
        for splits in (0, 1, 2, 7):
            flash_attn_with_kvcache(
                new[0], *pages, *new[1:], cache_seqlens=cu[:-1] * 0 + n, block_table=table,
                causal=True, num_splits=splits,
            )  # fmt: skip

    use(64, 2)
    use(1, 1)  # ones are told apart by torch's strides at most
    before = compiled()
    for _ in range(12):
        use(random.randint(2, 700), random.randint(2, 9))
    assert compiled() == before


@pytest.mark.parametrize("num_splits", [1, 4])
def test_append_and_attention_are_two_launches_and_a_combine(num_splits):
    function, args, options = calls()["kvcache"]
    function(*args, **options, num_splits=num_splits)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function(*args, **options, num_splits=num_splits)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == (2 if num_splits == 1 else 3), names


def test_the_engine_knows_the_backend():
    report = flashpage.backends("cuda", torch.bfloat16, layout="paged")
    assert report.serving("forward") == BACKENDS[0]
    assert report.serving("decode") == BACKENDS[0]
