"""The pictures of attention.md, drawn from the steps of the package as SVG; fetches nothing.

Coordinates and numbers are written with fixed decimals, so that the same steps are the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from flashpage.explain.hardware import DEVICES
from flashpage.explain.plots import Point, Roof, draw_roofline
from flashpage.explain.roofline import Workload, bound, costs
from flashpage.explain.steps import (
    OWNERS,
    PagedDecode,
    SequenceMap,
    TraceProblem,
    Walk,
    walk,
    worked_examples,
)

CELL = 44
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b1f24; }
  .n { font-family: ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; }
  .soft { fill: #59626d; } .paper { fill: #ffffff; }
  .cell { fill: none; stroke: #c3cad2; } .gone { fill: #eef0f2; stroke: #c3cad2; }
  .w0 { fill: #cfe1f5; stroke: #0b62bd; } .w1 { fill: #f6dfcb; stroke: #b04a00; }
  .w2 { fill: #d3ead9; stroke: #1a7f37; } .w3 { fill: #e6dbf8; stroke: #7a45d6; }
  .arrow { fill: none; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ed; } .soft { fill: #9ba6b2; } .paper { fill: #15181c; }
    .cell { stroke: #454d57; } .gone { fill: #242a31; stroke: #454d57; }
    .w0 { fill: #1d3a57; stroke: #6cb6ff; } .w1 { fill: #573a1d; stroke: #ffa657; }
    .w2 { fill: #1d4a2a; stroke: #56d364; } .w3 { fill: #42345c; stroke: #d2a8ff; }
  }
"""


class Canvas:
    """What was drawn so far; the size is that of what was drawn."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.parts: list[str] = []
        self.width = self.height = 0

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, round(x)), max(self.height, round(y))

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._reach(x + width, y + height)
        self.parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" '
            f'class="{kind}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        length = 7.2 * len(words)  # about; half of it where the text is centred
        self._reach(x + (length / 2 if kind.startswith("n") else length), y + 4)
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(words)}</text>')

    def number(self, x: float, y: float, words: str, kind: str = "") -> None:
        """In the middle of the cell whose corner is (x, y)."""
        self.text(x + CELL / 2, y + CELL / 2 + 5, words, f"n {kind}".strip())

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Lines through the points, with a tip at the end, which comes from the left."""
        way = "L".join(f"{x:.0f} {y:.0f}" for x, y in points)
        x, y = points[-1]
        tip = f"M{x - 6:.0f} {y - 4:.0f}L{x:.0f} {y:.0f}L{x - 6:.0f} {y + 4:.0f}"
        self.parts.append(f'<path d="M{way}{tip}" class="{kind}" style="fill:none"/>')

    def svg(self) -> str:
        width, height = self.width + 12, self.height + 12
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img" '
                f'aria-label="{escape(self.label)}">',
                f"<style>{STYLE}</style>",
                f'<rect width="{width}" height="{height}" class="paper"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def standard_picture(problem: TraceProblem) -> str:
    """S, P and O of standard attention, every entry of them in memory."""
    canvas = Canvas("Standard attention: scores S, probabilities P and output O of the example")
    result = problem.standard()
    matrices = (
        ("S = Q Kᵀ", result.scores[0, 0], "w1", ".0f"),
        ("P = softmax(S)", result.probs[0, 0], "w1", ".2f"),
        ("O = P V", result.out[0, :, 0], "w0", ".2f"),
    )
    x = 12
    for title, matrix, kind, form in matrices:
        canvas.text(x, 24, title)
        for i, row in enumerate(matrix.tolist()):
            for j, value in enumerate(row):
                at = (x + j * CELL, 36 + i * CELL)
                canvas.box(*at, CELL, CELL, kind)
                canvas.number(*at, format(value, form))
        x += matrix.shape[1] * CELL + 40
    return canvas.svg()


def online_picture(each: Walk) -> str:
    """The walk of the first worker: a line for each key block, the score in work framed."""
    canvas = Canvas("Online softmax: maximum, factor, sum and output after each key block")
    steps = [step for step in each.steps if step.worker == 0]
    num_keys = each.problem.k.shape[0]
    titles = ("m", "factor", "l", *(f"O{d}" for d in range(each.out.shape[1])))
    left = 12 + num_keys * CELL + 24
    canvas.text(12, 24, "scores of row 0")
    for i, title in enumerate(titles):
        canvas.text(left + i * 72 + 36, 24, title, "n soft")
    for i, step in enumerate(steps):
        y = 36 + i * (CELL + 8)
        for key in range(num_keys):
            done = [s for s in steps[: i + 1] if key in s.keys]
            kind = "w0" if key in step.keys else ("gone" if done else "cell")
            canvas.box(12 + key * CELL, y, CELL, CELL, kind)
            if done:
                score = float(done[0].s[0, key - done[0].keys.start])
                canvas.number(12 + key * CELL, y, f"{score:.0f}", "" if kind == "w0" else "soft")
        values = [float(step.rescale[0]), float(step.l[0]), *step.o[0].tolist()]
        cells = [f"{float(step.m[0]):.0f}", *(f"{value:.4f}" for value in values)]
        for j, cell in enumerate(cells):
            canvas.text(left + j * 72 + 36, y + CELL / 2 + 5, cell, "n")
    return canvas.svg()


def orders_picture(walks: Sequence[Walk]) -> str:
    """Which worker computes which score, in both orders; what is left out stays empty."""
    canvas = Canvas("Tiles by worker: FA1 splits the keys of a block, FA2 the query rows")
    x, cell = 12, 22
    for each in walks:
        rows, keys = len(each.problem.q), len(each.problem.k)
        canvas.text(x, 24, f"{each.order}: {OWNERS[each.order]}")
        canvas.text(x, 42, f"{each.num_reductions} reductions, {each.num_visited} tiles", "soft")
        for i in range(rows):
            for j in range(keys):
                canvas.box(x + j * cell, 52 + i * cell, cell, cell, "cell")
        for step in each.steps:
            for i in step.rows:
                for j in step.keys:
                    hidden = step.s[i - step.rows.start, j - step.keys.start].isinf()
                    kind = "gone" if hidden else f"w{step.worker % 4}"
                    canvas.box(x + j * cell, 52 + i * cell, cell, cell, kind)
        x += max(keys * cell + 40, 330)
    return canvas.svg()


def sequences_picture(sequences: SequenceMap) -> str:
    """Which token sees which: a block for each sequence."""
    canvas = Canvas("Sequences end to end: a block of scores for each, nothing between them")
    owners, cell = sequences.sequence_of_token, 26
    canvas.text(12, 24, f"cu_seqlens = {list(sequences.cu_seqlens)}")
    for i, row in enumerate(sequences.visible().tolist()):
        for j, seen in enumerate(row):
            kind = f"w{owners[i] % 4}" if seen else "cell"
            canvas.box(12 + j * cell, 36 + i * cell, cell, cell, kind)
    for i, tokens in enumerate(sequences.sequences):
        middle = 36 + (tokens.start + tokens.stop) / 2 * cell + 5
        words = f"sequence {i}: {_named('token', tokens)}"
        canvas.text(24 + len(owners) * cell, middle, words, "soft")
    return canvas.svg()


def pages_picture(decode: PagedDecode) -> str:
    """The block table, and the pages where they lie; arrows of each request."""
    canvas = Canvas("Block table and pages: shared pages have an arrow from each request")
    right = 12 + 90 + max(map(len, decode.block_table)) * CELL + 40
    canvas.text(12, 24, "block_table")
    canvas.text(right + 24, 24, f"cache: {decode.num_blocks} pages of {decode.block_size} tokens")
    for request, pages in enumerate(decode.block_table):
        y = 36 + request * (CELL + 30)
        canvas.text(12, y + CELL / 2 + 5, f"request {request}")
        for j, page in enumerate(pages):
            canvas.box(102 + j * CELL, y, CELL, CELL, f"w{request % 4}")
            canvas.number(102 + j * CELL, y, str(page))
            # Each arrow has a lane of its own: out of the cell's lower edge, then to the page.
            lane, below = right - 34 + 5 * (3 * request + j), y + CELL + 6 + 7 * j
            target = 36 + page * 36 + 10 + 8 * request
            start = (102 + j * CELL + CELL / 2, y + CELL)
            way = [start, (start[0], below), (lane, below), (lane, target), (right + 20, target)]
            canvas.path(way, f"arrow w{request % 4}")
    for page in range(decode.num_blocks):
        y, holders = 36 + page * 36, decode.requests_of_page(page)
        kind = "gone" if len(holders) > 1 else (f"w{holders[0] % 4}" if holders else "cell")
        canvas.box(right + 24, y, 320, 28, kind)
        who = f"request{'s' * (len(holders) > 1)} {' and '.join(map(str, holders))}"
        what = f"{who}, {_named('position', decode.positions_of_page(page))}"
        what = what if holders else "free"
        canvas.text(right + 32, y + 19, f"page {page}: {what}")
    return canvas.svg()


def _named(word: str, positions: range) -> str:
    """ "token 3", "tokens 4 to 8" or "no token" """
    if not positions:
        return f"no {word}"
    if len(positions) == 1:
        return f"{word} {positions.start}"
    return f"{word}s {positions.start} to {positions.stop - 1}"


def roofline_picture(path: Path, work: Workload) -> None:
    """The RTX 4090's roof, with standard and tiled attention under it."""
    device = DEVICES["rtx4090"]
    points = [
        Point(c.algorithm, c.intensity, bound(c, device, work.dtype).flops_per_second)
        for c in costs(work)
    ]
    draw_roofline(path, [Roof(device, work.dtype)], points, title=f"forward: {work.describe()}")


def draw(
    folder: Path,
    *,
    work: Workload,
    causal: TraceProblem,
    sequences: SequenceMap,
    decode: PagedDecode,
) -> None:
    """All of them, into a folder that exists."""
    _, example = worked_examples()
    pictures = {
        "standard": standard_picture(example),
        "online": online_picture(walk(example, "FA2")),
        "orders": orders_picture([walk(causal, order) for order in OWNERS]),
        "sequences": sequences_picture(sequences),
        "pages": pages_picture(decode),
    }
    for name, svg in pictures.items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    roofline_picture(folder / "roofline.svg", work)
