"""The one family of exceptions: every error a user can cause is a `FlashpageError`.

Each class is also the built-in type that callers of flash-attn, transformers or plain Python
already catch, so `except ValueError` and `pytest.raises(RuntimeError)` keep working.
Messages name the argument, its value and the rule it broke.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class FlashpageError(Exception):
    """Base class of everything flashpage raises on purpose."""


class ArgumentError(FlashpageError, ValueError, RuntimeError):
    """An argument has a wrong shape, dtype, device or value.

    Also a `RuntimeError`, because that is what flash-attn raises for the same mistakes.
    """


class CacheOverflowError(FlashpageError, RuntimeError):
    """Appending to a KV cache would write past its end."""


class UnsupportedError(FlashpageError, NotImplementedError):
    """The request is meaningful, but no backend here can serve it."""


class CheckpointError(FlashpageError, ValueError):
    """A model file is missing, truncated, inconsistent or of an unknown kind."""


class DownloadError(FlashpageError, RuntimeError):
    """A model could not be fetched; the message says what to do instead."""


class RequestError(FlashpageError, ValueError):
    """A generation request can not be served as asked (empty, too long, bad parameter)."""


class MissingDependencyError(FlashpageError, ImportError):
    """A package that this part of flashpage needs is not installed; the message names the extra."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say how to get it.

    Raises:
        MissingDependencyError: naming the module and the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise  # the module is there, something that it needs is not
        raise MissingDependencyError(
            f"{module} is not installed: pip install {module.split('.')[0]}, or flashpage with its "
            f"extra {extra!r}, which brings it"
        ) from error
