"""docs/attention.md says what the code computes, and its pictures are those that the code draws."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "attention.md").read_text(encoding="utf-8")
MADE_BY = re.compile(r"Matplotlib v[\d.]+")


@pytest.fixture
def make_docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS))
    import make_docs

    yield make_docs
    for name in ("make_docs", "claims", "pictures", "memory_curve"):
        sys.modules.pop(name, None)


def test_committed_is_what_the_code_makes(make_docs: ModuleType, tmp_path: Path) -> None:
    """`make docs` would change nothing; twice gives the same bytes."""
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        assert make_docs.make(folder, DOCUMENT) == DOCUMENT
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in (DOCS / "pictures").iterdir()}
    for name in names:
        drawn = (tmp_path / "one" / name).read_text()
        committed = (DOCS / "pictures" / name).read_text()
        assert drawn == (tmp_path / "two" / name).read_text()
        if MADE_BY.findall(drawn) == MADE_BY.findall(committed):  # versions place text differently
            assert drawn == committed, f"{name} is old: make docs"


def test_every_claim_is_told_and_every_mark_is_a_claim(make_docs: ModuleType) -> None:
    claims = sys.modules["claims"]
    marks = [name for name, _ in claims.MARK.findall(DOCUMENT)]
    assert set(marks) == set(claims.all_claims())
    assert "?<!--/-->" not in DOCUMENT
    with pytest.raises(KeyError, match="no-such-claim"):
        claims.fill("<!--no-such-claim-->1<!--/-->", claims.all_claims())


def test_figures_of_the_literature(make_docs: ModuleType) -> None:
    """The claims themselves, against what others have computed."""
    claims = sys.modules["claims"].all_claims()
    for name, text in {
        "s-bytes": "268 MB",
        "q-bytes": "4.2 MB",
        "s-bf16": "128 MiB",
        "standard-bytes": "1,091 MB",
        "flops": "34.4 GFLOP",
        "ridge": "81.9",
        "tiled-time": "416 us",
        "speed-up": "2.6",
        "l-last": "1.5530",
        "o-last": "0.5930, 0.6760",
        "o-standard": "0.5930, 0.6760",
        "fa1-reductions": "4",
        "fa2-reductions": "0",
    }.items():
        assert claims[name] == text


def test_measured_memory_grows_as_the_text_says(make_docs: ModuleType) -> None:
    """When the length doubles: standard's four times, that of the others twice at most."""
    claims = sys.modules["claims"].all_claims()
    growth = {name: float(claims[f"memory-{name}-growth"]) for name in ("standard", "tiled")}
    assert growth["standard"] == pytest.approx(4, abs=0.1)
    assert growth["tiled"] <= 2
    assert float(claims["memory-flashpage-growth"]) <= 2


def test_no_number_is_left_unmarked() -> None:
    """What is no claim is a size of an example, or a name: those may stand in the text."""
    text = re.sub(
        r"<!--([a-z0-9-]+)-->.*?<!--/-->|`[^`]*`|^#.*$|!\[.*?\]\(.*?\)", "", DOCUMENT, flags=re.M
    )
    numbers = set(re.findall(r"(?<![\w.])\d[\d.,]*\d|(?<![\w.])\d", text))
    sizes = {
        "0",
        "1",
        "2",
        "3",
        "4",
        "5",
        "8",
        "10",
        "11",
        "32",
        "64",
        "128",
        "8192",
        "32768",
        "4090",
    }
    assert numbers <= sizes


def test_pictures_are_shown_and_well_formed() -> None:
    shown = set(re.findall(r"!\[.+?\]\(pictures/(.+?)\)", DOCUMENT))
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}
    for name in shown:
        root = ElementTree.parse(DOCS / "pictures" / name).getroot()
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            right = float(box.get("x", 0)) + float(box.attrib["width"])
            assert right <= width
            assert float(box.get("y", 0)) + float(box.attrib["height"]) <= height


def test_files_that_are_named_exist() -> None:
    root = DOCS.parent
    for name in re.findall(r"`((?:docs|tests|attention|layers)/[\w./-]*)`", DOCUMENT):
        assert (root / name).exists() or (root / "src" / "flashpage" / name).exists(), name
