"""Python's garbage collector while an engine steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD = 10.0
"""seconds between full collections of a program that does nothing but generate"""

_last_full = time.monotonic()


@contextmanager
def old_objects_spared() -> Iterator[None]:
    """Within, the collector does not look through what was there before.

    A full collection visits every object of the process, torch's and transformers' modules among
    them: a pause of over 100 ms, in which no step is launched. What is made within is collected as
    ever. `gc.freeze` also makes the collector forget how much was allocated before; so that a loop
    over this can not keep it from ever running, a full collection follows here, outside, if the
    last one was long ago. Does nothing if the caller has frozen objects of their own.
    """
    global _last_full
    if gc.get_freeze_count() > 0 or not gc.isenabled():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if time.monotonic() - _last_full >= PERIOD:
            gc.collect()
            _last_full = time.monotonic()
