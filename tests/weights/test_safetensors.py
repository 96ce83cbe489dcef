"""Hugging Face directories: shards, indexes, and what can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashpage.errors import CheckpointError
from flashpage.weights.assign import checkpoint_slots
from flashpage.weights.load import load_model
from flashpage.weights.safetensors import read_json, safetensors_tensors

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path, tiny_config: Any, random_state: Any) -> Path:
    """A checkpoint in two shards with an index, and a third file that the index does not name."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    state = random_state("qwen3")
    names = list(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, tmp_path / file)
    save_file({"stray": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_shards_of_the_index(directory: Path) -> None:
    tensors = dict(safetensors_tensors(directory))
    loaded = load_model(directory, dtype="float32")
    assert loaded.name == directory.name
    for name, slot in checkpoint_slots(loaded.model).items():
        assert torch.equal(slot.target, tensors[name]), name


def test_all_files_without_an_index(directory: Path) -> None:
    (directory / INDEX).unlink()
    with pytest.raises(CheckpointError, match="unexpected: stray"):
        load_model(directory, dtype="float32")
    (directory / "consolidated.safetensors").unlink()
    load_model(directory, dtype="float32")


class TestRefused:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
            (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
            (b'{"a": "\xff"}', "not UTF-8"),
            (b"{", "not valid JSON"),
            (b"[1]", "must hold a JSON object"),
        ],
    )
    def test_json_that_is_no_config(self, content: bytes, words: str, directory: Path) -> None:
        (directory / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"config\.json .*{words}"):
            load_model(directory)

    def test_absent_shard(self, directory: Path) -> None:
        (directory / "b.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"b\.safetensors, not found"):
            load_model(directory)

    def test_index_that_leads_away(self, directory: Path) -> None:
        (directory / INDEX).write_text('{"weight_map": {"x": "../a.safetensors"}}')
        with pytest.raises(CheckpointError, match=r"\.\./a\.safetensors, not found"):
            load_model(directory)

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}'])
    def test_damaged_index(self, content: str, directory: Path) -> None:
        (directory / INDEX).write_text(content)
        with pytest.raises(CheckpointError, match="index"):
            load_model(directory)

    @pytest.mark.parametrize("keep", [0, 4, 100, -1])
    def test_truncated_shard(self, keep: int, directory: Path) -> None:
        content = (directory / "a.safetensors").read_bytes()
        (directory / "a.safetensors").write_bytes(content[:keep])
        with pytest.raises(CheckpointError, match=r"a\.safetensors can not be read"):
            load_model(directory)

    def test_nan(self, directory: Path) -> None:
        state = dict(safetensors_tensors(directory))
        state["model.norm.weight"] = torch.full((256,), float("nan"))
        (directory / INDEX).unlink()
        for file in directory.glob("*.safetensors"):
            file.unlink()
        save_file(state, directory / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight contains NaN"):
            load_model(directory)

    def test_pickled_weights_only(self, tmp_path: Path, tiny_config: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin.*convert"):
            load_model(tmp_path)

    def test_json_that_is_not(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("{'a': 1}")
        with pytest.raises(CheckpointError, match="not valid JSON"):
            read_json(tmp_path / "x.json")
        with pytest.raises(CheckpointError, match="can not be read"):
            read_json(tmp_path / "y.json")
