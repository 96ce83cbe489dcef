"""The one family of exceptions: every error a user can cause is a `FlashpageError`.

Each class is also the built-in type that callers of flash-attn, transformers or plain Python
already catch, so `except ValueError` and `pytest.raises(RuntimeError)` keep working.
Messages name the argument, its value and the rule it broke.
"""

from __future__ import annotations


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
