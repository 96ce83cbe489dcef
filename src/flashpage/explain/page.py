"""The page of `flashpage trace --html`: steps as JSON in one HTML file; computes and draws nothing.

What is drawn, and how a person steps, is in `assets/`: `page.html` is the frame into which the
style, the scripts and the data are put, so that the file needs nothing else.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from torch import Tensor

from flashpage.attention.tiled import Step
from flashpage.errors import ArgumentError
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
from flashpage.explain.trace_options import Shown

FORMATS = (".html", ".htm")
SCRIPTS = ("dom.js", "state.js", "tiles.js", "sequences.js", "pages.js", "player.js")


def check_page(path: Path) -> None:
    """What would keep a page from being written.

    Raises:
        ArgumentError: a suffix other than .html, no such directory, or a directory itself.
    """
    if path.suffix.lower() not in FORMATS:
        raise ArgumentError(f"html must end in {' or '.join(FORMATS)}, got {str(path)!r}")
    if not os.path.isdir(path.parent):
        raise ArgumentError(f"html must be in a directory that exists, got {str(path)!r}")
    if os.path.isdir(path):
        raise ArgumentError(f"html must be a file, got the directory {str(path)!r}")


def write_page(path: Path, shown: Sequence[Shown]) -> None:
    """Write the page, over what is there.

    Raises:
        ArgumentError: as `check_page`, or a file that can not be written.
    """
    check_page(path)
    try:
        path.write_text(page_html(shown), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"html must be a file that can be written, got {str(path)!r}: {error}"
        ) from error


def page_html(shown: Sequence[Shown]) -> str:
    """The whole page; the same data give the same text."""
    views = [view_data(each) for each in shown]
    data = json.dumps(views, allow_nan=False, separators=(",", ":"))
    return Template(_asset("page.html")).substitute(
        title=html.escape(views[0]["title"] if len(views) == 1 else "Worked examples"),
        style=_asset("page.css"),
        data=data.replace("<", "\\u003c"),  # no text in it can end the script element
        script="\n".join(_asset(name) for name in SCRIPTS),
    )


def _asset(name: str) -> str:
    return (files("flashpage.explain") / "assets" / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------
# Data of the views: what assets/*.js reads. Masked scores and the m of no key are null.
# ---------------------------------------------------------------------------------------------


def view_data(shown: Shown) -> dict[str, Any]:
    """One view, as JSON can hold it; `kind` says which script draws it."""
    if isinstance(shown, TraceProblem):
        return _tiles(shown)
    if isinstance(shown, SequenceMap):
        return _sequences(shown)
    return _pages(shown)


def _tiles(problem: TraceProblem) -> dict[str, Any]:
    standard = problem.standard()
    out = standard.out[0, :, 0]
    return {
        "kind": "tiles",
        "title": problem.title,
        "sizes": problem.describe(),
        "block_size_k": problem.block_size_k,
        "num_workers": problem.num_workers,
        "num_key_blocks": problem.num_key_blocks,
        **{name: _numbers(getattr(problem, name)) for name in "qkv"},
        "scores": _numbers(standard.scores[0, 0]),
        "probs": _numbers(standard.probs[0, 0]),
        "out": _numbers(out),
        "walks": [_walk(walk(problem, order), out) for order in ORDERS],
    }


def _walk(each: Walk, expected: Tensor) -> dict[str, Any]:
    return {
        "order": each.order,
        "owner": OWNERS[each.order],
        "steps": [_step(step) for step in each.steps],
        "out": _numbers(each.out),
        "num_reductions": each.num_reductions,
        "num_visited": each.num_visited,
        "num_skipped": each.num_skipped,
        "gap": largest_gap(each.out, expected),
    }


def _step(step: Step) -> dict[str, Any]:
    numbers = ("s", "m_before", "m", "rescale", "l", "o")
    return {
        "worker": step.worker,
        "key_block": step.key_block,
        "rows": _bounds(step.rows),
        "keys": _bounds(step.keys),
        **{name: _numbers(getattr(step, name)) for name in numbers},
        "num_reductions": step.num_reductions,
    }


def _sequences(sequences: SequenceMap) -> dict[str, Any]:
    return {
        "kind": "sequences",
        "title": "Sequences end to end: cu_seqlens",
        "causal": sequences.causal,
        "cu_seqlens": list(sequences.cu_seqlens),
        "sequence_of_token": list(sequences.sequence_of_token),
        "visible": sequences.visible().tolist(),
    }


def _pages(decode: PagedDecode) -> dict[str, Any]:
    count = len(decode.seqlens)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    return {
        "kind": "pages",
        "title": "A decode through its pages: block_table",
        "block_size": decode.block_size,
        "num_shared_tokens": decode.num_shared_tokens,
        "seqlens": list(decode.seqlens),
        "block_table": [list(pages) for pages in decode.block_table],
        "pool": [
            {
                "requests": list(decode.requests_of_page(page)),
                "tokens": _bounds(decode.positions_of_page(page)),
            }
            for page in range(decode.num_blocks)
        ],
        "shared": [{"requests": pair, "pages": list(decode.shared_pages(*pair))} for pair in pairs],
        "visits": [
            {
                "request": request,
                "logical_block": visit.logical_block,
                "page": visit.page,
                "tokens": _bounds(visit.tokens),
                "step": _step(visit.step),
            }
            for request, visits in enumerate(decode.visits)
            for visit in visits
        ],
        "out": _numbers(decode.tiled_out),
        "library_out": _numbers(decode.library_out),
        "gap": largest_gap(decode.tiled_out, decode.library_out),
    }


def _bounds(positions: range) -> list[int]:
    return [positions.start, positions.stop]


def _numbers(x: Tensor) -> list[Any]:
    """Nested lists; what is not finite becomes None, as JSON has no infinity."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(each) for each in value]
        return value if abs(value) < float("inf") else None

    return clean(x.tolist())
