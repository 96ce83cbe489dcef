"""The ARM form where there is no ARM processor: compiled for one, and run in an emulator if
there is one (Debian: qemu-user and binutils-aarch64-linux-gnu)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashpage.attention.cpu.numba_runtime import kernels
from flashpage.layers.cpu import forms

pytest.importorskip("numba")

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types

dots = kernels("flashpage.layers.cpu.dots")
vectors = kernels("flashpage.layers.cpu.vectors")

TRIPLE = "aarch64-unknown-linux-gnu"
TOOLS = ("qemu-aarch64", "aarch64-linux-gnu-as", "aarch64-linux-gnu-ld")
CASES = 300
# Reads what is given from stdin, calls `products`, and writes the results to stdout.
PROGRAM = f"""
        .globl  _start
_start: mov     x0, 0
        ldr     x1, =given
        ldr     x2, ={192 * CASES}
        mov     x8, 63
        svc     0
        ldr     x0, =given
        ldr     x1, =results
        bl      products
        mov     x0, 1
        ldr     x1, =results
        ldr     x2, ={64 * CASES}
        mov     x8, 64
        svc     0
        mov     x0, 0
        mov     x8, 93
        svc     0
        .bss
        .balign 64
given:  .skip   {192 * CASES}
results: .skip  {64 * CASES}
"""


@pytest.fixture(scope="module")
def arm() -> llvm.TargetMachine:
    """The first processors that had the instruction."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple(TRIPLE)
    except RuntimeError as error:
        pytest.skip(f"this llvmlite compiles for no ARM processor: {error}")
    return target.create_target_machine(
        cpu="cortex-a76", features="+dotprod", opt=3, reloc="static", codemodel="small"
    )


def parsed(module: ir.Module) -> llvm.ModuleRef:
    module.triple = TRIPLE
    reference = llvm.parse_assembly(str(module))
    reference.verify()
    return reference


def products(bits: int) -> ir.Module:
    """`products(given, results)`: `CASES` times acc, w and x, and `dots.dot` of each."""
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [vectors.I64] * 2)
    function = ir.Function(module, kind, "products")
    b = ir.IRBuilder(function.append_basic_block())
    given, results = function.args

    def body(case: Any, _: list[Any]) -> list[Any]:
        start = vectors.scaled(b, case, 192)
        acc, w, x = (
            vectors.load(b, given, b.add(start, vectors.i(64 * j)), vectors.VI32, 64)
            for j in range(3)
        )
        value = dots.dot(b, forms.SDOT, acc, w, x, bits)
        vectors.store(b, value, results, vectors.scaled(b, case, 64), 64)
        return []

    vectors.loop(b, vectors.i(CASES), 1, [], body)
    b.ret_void()
    return module


@pytest.mark.parametrize(("bits", "count"), [(4, 4), (8, 12)])
def test_the_instruction_is_used(arm: llvm.TargetMachine, bits: int, count: int) -> None:
    """Once for 16 bytes of 4-bit weights, and three times where they have 8 bits."""
    assert arm.emit_assembly(parsed(products(bits))).count("\tsdot\t") == count


@pytest.mark.parametrize("name", [n for n in vars(dots) if n.startswith(("q4_", "q6_", "q8_"))])
def test_every_kernel_compiles(arm: llvm.TargetMachine, name: str) -> None:
    intrinsic = getattr(dots, name)
    form = types.UniTuple(types.int64, forms.SDOT)
    count = intrinsic._defn.__code__.co_argcount - 2
    signature, generate = intrinsic._defn(None, form, *[types.int64] * count)
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [vectors.I64] * count)
    function = ir.Function(module, kind, "kernel")
    b = ir.IRBuilder(function.append_basic_block())

    class Context:
        def get_dummy_value(self) -> None:
            return None

    generate(Context(), b, signature, [None, *function.args])
    b.ret_void()
    assert "\tsdot\t" in arm.emit_assembly(parsed(module))


@pytest.mark.parametrize("bits", [4, 8])
def test_in_an_emulator(arm: llvm.TargetMachine, bits: int, tmp_path: Path) -> None:
    tools = [shutil.which(name) for name in TOOLS]
    if None in tools:
        pytest.skip(f"needs {', '.join(TOOLS)}")
    emulator, assembler, linker = tools
    acc = np.random.randint(-(2**20), 2**20, (CASES, 16), np.int32)
    w = np.random.randint(0, 2**bits, (CASES, 16, 4), np.uint8)
    x = np.random.randint(-127, 128, (CASES, 16, 4), np.int8)
    w[:2], x[0], x[1] = 2**bits - 1, 127, -127
    expected = acc + (w.astype(np.int32) * x).sum(-1, dtype=np.int32)

    (tmp_path / "products.o").write_bytes(arm.emit_object(parsed(products(bits))))
    subprocess.run([assembler, "-o", "start.o"], input=PROGRAM, text=True, cwd=tmp_path, check=True)
    objects = ["start.o", "products.o"]
    subprocess.run([linker, "-static", "-o", "program", *objects], cwd=tmp_path, check=True)
    (tmp_path / "given").write_bytes(
        b"".join(part[i].tobytes() for i in range(CASES) for part in (acc, w, x))
    )
    with (tmp_path / "given").open("rb") as given:
        written = subprocess.run(
            [emulator, "program"], stdin=given, cwd=tmp_path, capture_output=True, check=True
        ).stdout
    assert np.array_equal(np.frombuffer(written, np.int32).reshape(CASES, 16), expected)
