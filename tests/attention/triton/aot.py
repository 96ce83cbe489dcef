"""Compile the kernels ahead of time for GPUs that are not here, and read what they use.

    python tests/attention/triton/aot.py            a representative set
    python tests/attention/triton/aot.py --all      every row of the tables of tiles

The product's own functions are called, on small CPU tensors, behind a driver that compiles for
the wanted compute capability and launches nothing. Prints a table; fails where a kernel that must
not spill registers does, or asks for more shared memory than the GPU has.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from flashpage.attention.triton import runtime

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
    nothing = property(lambda self: lambda *args: None)
    with (
        mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", record),
        mock.patch.object(CompiledKernel, "run", nothing),
        mock.patch.object(CompiledKernel, "launch_metadata", lambda *_: None),
        mock.patch.object(runtime, "capability", lambda device: capability),
        mock.patch.object(runtime, "num_multiprocessors", lambda device: 132),
    ):
        try:
            yield compiled
        finally:
            driver._active = previous
