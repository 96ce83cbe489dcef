"""The operators as torch sees them: opcheck, torch.compile, no graph breaks."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import flashpage
import flashpage.attention.ops  # defines torch.ops.flashpage
from flashpage.errors import UnsupportedError

OPTIONS = (0.3, -1, 0, 0.0, 0.0)  # scale, left, right, softcap, dropout_p


def qkv(requires_grad=True):
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    return [torch.randn(s, requires_grad=requires_grad) for s in shapes]


def opcheck(op, args):
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("options", [OPTIONS, (0.3, 3, 1, 2.0, 0.0)])
def test_opcheck_forward_dense(options):
    slopes = torch.rand(4)
    args = (*qkv(), None, None, None, slopes, None, 5, 7, *options, False, False)
    opcheck(torch.ops.flashpage.forward, args)


def test_opcheck_forward_dropout():
    rng = torch.tensor([1, 2])
    args = (*qkv(), None, None, None, None, rng, 5, 7, 0.3, -1, -1, 0.0, 0.2, False, True)
    opcheck(torch.ops.flashpage.forward, args)


def test_opcheck_forward_varlen():
    q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    args = (q, k, v, cu, cu, None, None, None, 5, 5, *OPTIONS, False, False)
    opcheck(torch.ops.flashpage.forward, args)


def test_opcheck_forward_paged():
    q, pages = torch.randn(6, 4, 8), torch.randn(5, 2, 2, 8)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    args = (q, pages, pages.clone(), cu, cu, table, None, None, 4, 4, *OPTIONS, False, False)
    opcheck(torch.ops.flashpage.forward, args)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(with_dlse):
    q, k, v = qkv()
    out, lse, _ = torch.ops.flashpage.forward(
        q, k, v, None, None, None, None, None, 5, 7, *OPTIONS, False, False
    )
    dlse = torch.randn_like(lse) if with_dlse else None
    saved = (x.detach() for x in (torch.randn_like(out), q, k, v, out, lse))
    dout, *rest = saved
    args = (dout, dlse, *rest, None, None, None, None, 5, 7, *OPTIONS, False)
    opcheck(torch.ops.flashpage.backward, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck_decode(dtype):
    pages = torch.randn(5, 2, 2, 8, dtype=dtype)
    q = torch.randn(2, 3, 4, 8, dtype=dtype)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    args = (q, pages, pages.clone(), lengths, 0, table, None, None, None, 0.3, -1, 0, 0.0, 0)
    opcheck(torch.ops.flashpage.decode, args)
    index = torch.tensor([4, 2], dtype=torch.int32)
    pad, slopes = torch.tensor([0, 1], dtype=torch.int32), torch.rand(2, 4)
    rows = torch.tensor([1, 0], dtype=torch.int32)
    args = (q, pages, pages.clone(), rows, 1, None, index, pad, slopes, 0.3, 1, 0, 2.0, 3)
    opcheck(torch.ops.flashpage.decode, args)


@pytest.mark.parametrize("rotary", [False, True])
def test_opcheck_append_kv(rotary):
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    pages = torch.randn(5, 2, 2, 8)
    table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    cos_sin = (torch.rand(4, 4), torch.rand(4, 4)) if rotary else (None, None)
    args = (q, k, v, pages, pages.clone(), lengths, *cos_sin, table, None, None, True, True)
    opcheck(torch.ops.flashpage.append_kv, args)


def test_opcheck_store_kv():
    k, v, pages = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(5, 2, 2, 8)
    slots = torch.tensor([9, -1, 0])
    opcheck(torch.ops.flashpage.store_kv, (k, v, pages, pages.clone(), slots))


# ---------------------------------------------------------------------------------------------
# torch.compile
# ---------------------------------------------------------------------------------------------

COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler"),
    ),
]


class Attention(nn.Module):
    """A small attention layer, as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        return self.out(flashpage.flash_attn_func(q, k, v, causal=True).flatten(2))


@pytest.mark.parametrize("backend", COMPILERS)
def test_compile_fullgraph_of_a_module(backend):
    torch._dynamo.reset()
    module = Attention()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for length in (9, 12):
        x = torch.randn(2, length, 32)
        expected, actual = module(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        grads = torch.autograd.grad(expected.square().sum(), tuple(module.parameters()))
        same = torch.autograd.grad(actual.square().sum(), tuple(module.parameters()))
        for a, b in zip(same, grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


CU = torch.tensor([0, 3, 9], dtype=torch.int32)


def _flat(h):
    return torch.randn(9, h, 8)


SEVEN = {
    "flash_attn_func": lambda f, q, k, v: f(q[None], k[None], v[None], window_size=(4, 2)),
    "flash_attn_kvpacked_func": lambda f, q, k, v: f(q[None], torch.stack((k, v), 1)[None]),
    "flash_attn_qkvpacked_func": lambda f, q, k, v: f(torch.stack((q, q, q), 1)[None]),
    "flash_attn_varlen_func": lambda f, q, k, v: f(q, k, v, CU, CU, 6, 6, causal=True),
    "flash_attn_varlen_kvpacked_func": lambda f, q, k, v: f(
        q, torch.stack((k, v), 1), CU, CU, 6, 6
    ),
    "flash_attn_varlen_qkvpacked_func": lambda f, q, k, v: f(torch.stack((q, q, q), 1), CU, 6),
    "flash_attn_with_kvcache": lambda f, q, k, v: f(
        q[:, None], k[:, None].repeat(1, 4, 1, 1), v[:, None].repeat(1, 4, 1, 1), k[:, None],
        v[:, None], cache_seqlens=torch.arange(9, dtype=torch.int32) % 3, causal=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVEN)
def test_compile_fullgraph_of_all_seven(name):
    torch._dynamo.reset()
    function = getattr(flashpage, name)
    q, k, v = _flat(4), _flat(2), _flat(2)
    expected = SEVEN[name](function, q, k, v)
    compiled = torch.compile(
        lambda *x: SEVEN[name](function, *x), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q, k, v), expected)


@pytest.mark.parametrize("num_heads", [2, 4])
def test_compile_with_symbolic_sizes(num_heads):
    """Sizes that are symbols from the first call on, next to slopes of a size that is not."""
    torch._dynamo.reset()
    slopes = torch.rand(num_heads)

    def dense(q, k):
        return flashpage.flash_attn_func(q, k, k, alibi_slopes=slopes * torch.ones(num_heads))

    def varlen(q, k):
        cu, n = torch.tensor([0, 2, q.shape[1]], dtype=torch.int32), q.shape[1]
        return flashpage.flash_attn_varlen_func(q[0], k[0], k[0], cu, cu, n, n, alibi_slopes=slopes)

    def decode(q, k):
        return flashpage.flash_attn_with_kvcache(q, k, k, alibi_slopes=slopes)

    for function in (dense, varlen, decode):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
        for seqlen in (5, 8):
            q, k = torch.randn(2, seqlen, num_heads, 16), torch.randn(2, seqlen, 2, 16)
            torch.testing.assert_close(compiled(q, k), function(q, k))


def test_compiled_append_writes_in_place():
    torch._dynamo.reset()

    def step(q, cache, k, lengths):
        return flashpage.flash_attn_with_kvcache(
            q, cache, cache.clone(), k, k, cache_seqlens=lengths
        )

    cache = torch.zeros(2, 4, 1, 8)
    q = torch.randn(2, 1, 1, 8)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compiled(q, cache, q, torch.tensor([0, 2], dtype=torch.int32))
    assert torch.equal(cache[0, 0], q[0, 0])
    assert torch.equal(cache[1, 2], q[1, 0])
    assert cache.count_nonzero() == 16


def test_no_backend_for_a_device_says_so():
    x = torch.randn(1, 2, 1, 8, device="meta")
    assert flashpage.flash_attn_func(x, x, x).shape == x.shape  # the fake version
    problem = flashpage.backends("meta").problem
    from flashpage.attention import dispatch

    with pytest.raises(UnsupportedError, match="cpu_torch: serves tensors on the CPU, not on meta"):
        dispatch.choose(problem, "forward")
