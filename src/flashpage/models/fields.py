"""Reads single values out of a parsed config file; what has a wrong type or range is refused."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashpage.errors import CheckpointError

# Lengths and ids are int32 in the kernels.
MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Fields:
    """Checked access to one mapping, in which null counts as absent.

    Every refusal is a `CheckpointError` that names the source, the field, its value and the rule.
    Defaults have to keep the rule too: some are computed from other fields.

    Attributes:
        values: contents of a config file, or of a part of it.
        source: what messages call it: "config.json".
        prefix: stands before every name, as the architecture does in GGUF metadata.
    """

    values: Mapping[str, Any]
    source: str
    prefix: str = ""

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER
    ) -> int:
        value = self._required(name, default)
        if not _is_integer(value) or not low <= value <= high:
            raise self.refusal(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, allow_zero: bool = False) -> float:
        value = self._required(name, default)
        number = _as_finite(value)
        if number is None or number < 0 or (number == 0 and not allow_zero):
            rule = f"a finite number {'>=' if allow_zero else '>'} 0"
            raise self.refusal(name, value, rule)
        return number

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, value, "true or false")
        return value

    def string(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refusal(name, value, "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """The strings of a list; empty where it is absent."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self.refusal(name, value, "a list of strings")
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """The ids of a field that holds one or a list of them; empty where it is absent."""
        value = self.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list | tuple) else [value]
        if not all(_is_integer(i) and 0 <= i < vocab_size for i in ids):
            rule = f"a token id (an integer from 0 to vocab_size - 1 = {vocab_size - 1}) or a list"
            raise self.refusal(name, value, f"{rule} of token ids")
        return tuple(ids)

    def section(self, name: str) -> Fields:
        """The fields of a nested mapping; without any where it is absent."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.refusal(name, value, "an object")
        return Fields(value, f"{self.prefix}{name} of {self.source}")

    def get(self, name: str) -> Any:
        """The value as it is; None where it is absent."""
        return self.values.get(self.prefix + name)

    def refusal(self, name: str, value: Any, rule: str) -> CheckpointError:
        """The error to raise for a value that is not what `rule` says."""
        return CheckpointError(
            f"{self.prefix}{name} in {self.source} must be {rule}, got {shown(value)}"
        )

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.source} has no field {self.prefix}{name}")
        return default


def shown(value: Any) -> str:
    """A value for a message: cut if it is long or deep, as values of a damaged file can be."""
    return reprlib.repr(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON has integers of any length
        return None
    return number if math.isfinite(number) else None
