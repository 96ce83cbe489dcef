"""Which dot-product instructions of this processor the kernels are made of.

Every form gives the same bits: products of 8-bit integers are summed exactly, and what follows is
the same float32 arithmetic in the same order. A form is passed to kernels as a tuple whose length
says which: that makes it part of a kernel's type, so that each form is compiled, and kept on disk,
by itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache

from flashpage.attention.cpu.numba_runtime import why_unavailable
from flashpage.errors import ArgumentError

AMX, VNNI, AVX_VNNI, AVX2, SDOT, PORTABLE, PAIRS = range(1, 8)
NAMES = {
    "amx": AMX,
    "vnni_pairs": PAIRS,
    "vnni": VNNI,
    "avx_vnni": AVX_VNNI,
    "avx2": AVX2,
    "sdot": SDOT,
    "portable": PORTABLE,
}
"""Best first. `portable` uses no instruction by name, and any vectors that there are; it is for
tests, as torch is faster."""

_VARIABLE = "FLASHPAGE_CPU_FORM"
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18
_SYS_ARCH_PRCTL = 158

Tag = tuple[int, ...]


def tag(name: str) -> Tag:
    """The form as kernels take it."""
    return (0,) * NAMES[name]


def available_forms() -> list[str]:
    """Forms that this processor can run, best first; empty without numba."""
    if why_unavailable() is not None:
        return []
    features = _features()
    needs = {
        "amx": ("avx512vnni", "avx512bw", "avx512vl", "amx-tile", "amx-int8"),
        "vnni_pairs": ("avx512vnni", "avx512bw", "avx512vl"),
        "vnni": ("avx512vnni", "avx512bw", "avx512vl"),
        "avx_vnni": ("avxvnni", "avx2", "fma", "f16c"),
        "avx2": ("avx2", "fma", "f16c"),
    }
    found = [name for name, need in needs.items() if all(features.get(f) for f in need)]
    if "amx" in found and not _may_use_tiles():
        found.remove("amx")
    if "vnni_pairs" in found and not _adds_beside_products():
        found.remove("vnni_pairs")
        found.append("vnni_pairs")
    if platform.machine().lower() in ("aarch64", "arm64") and features.get("dotprod"):
        found.append("sdot")
    return [*found, "portable"]


def why_no_form() -> str | None:
    """None if the kernels serve this processor, else the reason."""
    reason = why_unavailable()
    if reason is None and available_forms() == ["portable"]:
        reason = "this processor has none of AVX-512 VNNI, AVX2 and the ARM dot product"
    return reason


def best_form() -> str:
    """The best form there is, or what the environment variable FLASHPAGE_CPU_FORM names.

    Raises:
        ArgumentError: the variable names no form, or one that this processor can not run.
    """
    available = available_forms()
    wanted = os.environ.get(_VARIABLE)
    if not wanted:
        return available[0]
    if wanted not in NAMES:
        raise ArgumentError(f"{_VARIABLE} = {wanted!r} must be one of {', '.join(NAMES)}")
    if wanted not in available:
        raise ArgumentError(
            f"{_VARIABLE} = {wanted!r} can not be run here: this processor has "
            f"{', '.join(available)}"
        )
    return wanted


@cache
def _features() -> dict[str, bool]:
    import llvmlite.binding as llvm

    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know this processor
        return {}


@cache
def _adds_beside_products() -> bool:
    """AMD's processors with AVX-512 have places of their own for additions; Intel's add where they
    multiply."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name().startswith("znver")


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for the tile registers: a process has them only once it asked."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    request = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return libc.syscall(*(ctypes.c_long(x) for x in request)) == 0
