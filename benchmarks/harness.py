"""What the benchmarks share: fair timing of two contenders, set-up, table, JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def interleaved_medians(
    contenders: dict[str, Callable[[], object]], rounds: int = 11, warmup: int = 2
) -> dict[str, float]:
    """Median seconds of each contender, called in turn so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(-warmup, rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            if round_ >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def setup() -> dict[str, Any]:
    """Hardware and versions, printed and returned."""
    info = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in info.items()), flush=True)
    return info


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))


def finish(benchmark: str, info: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """The last line: everything as one JSON document."""
    print(json.dumps({"benchmark": benchmark, "setup": info, "results": results}))
