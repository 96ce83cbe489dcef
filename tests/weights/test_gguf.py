"""GGUF files: every type and architecture, and every way to be damaged."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from flashpage.errors import CheckpointError
from flashpage.layers.rope import RopeConfig, inverse_frequencies
from flashpage.weights.assign import checkpoint_slots
from flashpage.weights.gguf import SUPPORTED_TYPES, GGUFFile
from flashpage.weights.load import load_model

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
@pytest.mark.usefixtures("unpacked")
def test_weights_are_the_dequantised_ones(
    architecture: str, type_name: str, tmp_path: Path, random_state: Any, write_gguf: Any
) -> None:
    path = tmp_path / "model.gguf"
    stored = write_gguf(path, architecture, random_state(architecture), type_name)
    loaded = load_model(path, dtype="float32")
    assert loaded.name == "model"
    assert loaded.tokenizer is None
    assert loaded.config.architecture == architecture
    assert loaded.config.qkv_bias == (architecture == "qwen2")
    assert loaded.config.qk_norm == (architecture == "qwen3")
    assert not loaded.config.tie_word_embeddings
    slots = checkpoint_slots(loaded.model)
    assert slots.keys() == stored.keys()
    for name, slot in slots.items():
        assert torch.equal(slot.target, stored[name]), name


@pytest.mark.usefixtures("unpacked")
def test_no_output_matrix_means_a_tied_head(
    tmp_path: Path, random_state: Any, write_gguf: Any
) -> None:
    state = random_state("llama")
    del state["lm_head.weight"]
    write_gguf(tmp_path / "m.gguf", "llama", state)
    model = load_model(tmp_path / "m.gguf", dtype="float32").model
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.embed_tokens.weight


def test_biases_are_found_by_their_tensors(
    tmp_path: Path, random_state: Any, write_gguf: Any
) -> None:
    """llama.cpp interleaves llama's q and k biases like the rows they belong to."""
    state = random_state("llama")
    for layer in range(2):
        for part, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            state[f"model.layers.{layer}.self_attn.{part}.bias"] = torch.randn(rows)
    stored = write_gguf(tmp_path / "m.gguf", "llama", state)
    model = load_model(tmp_path / "m.gguf", dtype="float32").model
    assert model.config.qkv_bias
    assert not model.config.o_bias
    for name, slot in checkpoint_slots(model).items():
        assert torch.equal(slot.target, stored[name]), name


@pytest.mark.parametrize(("type_name", "dtype"), [("F16", "float16"), ("Q8_0", None)])
def test_dtype_of_the_checkpoint(
    type_name: str, dtype: str | None, tmp_path: Path, random_state: Any, write_gguf: Any
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", random_state("llama"), type_name)
    assert GGUFFile(tmp_path / "m.gguf").model_config().dtype == dtype


class TestRope:
    def config(self, tmp_path: Path, write_gguf: Any, state: Any, **changes: Any) -> RopeConfig:
        extra = changes.pop("extra", None)
        metadata = {f"llama.rope.{k.replace('__', '.')}": v for k, v in changes.items()}
        write_gguf(tmp_path / "m.gguf", "llama", state("llama"), metadata=metadata, extra=extra)
        return GGUFFile(tmp_path / "m.gguf").model_config().rope

    def test_linear(self, tmp_path: Path, write_gguf: Any, random_state: Any) -> None:
        options = {"scaling__type": "linear", "scaling__factor": 4.0}
        rope = self.config(tmp_path, write_gguf, random_state, **options)
        assert (rope.kind, rope.factor) == ("linear", 4.0)

    def test_old_linear(self, tmp_path: Path, write_gguf: Any, random_state: Any) -> None:
        rope = self.config(tmp_path, write_gguf, random_state, scale_linear=2.0)
        assert (rope.kind, rope.factor) == ("linear", 2.0)

    def test_yarn(self, tmp_path: Path, write_gguf: Any, random_state: Any) -> None:
        options = {
            "scaling__type": "yarn",
            "scaling__factor": 4.0,
            "scaling__original_context_length": 32,
        }
        rope = self.config(tmp_path, write_gguf, random_state, **options)
        assert (rope.kind, rope.original_max_position_embeddings) == ("yarn", 32)
        assert rope.attention_factor == pytest.approx(1 + 0.1 * np.log(4))

    def test_unknown(self, tmp_path: Path, write_gguf: Any, random_state: Any) -> None:
        with pytest.raises(CheckpointError, match="longrope"):
            self.config(tmp_path, write_gguf, random_state, scaling__type="longrope")

    def test_frequency_factors(self, tmp_path: Path, write_gguf: Any, random_state: Any) -> None:
        factors = np.linspace(1, 8, 32, dtype=np.float32)
        extra = {"rope_freqs.weight": factors}
        rope = self.config(tmp_path, write_gguf, random_state, extra=extra)
        expected = inverse_frequencies(64, RopeConfig()) / torch.from_numpy(factors)
        torch.testing.assert_close(inverse_frequencies(64, rope), expected)
        load_model(tmp_path / "m.gguf", dtype="float32")  # the tensor is not an unexpected one

    def test_too_few_frequency_factors(
        self, tmp_path: Path, write_gguf: Any, random_state: Any
    ) -> None:
        extra = {"rope_freqs.weight": np.ones(5, np.float32)}
        with pytest.raises(CheckpointError, match=r"5.*32"):
            self.config(tmp_path, write_gguf, random_state, extra=extra)


class TestRefused:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("llama.expert_count", 8),
            ("llama.attention.sliding_window", 4096),
            ("llama.logit_scale", 0.5),
            ("llama.rope.dimension_count", 32),
            ("split.count", 3),
        ],
    )
    def test_other_arithmetic(
        self, key: str, value: Any, tmp_path: Path, write_gguf: Any, random_state: Any
    ) -> None:
        write_gguf(tmp_path / "m.gguf", "llama", random_state("llama"), metadata={key: value})
        with pytest.raises(CheckpointError, match=str(value)):
            load_model(tmp_path / "m.gguf", dtype="float32")

    def test_unknown_architecture(self, tmp_path: Path, write_gguf: Any, random_state: Any) -> None:
        write_gguf(tmp_path / "m.gguf", "mamba", random_state("llama"))
        with pytest.raises(CheckpointError, match=r"mamba.*llama, qwen2, qwen3"):
            load_model(tmp_path / "m.gguf")

    def test_unsupported_type(self, tmp_path: Path, write_gguf: Any, random_state: Any) -> None:
        write_gguf(tmp_path / "m.gguf", "llama", random_state("llama"), "Q5_0")
        with pytest.raises(CheckpointError, match=r"token_embd.weight has type Q5_0.*Q4_K"):
            load_model(tmp_path / "m.gguf")

    def test_missing_and_unexpected_tensors(
        self, tmp_path: Path, write_gguf: Any, random_state: Any
    ) -> None:
        state = random_state("llama")
        del state["model.layers.1.mlp.down_proj.weight"]
        extra = {"blk.0.strange.weight": np.ones((2, 2), np.float32)}
        write_gguf(tmp_path / "m.gguf", "llama", state, extra=extra)
        with pytest.raises(CheckpointError) as caught:
            load_model(tmp_path / "m.gguf", dtype="float32")
        assert "missing: model.layers.1.mlp.down_proj.weight" in str(caught.value)
        assert "unexpected: blk.0.strange.weight" in str(caught.value)


class TestDamaged:
    @pytest.fixture
    def content(
        self, tmp_path: Path, write_gguf: Any, random_state: Any, bpe_metadata: Any
    ) -> bytes:
        metadata = {**bpe_metadata("smollm"), "tokenizer.chat_template": "{{ messages }}"}
        write_gguf(tmp_path / "good.gguf", "llama", random_state("llama"), "Q4_0", metadata)
        return (tmp_path / "good.gguf").read_bytes()

    def test_truncated_anywhere(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "cut.gguf"
        data_start = GGUFFile(tmp_path / "good.gguf").tensors["token_embd.weight"].offset
        cuts = [*range(0, 64), *np.linspace(64, data_start, 60, dtype=int)]
        cuts += [*np.linspace(data_start, len(content) - 1, 20, dtype=int)]
        for cut in cuts:
            path.write_bytes(content[:cut])
            with pytest.raises(CheckpointError, match=r"cut\.gguf"):
                load_model(path, dtype="float32")

    def test_flipped_bytes_never_crash(self, tmp_path: Path, content: bytes) -> None:
        """Whatever the header says, it loads or says in our words why not."""
        path = tmp_path / "flipped.gguf"
        data_start = GGUFFile(tmp_path / "good.gguf").tensors["token_embd.weight"].offset
        structure_end = content.index(b"tokenizer.ggml")
        for i in range(200):
            damaged = bytearray(content)
            end = (structure_end, data_start)[i % 2]
            for _ in range(np.random.randint(1, 4)):
                damaged[np.random.randint(0, end)] ^= 1 << np.random.randint(0, 8)
            path.write_bytes(damaged)
            with contextlib.suppress(CheckpointError):
                load_model(path, dtype="float32")

    def test_nan_is_named(self, tmp_path: Path, write_gguf: Any, random_state: Any) -> None:
        state = random_state("qwen3")
        state["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
        write_gguf(tmp_path / "m.gguf", "qwen3", state)
        with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight.*NaN"):
            load_model(tmp_path / "m.gguf", dtype="float32")

    @pytest.mark.parametrize(
        ("data", "word"),
        [
            (b"", "empty"),
            (b"PK\x03\x04" * 20, "not a GGUF file"),
            (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
            (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "truncated"),
        ],
    )
    def test_not_a_gguf_file(self, data: bytes, word: str, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match=word):
            load_model(tmp_path / "m.gguf")


def test_reads_what_the_gguf_package_reads(smollm2_path: Path) -> None:
    """Metadata and tensor places of a real file, against the package's own reader."""
    ours, theirs = GGUFFile(smollm2_path), gguf.GGUFReader(smollm2_path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        assert ours.metadata[key] == theirs.fields[key].contents()
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.offset == tensor.data_offset
        assert info.num_bytes == tensor.n_bytes
        assert list(info.shape) == tensor.shape.tolist()[::-1]
