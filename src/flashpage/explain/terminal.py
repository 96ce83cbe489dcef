"""Where the commands of this room print: a terminal as wide as it is, or plain text."""

from __future__ import annotations

import sys

from rich.console import Console

PLAIN_WIDTH = 200  # columns of output that goes into a file or a pipe


def open_console() -> Console:
    """Standard output; into a file or pipe without colours, and not broken into lines of 80."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(width=width, markup=False, highlight=False)
