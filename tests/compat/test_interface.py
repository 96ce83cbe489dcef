"""`flash_attn.flash_attn_interface` of the shim: the calls below autograd, against autograd."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpage import flash_attn_func, flash_attn_varlen_func
from flashpage.errors import ArgumentError, UnsupportedError
from oracles import dense, varlen


@pytest.fixture
def interface(installed: None) -> ModuleType:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def qkv(*lead: int, seqlens: tuple[int, int] = (5, 7), requires_grad: bool = False) -> list[Tensor]:
    """q of 4 heads, k and v of 2, head_dim 16."""
    seqlen_q, seqlen_k = seqlens
    kv_shape = (*lead, seqlen_k, 2, 16)
    shapes = [(*lead, seqlen_q, 4, 16), kv_shape, kv_shape]
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def options(**changes: Any) -> dict[str, Any]:
    """All that flash-attn 2.8 wants to be given."""
    defaults = {
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
    return {**defaults, **changes}


CHANGES = [
    {},
    {"softmax_scale": 0.7, "causal": False},
    {"window_size_left": 2, "window_size_right": 1, "causal": False},
    {"softcap": 3.0, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
]


def as_public(given: dict[str, Any]) -> dict[str, Any]:
    """The same options as the seven functions spell them."""
    left, right = given["window_size_left"], given["window_size_right"]
    rest = {name: x for name, x in given.items() if not name.startswith("window_size")}
    return {**rest, "window_size": (left, right)}


@pytest.mark.parametrize("changes", CHANGES)
def test_dense(interface: ModuleType, changes: dict[str, Any]):
    q, k, v = qkv(2, requires_grad=True)
    given = options(**changes)
    out, lse, s_dmask, rng_state = interface._flash_attn_forward(
        q, k, v, **given, return_softmax=False
    )
    public, public_lse, _ = flash_attn_func(q, k, v, **as_public(given), return_attn_probs=True)
    assert torch.equal(out, public)
    assert torch.equal(lse, public_lse)
    assert s_dmask.shape == (0,)
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    assert not out.requires_grad

    dout = torch.randn_like(out)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = interface._flash_attn_backward(
        dout, q, k, v, out, lse, *grads, **given, deterministic=False
    )
    for grad, expected in zip(grads, torch.autograd.grad(public, (q, k, v), dout), strict=True):
        torch.testing.assert_close(grad, expected)
    assert softmax_d.shape == (2, 4, 128)
    torch.testing.assert_close(softmax_d[..., :5], (dout * out).sum(-1).transpose(1, 2))
    assert not softmax_d[..., 5:].any()


@pytest.mark.parametrize("changes", CHANGES)
def test_varlen(interface: ModuleType, changes: dict[str, Any]):
    """With an empty sequence, and rows of none."""
    q, k, v = qkv(seqlens=(140, 12), requires_grad=True)
    cu_q = torch.tensor([0, 4, 4, 133], dtype=torch.int32)
    cu_k = torch.tensor([0, 5, 9, 11], dtype=torch.int32)
    given = options(**changes)
    sequences = (cu_q, cu_k, 129, 5)
    out, lse, _, _ = interface._flash_attn_varlen_forward(q, k, v, *sequences, **given)
    public, public_lse, _ = flash_attn_varlen_func(
        q, k, v, *sequences, **as_public(given), return_attn_probs=True
    )
    assert torch.equal(out, public)
    assert torch.equal(lse, public_lse)

    dout = torch.randn_like(out)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = interface._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, *sequences, **given, deterministic=True
    )
    for grad, expected in zip(grads, torch.autograd.grad(public, (q, k, v), dout), strict=True):
        torch.testing.assert_close(grad, expected)
    assert softmax_d.shape == (4, 140 + 3 * 128)
    rows = (dout * out).sum(-1).t()
    torch.testing.assert_close(softmax_d[:, :4], rows[:, :4])
    torch.testing.assert_close(softmax_d[:, 256 : 256 + 129], rows[:, 4:133])
    softmax_d[:, :4] = softmax_d[:, 256 : 256 + 129] = 0
    assert not softmax_d.any()


def test_dropout_is_repeated_by_rng_state(interface: ModuleType):
    """The mask that S_dmask shows is that of the output and of the gradients."""
    q, k, v = qkv(1, seqlens=(6, 9), requires_grad=True)
    given = options(dropout_p=0.4, causal=False)
    out, lse, s_dmask, rng_state = interface._flash_attn_forward(
        q, k, v, **given, return_softmax=True
    )
    keep = s_dmask[:, :, :6, :9] >= 0
    assert 0 < keep.sum() < keep.numel()
    scores = torch.einsum("bqhd,bkhd->bhqk", q / 4, k.repeat_interleave(2, 2))
    p = scores.softmax(-1) * keep / 0.6
    expected = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, expected.detach())

    dout = torch.randn_like(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    backward = (dout, q, k, v, out, lse, *grads)
    interface._flash_attn_backward(*backward, **given, deterministic=False, rng_state=rng_state)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(ArgumentError, match="rng_state must be the one"):
        interface._flash_attn_backward(*backward, **given, deterministic=False)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("leftpad", [False, True])
def test_only_some_keys_exist(interface: ModuleType, paged: bool, leftpad: bool):
    seqlens, used, skipped = [6, 4, 5], [6, 0, 3], [2, 0, 3] if leftpad else [0, 0, 0]
    q, k, v = qkv(seqlens=(7, 15))
    cu_q, cu_k = [0, 2, 4, 7], [0, 6, 10, 15]
    cu_tensors = [torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)]
    k_given, v_given, table = k, v, None
    if paged:
        pages = torch.full((2, 6, 2, 2, 16), torch.nan)
        table = torch.tensor([[5, 1, 0], [9, 9, 9], [3, 2, 9]], dtype=torch.int32)
        for i in (0, 2):
            for t in range(seqlens[i]):
                slot = (int(table[i, t // 2]), t % 2) if t // 2 < 2 + (i == 0) else None
                if slot is not None:
                    pages[0][slot], pages[1][slot] = k[cu_k[i] + t], v[cu_k[i] + t]
        k_given, v_given = pages
    else:
        for i in range(3):  # what does not exist must not be read
            for t in [*range(skipped[i]), *range(used[i], seqlens[i])]:
                v_given[cu_k[i] + t] = torch.nan
    call = dict(
        **options(),
        block_table=table,
        seqused_k=torch.tensor(used, dtype=torch.int32),
        leftpad_k=torch.tensor(skipped, dtype=torch.int32) if leftpad else None,
    )
    if paged and leftpad:
        with pytest.raises(ArgumentError, match="block_table and leftpad_k"):
            interface._flash_attn_varlen_forward(q, k_given, v_given, *cu_tensors, 3, 6, **call)
        return
    out, lse, _, _ = interface._flash_attn_varlen_forward(
        q, k_given, v_given, *cu_tensors, 3, 6, **call
    )
    exists = [cu_k[i] + t for i in range(3) for t in range(skipped[i], used[i])]
    counts = torch.tensor([max(0, u - s) for u, s in zip(used, skipped, strict=True)])
    expected, expected_lse = varlen(
        q, k[exists], v[exists], cu_q, [0, *counts.cumsum(0).tolist()], causal=True
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_parts_of_the_keys_combine(interface: ModuleType):
    """As ring attention does it: forward part by part, backward with the LSE of all parts."""
    q, k, v = qkv(2, seqlens=(5, 8), requires_grad=True)
    given = options(causal=False)
    halves = [(k[:, :3], v[:, :3]), (k[:, 3:], v[:, 3:])]
    parts = [
        interface._flash_attn_forward(q, *half, **given, return_softmax=False) for half in halves
    ]
    lses = torch.stack([part[1].transpose(1, 2) for part in parts])
    lse = lses.logsumexp(0)
    out = sum(part[0] * (x - lse).exp()[..., None] for part, x in zip(parts, lses, strict=True))
    expected, expected_lse = dense(q, k, v)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse.transpose(1, 2), expected_lse.detach())
    dout, dq = torch.randn_like(out), torch.zeros_like(q)
    for half in halves:
        dq_part = torch.empty_like(q)
        interface._flash_attn_backward(
            dout,
            q,
            *half,
            out,
            lse.transpose(1, 2),
            dq_part,
            None,
            None,
            **given,
            deterministic=False,
        )
        dq += dq_part
    torch.testing.assert_close(dq, torch.autograd.grad(expected, q, dout)[0])


def test_s_dmask_is_one_block(interface: ModuleType):
    block = interface._get_block_size_n(torch.device("cpu"), 64, True, False)
    assert len(torch.randn(3, 1000).split(block, dim=-1)) == 1


def test_errors(interface: ModuleType):
    q, k, v = qkv(2)
    with pytest.raises(ArgumentError, match="return_softmax is only supported"):
        interface._flash_attn_forward(q, k, v, **options(), return_softmax=True)
    with pytest.raises(ArgumentError, match="k must have shape.*= \\(2, 7, 2, 16\\)"):
        interface._flash_attn_forward(q, k[..., :8], v, **options(), return_softmax=False)
    out, lse, *_ = interface._flash_attn_forward(q, k, v, **options(), return_softmax=False)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    with pytest.raises(ArgumentError, match="softmax_lse must have shape"):
        interface._flash_attn_backward(
            out, q, k, v, out, lse[..., :3], *grads, **options(), deterministic=False
        )
    with pytest.raises(ArgumentError, match="dk must have shape that of k"):
        interface._flash_attn_backward(
            out, q, k, v, out, lse, grads[0], grads[0], None, **options(), deterministic=False
        )
    cu = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="seqused_k must have dtype int32"):
        interface._flash_attn_varlen_forward(
            q[0], k[0], v[0], cu, cu, 5, 5, **options(), seqused_k=torch.tensor([3])
        )


def test_keys_beyond_max_seqlen_k_are_refused(interface: ModuleType):
    """The table of keys is as wide as max_seqlen_k says."""
    q, k = torch.randn(4, 2, 8), torch.randn(12, 2, 8)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 4], [0, 6, 12]))
    used = torch.tensor([6, 6], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="max_seqlen_k must be at least.*max_seqlen_k = 3"):
        interface._flash_attn_varlen_forward(q, k, k, cu_q, cu_k, 2, 3, **options(), seqused_k=used)
    full = interface._flash_attn_varlen_forward(q, k, k, cu_q, cu_k, 2, 6, **options())
    same = interface._flash_attn_varlen_forward(
        q, k, k, cu_q, cu_k, 2, 2**31 - 1, **options(), seqused_k=used
    )
    torch.testing.assert_close(same[0], full[0])


def test_the_compiled_module_says_that_it_is_not_here(interface: ModuleType):
    with pytest.raises(UnsupportedError, match="flash_attn_gpu.varlen_fwd is a function of"):
        interface.flash_attn_gpu.varlen_fwd()
    assert not hasattr(interface.flash_attn_gpu, "__wrapped__")
