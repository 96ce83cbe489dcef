"""What the tests of compat share: the shim installed in this process, and programs run outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashpage
from flashpage.compat import flash_attn as shim

SOURCE = Path(flashpage.__file__).parents[1]


@pytest.fixture
def installed() -> Iterator[None]:
    """`import flash_attn` works within the test."""
    shim.install()
    yield
    shim.uninstall()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python *arguments` in an empty folder, with the given PYTHONPATH."""

    def run_python(*arguments: str, path: str = str(SOURCE)) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run_python
