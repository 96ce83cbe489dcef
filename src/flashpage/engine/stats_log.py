"""A line of numbers about the engine on stderr, every so many seconds of stepping."""

from __future__ import annotations

import sys
from contextlib import suppress

from flashpage.engine.outputs import EngineStats


class StatsLog:
    """Writes what `EngineStats` say whenever `interval` more seconds were spent in steps.

    Time between steps does not count, neither for the interval nor for the rates: an engine that
    waits for its user says nothing, and tokens/s are those of its work.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._last: tuple[float, int, int] = (0.0, 0, 0)

    def is_due(self, seconds: float) -> bool:
        """Whether `seconds` of stepping are enough for another line."""
        return seconds - self._last[0] >= self._interval

    def write(self, stats: EngineStats) -> None:
        """One line; a stderr that is closed or gone loses it and harms no request."""
        line = self.line(stats)
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                print(f"flashpage: {line}", file=sys.stderr, flush=True)

    def line(self, stats: EngineStats) -> str:
        """What the engine holds and did; rates in tokens per second since the last line."""
        before, generated, prompt = self._last
        self._last = (stats.step_seconds, stats.tokens_generated, stats.prompt_tokens_computed)
        seconds = stats.step_seconds - before
        hits = stats.prefix_hit_rate
        return ", ".join(
            (
                f"{stats.num_running} running",
                f"{stats.num_waiting} waiting",
                f"{stats.pages_used} of {stats.pages_total} pages",
                f"prefix hits {'-' if hits is None else f'{100 * hits:.1f} %'}",
                f"{stats.preemptions} preemptions",
                f"generated {(stats.tokens_generated - generated) / seconds:.1f} tokens/s",
                f"prompt {(stats.prompt_tokens_computed - prompt) / seconds:.1f} tokens/s",
            )
        )
