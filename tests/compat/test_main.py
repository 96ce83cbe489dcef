"""The runner: programs that can not be edited, and the processes that they start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashpage.compat.flash_attn import search_path

Run = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = """
import flash_attn, subprocess, sys
print(flash_attn.flash_attn_func.__module__, sys.argv[1:], __name__)
if "child" in sys.argv:
    subprocess.run([sys.executable, "-c", "import flash_attn; print(flash_attn.__version__)"])
sys.exit(7)
"""
OURS = "flashpage.attention.functional"


@pytest.fixture(autouse=True)
def _program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)


@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"], ["-X", "utf8", "program.py"]])
def test_runs_as_python_does(run: Run, how: list[str]):
    result = run("-m", "flashpage.compat", *how, "--path", "x y")
    assert result.returncode == 7, result.stderr
    assert result.stdout == f"{OURS} ['--path', 'x y'] __main__\n"


def test_runs_code(run: Run):
    result = run("-m", "flashpage.compat", "-c", "import flash_attn; print(flash_attn.__version__)")
    assert (result.returncode, result.stdout) == (0, "2.8.3\n")


def test_children_inherit_it(run: Run):
    result = run("-m", "flashpage.compat", "program.py", "child")
    assert result.stdout.endswith("2.8.3\n"), result.stderr


def test_what_was_in_pythonpath_stays(run: Run, tmp_path: Path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "extra.py").write_text("value = 3")
    path = search_path() + ":" + str(tmp_path / "more")
    result = run("-m", "flashpage.compat", "-c", "import extra; print(extra.value)", path=path)
    assert result.stdout == "3\n", result.stderr


def test_path_is_printed(run: Run):
    result = run("-m", "flashpage.compat", "--path")
    assert (result.returncode, result.stdout) == (0, search_path() + "\n")


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0)])
def test_usage(run: Run, arguments: list[str], code: int):
    result = run("-m", "flashpage.compat", *arguments)
    assert result.returncode == code
    assert "usage: python -m flashpage.compat" in result.stdout + result.stderr


def test_a_failing_program_looks_as_under_python(run: Run, tmp_path: Path):
    (tmp_path / "broken.py").write_text("raise KeyError('here')\n")
    plain, ours = run("broken.py"), run("-m", "flashpage.compat", "broken.py")
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
    assert sys.executable not in ours.stderr
