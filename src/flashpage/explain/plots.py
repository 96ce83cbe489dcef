"""Draws the roofline and the memory curves into files; computes and measures nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpage.errors import ArgumentError, require
from flashpage.explain.hardware import Device
from flashpage.explain.memory import MemoryPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
SIZE = (8.0, 5.6)  # inches
DPI = 150


@dataclass(frozen=True)
class Theme:
    paper: str
    ink: str
    grid: str


THEMES = {
    "light": Theme(paper="#ffffff", ink="#1a1a1a", grid="#d9d9d9"),
    "dark": Theme(paper="#15181c", ink="#e8e8e8", grid="#3a4046"),
}

# Colour and shape say the same, so that a print in grey and a colour-blind eye lose nothing.
# The colours (Okabe and Ito 2008) stand out from both papers.
STYLES = {
    "standard": ("#d55e00", "s"),
    "tiled": ("#0090d0", "o"),
    "tiled, no cache": ("#cc79a7", "v"),
    "torch SDPA": ("#e69f00", "D"),
    "flashpage": ("#00a67a", "^"),
}
LINES = ("-", (0, (5, 2)))


@dataclass(frozen=True)
class Roof:
    """A device's limits, for one dtype."""

    device: Device
    dtype: str


@dataclass(frozen=True)
class Point:
    """An algorithm: where the roofline puts it, or where it was measured."""

    algorithm: str
    intensity: float
    flops_per_second: float
    is_measured: bool = False


def check_theme(theme: str) -> None:
    """Raises ArgumentError for a theme that is not in `THEMES`, also where nothing is drawn."""
    if theme not in THEMES:
        raise ArgumentError(f"theme must be one of {', '.join(THEMES)}, got {theme!r}")


def check_plot(path: Path, theme: str) -> None:
    """What would keep a picture from being written, said before anything is measured.

    Raises:
        ArgumentError: a suffix other than .png or .svg, no such directory, no such theme.
        MissingDependencyError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ArgumentError(f"plot must end in {' or '.join(FORMATS)}, got {str(path)!r}")
    if not os.path.isdir(path.parent):
        raise ArgumentError(f"plot must be in a directory that exists, got {str(path)!r}")
    if os.path.isdir(path):  # not of pathlib, which raises on names too long
        raise ArgumentError(f"plot must be a file, got the directory {str(path)!r}")
    check_theme(theme)
    require("matplotlib", "explain")


def draw_roofline(
    path: Path,
    roofs: Sequence[Roof],
    points: Sequence[Point],
    *,
    title: str,
    theme: str = "light",
) -> None:
    """FLOP/s over FLOP per byte, both logarithmic: a line for each roof, a marker for each point.

    Raises: as `check_plot`, and ArgumentError if the file can not be written.
    """
    check_plot(path, theme)
    figure, axes = _figure(title, THEMES[theme])
    ridges = [roof.device.ridge(roof.dtype) for roof in roofs]
    xs = [*ridges, *(p.intensity for p in points)]
    left, right = min(xs) / 4, max(xs) * 4
    ink = THEMES[theme].ink
    for roof, ridge, line in zip(roofs, ridges, LINES, strict=False):
        device, peak = roof.device, roof.device.peak_flops(roof.dtype)
        x = [left, ridge, right]
        y = [left * device.bytes_per_second, peak, peak]
        label = f"{device.title}: {si(peak)}FLOP/s, {si(device.bytes_per_second)}B/s"
        axes.plot(x, y, color=ink, linestyle=line, linewidth=1.8, label=label, zorder=2)
        axes.plot([ridge], [peak], "|", color=ink, markersize=14, zorder=2)
        axes.annotate(
            f"ridge {ridge:.3g}",
            (ridge, peak),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=ink,
            fontsize=9,
        )
    for point in points:
        colour, marker = STYLES[point.algorithm]
        axes.plot(
            [point.intensity],
            [point.flops_per_second],
            linestyle="none",
            marker=marker,
            markersize=9,
            color=colour,
            markerfacecolor="none" if point.is_measured else colour,
            markeredgewidth=2,
            label=f"{point.algorithm}, {'measured' if point.is_measured else 'bound'}",
            zorder=4 if point.is_measured else 3,
        )
    axes.set_xlim(left, right)
    low = min([p.flops_per_second for p in points] + [left * roofs[0].device.bytes_per_second])
    axes.set_ylim(low / 2, max(r.device.peak_flops(r.dtype) for r in roofs) * 3)
    _finish(figure, axes, "arithmetic intensity, FLOP per byte of memory traffic", "FLOP/s")
    _save(figure, path)


def draw_memory(
    path: Path,
    points: Sequence[MemoryPoint],
    *,
    score_bytes: Sequence[int],
    title: str,
    theme: str = "light",
) -> None:
    """Peak extra memory over sequence length, both logarithmic.

    Args:
        score_bytes: size of S alone at each sequence length of `points`, drawn for comparison.

    Raises: as `check_plot`, and ArgumentError if the file can not be written.
    """
    check_plot(path, theme)
    figure, axes = _figure(title, THEMES[theme])
    seqlens = sorted({p.seqlen for p in points})
    axes.plot(
        seqlens,
        score_bytes,
        color=THEMES[theme].ink,
        linestyle=(0, (2, 2)),
        linewidth=1.2,
        label="S alone, by its size",
    )
    for name in dict.fromkeys(p.name for p in points):
        curve = [(p.seqlen, p.peak_bytes) for p in points if p.name == name and p.peak_bytes]
        if not curve:
            continue
        colour, marker = STYLES[name]
        axes.plot(
            *zip(*curve, strict=True),
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=2,
            label=f"{name}, measured",
        )
    axes.set_xticks(seqlens, [str(n) for n in seqlens], minor=False)
    axes.minorticks_off()
    _finish(figure, axes, "sequence length N", "peak memory beyond the inputs", unit="B")
    axes.set_xticks(seqlens, [str(n) for n in seqlens])
    _save(figure, path)


# ---------------------------------------------------------------------------------------------
# What both share
# ---------------------------------------------------------------------------------------------


def _figure(title: str, theme: Theme) -> tuple[Figure, Axes]:
    """Log-log axes in the colours of the theme; no window system and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, facecolor=theme.paper, layout="constrained")
    axes = figure.add_subplot(facecolor=theme.paper, xscale="log", yscale="log")
    axes.set_title(title, color=theme.ink, fontsize=10, wrap=True)
    axes.grid(True, which="major", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=theme.ink)
    for item in (axes.xaxis.label, axes.yaxis.label):
        item.set_color(theme.ink)
    for side, spine in axes.spines.items():
        spine.set_color(theme.ink)
        spine.set_visible(side in ("left", "bottom"))
    return figure, axes


def _finish(figure: Figure, axes: Axes, x: str, y: str, unit: str = "FLOP/s") -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.yaxis.set_major_formatter(EngFormatter(unit=unit))
    legend = figure.legend(
        loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor="linecolor"
    )
    for text in legend.get_texts():
        text.set_color(axes.xaxis.label.get_color())


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import rc_context

    is_svg = path.suffix.lower() == ".svg"
    options: dict[str, Any] = {"metadata": {"Date": None}} if is_svg else {"dpi": DPI}
    try:
        with rc_context({"svg.hashsalt": "flashpage"}):  # the same picture is the same file
            figure.savefig(path, facecolor=figure.get_facecolor(), **options)
    except OSError as error:
        raise ArgumentError(
            f"plot must be a file that can be written, got {str(path)!r}: {error}"
        ) from error


def si(value: float) -> str:
    """Four digits and a prefix: 1.008 T"""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value:.4g} "
