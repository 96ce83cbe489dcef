"""What `flashpage trace` prints: the steps of `explain/steps.py` as tables; computes nothing."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from flashpage.attention.tiled import Step
from flashpage.explain.page import check_page, write_page
from flashpage.explain.steps import (
    ORDERS,
    OWNERS,
    PagedDecode,
    SequenceMap,
    TraceProblem,
    Walk,
    largest_gap,
    walk,
)
from flashpage.explain.terminal import open_console
from flashpage.explain.trace_options import Shown, read_options

MAX_DIMS = 3  # entries of a row of Q, K, V or O that are shown
MAX_KEYS = 8  # entries of a row of S or P that are shown

STATE = ("m old", "m", "factor", "l")

LEGEND = (
    "s: scores; m: running maximum; factor: exp(m old - m), corrects l and O;\n"
    "l: running sum of exp(s - m); O: running output, divided by l.\n"
    "'-': masked, or no key seen yet."
)


def report_trace(*, html: Path | None = None, **options: bool | int | str | None) -> None:
    """Print what the options of the command line ask for, or write it as a page.

    Args:
        html: write the page there, and print no tables.
        options: those of `read_options`.

    Raises:
        ArgumentError: as `read_options`, or a page that can not be written.
    """
    if html is not None:
        check_page(html)
    shown = read_options(**options)
    console = open_console()
    if html is not None:
        write_page(html, shown)
        console.print(f"written: {html}")
        return
    for each in shown:
        print_shown(console, each)
    if isinstance(shown[-1], TraceProblem):
        console.print(LEGEND)


def print_shown(console: Console, shown: Shown) -> None:
    """One of the three things that can be shown."""
    if isinstance(shown, SequenceMap):
        print_map(console, shown)
    elif isinstance(shown, PagedDecode):
        print_pages(console, shown)
    else:
        print_problem(console, shown)


# ---------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------


def print_problem(console: Console, problem: TraceProblem) -> None:
    """Inputs, standard attention, the walks of both orders, and the two side by side."""
    walks = [walk(problem, order) for order in ORDERS]
    standard = problem.standard()
    out = standard.out[0, :, 0]
    console.print(f"{problem.title}\n{problem.describe()}\n", style="bold")
    console.print(inputs_table(problem))
    console.print("\nStandard attention: all of S and P in memory", style="bold")
    console.print(standard_table(standard.scores[0, 0], standard.probs[0, 0], out))
    for each in walks:
        console.print(f"\n{each.order}: {OWNERS[each.order]}", style="bold")
        console.print(walk_table(each))
    console.print("\nSide by side", style="bold")
    console.print(comparison_table(walks, out))
    console.print()


def inputs_table(problem: TraceProblem) -> Table:
    """The rows of Q, K and V."""
    table = _table(_right("row"), *("Q", "K", "V"))
    for i in range(max(len(problem.q), len(problem.k))):
        cells = (_inputs(x[i]) if i < len(x) else "" for x in (problem.q, problem.k, problem.v))
        table.add_row(str(i), *cells)
    return table


def standard_table(scores: Tensor, probs: Tensor, out: Tensor) -> Table:
    """A line for each query row: all its scores, their softmax, its output."""
    table = _table(_right("row"), "S", "P", "O")
    for i, (s, p, o) in enumerate(zip(scores, probs, out, strict=True)):
        table.add_row(str(i), _scores(s), _results(p, MAX_KEYS), _results(o))
    return table


def walk_table(each: Walk) -> Table:
    """A line for each row of each tile; where workers exchange, one more for what all hold then."""
    where = (_right("keys"), Column("worker", no_wrap=True), _right("row"))
    table = _table(*where, "s", *map(_right, STATE), "O")
    for block in _groups(each):
        for step in block:
            _add_tile(table, step, with_state=each.order == "FA2" or len(block) == 1)
        if each.order == "FA1" and len(block) > 1:
            _add_state(table, block[-1])
        table.add_section()
    return table


def _groups(each: Walk) -> Iterator[list[Step]]:
    """Steps that belong together: of one key block in FA1, of one worker in FA2."""
    for _, steps in groupby(each.steps, lambda s: s.key_block if each.order == "FA1" else s.worker):
        yield list(steps)


def _add_tile(table: Table, step: Step, *, with_state: bool) -> None:
    if not step.keys:
        table.add_row("none", str(step.worker), "", "no key")
        return
    for i, row in enumerate(step.rows):
        state = _state(step, i) if with_state else ()
        first = (_span(step.keys), str(step.worker)) if i == 0 else ("", "")
        table.add_row(*first, str(row), _scores(step.s[i]), *state)


def _add_state(table: Table, step: Step) -> None:
    for i, row in enumerate(step.rows):
        said = f"reduction {step.num_reductions}" if i == 0 else ""
        table.add_row("", "all" if i == 0 else "", str(row), said, *_state(step, i))


def _state(step: Step, i: int) -> tuple[str, ...]:
    """m before and after, correction factor, l and O of the i-th row of a step."""
    seen = float(step.l[i]) > 0
    before, after = (_rough(float(m[i])) for m in (step.m_before, step.m))
    factor, total = (f"{float(x[i]):.4f}" for x in (step.rescale, step.l))
    return before, after, factor, total, _results(step.o[i]) if seen else "-"


def comparison_table(walks: Sequence[Walk], expected: Tensor) -> Table:
    """What the orders have in common, and what not; `expected` is the O of standard attention."""
    table = _table("", *(each.order for each in walks))

    def row(title: str, *cells: object) -> None:
        table.add_row(title, *map(str, cells))

    row("a worker holds", "a part of each key block", "its query rows")
    row("for", "all query rows", "all keys they see")
    row("cross-worker reductions", *(each.num_reductions for each in walks))
    row("tiles visited", *(each.num_visited for each in walks))
    row("tiles left out: all masked", *(each.num_skipped for each in walks))
    for i in range(len(expected)):
        row(f"last O, row {i}", *(_results(each.out[i]) for each in walks))
    gaps = (largest_gap(each.out, expected) for each in walks)
    row("largest difference to standard", *(f"{gap:.1e}" if gap else "0" for gap in gaps))
    return table


# ---------------------------------------------------------------------------------------------
# cu_seqlens
# ---------------------------------------------------------------------------------------------


def print_map(console: Console, sequences: SequenceMap) -> None:
    """The bounds of each sequence, the tokens in a line, and which token sees which."""
    names = [string.ascii_uppercase[i] for i in sequences.sequence_of_token]
    total = len(names)
    bounds = ", ".join(map(str, sequences.cu_seqlens))
    console.print(f"cu_seqlens = [{bounds}]", style="bold")
    mask = "causal" if sequences.causal else "no mask"
    console.print(
        f"{len(sequences.sequences)} sequences end to end, {total} tokens, no padding; {mask}\n"
    )
    table = _table("sequence", *map(_right, ("begins", "ends before", "length")), "tokens")
    for i, tokens in enumerate(sequences.sequences):
        name = f"{i} ({string.ascii_uppercase[i]})"
        numbers = (tokens.start, tokens.stop, len(tokens))
        table.add_row(name, *map(str, numbers), _span(tokens))
    console.print(table)
    console.print("\nWhich token (down) sees which (across); elsewhere nothing is computed")
    console.print(f"      {''.join(names)}")
    for i, row in enumerate(sequences.visible().tolist()):
        console.print(f"{i:3d} {names[i]} {''.join('#' if seen else '.' for seen in row)}")


# ---------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------


def print_pages(console: Console, decode: PagedDecode) -> None:
    """The block table, who holds which page, which are shared, and the walk of each request."""
    count = len(decode.seqlens)
    console.print(
        f"Decode: {count} request{'s' * (count != 1)}, one new token each, "
        f"pages of {decode.block_size} tokens",
        style="bold",
    )
    if decode.num_shared_tokens:
        console.print(f"tokens all requests have in common, from 0 on: {decode.num_shared_tokens}")
    console.print()
    console.print(requests_table(decode))
    console.print()
    console.print(pool_table(decode))
    for first in range(count):
        for second in range(first + 1, count):
            pages = decode.shared_pages(first, second)
            said = ", ".join(map(str, pages)) if pages else "none"
            console.print(f"pages that requests {first} and {second} share: {said}")
    for i in range(count):
        where = f"page block_table[{i}][p // {decode.block_size}], slot p % {decode.block_size}"
        console.print(f"\nRequest {i}: position p lies in {where}")
        console.print(visits_table(decode, i))
    gap = largest_gap(decode.tiled_out, decode.library_out)
    console.print(
        "\nflash_attn_with_kvcache reads these pages in place: its O differs by at most "
        f"{f'{gap:.1e}' if gap else '0'}"
    )
    console.print(LEGEND)


def requests_table(decode: PagedDecode) -> Table:
    """A line for each request: its row of the block table."""
    table = _table("request", _right("cache_seqlens"), "block_table")
    for i, (n, pages) in enumerate(zip(decode.seqlens, decode.block_table, strict=True)):
        table.add_row(str(i), str(n), " ".join(map(str, pages)))
    return table


def pool_table(decode: PagedDecode) -> Table:
    """A line for each page of the cache: who holds it and what lies there."""
    table = _table(_right("page"), _right("holders"), "requests", "positions")
    for page in range(decode.num_blocks):
        requests = decode.requests_of_page(page)
        if not requests:
            table.add_row(str(page), "0", "free", "")
            continue
        names = " ".join(map(str, requests))
        positions = _span(decode.positions_of_page(page))
        table.add_row(str(page), str(len(requests)), names, positions)
    return table


def visits_table(decode: PagedDecode, request: int) -> Table:
    """A line for each page that the new token of a request reads."""
    where = (Column("page", no_wrap=True), Column("positions", no_wrap=True))
    table = _table(*where, "s", *map(_right, STATE), "O")
    for visit in decode.visits[request]:
        way = f"{visit.logical_block} -> {visit.page}{'*' * (len(visit.requests) > 1)}"
        table.add_row(way, _span(visit.tokens), _scores(visit.step.s[0]), *_state(visit.step, 0))
    shared = any(len(visit.requests) > 1 for visit in decode.visits[request])
    table.caption = "column of the block table -> page" + "; * shared" * shared
    table.caption_justify = "left"
    return table


# ---------------------------------------------------------------------------------------------
# Cells
# ---------------------------------------------------------------------------------------------


def _table(*columns: Column | str) -> Table:
    """Narrow: nine columns of numbers must fit 80."""
    return Table(
        *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )


def _right(title: str) -> Column:
    return Column(title, justify="right", no_wrap=True)


def _span(tokens: range) -> str:
    """First and last of some positions."""
    if len(tokens) <= 1:
        return str(tokens.start) if tokens else "none"
    return f"{tokens.start}-{tokens.stop - 1}"


def _rough(x: float) -> str:
    """A score or an input: at most two decimals."""
    if x == float("-inf"):
        return "-"
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _scores(row: Tensor) -> str:
    return _joined([_rough(x) for x in row.tolist()], MAX_KEYS)


def _inputs(row: Tensor) -> str:
    return _joined([_rough(x) for x in row.tolist()], MAX_DIMS)


def _results(row: Tensor, most: int = MAX_DIMS) -> str:
    """Four decimals, as the worked examples have them."""
    return _joined([f"{x:.4f}" for x in row.tolist()], most)


def _joined(numbers: list[str], most: int) -> str:
    return " ".join(numbers[:most] + ["..."] * (len(numbers) > most))
