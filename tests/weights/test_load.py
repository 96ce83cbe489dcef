"""What load_model takes, what it chooses by itself, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpage.errors import ArgumentError, CheckpointError, DownloadError
from flashpage.layers.linear import has_fast_bfloat16
from flashpage.weights import default_model, hub
from flashpage.weights.assign import checkpoint_slots
from flashpage.weights.gguf_tokenizer import tokenizer_from_gguf
from flashpage.weights.load import LoadedModel, load_model


def weights(loaded: LoadedModel) -> torch.Tensor:
    return torch.cat([p.flatten().float() for p in loaded.model.parameters()])


class TestDummy:
    def test_config_dict_file_and_directory(self, tmp_path: Path, tiny_config: Any) -> None:
        config = tiny_config("qwen2")
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
        sources = (config, tmp_path / "config.json", tmp_path)
        models = [load_model(s, load_format="dummy", dtype="float32") for s in sources]
        for loaded in models:
            assert torch.equal(weights(loaded), weights(models[0]))
            assert loaded.tokenizer is None
        assert [m.config.eos_token_ids for m in models] == [(), (), (7, 8)]

    def test_seed(self, tiny_config: Any) -> None:
        first, again, other = (
            weights(load_model(tiny_config(), load_format="dummy", dtype="float32", seed=seed))
            for seed in (1, 1, 2)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    @pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
    def test_seed_at_the_ends_of_its_range(self, seed: int, tiny_config: Any) -> None:
        load_model(tiny_config(), load_format="dummy", dtype="float32", seed=seed)

    @pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 10**23, 1.0, "1", True, None])
    def test_seed_that_can_not_be(self, seed: Any, tiny_config: Any) -> None:
        with pytest.raises(ArgumentError, match="seed must be an integer from"):
            load_model(tiny_config(), load_format="dummy", seed=seed)

    def test_scale(self, tiny_config: Any) -> None:
        loaded = load_model(tiny_config("qwen3"), load_format="dummy", dtype="float32")
        for name, slot in checkpoint_slots(loaded.model).items():
            if name.endswith("norm.weight"):
                assert (slot.target == 1).all()
            else:
                assert slot.target.std().item() == pytest.approx(0.02, rel=0.1)

    def test_a_name_that_is_no_config(self) -> None:
        with pytest.raises(CheckpointError, match="'qwen3-0.7b' is no file.* qwen3-0.6b"):
            load_model("qwen3-0.7b", load_format="dummy")

    def test_needs_a_config(self, tiny_config: Any) -> None:
        with pytest.raises(ArgumentError, match="config"):
            load_model(load_format="dummy")
        with pytest.raises(ArgumentError, match="load_format='dummy'"):
            load_model(tiny_config())


class TestDtype:
    @pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
    def test_named(self, dtype: Any, tiny_config: Any) -> None:
        loaded = load_model(tiny_config(), load_format="dummy", dtype=dtype)
        assert loaded.model.dtype == torch.bfloat16
        assert loaded.model.norm.weight.dtype == torch.bfloat16

    def test_auto_is_what_the_processor_is_fast_in(self, tiny_config: Any) -> None:
        loaded = load_model(tiny_config(), load_format="dummy")
        expected = torch.bfloat16 if has_fast_bfloat16() else torch.float32
        assert loaded.model.dtype == expected
        assert loaded.model.lm_head.is_packed == has_fast_bfloat16()

    @pytest.mark.parametrize("dtype", ["float64", "fp16", torch.int8, None])
    def test_unknown(self, dtype: Any, tiny_config: Any) -> None:
        with pytest.raises(ArgumentError, match="dtype"):
            load_model(tiny_config(), load_format="dummy", dtype=dtype)


class TestDevice:
    @pytest.mark.parametrize("device", ["foo", "", "meta", "mps", "cuda:-1", None, 2**70])
    def test_unknown(self, device: Any, tiny_config: Any) -> None:
        with pytest.raises(ArgumentError, match="device must be 'cpu', 'cuda' or"):
            load_model(tiny_config(), load_format="dummy", device=device)

    @pytest.mark.parametrize(("device", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
    def test_not_there(
        self, device: str, count: int, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        with pytest.raises(ArgumentError, match=f"'{device}' is not there.*{count} CUDA devices"):
            load_model(tiny_config(), load_format="dummy", device=torch.device(device))


class TestEnds:
    """Tokens that begin and end a text, from each place that names them."""

    @pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
    @pytest.mark.parametrize("i", [-1, 680, 1000])
    def test_eos_outside_the_vocabulary(
        self, file: str, i: int, tmp_path: Path, tiny_config: Any
    ) -> None:
        contents = {"config.json": tiny_config(), "generation_config.json": {}}
        contents[file]["eos_token_id"] = [3, i]
        for name, content in contents.items():
            (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=rf"eos_token_id in {file} .*679.*{i}"):
            load_model(tmp_path, load_format="dummy")

    @pytest.mark.parametrize("name", ["bos", "eos"])
    def test_tokenizer_of_a_larger_model(
        self, name: str, tiny_config: Any, bpe_metadata: Any
    ) -> None:
        tokenizer = tokenizer_from_gguf(bpe_metadata("smollm"))
        ends = {"bos_token_id": None, "eos_token_ids": ()}
        ends |= {"bos": {"bos_token_id": 60}, "eos": {"eos_token_ids": (3, 60)}}[name]
        vars(tokenizer).update(ends)
        with pytest.raises(CheckpointError, match=f"{name} token of the tokenizer has id 60.* 59"):
            load_model(tiny_config(vocab_size=60), load_format="dummy", tokenizer=tokenizer)

    def test_eos_of_a_gguf_file(
        self, tmp_path: Path, write_gguf: Any, random_state: Any, bpe_metadata: Any
    ) -> None:
        metadata = bpe_metadata("smollm", eot_token_id=680)
        write_gguf(tmp_path / "m.gguf", "llama", random_state("llama"), metadata=metadata)
        with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.eot_token_id .*679.*680"):
            load_model(tmp_path / "m.gguf")


class TestSource:
    def test_unknown_load_format(self) -> None:
        with pytest.raises(ArgumentError, match="load_format"):
            load_model("x", load_format="pickle")

    @pytest.mark.parametrize("path", ["/not/there", "missing.gguf", "a/b/c"])
    def test_path_that_is_not_there(self, path: str) -> None:
        with pytest.raises(CheckpointError, match="neither a file nor a directory"):
            load_model(path)

    def test_directory_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            load_model(tmp_path)

    def test_a_gguf_file_as_safetensors(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.touch()
        with pytest.raises(CheckpointError, match="is a .gguf file, but load_format = 'safetens"):
            load_model(path, load_format="safetensors")

    def test_a_config_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_text("{}")
        with pytest.raises(CheckpointError, match="for random weights.*load_format='dummy'"):
            load_model(path)

    def test_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="pass the directory"):
            load_model(tmp_path / "model.safetensors")

    def test_directory_with_one_gguf_file(
        self, tmp_path: Path, write_gguf: Any, random_state: Any, bpe_metadata: Any
    ) -> None:
        metadata = bpe_metadata("smollm")
        write_gguf(tmp_path / "tiny.gguf", "llama", random_state("llama"), metadata=metadata)
        loaded = load_model(tmp_path, dtype="float32")
        assert loaded.name == "tiny"
        assert loaded.tokenizer is not None
        assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids

    def test_several_gguf_files(self, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match="name one"):
            load_model(tmp_path)

    def test_other_tokenizer(
        self, tmp_path: Path, write_gguf: Any, random_state: Any, bpe_metadata: Any
    ) -> None:
        """One that is brought is used, even where the model's own can not be read."""
        state = random_state("llama")
        good, odd = tmp_path / "good.gguf", tmp_path / "odd.gguf"
        write_gguf(good, "llama", state, metadata=bpe_metadata("smollm"))
        write_gguf(odd, "llama", state, metadata=bpe_metadata("smollm", model="rwkv"))
        with pytest.raises(CheckpointError, match="rwkv"):
            load_model(odd, dtype="float32")
        brought = load_model(good, dtype="float32").tokenizer
        assert load_model(odd, dtype="float32", tokenizer=brought).tokenizer is brought
        assert load_model(odd, dtype="float32", tokenizer=good).tokenizer.encode("Hi")

    def test_none_is_the_default_model(
        self, tmp_path: Path, write_gguf: Any, random_state: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_gguf(tmp_path / "d.gguf", "llama", random_state("llama"))
        monkeypatch.setattr(default_model, "default_model_path", lambda: tmp_path / "d.gguf")
        assert load_model(dtype="float32").name == "SmolLM2-135M-Instruct"

    def test_too_large_for_memory(self, tiny_config: Any) -> None:
        config = tiny_config(vocab_size=2**30, hidden_size=2**20)
        with pytest.raises(CheckpointError, match="do not fit"):
            load_model(config, load_format="dummy", dtype="float32")


class TestHub:
    def test_downloaded_directory_is_loaded(
        self, tmp_path: Path, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
        asked: dict[str, Any] = {}

        def snapshot_download(model_id: str, **options: Any) -> str:
            asked.update(options, model_id=model_id)
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
            load_model("owner/name")
        assert asked["model_id"] == "owner/name"
        assert "*.safetensors" in asked["allow_patterns"]
        assert not any("bin" in pattern for pattern in asked["allow_patterns"])

    @pytest.mark.parametrize("model_id", ["owner/name", "no spaces allowed"])
    def test_offline(self, model_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(DownloadError) as caught:
            hub.fetch_from_hub(model_id)
        message = str(caught.value)
        assert model_id in message
        assert "config.json" in message


@pytest.mark.parametrize("model", [5, [], b"x", 1.5])
def test_models_of_a_wrong_kind(model: Any) -> None:
    for load_format in ("auto", "dummy"):
        with pytest.raises(ArgumentError, match="model must be a path"):
            load_model(model, load_format=load_format)


def test_what_can_be_no_path() -> None:
    with pytest.raises(CheckpointError, match="is no path"):
        load_model("x" * 5000)
    with pytest.raises((CheckpointError, DownloadError)):  # Pythons differ on when they say so
        load_model("a\0b")


def test_the_name_of_a_config_is_not_asked_of_the_hub() -> None:
    with pytest.raises(ArgumentError, match=r"'qwen3-0\.6b' has no weights: .*load_format='dummy'"):
        load_model("qwen3-0.6b")
