"""The pictures: what is in them, and what is refused before anything is drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashpage.errors import ArgumentError, MissingDependencyError
from flashpage.explain import plots
from flashpage.explain.hardware import DEVICES
from flashpage.explain.memory import MemoryPoint
from flashpage.explain.plots import Point, Roof, draw_memory, draw_roofline

ROOFS = [Roof(DEVICES["rtx4090"], "fp32"), Roof(DEVICES["t4"], "fp32")]
POINTS = [Point("standard", 31.5, 3.2e13), Point("flashpage", 2048, 5e12, is_measured=True)]
MEMORY = [
    MemoryPoint("standard", 512, 4_000_000),
    MemoryPoint("standard", 1024, None),
    MemoryPoint("tiled", 512, 200_000),
    MemoryPoint("tiled", 1024, 400_000),
]


@pytest.fixture(autouse=True)
def needs_matplotlib(request: pytest.FixtureRequest) -> None:
    if "without_matplotlib" not in request.fixturenames:
        pytest.importorskip("matplotlib")


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, *rest: object) -> None:
            if name == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
def test_both_pictures(theme: str, suffix: str, tmp_path: Path) -> None:
    roofline, memory = tmp_path / f"r{suffix}", tmp_path / f"m{suffix}"
    draw_roofline(roofline, ROOFS, POINTS, title="a title", theme=theme)
    draw_memory(memory, MEMORY, score_bytes=[10**6, 4 * 10**6], title="a title", theme=theme)
    for path in (roofline, memory):
        if suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_what_the_roofline_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    draw_roofline(tmp_path / "r.svg", ROOFS, POINTS, title="a title")
    (figure,) = drawn
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_title() == "a title"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "GeForce RTX 4090: 82.6 TFLOP/s, 1.008 TB/s",
        "T4: 8.1 TFLOP/s, 320 GB/s",
        "standard, bound",
        "flashpage, measured",
    ]
    roof = axes.lines[0].get_xydata()
    assert roof[1].tolist() == pytest.approx([82.6e12 / 1008e9, 82.6e12])
    assert roof[0][1] / roof[0][0] == pytest.approx(1008e9)  # the slope is the bandwidth
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    for point in POINTS:
        assert left < point.intensity < right
        assert low < point.flops_per_second < high


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_roofline(tmp_path / name, ROOFS, POINTS, title="a title")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("name", "theme", "words"),
    [
        ("a.pdf", "light", "plot must end in .png or .svg, got"),
        ("a", "light", "plot must end in .png or .svg, got"),
        ("missing/a.png", "light", "plot must be in a directory that exists"),
        ("folder.png", "light", "plot must be a file, got the directory"),
        ("a.png", "sepia", "theme must be one of light, dark, got 'sepia'"),
    ],
)
def test_refused(name: str, theme: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ArgumentError, match=words):
        draw_roofline(tmp_path / name, ROOFS, POINTS, title="", theme=theme)


def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="plot must be a file that can be written"):
        draw_roofline(tmp_path / f"{'x' * 300}.png", ROOFS, POINTS, title="")


def test_matplotlib_is_named_when_missing(tmp_path: Path, without_matplotlib: None) -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install matplotlib, or .*'explain'"):
        plots.check_plot(tmp_path / "a.png", "light")


@pytest.mark.parametrize(
    ("value", "text"), [(1.008e12, "1.008 T"), (999.0, "999 "), (2048, "2.048 k"), (4e15, "4 P")]
)
def test_si(value: float, text: str) -> None:
    assert plots.si(value) == text
