"""Memory: no S_q x S_k matrix, forward or backward. Measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from flashpage import flash_attn_func
S, d = 32768, 64
kwargs = eval(sys.argv[1])

def peak():  # bytes; the highest resident size so far
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

# The same path once on a small problem, so that libraries are loaded and their pools filled.
small = [torch.randn(1, 256, 1, d, requires_grad=True) for _ in range(3)]
flash_attn_func(*small, **kwargs).sum().backward()
inputs = [torch.randn(1, S, 1, d, requires_grad=True) for _ in range(3)]
dout = torch.randn(1, S, 1, d)
before = peak()
out = flash_attn_func(*inputs, **kwargs)
out.backward(dout)
assert all(torch.isfinite(x.grad).all() for x in inputs)
print((peak() - before) / 2**20)
"""


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (4096, 0)}], ids=str)
def test_peak_extra_memory_at_32768_tokens(options):
    """S alone would take 4 GiB."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr(options)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 256
