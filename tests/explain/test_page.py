"""The file of `flashpage trace --html`: one that needs nothing else, with the data of the steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpage.errors import ArgumentError
from flashpage.explain.page import SCRIPTS, page_html, view_data, write_page
from flashpage.explain.steps import map_sequences, paged_decode, random_problem, worked_examples

ASSETS = Path(__file__).parents[2] / "src" / "flashpage" / "explain" / "assets"


def data_of(page: str) -> list[dict[str, Any]]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


def test_needs_nothing_else() -> None:
    page = page_html(worked_examples())
    assert not re.findall(r"(?:src|href)=(?!\"data:,\")|@import|url\((?!#)|fetch\(|XMLHttp", page)
    links = set(re.findall(r"https?://[^\"'\s]+", page))
    assert links <= {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert "default-src 'none'" in page  # and a browser would refuse
    assert not re.findall(r"\$(?:title|style|data|script)", page)


def test_every_asset_is_in_the_page() -> None:
    page = page_html(worked_examples())
    assert {path.name for path in ASSETS.iterdir()} == {*SCRIPTS, "page.html", "page.css"}
    for name in (*SCRIPTS, "page.css"):
        assert (ASSETS / name).read_text() in page


def test_the_data_are_those_of_the_steps() -> None:
    problem = random_problem(seqlen_q=5, seqlen_k=7, num_workers=2, causal=True, seed=9)
    (view,) = data_of(page_html([problem]))
    expected = problem.standard()
    torch.testing.assert_close(torch.tensor(view["out"]).double(), expected.out[0, :, 0])
    for each in view["walks"]:
        torch.testing.assert_close(torch.tensor(each["out"]), torch.tensor(view["out"]))
        assert each["gap"] < 1e-12
    hidden = [[s is None for s in row] for row in view["scores"]]
    assert hidden == expected.scores[0, 0].isinf().tolist()
    assert [each["num_reductions"] for each in view["walks"]] == [problem.num_key_blocks, 0]


def test_rows_that_see_no_key_are_json_too() -> None:
    problem = random_problem(seqlen_q=3, seqlen_k=1, num_workers=1, causal=True)
    (view,) = data_of(page_html([problem]))
    assert view["walks"][1]["steps"][0]["m"][0] is None
    assert view["walks"][1]["out"][0] == [0, 0]


def test_sequences_and_pages() -> None:
    sequences = view_data(map_sequences([2, 0, 1]))
    assert sequences["cu_seqlens"] == [0, 2, 2, 3]
    decode = paged_decode((11, 10), block_size=4, num_shared_tokens=8)
    pages = view_data(decode)
    assert [visit["page"] for visit in pages["visits"]] == [*sum(decode.block_table, ())]
    assert pages["shared"] == [{"requests": (0, 1), "pages": list(decode.shared_pages(0, 1))}]
    free = [page for page in pages["pool"] if not page["requests"]]
    assert free
    assert all(page["tokens"] == [0, 0] for page in free)


def test_the_same_data_are_the_same_page(tmp_path: Path) -> None:
    for name in ("a.html", "b.HTML"):
        write_page(tmp_path / name, [paged_decode((5, 6))])
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.HTML").read_bytes()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt", "html must end in .html or .htm, got"),
        ("a", "html must end in .html or .htm, got"),
        ("missing/a.html", "html must be in a directory that exists"),
        ("folder.html", "html must be a file, got the directory"),
        (f"{'x' * 300}.html", "html must be a file that can be written"),
    ],
)
def test_refused(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ArgumentError, match=words):
        write_page(tmp_path / name, worked_examples())
