"""Compile the kernels for Hopper without one, and read what ptxas says of them.

    python tests/attention/hopper/aot.py            a representative set
    python tests/attention/hopper/aot.py --all      every row of the table of tiles, with every mask

Fails where ptxas would serialise the matrix products (it then says why), where a kernel that must
not spill registers does, where one needs more shared memory than there is, or where it stores over
a barrier.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
from aot import KV_HEADS, SHARED_KB, TOOLS, _inputs, _problem, compiling_for

from flashpage.attention.dispatch import DecodeInputs
from flashpage.attention.hopper.backward import backward
from flashpage.attention.hopper.backward_kernel import backward_kernel
from flashpage.attention.hopper.decode import decode
from flashpage.attention.hopper.decode_kernel import decode_kernel
from flashpage.attention.hopper.forward import forward
from flashpage.attention.hopper.forward_kernel import forward_kernel
from flashpage.attention.problem import Problem

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """One call."""

    name: str
    """of a backward or a decode, it begins so"""
    layout: str
    head_dim: int
    dtype: torch.dtype = BF16
    block_size: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    max_seqlen: int = 4096
    spills: int = 0
    """bytes a thread that are known and allowed"""
    num_splits: int = 1
    """of a decode"""


CAUSAL = {"window_right": 0}
WINDOW = {"window_left": 64, "window_right": 8}
SOFTCAP = {"softcap": 20.0}


def representative() -> Iterator[Case]:
    yield Case("causal d 64", "dense", 64, options=CAUSAL)
    yield Case("causal d 64 short", "dense", 64, options=CAUSAL, max_seqlen=512)
    yield Case("causal d 256", "dense", 256, options=CAUSAL)
    yield Case("pages of 16 causal d 96", "paged", 96, FP16, block_size=16, options=CAUSAL)
    for splits, page in ((1, 256), (2, 16)):
        name = f"decode pages of {page} {splits} causal d 128"
        yield Case(name, "paged", 128, BF16, page, CAUSAL, num_splits=splits)
    yield Case("backward causal d 128", "dense", 128, options=CAUSAL)
    yield Case("backward varlen d 64", "varlen", 64, FP16)
    for d in (64, 128):
        deterministic = {"deterministic": True}
        yield Case(f"backward deterministic d {d}", "dense", d, options=deterministic)


def every() -> Iterator[Case]:
    masks = {"full": {}, "causal": CAUSAL, "window": WINDOW, "softcap": {**CAUSAL, **SOFTCAP}}
    for d in (64, 128, 256):
        for mask, options in masks.items():
            for layout, page in (("dense", 0), ("varlen", 0), ("paged", 16), ("paged", 256)):
                name = f"{layout} {page or ''} {mask} d {d}"
                # Small pages with softcap: once a tile, outside the loops over keys.
                spills = 56 if d == 64 and page == 16 and mask == "softcap" else 32
                for seqlen in (512, 4096) if d == 64 else (4096,):
                    yield Case(f"{name} {seqlen}", layout, d, BF16, page, options, seqlen, spills)
                for splits in (1, 2) if layout != "varlen" else ():
                    decoded = f"decode {name} {splits}"
                    yield Case(
                        decoded, layout, d, BF16, page, options, 4096, 32 * (d == 256), splits
                    )
                if d <= 128 and not page:
                    for more in ({}, {"deterministic": True}):
                        name = f"backward {layout} {mask} d {d} {'deterministic' if more else ''}"
                        yield Case(name, layout, d, options={**options, **more}, spills=80)


def compile_case(case: Case) -> Any:
    """The compiled kernel of a case; nothing is launched."""
    problem = _problem(case.layout, case.dtype, case.head_dim, **case.options)
    if case.name.startswith("decode"):
        return _compile_decode(case, problem)
    x = _inputs(case.layout, case.dtype, case.head_dim, case.block_size, problem, case.max_seqlen)
    kernel = backward_kernel if case.name.startswith("backward") else forward_kernel
    with compiling_for(90):
        if kernel is forward_kernel:
            forward(problem, x)
        else:
            lse = torch.zeros(*x.q.shape[:-3], *x.q.shape[-2:-4:-1])
            backward(problem, x, torch.empty_like(x.q), None, torch.empty_like(x.q), lse)
    return list(kernel.device_caches[90][0].values())[-1]


def _compile_decode(case: Case, problem: Problem) -> Any:
    """16 queries a sequence."""
    pages = (16, case.block_size) if case.block_size else (2, 4096)
    q = torch.empty(2, 16, problem.num_q_heads, case.head_dim, dtype=case.dtype)
    k, v = (torch.empty(*pages, KV_HEADS, case.head_dim, dtype=case.dtype) for _ in range(2))
    lengths = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 8, dtype=torch.int32) if case.block_size else None
    with compiling_for(90):
        decode(problem, DecodeInputs(q, k, v, lengths, 0, table, None, None, None, case.num_splits))
    return list(decode_kernel.device_caches[90][0].values())[-1]


@gluon.constexpr_function
def _register_order(n, warps):
    """Two elements of a row, two of the row 8 further down, then those 8 columns on."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], *([0, 8 << i] for i in range((n // 8).bit_length() - 1))],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[16 * warps, n],
    )


@gluon.jit
def _register_order_kernel(N: gl.constexpr, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    found: gl.constexpr = gl.to_linear_layout(LAYOUT, [16 * WARPS, N])
    expected: gl.constexpr = _register_order(N, WARPS)
    gl.static_assert(found == expected)


def check_register_order() -> None:
    """What `instructions.py` takes for granted of a thread's registers."""
    for n, warps in ((64, 4), (128, 4), (256, 4), (64, 8), (128, 8)):
        with compiling_for(90):
            _register_order_kernel[(1,)](n, warps, num_warps=warps)


def judge(ptx: str) -> tuple[int, int, list[str]]:
    """Registers, bytes of spills, and warnings, as ptxas reports them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        said = subprocess.run(
            [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", Path(folder, "cubin")],
            capture_output=True,
            text=True,
            check=True,
        )
    text = said.stdout + said.stderr
    registers = int(re.search(r"Used (\d+) registers", text)[1])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", text)))
    return registers, spills, [line for line in text.splitlines() if "C75" in line]


_BARRIER_SET_UP = re.compile(r"SYNCS\.EXCH\.64 URZ, \[UR\d+\+(0x[0-9a-f]+)\]")
_STORE = re.compile(r"STS(\.64|\.128|\.U8|) \[UR\d+\+(0x[0-9a-f]+)\]")
_STORED_BYTES = {"": 4, ".64": 8, ".128": 16, ".U8": 1}


def overwritten_barriers(cubin: bytes) -> list[str]:
    """Places of barriers in shared memory that the kernel also stores other things to.

    Triton gives the memory of a barrier that is set up and never waited at to what warps are told
    when they start. It held until processes shared a GPU: then such kernels ended in illegal memory
    accesses within seconds. Of places that are computed, as those of the slots in which a producer
    tells of its work, the first is looked at.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    barriers = {int(place, 16) for place in _BARRIER_SET_UP.findall(code)}
    assert barriers, "every kernel has barriers: is this how they are set up?"
    stored = {
        int(place, 16) + byte
        for kind, place in _STORE.findall(code)
        for byte in range(_STORED_BYTES[kind])
    }
    return [hex(b) for b in sorted(barriers) if not stored.isdisjoint(range(b, b + 8))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every row of the table, every mask")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    cases = [c for c in (every() if options.all else representative()) if options.only in c.name]
    check_register_order()
    faults = []
    with ThreadPoolExecutor(2) as pool:
        pending = []
        for case in cases:
            kernel = compile_case(case)
            pending.append((case, kernel, pool.submit(judge, kernel.asm["ptx"])))
        for case, kernel, judged in pending:
            registers, spills, warnings = judged.result()
            shared, products = kernel.metadata.shared, kernel.asm["ptx"].count("wgmma.mma_async")
            print(
                f"{case.name:<32} {registers:4} registers {spills:4} B spilled "
                f"{shared / 1024:6.1f} KB shared  {products} wgmma"
            )
            faults += [f"{case.name}: {warning}" for warning in warnings]
            if overwritten := overwritten_barriers(kernel.asm["cubin"]):
                faults.append(f"{case.name} stores over barriers at {', '.join(overwritten)}")
            if spills > case.spills:
                faults.append(f"{case.name} spills {spills} bytes a thread")
            if shared > SHARED_KB[90] * 1024:
                faults.append(f"{case.name} needs {shared} bytes of shared memory")
    print(f"{len(cases)} kernels compiled, not run")
    print("\n".join(faults) or "no faults")
    sys.exit(bool(faults) or not cases)


if __name__ == "__main__":
    main()
