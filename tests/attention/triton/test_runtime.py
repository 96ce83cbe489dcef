"""Kernels are compiled ahead, side by side, and nothing is launched meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Compiled for a GPU that is not here: what would be launched is a mock, which counts.
SCRIPT = """
import sys, threading
from unittest import mock

import torch
from triton.compiler import CompiledKernel

import aot
from flashpage.attention.triton import runtime
from flashpage.layers.triton_kernels import silu_and_mul

device = torch.device("cuda", 0)
x = torch.empty(2, 6144, dtype=torch.bfloat16)
threads = set()
launch = mock.Mock()


def run(kernel):
    threads.add(threading.current_thread().name)
    return launch


with aot.compiling_for(90) as compiled, mock.patch.object(torch.cuda, "set_device") as set_device:
    with mock.patch.object(CompiledKernel, "run", property(run)):
        with runtime.compiling_ahead(device):
            silu_and_mul(x)
            silu_and_mul(x)
        assert [k.name for k in compiled] == ["_silu_and_mul_kernel"], compiled
        assert threads and "MainThread" not in threads, threads
        assert set_device.call_args_list == [mock.call(0)], set_device.call_args_list
        assert not launch.called
        silu_and_mul(x)
        assert launch.call_count == 1
        assert len(compiled) == 1
        try:
            with runtime.compiling_ahead(device):
                raise ValueError("inside")
        except ValueError:
            pass
        silu_and_mul(x)
        assert launch.call_count == 2
print("held")
"""


def test_kernels_are_compiled_ahead_and_not_launched(tmp_path):
    """In a process of its own: this one interprets kernels."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    paths = [root / "src", root / "tests", Path(__file__).parent]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment
    )
    assert result.stdout == "held\n", result.stdout[-3000:] + result.stderr[-3000:]


def test_every_kernel_is_launched_there():
    source = Path(__file__).parents[3] / "src"
    launches = [
        f"{path.relative_to(source)}: {line.strip()}"
        for path in source.rglob("*.py")
        if path.name != "runtime.py"
        for line in path.read_text().splitlines()
        if re.search(r"kernel\w*\[", line)
    ]
    assert launches == []
