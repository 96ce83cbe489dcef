"""One family of exceptions, and a clear word where an optional package is missing."""

from __future__ import annotations

import inspect

import pytest

from flashpage import errors
from flashpage.errors import FlashpageError, MissingDependencyError, require


def test_every_error_is_of_the_family_and_a_built_in():
    classes = [
        c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)
    ]
    assert len(classes) >= 7
    for c in classes:
        assert issubclass(c, FlashpageError)
        if c is not FlashpageError:
            assert issubclass(c, ValueError | RuntimeError | NotImplementedError | ImportError)


def test_require():
    assert require("json", "engine").dumps([1]) == "[1]"
    with pytest.raises(
        MissingDependencyError,
        match=r"nothing_like_it is not .*pip install nothing_like_it, or .*'engine'",
    ):
        require("nothing_like_it", "engine")
