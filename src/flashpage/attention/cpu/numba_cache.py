"""Where compiled kernels are kept: a folder for each state of their sources.

numba looks at the file of a function alone, and not at those that it imports.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.runtime import rtsys

import flashpage
from flashpage.folders import user_cache

logger = logging.getLogger("flashpage")

_PACKAGE = Path(flashpage.__file__).parent
_SOURCES = ("attention/cpu/numba_*.py", "layers/numba_*.py", "layers/cpu/*.py")
_PREFIX = "kernels-"
KEPT = 3
"""Folders of other states that stay when a new one is made."""


def keep(dispatcher: Any) -> Any:
    """Let a `numba.njit` function be kept on disk, if there is a folder to keep it in."""
    if folder() is not None:
        dispatcher._cache = _Cache(dispatcher.py_func)
    return dispatcher


@cache
def folder() -> Path | None:
    """This state's folder: in the package, or else in the user's cache, or else a temporary one.

    `NUMBA_CACHE_DIR` stands for the first two if it is set. None if nothing can be written.
    """
    name = _PREFIX + _state()
    places = list(_places())
    for place in places:
        found = _made(place, name)
        if found is not None:
            return found
    temporary = _temporary_place()
    found = None if temporary is None else _made(temporary, name)
    if found is not None:
        logger.warning(
            "compiled CPU kernels are kept in a temporary folder, %s: they can not be written to "
            "%s (FLASHPAGE_CACHE names another)",
            found,
            " or ".join(str(place) for place in places),
        )
    return found


def _state() -> str:
    """A name for the kernels' sources and what compiles them."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for pattern in _SOURCES:
        for file in sorted(_PACKAGE.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _places() -> Iterator[Path]:
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
        return
    yield _PACKAGE / "__pycache__"
    try:
        yield user_cache()
    except RuntimeError:  # no home
        return


def _temporary_place() -> Path | None:
    """A folder that nobody else can write: what is kept there will be executed."""
    try:
        user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
        place = Path(tempfile.gettempdir()) / f"flashpage-{user}"
        place.mkdir(mode=0o700, exist_ok=True)
        info = place.lstat()
    except (OSError, KeyError, ImportError):  # the last two: a user without a name
        return None
    if hasattr(os, "getuid") and (
        not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022
    ):
        return None
    return place


def _made(place: Path, name: str) -> Path | None:
    """The folder of that name in `place`, if it can be written."""
    wanted = place / name
    try:
        if not wanted.is_dir():
            wanted.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another process removes them too
                _remove_old(place, wanted)
    except OSError:
        return None
    return wanted if os.access(wanted, os.W_OK | os.X_OK) else None


def _remove_old(place: Path, new: Path) -> None:
    """Leave `KEPT` other folders, those that were written last."""
    others = [x for x in place.glob(f"{_PREFIX}*") if x != new]
    others.sort(key=lambda x: x.stat().st_mtime, reverse=True)
    for old in others[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


class _Locator:
    """What numba asks for the place of a function's files."""

    def __init__(self, place: Path, function: Callable[..., Any]) -> None:
        self._place = str(place)
        self._name = f"{function.__module__}-{function.__code__.co_firstlineno}"

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _Locator | None:
        place = folder()
        return None if place is None else cls(place, function)

    def ensure_cache_path(self) -> None:
        os.makedirs(self._place, exist_ok=True)

    def get_cache_path(self) -> str:
        return self._place

    def get_source_stamp(self) -> str:
        return ""  # the folder has it

    def get_disambiguator(self) -> str:
        return self._name


class _CacheImpl(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):
    _impl_class = _CacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """A kernel from disk; None if it is not there.

        numba's own first imports all that it can compile, 0.1 s that finished code does not need:
        that only calls numba's runtime. If the kernel must be compiled, numba imports it then.
        """
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)
