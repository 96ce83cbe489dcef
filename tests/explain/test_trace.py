"""What `flashpage trace` prints: the numbers of the data, readable at 80 columns."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.table import Table

from flashpage.explain import trace
from flashpage.explain.steps import (
    map_sequences,
    paged_decode,
    random_problem,
    walk,
    worked_examples,
)


def render(table: Table, width: int = 200) -> list[list[str]]:
    """The cells of each line; columns are two or more spaces apart."""
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return [re.split(r"\s{2,}", line.strip()) for line in file.getvalue().splitlines()]


def test_fa2_line_by_line() -> None:
    _, problem = worked_examples()
    lines = [cells for cells in render(trace.walk_table(walk(problem, "FA2"))) if len(cells) > 1]
    assert lines[1] == ["0", "0", "0", "1", "-", "1", "0.0000", "1.0000", "1.0000 0.0000"]
    assert lines[2] == ["1", "0", "0", "3", "1", "3", "0.1353", "1.1353", "0.1192 0.8808"]
    assert lines[-1] == ["3", "1", "1", "0", "4", "4", "1.0000", "1.2034", "0.1843 0.8723"]
    assert len(lines) == 1 + 8


def test_fa1_shows_the_reductions() -> None:
    _, problem = worked_examples()
    lines = render(trace.walk_table(walk(problem, "FA1")))
    reductions = [cells for cells in lines if "reduction" in " ".join(cells)]
    assert [cells[2] for cells in reductions] == [f"reduction {n}" for n in (1, 2, 3, 4)]
    assert reductions[-1][3:] == ["3", "3", "1.0000", "1.5530", "0.5930 0.6760"]
    assert ["none", "1", "no key"] in lines  # blocks of one key leave the second worker idle


def test_side_by_side() -> None:
    _, problem = worked_examples()
    walks = [walk(problem, order) for order in ("FA1", "FA2")]
    lines = render(trace.comparison_table(walks, problem.standard().out[0, :, 0]))
    assert ["cross-worker reductions", "4", "0"] in lines
    assert ["tiles visited", "4", "8"] in lines
    assert ["last O, row 1", "0.1843 0.8723", "0.1843 0.8723"] in lines
    gaps = next(cells for cells in lines if cells[0].startswith("largest difference"))
    assert max(map(float, gaps[1:])) < 1e-14


def test_rows_that_see_no_key() -> None:
    problem = random_problem(seqlen_q=3, seqlen_k=1, num_workers=1, causal=True)
    lines = render(trace.walk_table(walk(problem, "FA2")))
    assert lines[2][2:] == ["0", "-", "-", "-", "0.0000", "0.0000", "-"]
    assert "nan" not in str(lines)


@pytest.mark.parametrize(
    "show",
    [
        lambda console: trace.print_problem(console, worked_examples()[1]),
        lambda console: trace.print_problem(
            console, random_problem(seqlen_q=10, head_dim=64, block_size_k=20, causal=True)
        ),
        lambda console: trace.print_map(console, map_sequences([30, 30, 4])),
        lambda console: trace.print_pages(
            console, paged_decode((64, 63), block_size=16, num_shared_tokens=32, head_dim=64)
        ),
    ],
)
def test_80_columns(show: Callable[[Console], None]) -> None:
    file = io.StringIO()
    show(Console(file=file, width=80, markup=False, highlight=False))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text  # no cell is cut off


def test_map() -> None:
    file = io.StringIO()
    trace.print_map(Console(file=file, width=80, highlight=False), map_sequences([2, 0, 1]))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[0] == "cu_seqlens = [0, 2, 2, 3]"
    assert lines[-4:] == ["      AAC", "  0 A ##.", "  1 A ##.", "  2 C ..#"]
    assert "1 (B)          2            2       0  none" in lines
