"""Reads a Hugging Face model directory: its JSON files and its safetensors shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from flashpage.errors import CheckpointError, require

_INDEX_NAME = "model.safetensors.index.json"


def read_text(path: Path) -> str:
    """The contents of a text file.

    Raises:
        CheckpointError: the file can not be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file can not be read, is not JSON or nested too deeply, or holds
            something else.
    """
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} can not be read: its JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_json_if_present(path: Path) -> dict[str, Any] | None:
    """Like `read_json`, and None where there is no such file."""
    return read_json(path) if path.is_file() else None


def safetensors_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the directory's shards, on the CPU, read as it is asked for.

    Raises:
        CheckpointError: no safetensors file, a shard of the index is absent, or a damaged file.
    """
    require("safetensors", "engine")
    from safetensors import SafetensorError, safe_open

    for path in shard_paths(directory):
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} can not be read: {error}") from error


def shard_paths(directory: Path) -> list[Path]:
    """The files that hold the weights: those of the index, or all there are."""
    index = read_json_if_present(directory / _INDEX_NAME)
    if index is None:
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            found = _found_instead(directory)
            raise CheckpointError(f"{directory} has no .safetensors file{found}")
        return paths
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / _INDEX_NAME} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # Only plain names: an index must not lead out of its directory.
        if Path(name).name != name or not (directory / name).is_file():
            raise CheckpointError(f"{directory / _INDEX_NAME} names the shard {name}, not found")
    return [directory / name for name in names]


def _found_instead(directory: Path) -> str:
    pickled = sorted(p.name for p in directory.glob("*.bin"))
    if not pickled:
        return ""
    return f", only {pickled[0]}: pickled weights are not read, convert them to safetensors"
