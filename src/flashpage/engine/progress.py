"""A progress bar on stderr for work that takes long; silent where nobody watches."""

from __future__ import annotations

import sys
import time
from types import TracebackType

SHOW_AFTER_SECONDS = 1.0


class Progress:
    """Counts finished requests and generated tokens; shows both, and tokens/s, after a second.

    `enabled` None means: only if stderr is a terminal. rich is imported when the bar appears.
    """

    def __init__(self, num_requests: int, enabled: bool | None = None) -> None:
        self._num_requests = num_requests
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._start = time.perf_counter()
        self._bar = None
        self._task = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, num_finished: int, num_tokens: int) -> None:
        """Show where the work is, if it has taken long enough to be worth a look."""
        seconds = time.perf_counter() - self._start
        if not self._enabled or seconds < SHOW_AFTER_SECONDS:
            return
        if self._bar is None:
            self._open()
        rate = f"{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s"
        self._bar.update(self._task, completed=num_finished, rate=rate)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("requests", total=self._num_requests, rate="")
        self._bar.start()
