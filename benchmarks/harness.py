"""What the benchmarks share: fair timing, inputs, set-up, table, JSON."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashpage.explain.hardware import processor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


# ---------------------------------------------------------------------------------------------
# Timing
# ---------------------------------------------------------------------------------------------


def interleaved_medians(
    contenders: dict[str, Callable[[], object]], rounds: int = 11, warmup: int = 2
) -> dict[str, float]:
    """Median seconds of each contender on the CPU, called in turn so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(-warmup, rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            if round_ >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def gpu_medians(
    contenders: dict[str, Callable[[], object]], ms: int = 20, rounds: int = 7
) -> dict[str, float]:
    """Median seconds of each contender by CUDA events, a few calls each in turn. They are queued
    while the GPU sleeps, so that no time of Python is in it."""
    plans, times = {}, {name: [] for name in contenders}
    for name, call in contenders.items():
        call()
        seconds, host = _timed(call, 2, 0.01)
        calls = max(1, round(ms / 1e3 / seconds))
        plans[name] = calls, host * calls * 2.5 + 2e-4
    for name in _turns(list(contenders), rounds):
        times[name].append(_timed(contenders[name], *plans[name])[0])
    return {name: statistics.median(t) for name, t in times.items()}


def _turns(names: list[str], rounds: int) -> Iterator[str]:
    """Each name `rounds` times, each round in another order: where a GPU is at its power limit, who
    comes after one that draws little is up to 7 % faster."""
    order = random.Random(0)
    for _ in range(rounds):
        yield from order.sample(names, len(names))


def _timed(call: Callable[[], object], calls: int, sleep: float) -> tuple[float, float]:
    """Seconds of a call on the GPU, and of the host until it has queued one."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(round(sleep * 2e9))  # cycles
    start.record()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    host = (time.perf_counter() - began) / calls
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls / 1e3, host


def graph_medians(
    contenders: dict[str, Callable[[], object]], calls: int | None = 20, rounds: int = 11
) -> dict[str, float]:
    """Median seconds of each contender's work on the GPU alone: CUDA graphs of `calls` calls in a
    row, None for as many as take 20 ms, are replayed in turn, so that no time of Python is in it.
    One that can not be captured is printed and left out."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graphs = {}
        for name, call in contenders.items():
            call()
            n = calls or max(1, min(200, round(0.02 / _timed(call, 2, 0.002)[0])))
            try:
                graphs[name] = n, _captured(call, n, stream)
            except RuntimeError as error:
                print(f"  {name} is not captured: {str(error).splitlines()[0][:80]}")
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for name in _turns(list(graphs), rounds):
            n, graph = graphs[name]
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / n / 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def _captured(
    call: Callable[[], object], calls: int, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    graph.replay()
    return graph


def host_seconds(call: Callable[[], object], calls: int = 200) -> float:
    """Median of 5: seconds of Python and drivers until a call returns, the GPU not waited for."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 5):
            call()
        times.append((time.perf_counter() - start) / (calls // 5))
    torch.cuda.synchronize()
    return statistics.median(times)


def medians(contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each contender on this machine's GPU, or else its CPU."""
    return gpu_medians(contenders) if ON_GPU else interleaved_medians(contenders)


# ---------------------------------------------------------------------------------------------
# Inputs and results
# ---------------------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_(grad)


def setup() -> dict[str, Any]:
    """Hardware and versions, printed and returned."""
    info: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if ON_GPU:
        import triton

        info |= {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}
    print(", ".join(f"{key} {value}" for key, value in info.items()), flush=True)
    return info


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))


def finish(benchmark: str, info: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """The last line: everything as one JSON document."""
    print(json.dumps({"benchmark": benchmark, "setup": info, "results": results}))
