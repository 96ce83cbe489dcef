"""Triton's interpreter without what it repeats at every call of a function within a kernel.

It replaces the language's functions by those that interpret, again for each such call, though they
are replaced for all: a quarter of the time that the kernels take.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """For all kernels of this process that are interpreted."""
    interpreter.InterpretedFunction.__call__ = _call


def _call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    # A launch replaces those of `tl` and puts them back; those of `core` stay once replaced.
    if any(tl.core.is_builtin(module.arange) for module in (tl, tl.core)):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)
