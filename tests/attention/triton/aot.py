"""Compile the kernels ahead of time for GPUs that are not here, and read what they use.

    python tests/attention/triton/aot.py            a representative set
    python tests/attention/triton/aot.py --all      every row of the tables of tiles

The product's own functions are called, on small CPU tensors, behind a driver that compiles for
the wanted compute capability and launches nothing. Prints a table; fails where a kernel that must
not spill registers does, or asks for more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from flashpage.attention.dispatch import AttentionInputs, DecodeInputs
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.backward import backward
from flashpage.attention.triton.cache import append_kv, store_kv
from flashpage.attention.triton.decode import decode
from flashpage.attention.triton.forward import forward
from flashpage.layers.triton_kernels import add_rms_norm, rotate_and_store, silu_and_mul
from flashpage.layers.triton_linear import add_norm_linear, linear
from flashpage.layers.triton_products import product
from flashpage.layers.triton_sampler import sample_plain

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
CAPABILITIES = (80, 86, 89, 90, 100, 120)
SHARED_KB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@dataclass(frozen=True)
class Compiled:
    """What one compiled kernel uses, of one thread (registers, local bytes) or block (shared)."""

    name: str
    seconds: float
    registers: int
    local_bytes: int
    """stack and spills"""
    shared_bytes: int
    instructions: dict[str, int]


class _Driver:
    """Knows a target and nothing else."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    usage = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[list[Compiled]]:
    """Calls within compile for `capability`; the list fills with what was compiled."""
    compiled: list[Compiled] = []
    started = [time.perf_counter()]

    def record(*_: Any, **kwargs: Any) -> None:
        cache = kwargs["fn"].jit_function.device_caches[capability][0]
        kernel: CompiledKernel = cache[kwargs["key"]]
        registers, local_bytes = _resources(kernel.asm["cubin"])
        ptx = kernel.asm["ptx"]
        kinds = ("wgmma.mma_async", "mma.sync", "cp.async.bulk", "cp.async.c", "tcgen05.mma")
        compiled.append(
            Compiled(
                kernel.name,
                time.perf_counter() - started[0],
                registers,
                local_bytes,
                kernel.metadata.shared,
                {kind: n for kind in kinds if (n := ptx.count(kind))},
            )
        )
        started[0] = time.perf_counter()

    previous = driver._active
    driver.set_active(_Driver(capability))
    with (
        mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", record),
        mock.patch.object(CompiledKernel, "run", property(lambda self: mock.Mock())),
        mock.patch.object(CompiledKernel, "launch_metadata", return_value=None),
        mock.patch.object(runtime, "capability", return_value=capability),
        mock.patch.object(runtime, "num_multiprocessors", return_value=132),
    ):
        try:
            yield compiled
        finally:
            driver._active = previous


# ---------------------------------------------------------------------------------------------
# What is compiled
# ---------------------------------------------------------------------------------------------

HEADS, KV_HEADS = 4, 2


def _problem(layout: str, dtype: torch.dtype, head_dim: int, **options: Any) -> Problem:
    return Problem(
        layout=layout,
        device=torch.device("cpu"),
        dtype=dtype,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        **options,
    )


def _inputs(
    layout: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    problem: Problem,
    max_seqlen: int = 4096,
) -> AttentionInputs:
    tokens = (256,) if layout != "dense" else (2, 128)
    q = torch.empty(*tokens, HEADS, head_dim, dtype=dtype)
    pool = (16, block_size) if layout == "paged" else tokens
    k, v = (torch.empty(*pool, KV_HEADS, head_dim, dtype=dtype) for _ in range(2))
    cu = torch.zeros(3, dtype=torch.int32) if layout != "dense" else None
    table = torch.zeros(2, 8, dtype=torch.int32) if layout == "paged" else None
    slopes = torch.zeros(HEADS) if problem.has_alibi else None
    rng_state = torch.zeros(2, dtype=torch.int64) if problem.dropout_p else None
    return AttentionInputs(q, k, v, cu, cu, table, slopes, rng_state, max_seqlen, max_seqlen)


def compile_forward(
    layout: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int = 0,
    max_seqlen: int = 4096,
    **options: Any,
) -> None:
    problem = _problem(layout, dtype, head_dim, **options)
    inputs = _inputs(layout, dtype, head_dim, block_size, problem, max_seqlen)
    module = sys.modules[forward.__module__]
    with mock.patch.object(module, "_num_splits", return_value=1):
        forward(problem, inputs, problem.dropout_p > 0.0)
    if layout == "paged":
        with mock.patch.object(module, "_num_splits", return_value=4):
            forward(problem, inputs, False)


def compile_backward(layout: str, dtype: torch.dtype, head_dim: int, **options: Any) -> None:
    problem = _problem(layout, dtype, head_dim, **options)
    inputs = _inputs(layout, dtype, head_dim, 0, problem)
    lse = torch.zeros(*inputs.q.shape[:-3], HEADS, inputs.q.shape[-3])
    out = torch.empty_like(inputs.q)
    backward(problem, inputs, out.clone(), None, out, lse)


def compile_decode(
    dtype: torch.dtype, head_dim: int, block_size: int, seqlen_q: int = 1, **options: Any
) -> None:
    problem = _problem("paged" if block_size else "dense", dtype, head_dim, **options)
    pool = (64, block_size) if block_size else (2, 256)
    k, v = (torch.empty(*pool, KV_HEADS, head_dim, dtype=dtype) for _ in range(2))
    q = torch.empty(2, seqlen_q, HEADS, head_dim, dtype=dtype)
    table = torch.zeros(2, 8, dtype=torch.int32) if block_size else None
    lengths = torch.zeros(2, dtype=torch.int32)
    slopes = torch.zeros(HEADS) if problem.has_alibi else None
    for num_splits in (1, 4):
        decode(problem, DecodeInputs(q, k, v, lengths, 1, table, None, None, slopes, num_splits))


def compile_cache(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    k = torch.empty(2, 1, KV_HEADS, head_dim, dtype=dtype)
    q = torch.empty(2, 1, HEADS, head_dim, dtype=dtype)
    pages = torch.empty(8, block_size, KV_HEADS, head_dim, dtype=dtype)
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    cos = torch.empty(4 * block_size, head_dim // 2, dtype=dtype)
    append_kv(q, k, k, pages, pages, lengths, cos, cos, table, None, None, False, True)
    store_kv(k[:, 0], k[:, 0], pages, pages, torch.zeros(2, dtype=torch.int64))


def compile_layers(dtype: torch.dtype) -> None:
    """The engine's small kernels, at the sizes of Qwen3-0.6B."""
    x = torch.empty(2, 1024, dtype=dtype)
    add_rms_norm(x, x, x[0], 1e-6)
    silu_and_mul(torch.empty(2, 6144, dtype=dtype))
    qkv, angles = torch.empty(2, 32, 128, dtype=dtype), torch.empty(2, 1, 128, dtype=dtype)
    pages = torch.empty(8, 64, 8, 128, dtype=dtype)
    weight, slots = torch.empty(128, dtype=dtype), torch.zeros(2, dtype=torch.int32)
    rotate_and_store(qkv, 16, 8, weight, weight, 1e-6, angles, angles, pages, pages, slots)
    rotate_and_store(qkv, 16, 8, None, None, 0.0, angles, angles, pages, pages, slots)
    draw = torch.empty(2), torch.empty(2), torch.empty(2, dtype=torch.float64)
    cut = torch.empty(2, dtype=torch.int32), torch.empty(2)
    sample_plain(torch.empty(2, 151936, dtype=dtype), *draw, *cut)


def compile_few_rows(dtype: torch.dtype, num_rows: int, hidden: int, intermediate: int) -> None:
    """A product with all that can be fused with it, and one without."""
    x = torch.empty(num_rows, hidden, dtype=dtype)
    up = torch.empty(2 * intermediate, hidden, dtype=dtype)
    down = torch.empty(hidden, intermediate, dtype=dtype)
    gated, _ = add_norm_linear(x, x, x[0], 1e-6, up, None, gated=True)
    linear(gated, down, x[0])


def compile_some_rows(dtype: torch.dtype, num_rows: int, hidden: int, intermediate: int) -> None:
    """A product in parts and the norm that adds them up, and a gated one."""
    x = torch.empty(num_rows, hidden, dtype=dtype)
    up = torch.empty(2 * intermediate, hidden, dtype=dtype)
    down = torch.empty(hidden, intermediate, dtype=dtype)
    gated = product(x, up, None, gated=True)
    add_rms_norm(product(gated, down, x[0]), x, x[0], 1e-6)


QWEN3_06B, LLAMA3_8B = (1024, 3072), (4096, 14336)


@dataclass(frozen=True)
class Case:
    """One call, compiled for one capability. `main`: its kernels must not spill."""

    name: str
    capability: int
    call: Callable[[], None]
    main: bool = False


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAUSAL = {"window_right": 0}


def representative() -> Iterator[Case]:
    """The main kernels for every GPU, and each option once."""
    for capability in CAPABILITIES:
        dense = partial(compile_forward, "dense", BF16, 128, **CAUSAL)
        yield Case("forward causal d 128", capability, dense, True)
        paged = partial(compile_decode, BF16, 128, 16, **CAUSAL)
        yield Case("decode pages of 16, d 128", capability, paged, True)
    for capability in (80, 90):
        dense = partial(compile_backward, "dense", BF16, 128, **CAUSAL)
        yield Case("backward causal d 128", capability, dense, True)
    for d in (128, 256):
        short = partial(compile_forward, "dense", BF16, d, 0, 128, **CAUSAL)
        yield Case(f"forward short d {d}", 90, short, True)
    yield Case("forward varlen d 64", 90, lambda: compile_forward("varlen", FP16, 64), True)
    yield Case("forward pages of 16", 90, lambda: compile_forward("paged", BF16, 128, 16), True)
    yield Case("forward pages of 256", 90, lambda: compile_forward("paged", BF16, 128, 256), True)
    for capability in (80, 90):
        yield Case("layers", capability, lambda: compile_layers(BF16), True)
    for capability in (80, 90, 100, 120):
        for rows in (1, 8):
            few = partial(compile_few_rows, BF16, rows, *QWEN3_06B)
            yield Case(f"products of {rows} rows", capability, few, True)
    for rows in (5, 128):
        some = partial(compile_some_rows, BF16, rows, *QWEN3_06B)
        yield Case(f"products of {rows} rows, in parts", 90, some, True)
    few = partial(compile_few_rows, BF16, 2, *LLAMA3_8B)
    yield Case("products of 2 rows, wide", 90, few, True)
    yield Case("cache", 90, lambda: compile_cache(BF16, 128, 16), True)
    options = {"window_left": 64, "window_right": 8, "has_alibi": True, "softcap": 20.0}
    yield Case("forward options", 86, lambda: compile_forward("varlen", FP16, 80, **options))
    yield Case("backward options", 86, lambda: compile_backward("varlen", FP16, 80, **options))
    yield Case("decode options", 86, lambda: compile_decode(FP16, 80, 0, 5, **options))
    yield Case("forward dropout", 89, lambda: compile_forward("dense", BF16, 64, dropout_p=0.1))
    yield Case("backward dropout", 89, lambda: compile_backward("dense", BF16, 64, dropout_p=0.1))


def every() -> Iterator[Case]:
    """Every row of the tables of tiles, with and without a mask."""
    yield from representative()
    for capability in (80, 90, 100, 120):
        for dtype in (FP16, BF16, FP32):
            for rows in (1, 2, 4, 8):
                for sizes in (QWEN3_06B, LLAMA3_8B):
                    few = partial(compile_few_rows, dtype, rows, *sizes)
                    yield Case(f"products of {rows} rows, {sizes} {dtype}", capability, few, True)
    for capability in (75, *CAPABILITIES):
        for dtype in (FP16, BF16, FP32):
            if capability == 75 and dtype == BF16:
                continue
            for d in (16, 32, 64, 128, 256):
                label = f"{str(dtype).removeprefix('torch.')} d {d}"
                cases: list[tuple[str, Callable[[], None]]] = []
                for mask, options in (("full", {}), ("causal", CAUSAL)):
                    dense = partial(compile_forward, "dense", dtype, d, **options)
                    varlen = partial(compile_backward, "varlen", dtype, d, **options)
                    cases.append((f"forward {mask}", dense))
                    if capability == 90 and d >= 128 and dtype != FP32:
                        short = partial(compile_forward, "dense", dtype, d, 0, 128, **options)
                        cases.append((f"forward short {mask}", short))
                    if not (capability == 75 and dtype == FP32 and d > 128):  # not served
                        cases.append((f"backward {mask}", varlen))
                for page in (0, 16, 256):
                    for seqlen_q in (1, 40):
                        call = partial(compile_decode, dtype, d, page, seqlen_q, **CAUSAL)
                        cases.append((f"decode page {page} q {seqlen_q}", call))
                cases.append(("cache", partial(compile_cache, dtype, d, 16)))
                for name, call in cases:
                    yield Case(f"{name} {label}", capability, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every row of the tables")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--capability", type=int, help="one capability")
    options = parser.parse_args()
    faults = []
    start = time.perf_counter()
    count = 0
    for case in every() if options.all else representative():
        if options.only not in case.name:
            continue
        if options.capability and case.capability != options.capability:
            continue
        with compiling_for(case.capability) as compiled:
            case.call()
        for k in compiled:
            count += 1
            print(
                f"sm_{case.capability:<4} {case.name:<34} {k.name:<22} {k.seconds:5.1f} s "
                f"{k.registers:4} registers {k.local_bytes:5} B local {k.shared_bytes / 1024:6.1f} "
                f"KB shared  {k.instructions}",
                flush=True,
            )
            where = f"sm_{case.capability}, {case.name}: {k.name}"
            if case.main and k.local_bytes:
                faults.append(f"{where} spills {k.local_bytes} bytes a thread")
            if k.shared_bytes > SHARED_KB[case.capability] * 1024:
                faults.append(f"{where} needs {k.shared_bytes} bytes of shared memory")
    print(f"{count} kernels compiled, not run, in {time.perf_counter() - start:.0f} s")
    print("\n".join(faults) or "no faults")
    sys.exit(bool(faults) or not count)


if __name__ == "__main__":
    main()
