"""The memory curve of attention.md, which is measured: kept in a file, so that `make docs` repeats.

`python docs/memory_curve.py` measures it anew on this machine.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from flashpage.explain.memory import MemoryPoint, at_seqlen, halvings, measure_memory
from flashpage.explain.plots import draw_memory
from flashpage.explain.roofline import Workload

FILE = Path(__file__).with_suffix(".json")
WORK = Workload((4096,), (4096,), head_dim=64, dtype="fp32")


def measure() -> None:
    points = measure_memory(WORK, halvings(WORK.seqlens_k[0]), progress=print)
    machine = f"{platform.machine()} CPU, torch {torch.__version__.split('+')[0]}"
    kept = {"machine": machine, "points": [asdict(point) for point in points]}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def load() -> tuple[str, list[MemoryPoint]]:
    """The machine that it was measured on, and the points."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    return kept["machine"], [MemoryPoint(**point) for point in kept["points"]]


def memory_picture(path: Path) -> None:
    machine, points = load()
    seqlens = sorted({point.seqlen for point in points})
    scores = [at_seqlen(WORK, n).score_bytes for n in seqlens]
    title = f"forward up to {WORK.describe()}; {machine}"
    draw_memory(path, points, score_bytes=scores, title=title)


def memory_claims() -> dict[str, str]:
    """Peaks at the largest length, and how much they grew from half of it."""
    machine, points = load()
    longest = WORK.seqlens_k[0]
    peaks = {(point.name, point.seqlen): point.peak_bytes for point in points}
    claims = {"memory-machine": machine, "memory-length": str(longest)}
    for name in ("standard", "tiled", "flashpage"):
        peak, half = peaks[name, longest], peaks[name, longest // 2]
        assert peak is not None, name
        assert half is not None, name
        claims[f"memory-{name}"] = f"{peak / 1e6:.1f} MB"
        claims[f"memory-{name}-growth"] = f"{peak / half:.1f}"
    return claims


if __name__ == "__main__":
    measure()
