"""What `flashpage roofline` prints: tables of devices, costs, measurements and memory."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

from flashpage.errors import ArgumentError
from flashpage.explain import plots
from flashpage.explain.hardware import (
    DEVICES,
    DTYPES,
    THIS,
    Device,
    find_device,
    measure_this_machine,
    this_torch_device,
)
from flashpage.explain.measure import Measurement, fitting, measure
from flashpage.explain.memory import MemoryPoint, at_seqlen, halvings, measure_memory
from flashpage.explain.roofline import Cost, Workload, bound, check_size, costs
from flashpage.explain.terminal import open_console

DEFAULT_SEQLEN = 8192
DEFAULT_BLOCK_SIZE = 16


def make_workload(
    *,
    seqlen: int | None = None,
    varlen: str | None = None,
    decode: bool = False,
    batch: int = 1,
    num_q_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    dtype: str = "fp32",
    causal: bool = False,
    block_size: int | None = None,
) -> Workload:
    """The workload that the options of the command line describe.

    Args:
        seqlen: of each of `batch` sequences, 8192 if left out; with decode, keys in the cache.
        varlen: lengths between commas, instead of seqlen and batch.
        decode: one new query a sequence, K and V in pages of block_size tokens.
        num_kv_heads: default num_q_heads.

    Raises:
        ArgumentError: a size that is not possible.
    """
    if block_size is not None and not decode:
        raise ArgumentError(f"block_size must be left out without decode, got {block_size}")
    if varlen is None:
        seqlen = DEFAULT_SEQLEN if seqlen is None else seqlen
        check_size("seqlen", seqlen)
        check_size("batch", batch)
        seqlens = (seqlen,) * batch
    elif batch != 1:
        raise ArgumentError(f"batch must be left out when varlen gives every length, got {batch}")
    elif seqlen is not None:
        raise ArgumentError(f"seqlen must be left out when varlen gives every length, got {seqlen}")
    else:
        try:
            seqlens = tuple(int(n) for n in varlen.split(","))
        except ValueError:
            raise ArgumentError(
                f"varlen must be lengths between commas such as 512,1024, got {varlen!r}"
            ) from None
        if min(seqlens) < 1:
            raise ArgumentError(f"varlen must be lengths from 1, got {varlen!r}")
    return Workload(
        seqlens_q=(1,) * len(seqlens) if decode else seqlens,
        seqlens_k=seqlens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_q_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        block_size=(block_size if block_size is not None else DEFAULT_BLOCK_SIZE)
        if decode
        else None,
    )


def report_roofline(
    work: Workload,
    gpu: str,
    *,
    backward: bool = False,
    measured: bool = False,
    plot: Path | None = None,
    theme: str = "light",
) -> None:
    """Print (and draw) the roofline of a workload on a device, and what this machine makes of it.

    Raises:
        ArgumentError: an unknown device, or one without that dtype; a file that can not be drawn.
        MissingDependencyError: `plot` without matplotlib.
    """
    plots.check_theme(theme)
    if plot is not None:
        plots.check_plot(plot, theme)
    algorithms = costs(work, backward=backward)
    device = find_device(gpu, work.dtype)
    device.peak_flops(work.dtype)  # refused before anything is measured
    console = open_console()
    title = f"{'backward' if backward else 'forward'}: {work.describe()}"
    console.print(title)
    console.print(_device_line(device, work.dtype))
    console.print(transfers_table(algorithms[:2]), bounds_table(algorithms, device, work.dtype))
    console.print(_cache_line(work, device))

    roofs = [plots.Roof(device, work.dtype)]
    points = [
        plots.Point(c.algorithm, c.intensity, bound(c, device, work.dtype).flops_per_second)
        for c in algorithms
    ]
    if measured:
        here = device if device.name == THIS else measure_this_machine(work.dtype)
        if here is not device:
            roofs.append(plots.Roof(here, work.dtype))
            console.print(_device_line(here, work.dtype))
        results = _report_measured(console, work, here, backward)
        points += [
            plots.Point(m.name, m.cost.intensity, m.flops_per_second, is_measured=True)
            for m in results
            if m.seconds is not None
        ]
    if plot is not None:
        plots.draw_roofline(plot, roofs, points, title=title, theme=theme)
        console.print(f"drawn: {plot}")


def report_memory(work: Workload, *, plot: Path | None = None, theme: str = "light") -> None:
    """Print (and draw) peak extra memory as N doubles up to `work`'s; progress goes to stderr.

    Raises: as `report_roofline` and `measure_memory`.
    """
    plots.check_theme(theme)
    if plot is not None:
        plots.check_plot(plot, theme)
    seqlens = halvings(work.seqlens_k[0])
    points = measure_memory(
        work,
        seqlens,
        progress=lambda line: print(f"measuring: {line}", file=sys.stderr, flush=True),
    )
    scores = [at_seqlen(work, n).score_bytes for n in seqlens]
    title = f"forward up to {work.describe()}"
    console = open_console()
    console.print(f"peak memory beyond the inputs, {title}")
    console.print(f"measured: {_setup()}, a process for each figure")
    console.print(memory_table(points, scores))
    if plot is not None:
        plots.draw_memory(plot, points, score_bytes=scores, title=title, theme=theme)
        console.print(f"drawn: {plot}")


# ---------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------


def print_devices() -> None:
    """The table of devices, with sources."""
    table = Table("name", "device", "FP32", "BF16", "FP16", "GB/s", "L2", "ridge", "source")
    for d in DEVICES.values():
        peaks = ["-" if getattr(d, dtype) is None else f"{getattr(d, dtype):g}" for dtype in DTYPES]
        l2 = "-" if d.l2 is None else f"{d.l2:g}"
        ridge = d.ridge("fp16" if d.bf16 is None else "bf16")
        table.add_row(d.name, d.title, *peaks, f"{d.bandwidth:g}", l2, f"{ridge:.0f}", d.source)
    table.add_row(THIS, "this machine", *["-"] * 6, "measured when asked for")
    console = open_console()
    console.print(table)
    console.print(
        "TFLOP/s of matrix products without sparsity; L2 in MiB; ridge in FLOP/B, 16-bit. "
        "Datasheets, whitepapers and briefs are NVIDIA's.",
    )


def transfers_table(algorithms: Sequence[Cost]) -> Table:
    """Which tensor costs how many bytes, for each algorithm."""
    table = Table("algorithm", "tensor", *_right("size", "read", "written"))
    for cost in algorithms:
        for i, t in enumerate(cost.transfers):
            table.add_row(
                "" if i else cost.algorithm,
                t.tensor,
                *(_bytes(n) if n else "-" for n in (t.size, t.read, t.written)),
                end_section=i == len(cost.transfers) - 1,
            )
    return table


def bounds_table(algorithms: Sequence[Cost], device: Device, dtype: str) -> Table:
    """What the roofline says of each algorithm; speed-ups are against the first."""
    columns = ("FLOP", "bytes", "FLOP/B", "least time", "utilisation", "speed-up")
    table = Table("algorithm", *_right(*columns), "bound by")
    first = bound(algorithms[0], device, dtype).seconds
    for cost in algorithms:
        b = bound(cost, device, dtype)
        table.add_row(
            cost.algorithm,
            f"{plots.si(cost.flops)}FLOP",
            _bytes(cost.bytes),
            f"{cost.intensity:,.1f}",
            _seconds(b.seconds),
            f"{b.utilisation:.1%}",
            f"{first / b.seconds:.2f}x",
            "compute" if b.is_compute_bound else "memory",
        )
    return table


def measured_table(results: Sequence[Measurement], here: Device, dtype: str) -> Table:
    """What was measured, beside the least time that this machine's roofline allows."""
    columns = ("time", "least time", "FLOP/s", "of the peak", "speed-up")
    table = Table("measured", *_right(*columns))
    first = results[0].seconds
    assert first is not None
    for m in results:
        if m.seconds is None:
            table.add_row(m.name, *["-"] * len(columns))
            continue
        table.add_row(
            m.name,
            _seconds(m.seconds),
            _seconds(bound(m.cost, here, dtype).seconds),
            f"{plots.si(m.flops_per_second)}FLOP/s",
            f"{m.flops_per_second / here.peak_flops(dtype):.1%}",
            f"{first / m.seconds:.2f}x",
        )
    return table


def memory_table(points: Sequence[MemoryPoint], score_bytes: Sequence[int]) -> Table:
    """A row for each sequence length, a column for each implementation."""
    names = list(dict.fromkeys(p.name for p in points))
    table = Table(*_right("N", "S alone", *names))
    peaks = {(p.name, p.seqlen): p.peak_bytes for p in points}
    seqlens = sorted({p.seqlen for p in points})
    for seqlen, scores in zip(seqlens, score_bytes, strict=True):
        cells = [peaks[name, seqlen] for name in names]
        texts = ["does not fit" if n is None else _bytes(n) for n in cells]
        table.add_row(str(seqlen), _bytes(scores), *texts)
    return table


def _report_measured(
    console: Console, work: Workload, here: Device, backward: bool
) -> list[Measurement]:
    where = this_torch_device()
    fits = fitting(work, here, where, backward=backward)
    results = measure(fits, where, backward=backward)
    console.print(f"measured: {_setup()}, {fits.describe()}")
    if fits != work:
        console.print("(lengths halved until standard attention fits here)")
    console.print(measured_table(results, here, work.dtype))
    for m in results:
        if m.why_not:
            console.print(f"{m.name} was not run: {m.why_not}")
    return results


def _device_line(device: Device, dtype: str) -> str:
    return (
        f"{device.title}: {plots.si(device.peak_flops(dtype))}FLOP/s in {dtype}, "
        f"{plots.si(device.bytes_per_second)}B/s, ridge {device.ridge(dtype):.1f} FLOP/B "
        f"({device.source})"
    )


def _cache_line(work: Workload, device: Device) -> str:
    """Which of the two tiled costs to believe."""
    longest = max(work.seqlens_k)
    size = 2 * longest * work.head_dim * work.itemsize
    line = f"K and V of one head: {_bytes(size)}"
    if device.l2_bytes is None:
        return f"{line}; the size of the last cache is not known"
    fits = "fit, re-reads can be absorbed" if size <= device.l2_bytes else "do not fit"
    return f"{line}; L2 of the {device.title}: {_bytes(device.l2_bytes)}: they {fits}"


def _setup() -> str:
    where = this_torch_device()
    if where.type == "cuda":
        return f"{torch.cuda.get_device_name(where)}, torch {torch.__version__}"
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' * (count > 1)}"
    return f"{platform.machine()} CPU, {threads}, torch {torch.__version__}"


def _right(*titles: str) -> list[Column]:
    return [Column(title, justify="right") for title in titles]


def _bytes(count: float) -> str:
    return f"{plots.si(count)}B"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.3g} s"
