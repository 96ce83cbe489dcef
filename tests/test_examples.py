"""The examples run as they are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from flashpage.compat import flash_attn

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.usefixtures("smollm2_path")
def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "generate.py"), run_name="__main__")
    assert "Paris" in capsys.readouterr().out


@pytest.mark.usefixtures("smollm2_path")
def test_stream(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "stream.py"), run_name="__main__")
    first, second = re.findall(r"(\d+) of \d+ prompt tokens cached", capsys.readouterr().out)
    assert int(first) == 0
    assert int(second) > 0


def test_engine_steps(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "engine_steps.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "request-1 aborted" in output
    assert "request-0 ended" in output
    assert output.splitlines()[-1].endswith("0 running, 0 pages used")


def test_compat(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        runpy.run_path(str(EXAMPLES / "compat.py"), run_name="__main__")
    finally:
        flash_attn.uninstall()
    output = capsys.readouterr().out
    assert "flash_attn_func is flashpage.attention.functional's" in output
    assert float(re.search(r"differ by (\S+)", output)[1]) < 1e-5
