"""Python's garbage collector while an engine steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_spared() -> Iterator[None]:
    """Within, the collector does not look through what was there before.

    A full collection visits every object of the process, torch's and transformers' modules among
    them: a pause of over 100 ms, in which no step is launched. What is made within is collected as
    ever, and all the rest afterwards. Does nothing if the caller has frozen objects of their own.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
