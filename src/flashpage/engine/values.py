"""Values from outside: shown in messages whatever they are, and copied so that they stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

MAX_SHOWN = 200  # characters


def show(value: Any) -> str:
    """`repr(value)`, shortened; for values that Python refuses to print, their type.

    A very long integer is such a value: printing it raises `ValueError`.
    """
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__} that can not be printed>"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


class FrozenDict(dict[Any, Any]):
    """A copy of a mapping that can not be changed, but is otherwise a dict (it can be pickled)."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("this mapping belongs to a frozen object and can not be changed")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[Mapping[Any, Any]]]:
        return FrozenDict, (dict(self),)
