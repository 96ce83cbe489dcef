"""The page of `flashpage trace --html` in a real browser: stepped, measured, in both themes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from flashpage.attention.standard import standard_attention
from flashpage.explain.page import write_page
from flashpage.explain.steps import (
    PagedDecode,
    TraceProblem,
    map_sequences,
    paged_decode,
    random_problem,
    worked_examples,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
HOW = "`make browser` installs it on Debian"
PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 900}
MODES: dict[str, Callable[[], list[Any]]] = {
    "examples": lambda: list(worked_examples()),
    "own": lambda: [random_problem(seqlen_q=3, seqlen_k=7, head_dim=5, block_size_k=4, seed=5)],
    "causal": lambda: [random_problem(seqlen_q=6, num_workers=3, causal=True, seed=1)],
    "no-key": lambda: [random_problem(seqlen_q=5, seqlen_k=2, num_workers=2, causal=True)],
    "largest": lambda: [random_problem(seqlen_q=64, head_dim=64, block_size_k=16, num_workers=9)],
    "varlen": lambda: [map_sequences([3, 0, 1, 5], causal=True)],
    "varlen-long": lambda: [map_sequences([30, 1, 33])],
    "paged": lambda: [paged_decode((11, 10), num_shared_tokens=8)],
    "paged-many": lambda: [paged_decode((64, 9, 33, 5), block_size=4, num_shared_tokens=4)],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason=f"needs playwright: {HOW}")
    if CHROMIUM is None:
        pytest.skip(f"needs chromium: {HOW}")
    with sync_api.sync_playwright() as playwright:
        # Chromium's sandbox does not run as root, which containers do.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


class Shown:
    """A page that is open, with all it said and asked for."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(path.as_uri())
        self.count = int(page.get_attribute("#slider", "max"))

    @property
    def step(self) -> int:
        step, count = map(int, self.page.inner_text("#count").split(" / "))
        assert count == self.count
        assert self.page.input_value("#slider") == str(step)
        return step

    def press(self, key: str) -> int:
        self.page.keyboard.press(key)
        return self.step

    def click(self, name: str) -> int:
        self.page.get_by_role("button", name=name, exact=True).click()
        return self.step

    def output(self, panel: str) -> list[list[str]]:
        """The texts of the table of O: a row for each row of O."""
        cells = "rows => rows.map(row => [...row.querySelectorAll('td')].map(td => td.innerText))"
        rows = self.page.eval_on_selector_all(f"{panel} .out tbody tr", cells)
        return [row[1:] for row in rows]  # the first tells how many keys were seen

    def check_quiet(self) -> None:
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(("file:", "data:"))] == []


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Shown]]:
    contexts = []

    def open_page(mode: str, **options: Any) -> Shown:
        path = tmp_path / "page.html"
        write_page(path, MODES[mode]())
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        context.set_default_timeout(10_000)
        contexts.append(context)
        return Shown(context.new_page(), path)

    yield open_page
    for context in contexts:
        context.close()


def assert_shows(texts: list[list[str]], expected: Tensor) -> None:
    """Every number to the four decimals that are written."""
    numbers = [[float(text.replace("\N{MINUS SIGN}", "-")) for text in row] for row in texts]
    shown = torch.tensor(numbers, dtype=torch.float64)
    torch.testing.assert_close(shown, expected.double(), atol=5.01e-5, rtol=0)


def oracle(problem: TraceProblem) -> Tensor:
    q, k, v = (x[None, :, None] for x in (problem.q, problem.k, problem.v))
    scale = problem.softmax_scale
    return standard_attention(q, k, v, softmax_scale=scale, causal=problem.causal).out[0, :, 0]


@pytest.mark.parametrize("mode", MODES)
def test_by_keyboard_to_the_end_and_back(show: Callable[..., Shown], mode: str) -> None:
    shown = show(mode)
    panels = [".panel[data-order=FA1]", ".panel[data-order=FA2]"]
    problems = [each for each in MODES[mode]() if isinstance(each, TraceProblem)]
    for i, problem in enumerate(problems):
        if i:
            shown.page.get_by_role("tab").nth(i).click()
            shown.page.locator("#title").click()  # the tabs use the arrows themselves
            shown.count = problem.num_key_blocks
        assert shown.step == 0
        assert {text for row in shown.output(panels[0]) for text in row} == {"–"}
        for step in range(1, problem.num_key_blocks + 1):
            assert shown.press("ArrowRight") == step
        for panel in panels:
            assert_shows(shown.output(panel), oracle(problem))
    if not problems:
        assert [shown.press("ArrowRight") for _ in range(shown.count)][-1] == shown.count
    assert shown.press("ArrowRight") == shown.count  # there is nothing behind the end
    assert shown.press("ArrowLeft") == shown.count - 1
    assert shown.press("Home") == 0
    assert shown.press("ArrowLeft") == 0
    assert shown.press("End") == shown.count
    shown.check_quiet()


def test_by_buttons_and_slider(show: Callable[..., Shown]) -> None:
    shown = show("causal")
    texts = []
    for step in range(1, shown.count + 1):
        assert shown.click("Forward") == step
        texts.append(shown.page.inner_text("#text"))
    assert len(set(texts)) == shown.count
    assert_shows(shown.output(".panel[data-order=FA2]"), oracle(MODES["causal"]()[0]))
    assert shown.page.get_by_role("button", name="Forward").is_disabled()
    assert shown.page.evaluate("document.activeElement.id") == "back"  # the keyboard is not lost
    assert shown.click("Back") == shown.count - 1
    assert shown.click("To the start") == 0
    assert shown.click("To the end") == shown.count
    shown.page.fill("#slider", "1")
    assert shown.step == 1
    shown.page.focus("#slider")
    assert shown.press("ArrowRight") == 2  # once, though both the slider and the page listen
    shown.check_quiet()


def test_play(show: Callable[..., Shown]) -> None:
    shown = show("examples")
    assert shown.press(" ") == 0
    assert shown.page.inner_text("#play") == "Pause"
    shown.page.locator("#count", has_text="2 / 2").wait_for()
    assert shown.step == shown.count == 2
    assert shown.page.inner_text("#play") == "Play"


def test_the_second_worked_example(show: Callable[..., Shown]) -> None:
    shown = show("examples")
    shown.page.get_by_role("tab", name="Example 2").click()
    shown.count = 4
    shown.page.locator("#title").click()
    assert (shown.press("ArrowRight"), shown.press("ArrowRight")) == (1, 2)
    assert "m rises: row 0 from 1 to 3, factor 0.1353" in shown.page.inner_text("#text")
    rows = shown.page.locator(".panel[data-order=FA2] table").nth(1).locator("tbody tr")
    assert rows.nth(0).locator("td").all_inner_texts() == ["1", "3", "0.1353", "1.1353"]
    now = shown.page.locator(".panel[data-order=FA2] .scores .now").all_inner_texts()
    assert now == ["3", "4"]  # key 1, a row for each worker
    shown.press("End")
    counts = [
        shown.page.inner_text(f".panel[data-order={order}] .counter") for order in ("FA1", "FA2")
    ]
    assert counts == ["4 reductions across workers", "0 reductions across workers"]


def test_arrows_point_at_the_pages(show: Callable[..., Shown]) -> None:
    shown = show("paged")
    (decode,) = MODES["paged"]()
    assert isinstance(decode, PagedDecode)
    for request, visits in enumerate(decode.visits):
        for visit in visits:
            shown.press("ArrowRight")
            where = f"block_table[{request}][{visit.logical_block}] = page {visit.page},"
            assert where in shown.page.inner_text("#text")
            assert shown.page.get_attribute(".page.now", "data-page") == str(visit.page)
            entry = shown.page.inner_text(".block-table td.now")
            assert entry == str(visit.page)
            end = shown.page.evaluate(
                """() => {
                  const path = document.querySelector(".arrow.now");
                  const tip = path.getPointAtLength(path.getTotalLength());
                  const frame = document.querySelector(".arrows").getBoundingClientRect();
                  return [frame.left + tip.x, frame.top + tip.y];
                }"""
            )
            box = shown.page.locator(".page.now").bounding_box()
            assert abs(end[0] - box["x"]) < 3
            assert box["y"] < end[1] < box["y"] + box["height"]
            assert shown.page.locator(".arrow").count() == visit.logical_block + 1
    assert_shows(shown.output(".panel"), decode.library_out)
    shared = ", ".join(map(str, decode.shared_pages(0, 1)))
    assert f"Requests 0 and 1 share pages {shared}: positions 0–7" in shown.page.inner_text("#view")


def test_sequences_light_up(show: Callable[..., Shown]) -> None:
    shown = show("varlen")
    lit = []
    for _ in range(shown.count):
        shown.press("ArrowRight")
        lit.append(shown.page.locator(".tokens .current").count())
    assert lit == [3, 0, 1, 5]
    assert shown.page.locator(".bounds .current b").all_inner_texts() == ["4", "9"]
    assert shown.page.locator(".map .seen").count() == 6 + 1 + 15  # triangles


@pytest.mark.parametrize("mode", MODES)
def test_fits_a_phone(show: Callable[..., Shown], mode: str) -> None:
    shown = show(mode, viewport=PHONE)
    for step in (0, 1, shown.count):
        shown.page.fill("#slider", str(step))
        assert shown.page.evaluate("document.documentElement.scrollWidth") == 360
    for name in ("To the start", "Back", "Forward", "To the end", "Play"):
        box = shown.page.get_by_role("button", name=name, exact=True).bounding_box()
        assert min(box["width"], box["height"]) >= 40  # a thumb's
    shown.check_quiet()


LUMINANCE = """selector => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = colour => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(document.querySelector(selector));
  const panel = getComputedStyle(document.querySelector(".panel")).backgroundColor;
  return [paint(style.color), paint(panel)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(show: Callable[..., Shown], scheme: str) -> None:
    """The system's at first, the other by the button; text stands out from both (WCAG AA)."""
    shown = show("examples", color_scheme=scheme)
    for theme in (scheme, {"light": "dark", "dark": "light"}[scheme]):
        for selector in ("h1", ".sizes", ".numbers th", ".legend", ".counter"):
            ink, panel = shown.page.evaluate(LUMINANCE, selector)
            assert (panel < 0.1) == (theme == "dark")
            assert (max(ink, panel) + 0.05) / (min(ink, panel) + 0.05) > 4.5
        shown.page.locator("#theme").click()
    shown.check_quiet()


def test_for_those_who_do_not_see_it(show: Callable[..., Shown]) -> None:
    shown = show("examples", reduced_motion="reduce")
    assert shown.page.get_attribute("#text", "aria-live") == "polite"
    shown.press("ArrowRight")
    assert shown.page.get_attribute("#slider", "aria-valuetext") == "step 1 of 2"
    controls = "[...document.querySelectorAll('button, input')].filter(e => e.checkVisibility())"
    assert all(shown.page.evaluate(f"{controls}.map(e => e.ariaLabel || e.innerText)"))
    shown.page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert shown.page.evaluate(outline) == "solid"
    moving = "getComputedStyle(document.querySelector('.bar > span')).transitionDuration"
    assert shown.page.evaluate(moving) in ("0s", "1e-06s")
