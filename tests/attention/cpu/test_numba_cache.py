"""Where compiled kernels are kept, and when they are compiled anew: a copy of the package each."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import flashpage
from flashpage.attention.cpu import numba_cache

# The kernel that compiles fastest.
SCRIPT = """
from flashpage.attention.cpu.numba_runtime import call, kernels
assert call(kernels("flashpage.layers.cpu.sync").try_to_meet, 1, 1, 10)
"""
PLACES = ("FLASHPAGE_CACHE", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")
COMPILED = "compiled flashpage's CPU kernel 'try_to_meet' in"


@pytest.fixture
def package(tmp_path):
    """A package in which nothing is compiled yet."""
    copy = tmp_path / "library" / "flashpage"
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(flashpage.__file__).parent, copy, ignore=skipped)
    return copy


def run(package, **variables):
    """What a process says that needs the kernel."""
    environment = {k: v for k, v in os.environ.items() if k not in PLACES}
    environment |= {"PYTHONPATH": str(package.parent), **variables}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_compiling_is_said_once_and_kept_in_the_package(package):
    assert run(package).count(COMPILED) == 1
    assert "compil" not in run(package)
    # A damaged file, as a full disk leaves it, is compiled anew.
    kept = list((package / "__pycache__").glob("kernels-*/sync.try_to_meet-*.nb[ic]"))
    assert len(kept) == 2
    for file in kept:
        file.write_bytes(file.read_bytes()[:100])
    assert run(package).count(COMPILED) == 1


def test_a_change_of_an_imported_file_compiles_anew(package):
    run(package)
    with (package / "attention" / "cpu" / "numba_math.py").open("a") as file:
        file.write("# changed\n")
    assert run(package).count(COMPILED) == 1
    assert len(list((package / "__pycache__").glob("kernels-*"))) == 2


def test_a_package_that_can_not_be_written_keeps_them_in_the_users_cache(package, tmp_path):
    (package / "__pycache__").write_text("a file where the folder would be")
    assert COMPILED in run(package, FLASHPAGE_CACHE=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").glob("kernels-*/*.nbc"))
    assert "compil" not in run(package, FLASHPAGE_CACHE=str(tmp_path / "cache"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a home that is no folder")
def test_where_nothing_else_can_be_written_a_temporary_folder_keeps_them(package, tmp_path):
    (package / "__pycache__").write_text("a file where the folder would be")
    for times in (1, 0):
        said = run(package, HOME=os.devnull, TMPDIR=str(tmp_path))
        assert said.count("kept in a temporary folder") == 1
        assert said.count(COMPILED) == times
    (place,) = tmp_path.glob("flashpage-*")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert list(place.glob("kernels-*/*.nbc"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_a_temporary_folder_that_others_may_write_is_not_used(tmp_path, monkeypatch):
    """Whoever can write there could have this process run their code."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = numba_cache._temporary_place()
    assert place is not None
    place.chmod(0o777)
    assert numba_cache._temporary_place() is None
    place.rmdir()
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    assert numba_cache._temporary_place() is None


def test_folders_of_old_states_do_not_pile_up(tmp_path):
    for i in range(numba_cache.KEPT + 4):
        folder = numba_cache._made(tmp_path, f"kernels-{i}")
        assert folder == tmp_path / f"kernels-{i}"
        os.utime(folder, (i, i))
    (tmp_path / "other").mkdir()
    numba_cache._made(tmp_path, "kernels-new")
    numba_cache._made(tmp_path, "kernels-new")
    last = range(4, numba_cache.KEPT + 4)
    expected = {f"kernels-{i}" for i in last} | {"kernels-new", "other"}
    assert {x.name for x in tmp_path.iterdir()} == expected


def test_torch_computes_where_numba_may_not_compile():
    script = """
import torch
from flashpage import flash_attn_with_kvcache
from flashpage.attention.cpu.numba_runtime import why_unavailable
assert "NUMBA_DISABLE_JIT" in why_unavailable()
q, k, v = (torch.randn(1, n, 2, 32) for n in (1, 9, 9))
out = flash_attn_with_kvcache(q, k, v, cache_seqlens=9)
scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 32**0.5
expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
assert (out - expected).abs().max() < 1e-5
"""
    environment = os.environ | {
        "NUMBA_DISABLE_JIT": "1",
        "PYTHONPATH": str(Path(flashpage.__file__).parents[1]),
    }
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
