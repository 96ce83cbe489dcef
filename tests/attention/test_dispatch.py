"""The report of backends, and forcing one."""

from __future__ import annotations

import sys

import pytest
import torch

import flashpage
from flashpage.attention import dispatch
from flashpage.attention.cpu import numba_runtime
from flashpage.errors import ArgumentError


def test_report_on_a_cpu():
    report = flashpage.backends(layout="paged", dtype=torch.bfloat16)
    assert report.serving("forward") == "cpu_torch"
    assert report.serving("decode") == "cpu_numba"
    assert report.serving("backward") is None
    text = str(report)
    assert "paged bfloat16 on cpu" in text
    assert "decode    cpu_numba  serves" in text
    assert "no: attention over pages has no backward" in text
    assert flashpage.backends().serving("backward") == "cpu_torch"


def test_report_says_why_not():
    for report in (flashpage.backends("meta"), flashpage.backends(dtype=torch.int8)):
        assert all(report.serving(f) is None for f in ("forward", "backward", "decode"))
    assert "not on cuda" in str(flashpage.backends("cuda"))
    assert "not torch.int8" in str(flashpage.backends(dtype=torch.int8))
    double = flashpage.backends(dtype=torch.float64)
    assert double.serving("decode") == "cpu_torch"
    assert "serves float32, bfloat16 and float16, not torch.float64" in str(double)


def test_bad_questions():
    with pytest.raises(ArgumentError, match="layout must be one of.*'packed'"):
        flashpage.backends(layout="packed")
    for device in ("foo", "", "cuda:-1", None, 2**70):
        with pytest.raises(ArgumentError, match="device must be a torch device"):
            flashpage.backends(device)
    with pytest.raises(ArgumentError, match="dtype must be a torch dtype or its name, got 'bf17'"):
        flashpage.backends(dtype="bf17")
    assert flashpage.backends(dtype="bfloat16").problem.dtype == torch.bfloat16
    with pytest.raises(ArgumentError, match="names must be among"), dispatch.only("cpu_fast"):
        pass


@pytest.mark.parametrize(
    "question",
    [
        {"head_dim": 300},
        {"head_dim": 0},
        {"num_q_heads": 3, "num_kv_heads": 2},
        {"num_kv_heads": 0},
        {"softcap": -1.0},
        {"dropout_p": 1.0},
        {"softcap": 30.0, "dropout_p": 0.1},
    ],
)
def test_refuses_what_the_call_refuses(question):
    """In the same words."""
    with pytest.raises(ArgumentError) as asked:
        flashpage.backends(**question)
    options = dict(question)
    heads, kv_heads, dim = (
        options.pop(name, default)
        for name, default in (("num_q_heads", 8), ("num_kv_heads", 8), ("head_dim", 64))
    )
    q, kv = torch.zeros(1, 2, heads, dim), torch.zeros(1, 2, kv_heads, dim)
    with pytest.raises(ArgumentError) as called:
        flashpage.flash_attn_func(q, kv, kv, **options)
    assert str(asked.value) == str(called.value)


def test_without_numba_torch_serves(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # makes `import numba` fail
    numba_runtime.why_unavailable.cache_clear()
    dispatch._choose.cache_clear()
    try:
        report = flashpage.backends(layout="paged")
        assert report.serving("decode") == "cpu_torch"
        assert "pip install numba" in str(report)
        cache = torch.randn(1, 4, 1, 8)
        q = torch.randn(1, 1, 1, 8)
        out = flashpage.flash_attn_with_kvcache(q, cache, cache)
        torch.testing.assert_close(out, flashpage.flash_attn_func(q, cache, cache))
    finally:
        numba_runtime.why_unavailable.cache_clear()
        dispatch._choose.cache_clear()


def test_the_backward_is_served_by_what_the_forward_named():
    """Wherever it runs: for tensors on a GPU autograd has threads of its own."""
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    with dispatch.only("cpu_torch"):
        out = flashpage.flash_attn_func(q, q, q)
        assert dispatch.named() == ("cpu_torch",)
    assert dispatch.named() is None
    with dispatch.only("cpu_numba"):  # which has no backward
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert dispatch.named() == ("cpu_numba",)
    assert torch.isfinite(grad).all()
