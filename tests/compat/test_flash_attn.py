"""`import flash_attn` finds flashpage: in this process, and in one that only has PYTHONPATH."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashpage
from flashpage.compat.flash_attn import SHIM, install, search_path, uninstall
from flashpage.errors import ArgumentError

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
SEQUENCES = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {SEQUENCES}, {TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {SEQUENCES}, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}

# What flash-attn's own test file takes, and what programs are known to take.
IMPORTS = """
import flash_attn
from flash_attn import (
    flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache,
)
from flash_attn.bert_padding import (
    index_first_axis, index_first_axis_residual, index_put_first_axis, pad_input, unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flash_attn.flash_attn_interface import (
    USE_TRITON_ROCM, _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_backward,
    _flash_attn_varlen_forward, _get_block_size_n, _wrapped_flash_attn_forward, flash_attn_func,
    flash_attn_gpu,
)
from flash_attn.layers.rotary import (
    RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_func, apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_, apply_rotary_emb_torch,
)
from flash_attn.ops.triton.rotary import apply_rotary
"""
CHECKS = f"""{IMPORTS}
import importlib.metadata as metadata
import flashpage
assert flash_attn.flash_attn_func is flashpage.flash_attn_func
assert flash_attn.__version__ == metadata.version("flash_attn") == metadata.version("flash-attn")
assert "flash_attn" in metadata.packages_distributions()["flash_attn"]
print("served by", flash_attn.__file__)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    uninstall()


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another flash_attn, imported in this process."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("from flash_attn import losses\n")
    (tmp_path / "flash_attn" / "losses.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("flash_attn")
    yield tmp_path
    for name in ("flash_attn", "flash_attn.losses"):
        sys.modules.pop(name, None)


def test_the_seven_functions_are_ours():
    install()
    module = importlib.import_module("flash_attn")
    assert sorted(module.__all__) == sorted(SIGNATURES)
    for name in SIGNATURES:
        assert getattr(module, name) is getattr(flashpage, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name: str):
    parameters = inspect.signature(getattr(flashpage, name)).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(shown) == SIGNATURES[name]


def test_install_and_uninstall_twice():
    before = list(sys.path)
    install()
    install()
    assert sys.path == [str(SHIM), *before]
    importlib.import_module("flash_attn.bert_padding")
    install()
    assert importlib.util.find_spec("flash_attn").origin.startswith(str(SHIM))
    assert importlib.metadata.version("flash_attn") == "2.8.3"
    uninstall()
    uninstall()
    assert sys.path == before
    assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]


def test_install_moves_to_the_front(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(SHIM)])
    install()
    assert (sys.path[0], sys.path.count(str(SHIM))) == (str(SHIM), 1)


def test_another_flash_attn_is_refused(foreign: Path):
    with pytest.raises(
        ArgumentError, match=f"override must be True to replace flash_attn, .*{foreign}"
    ):
        install()
    assert str(SHIM) not in sys.path


def test_another_flash_attn_is_replaced_on_request(foreign: Path):
    install(override=True)
    assert importlib.import_module("flash_attn").flash_attn_func is flashpage.flash_attn_func
    assert "flash_attn.losses" not in sys.modules
    uninstall()
    assert importlib.import_module("flash_attn").__file__.startswith(str(foreign))


def test_install_goes_before_one_that_is_not_imported_yet(run: Run, tmp_path: Path):
    (tmp_path / "flash_attn.py").write_text("raise SystemExit('the wrong one')\n")
    result = run("-c", f"from flashpage.compat import flash_attn as f; f.install()\n{CHECKS}")
    assert result.returncode == 0, result.stderr


def test_search_path_serves_any_program(run: Run, tmp_path: Path):
    (tmp_path / "program.py").write_text(CHECKS)
    result = run("program.py", path=search_path())
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"served by {SHIM}")


def test_search_path_has_no_site_folder():
    for folder in search_path().split(os.pathsep):
        assert Path(folder).is_dir()
        assert Path(folder).name != "site-packages"


def test_transformers_finds_it_installed(run: Run):
    """As far as the package goes; whether it is used, transformers decides by the device."""
    checks = """
from transformers.utils import import_utils
assert import_utils._is_package_available("flash_attn", return_version=True) == (True, "2.8.3")
import_utils.is_torch_cuda_available = lambda: True
assert import_utils.is_flash_attn_2_available()
assert import_utils.is_flash_attn_greater_or_equal("2.8.0")
assert not import_utils.is_flash_attn_4_available()
"""
    pytest.importorskip("transformers")
    result = run("-c", checks, path=search_path())
    assert result.returncode == 0, result.stderr
