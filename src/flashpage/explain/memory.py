"""Peak memory of attention beyond its inputs, each figure measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import flashpage
from flashpage.errors import ArgumentError, UnsupportedError
from flashpage.explain.hardware import free_bytes, this_torch_device
from flashpage.explain.measure import IMPLEMENTATIONS, SCORE_COPIES, make_inputs, runner
from flashpage.explain.roofline import Workload

COMPARED = ("standard", "tiled", "flashpage")
WARM_UP_SEQLEN = 64

# With glibc's defaults, freed blocks of up to 32 MiB stay with the process and are used again:
# their second use would not be seen.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class MemoryPoint:
    """Peak bytes beyond the inputs, the output included; None where it would not fit."""

    name: str
    seqlen: int
    peak_bytes: int | None


def halvings(seqlen: int, count: int = 5) -> list[int]:
    """Sequence lengths from small to `seqlen`, each twice the one before."""
    return sorted({max(1, seqlen >> i) for i in range(count)})


def at_seqlen(work: Workload, seqlen: int) -> Workload:
    """The same batch with every sequence `seqlen` long."""
    seqlens = (seqlen,) * len(work.seqlens_k)
    return replace(work, seqlens_q=seqlens, seqlens_k=seqlens)


def measure_memory(
    work: Workload,
    seqlens: Sequence[int],
    *,
    names: Sequence[str] = COMPARED,
    progress: Callable[[str], None] = lambda line: None,
) -> list[MemoryPoint]:
    """Peak extra memory of a forward without mask, at each sequence length.

    Args:
        work: all but the lengths.
        seqlens: of all its sequences.
        names: from `IMPLEMENTATIONS`.
        progress: told what is measured next.

    Raises:
        ArgumentError: a size or name that is not possible, or a workload that is not dense
            self-attention without mask.
        UnsupportedError: the system does not say how much memory a process took.
    """
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ArgumentError(f"names must be from {IMPLEMENTATIONS}, got {name!r}")
    if work.layout != "dense" or work.causal or work.seqlens_q != work.seqlens_k:
        raise ArgumentError(
            "memory must be of dense attention without mask (no causal, varlen, decode), "
            f"got {work.describe()}"
        )
    limit = free_bytes(this_torch_device()) // 2
    points = []
    for seqlen in seqlens:
        sized = at_seqlen(work, seqlen)
        for name in names:
            if name == "standard" and SCORE_COPIES * sized.score_bytes > limit:
                points.append(MemoryPoint(name, seqlen, None))
                continue
            progress(f"{name}, N = {seqlen}")
            points.append(MemoryPoint(name, seqlen, _peak_in_a_process(name, sized)))
    return points


def _peak_in_a_process(name: str, work: Workload) -> int:
    home = str(Path(flashpage.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-m", "flashpage.explain.memory", name, json.dumps(asdict(work))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **MALLOC, "PYTHONPATH": os.pathsep.join([home, *sys.path])},
    )
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnsupportedError(
            f"memory of {name} at seqlen {work.seqlens_k[0]} can not be measured here: the process "
            f"ended with code {result.returncode}: {reason}"
        )
    return int(result.stdout)


# ---------------------------------------------------------------------------------------------
# In the process of its own
# ---------------------------------------------------------------------------------------------


def _main(name: str, fields: dict[str, Any]) -> None:
    """Print the peak growth in bytes."""
    work = Workload(**{key: tuple(x) if isinstance(x, list) else x for key, x in fields.items()})
    device = this_torch_device()
    with torch.inference_mode():
        runner(name, make_inputs(at_seqlen(work, WARM_UP_SEQLEN), device))()
        call = runner(name, make_inputs(work, device))
        print(_cuda_growth(call) if device.type == "cuda" else _resident_growth(call))


def _cuda_growth(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _resident_growth(call: Callable[[], object]) -> int:
    """How far the resident size rose above what it was.

    Linux keeps the peak for each address space and lets it be reset. `getrusage` is the fallback
    elsewhere: its peak can be that of the parent process, before this program was loaded.
    """
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = _proc_status("VmRSS")
        call()
        return _proc_status("VmHWM") - before
    except (OSError, KeyError):
        pass
    try:
        import resource
    except ImportError:
        raise UnsupportedError("this system does not say what a process took at most") from None
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


def _proc_status(field: str) -> int:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields[field].split()[0]) * 1024


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
