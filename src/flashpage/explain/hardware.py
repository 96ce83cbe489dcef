"""What devices can do, from their datasheets or measured here; knows nothing of attention."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashpage.errors import ArgumentError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

THIS = "this"
"""name of the machine that the program runs on; its figures are measured, not looked up"""

COPY_BYTES = 2**28
SAMPLE_SECONDS = 0.005


@dataclass(frozen=True)
class Device:
    """One line of the table: peaks of matrix products without sparsity, and of memory.

    Attributes:
        name: what `--gpu` takes.
        title: the product.
        fp32: TFLOP/s of the ordinary cores (no TF32); None where not known.
        bf16, fp16: TFLOP/s of the matrix units, accumulating in fp32; None where there are none.
        bandwidth: of the device's memory, GB/s (1e9 bytes).
        l2: the last cache that all cores share, MiB; None where not known.
        source: the document of each figure; "not verified" where no copy of it could be compared.
    """

    name: str
    title: str
    fp32: float | None
    bf16: float | None
    fp16: float | None
    bandwidth: float
    l2: float | None
    source: str

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of matrix products in `dtype`.

        Raises:
            ArgumentError: this device has no such peak.
        """
        peak = {"fp32": self.fp32, "bf16": self.bf16, "fp16": self.fp16}[resolve_dtype(dtype)]
        if peak is None:
            known = [name for name in DTYPES if getattr(self, name) is not None]
            raise ArgumentError(
                f"dtype must be one that {self.title} has a peak for ({', '.join(known)}), "
                f"got {dtype!r}"
            )
        return peak * 1e12

    @property
    def bytes_per_second(self) -> float:
        return self.bandwidth * 1e9

    @property
    def l2_bytes(self) -> float | None:
        return None if self.l2 is None else self.l2 * 2**20

    def ridge(self, dtype: str) -> float:
        """FLOP per byte from which on arithmetic is the limit, and no longer memory."""
        return self.peak_flops(dtype) / self.bytes_per_second


# Add a device by a line. Documents are NVIDIA's own; figures printed with sparsity are halved.
# fmt: off
DEVICES = {device.name: device for device in (
    #       name      title              fp32  bf16    fp16    GB/s  L2     source
    Device("rtx4090", "GeForce RTX 4090", 82.6, 165.2,  165.2,  1008, 72,
           "FLOP/s, GB/s, L2: Ada whitepaper"),
    Device("rtx3090", "GeForce RTX 3090", 35.6, 71.0,   71.0,   936,  6,
           "FLOP/s, GB/s, L2: GA102 whitepaper"),
    Device("a100",    "A100 80GB SXM",    19.5, 312.0,  312.0,  2039, 40,
           "FLOP/s, GB/s: A100 80GB datasheet; L2: A100 whitepaper"),
    Device("l40s",    "L40S",             91.6, 362.05, 362.05, 864,  96,
           "FLOP/s, GB/s: L40S datasheet; L2: Ada whitepaper, of a full AD102 (not verified)"),
    Device("h100",    "H100 SXM",         67.0, 989.5,  989.5,  3350, 50,
           "FLOP/s, GB/s: H100 datasheet; L2: H100 whitepaper"),
    Device("h200",    "H200 SXM",         67.0, 989.5,  989.5,  4800, 50,
           "FLOP/s, GB/s: H200 datasheet; L2: H100 whitepaper (the same GH100)"),
    Device("b200",    "B200 (HGX)",       80.0, 2250.0, 2250.0, 8000, 126.5,
           "FLOP/s, GB/s: Blackwell technical brief; L2: the CUDA driver (tuning guide: 126 MB)"),
    Device("t4",      "T4",               8.1,  None,   65.0,   320,  4,
           "FLOP/s, GB/s: T4 datasheet; L2: Turing whitepaper (TU104)"),
)}
# fmt: on


def resolve_dtype(name: str) -> str:
    """`fp32`, `bf16` or `fp16`, also from torch's names of them.

    Raises:
        ArgumentError: another name.
    """
    for short, dtype in DTYPES.items():
        if name in (short, str(dtype).removeprefix("torch.")):
            return short
    raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")


def find_device(name: str, dtype: str) -> Device:
    """The device of that name (case, spaces and hyphens do not count); `this` is measured now.

    Raises:
        ArgumentError: a name that is in no line of the table.
    """
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    if key == THIS:
        return measure_this_machine(dtype)
    if key not in DEVICES:
        known = ", ".join([THIS, *DEVICES])
        raise ArgumentError(f"gpu must be one of {known}, got {name!r}")
    return DEVICES[key]


# ---------------------------------------------------------------------------------------------
# This machine
# ---------------------------------------------------------------------------------------------


def this_torch_device() -> torch.device:
    """Where this machine computes: its CUDA device if it has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure_this_machine(dtype: str, *, seconds: float = 0.5) -> Device:
    """Peak and bandwidth that a matrix product and a copy reach on this machine.

    Args:
        dtype: of the product; the other peaks stay unknown.
        seconds: how long to look at each of the two, about.
    """
    dtype = resolve_dtype(dtype)
    where = this_torch_device()
    peaks: dict[str, float | None] = dict.fromkeys(DTYPES)
    peaks[dtype] = _product_flops(DTYPES[dtype], where, seconds) / 1e12
    if where.type == "cuda":
        title = torch.cuda.get_device_name(where)
        l2 = torch.cuda.get_device_properties(where).L2_cache_size / 2**20
        threads = ""
    else:
        title, l2 = f"this machine ({processor()})", None
        count = torch.get_num_threads()
        threads = f" on {count} thread{'s' * (count > 1)}"
    return Device(
        name=THIS,
        title=title,
        **peaks,
        bandwidth=copy_bandwidth(where, seconds) / 1e9,
        l2=l2,
        source=f"measured: a matrix product in {dtype} and a copy, torch {torch.__version__}"
        + threads,
    )


def median_seconds(
    call: Callable[[], object], device: torch.device, *, seconds: float = 0.5
) -> float:
    """Median seconds of a call, the device waited for; at least three samples, no flushed caches.

    A sample holds as many calls as fill some milliseconds, so that neither the clock nor the
    launch of the last kernel counts.
    """
    call()  # kernels compile, pools fill
    once = _timed(call, 1, device)
    calls = max(1, int(SAMPLE_SECONDS / once))
    rounds = min(25, max(3, int(seconds / (once * calls))))
    return statistics.median(_timed(call, calls, device) / calls for _ in range(rounds))


def _timed(call: Callable[[], object], calls: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product_flops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """FLOP/s of square matrix products, the best size of those that take little enough time."""
    best, size = 0.0, 512
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        took = median_seconds(lambda: torch.mm(a, b, out=out), device, seconds=seconds / 4)  # noqa: B023
        best = max(best, 2 * size**3 / took)
        if size >= 8192 or 8 * took > seconds / 4:  # the next size takes eight times as long
            return best
        size *= 2


def copy_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes per second of a copy too large for caches, read and written bytes both counted."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = median_seconds(lambda: target.copy_(source), device, seconds=seconds)
    return 2 * COPY_BYTES / took


def read_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes per second of a sum over more memory than caches hold: nothing is written."""
    source = torch.zeros(2 * COPY_BYTES // 4, dtype=torch.float32, device=device)
    return 2 * COPY_BYTES / median_seconds(source.sum, device, seconds=seconds)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that a program could still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 2**31


def processor() -> str:
    """The name of this machine's processor, as far as it can be found."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
