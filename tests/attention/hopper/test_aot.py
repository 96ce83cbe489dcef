"""The kernels for Hopper compile without one: no serialised matrix products, no unknown spills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_representative_kernels_compile(tmp_path):
    """In a process of its own: this one interprets kernels."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root / "tests")])
    script = Path(__file__).with_name("aot.py")
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "no faults" in result.stdout
