"""The table of devices, and the figures of this machine."""

from __future__ import annotations

import pytest
import torch

from flashpage.errors import ArgumentError
from flashpage.explain import hardware
from flashpage.explain.hardware import DEVICES, DTYPES, find_device, resolve_dtype

CPU = torch.device("cpu")


def test_every_device_is_complete() -> None:
    assert set(DEVICES) == {"rtx4090", "rtx3090", "a100", "l40s", "h100", "h200", "b200", "t4"}
    for name, device in DEVICES.items():
        assert device.name == name
        for figure in ("FLOP/s", "GB/s", "L2"):
            assert figure in device.source
        for dtype in DTYPES:
            if (name, dtype) != ("t4", "bf16"):
                assert 1 < device.ridge(dtype) < 1000
        assert device.peak_flops("fp16") > device.peak_flops("fp32")


@pytest.mark.parametrize(
    ("name", "num_cores", "gigahertz"),
    [
        ("rtx4090", 16384, 2.520),
        ("rtx3090", 10496, 1.695),
        ("a100", 6912, 1.410),
        ("l40s", 18176, 2.520),
        ("h100", 16896, 1.980),
        ("h200", 16896, 1.980),
        ("t4", 2560, 1.590),
    ],
)
def test_peaks_follow_from_cores_and_clock(name: str, num_cores: int, gigahertz: float) -> None:
    """A multiply-add for each core and cycle, at the highest clock of the product."""
    assert DEVICES[name].fp32 == pytest.approx(2 * num_cores * gigahertz / 1e3, rel=0.006)


def test_ridge_of_the_rtx_4090() -> None:
    device = find_device("rtx4090", "fp32")
    assert device.peak_flops("fp32") == 82.6e12
    assert device.bytes_per_second == 1008e9
    assert device.ridge("fp32") == pytest.approx(82, abs=0.1)


@pytest.mark.parametrize("name", ["RTX 4090", "rtx-4090", "RTX_4090"])
def test_names_are_read_kindly(name: str) -> None:
    assert find_device(name, "fp32") is DEVICES["rtx4090"]


def test_unknown_device_lists_the_known() -> None:
    with pytest.raises(ArgumentError, match="gpu must be one of this, rtx4090.*got 'tpu9'"):
        find_device("tpu9", "fp32")


def test_dtypes() -> None:
    assert resolve_dtype("bfloat16") == resolve_dtype("bf16") == "bf16"
    with pytest.raises(ArgumentError, match="dtype must be one of fp32, bf16, fp16, got 'int8'"):
        resolve_dtype("int8")
    with pytest.raises(ArgumentError, match=r"T4 has a peak for \(fp32, fp16\), got 'bf16'"):
        DEVICES["t4"].peak_flops("bf16")


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "COPY_BYTES", 2**24)
    device = hardware.measure_this_machine("float32", seconds=0.02)
    assert device.peak_flops("fp32") > 1e9
    assert device.bytes_per_second > 1e8
    assert device.source.startswith("measured")
    with pytest.raises(ArgumentError, match=r"\(fp32\), got 'bf16'"):
        device.peak_flops("bf16")


def test_bandwidths_count_the_bytes_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "COPY_BYTES", 2**20)
    monkeypatch.setattr(hardware, "median_seconds", lambda call, device, seconds: (call(), 0.5)[1])
    assert hardware.copy_bandwidth(CPU, 1.0) == 2 * 2**20 / 0.5  # one read, one written
    assert hardware.read_bandwidth(CPU, 1.0) == 2 * 2**20 / 0.5


def test_median_counts_a_call_once() -> None:
    calls = []
    took = hardware.median_seconds(lambda: calls.append(0), CPU, seconds=0.01)
    assert 0 < took < 1e-4
    assert len(calls) > 3


def test_free_memory() -> None:
    assert 2**20 < hardware.free_bytes(CPU) < 2**50
