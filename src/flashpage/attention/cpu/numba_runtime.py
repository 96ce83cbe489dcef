"""Calling numba kernels on tensors: is numba there, threads, bits, and a word when one compiles.

numba is optional; every kernel has a twin in torch.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("flashpage")

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""dtype to the number that says it in the kernels, as in `numba_math`"""

# numba's number of threads is a thread's own; setting it costs as much as a small kernel.
_current = threading.local()

# numba's fallback threading layer must not be entered twice; and two calls at once would only
# share the same cores.
_lock = threading.Lock()

_loaded: set[tuple[object, ...]] = set()
"""kernels that have been called, with what tells their signatures apart"""


@cache
def why_unavailable() -> str | None:
    """None if numba can be used, else the reason."""
    try:
        import numba
    except ImportError:
        return "numba is not installed (pip install numba)"
    if numba.config.DISABLE_JIT:
        return "numba does not compile (NUMBA_DISABLE_JIT is set)"
    # torch brings an OpenMP runtime; numba starts a parallel loop in 2 us with it, and in 80 us
    # with its own work queue. Only a preference: set before anything of numba runs in parallel.
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    return None


@cache
def kernels(module: str) -> ModuleType:
    """Import a module of kernels."""
    import numba

    # numba shares torch's OpenMP runtime, and sets its number of threads when it starts its own.
    threads = torch.get_num_threads()
    numba.set_num_threads(1)
    _current.threads = 1
    torch.set_num_threads(threads)
    return importlib.import_module(module)


def call(kernel: Any, threads: int, *args: object) -> Any:
    """Run a kernel on so many threads; say so if that compiled it."""
    if getattr(_current, "threads", 0) != threads:
        import numba

        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        _current.threads = threads
    # By lengths of tuples and dtypes a kernel's signatures differ.
    signature = (id(kernel), *[_part_of_signature(x) for x in args])
    with _lock:
        if signature in _loaded:
            return kernel(*args)
        result = _first_call(kernel, *args)
        _loaded.add(signature)
        return result


def _part_of_signature(x: object) -> object:
    if type(x) is tuple:
        return len(x)
    return x.dtype if isinstance(x, np.ndarray) else None


def _first_call(kernel: Any, *args: object) -> Any:
    """Call a kernel that is not loaded yet: from disk in no time, or compiled, with a word."""
    name = f"flashpage's CPU kernel '{kernel.__name__}'"
    done, missed = threading.Event(), _misses(kernel)
    arguments = (kernel, name, missed, done)
    threading.Thread(target=_say_if_compiled, args=arguments, daemon=True).start()
    start = time.perf_counter()
    try:
        try:
            result = kernel(*args)
        except Exception:
            # Kernels raise nothing themselves: what numba kept on disk is damaged, or cannot be
            # written any more. Compile anew; if that fails as well, it is another matter.
            if not _discard_kept_code(kernel):
                raise
            result = kernel(*args)
    finally:
        done.set()
    seconds = time.perf_counter() - start
    if _misses(kernel) > missed:
        kept = "kept on disk"
        if kernel.stats.cache_path is None:
            kept = "there is no writable folder to keep it in (FLASHPAGE_CACHE names one)"
        logger.warning("compiled %s in %.1f s; %s", name, seconds, kept)
    return result


def _misses(kernel: Any) -> int:
    """How often code was not found on disk."""
    return sum(kernel.stats.cache_misses.values())


def _say_if_compiled(kernel: Any, name: str, missed: int, done: threading.Event) -> None:
    """After a second, unless the kernel is only being loaded."""
    while not done.wait(1.0):
        if _misses(kernel) > missed:
            logger.warning("compiling %s (once, up to a minute) ...", name)
            return


def _discard_kept_code(kernel: Any) -> bool:
    """Delete all kernels that are kept; returns whether there were any."""
    folder = kernel.stats.cache_path
    kept = [] if folder is None else list(Path(folder).glob("*.nb[ic]"))
    for file in kept:
        file.unlink(missing_ok=True)
    return bool(kept)
