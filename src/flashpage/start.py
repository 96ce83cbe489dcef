"""The start of a process that runs a model: how long ago it was, and what makes it short."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def seconds_since_start() -> float | None:
    """Seconds since this process was started, to 0.01; None where there is no `/proc`."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # "starttime", the 22nd of all, in ticks since the machine was started.
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def let_threads_sleep() -> None:
    """How OpenMP's threads wait, unless the environment says so; read when torch is loaded.

    Threads that spin while they wait lose their turn to whatever else runs on the machine, at every
    step anew; but those that sleep at once must be woken for every kernel. So GNU's OpenMP may spin
    for a part of a millisecond: from one kernel to the next.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, Python's collector does not run; afterwards it leaves alone what was made within.

    For a program's imports and its model, which live as long as it does: the collector would look
    through them again and again while they are made, and once more during the first answer.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
