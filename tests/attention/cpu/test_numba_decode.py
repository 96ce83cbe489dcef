"""How the numba kernel is called: threads, concurrency. Its results are tested
in `test_kvcache`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import torch

import flashpage
from flashpage.attention import dispatch
from flashpage.attention.cpu import numba_decode


def run_script(script, **environment):
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    assert result.returncode == 0, result.stderr
    return result


DECODE = """
import torch, flashpage
def decode(context):
    cache, q = torch.randn(2, context, 2, 8), torch.randn(2, 1, 4, 8)
    return flashpage.flash_attn_with_kvcache(q, cache, cache)
"""


def test_torchs_number_of_threads_is_kept():
    script = f"""{DECODE}
for threads in (1, 2):
    torch.set_num_threads(threads)
    for context in (4, 8192):
        decode(context)
        assert torch.get_num_threads() == threads, (threads, torch.get_num_threads())
"""
    run_script(script)


def test_calls_from_several_threads():
    cache = torch.randn(4, 700, 2, 16)
    q = torch.randn(4, 1, 4, 16)
    expected = flashpage.flash_attn_with_kvcache(q, cache, cache)
    wrong = []

    def work():
        for _ in range(20):
            if not torch.equal(flashpage.flash_attn_with_kvcache(q, cache, cache), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_many_queries_go_through_torch(monkeypatch):
    def refuse(*args):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(numba_decode, "decode", refuse)
    cache = torch.randn(1, 30, 1, 8)
    with dispatch.only("cpu_numba"):
        q = torch.randn(1, numba_decode.MAX_SEQLEN_Q + 1, 1, 8)
        flashpage.flash_attn_with_kvcache(q, cache, cache)


def test_half_precision_bits_round_as_torch_does():
    """`store` and `load` of 16-bit floats, over every kind of value and on random bits."""
    from flashpage.attention.cpu.numba_runtime import KINDS, kernels, why_unavailable

    assert why_unavailable() is None
    import numpy as np

    math = kernels("flashpage.attention.cpu.numba_math")
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).to(torch.int32)
    special = [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 1e38, 6e-8, 2e-8, 6.1e-5, torch.inf]
    values = torch.cat((bits.view(torch.float32), torch.tensor(special), -torch.tensor(special)))
    values = torch.cat((values, torch.randn(10_000), torch.randn(10_000) * 1e-6))
    for dtype in (torch.bfloat16, torch.float16):
        stored = np.zeros(len(values), np.uint16)
        math.store(stored, 0, values.numpy(), 0, len(values), KINDS[dtype])
        expected = values.to(dtype)
        result = torch.from_numpy(stored).view(dtype)
        assert torch.equal(torch.isnan(result), torch.isnan(expected))
        same = result.view(torch.int16) == expected.view(torch.int16)
        assert bool((same | torch.isnan(expected)).all())
        loaded = np.zeros(len(values), np.float32)
        math.load(loaded, 0, stored, 0, len(values), KINDS[dtype])
        back = torch.from_numpy(loaded)
        assert torch.equal(back.nan_to_num(nan=7.0), expected.float().nan_to_num(nan=7.0))
