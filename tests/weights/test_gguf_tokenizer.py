"""Tokenizers of GGUF files give the ids of llama.cpp, which made the tables in data/."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashpage.errors import CheckpointError, RequestError
from flashpage.weights.gguf_tokenizer import tokenizer_from_gguf
from flashpage.weights.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"
PRES = ("gpt-2", "smollm", "default", "llama-bpe", "qwen2")


def table(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def spm_metadata(**changes: Any) -> dict[str, Any]:
    data = table("tiny_spm.json")
    metadata = {
        "model": "llama",
        "tokens": data["pieces"],
        "scores": data["scores"],
        "token_type": data["kinds"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: os.PathLike[str]) -> Tokenizer:
    return load_tokenizer(smollm2_path)


class TestSmolLM2:
    def test_known_ids(self, tokenizer: Tokenizer) -> None:
        for text, ids in table("smollm2_ids.json")["cases"]:
            assert tokenizer.encode(text) == ids, text

    def test_attributes(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.vocab_size == 49152
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_ids == (2, 0)

    def test_chat(self, tokenizer: Tokenizer) -> None:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert text.startswith("<|im_start|>system\n")
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids[0] == 1
        assert ids.count(2) == 2
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert "<|" not in tokenizer.decode(ids)

    @settings(deadline=None, max_examples=100)
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
    def test_round_trip(self, tokenizer: Tokenizer, text: str) -> None:
        def again(text: str) -> str:
            return tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)

        # Some bytes have no token in this vocabulary: in llama.cpp too they leave no trace.
        assume(all(again(character) == character for character in text))
        assert again(text) == text


@functools.cache
def byte_level(pre: str) -> Tokenizer:
    data = table("tiny_bpe.json")
    keys = {"tokens": "tokens", "token_type": "kinds", "merges": "merges"}
    metadata = {f"tokenizer.ggml.{key}": data[name] for key, name in keys.items()}
    kind = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    return tokenizer_from_gguf({**metadata, **kind})


class TestByteLevel:
    @pytest.mark.parametrize("pre", PRES)
    def test_known_ids(self, pre: str, bpe_metadata: Any) -> None:
        tokenizer = tokenizer_from_gguf(bpe_metadata(pre))
        for text, ids in table("tiny_bpe.json")[pre]:
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text

    def test_the_patterns_differ(self) -> None:
        """The table would not notice a wrong pattern if all gave the same ids."""
        ids = [json.dumps([ids for _, ids in table("tiny_bpe.json")[pre]]) for pre in PRES]
        assert len(set(ids)) == len(PRES)

    @settings(deadline=None, max_examples=100)
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.sampled_from(PRES))
    def test_round_trip(self, text: str, pre: str) -> None:
        tokenizer = byte_level(pre)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    @pytest.mark.parametrize(
        ("pre", "changes", "begins", "ends"),
        [
            ("smollm", {}, False, False),
            ("llama-bpe", {}, True, False),
            ("llama-bpe", {"add_bos_token": False}, False, False),
            ("smollm", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ],
    )
    def test_framing(
        self, pre: str, changes: Any, begins: bool, ends: bool, bpe_metadata: Any
    ) -> None:
        tokenizer = tokenizer_from_gguf(bpe_metadata(pre, **changes))
        bare = tokenizer.encode("abc", add_special_tokens=False)
        bos = [tokenizer.bos_token_id] if begins else []
        eos = [tokenizer.eos_token_ids[0]] if ends else []
        assert tokenizer.encode("abc") == bos + bare + eos
        assert tokenizer.encode("") == bos + eos

    def test_half_a_character_is_a_replacement_character(self, bpe_metadata: Any) -> None:
        tokenizer = tokenizer_from_gguf(bpe_metadata("smollm"))
        ids = tokenizer.encode("ok 🦙")
        assert tokenizer.decode(ids) == "ok 🦙"
        assert tokenizer.decode(ids[:-1]).endswith("\ufffd")

    def test_user_defined_tokens_are_text(self, bpe_metadata: Any) -> None:
        """They are matched like special tokens, and shown like ordinary ones."""
        metadata = bpe_metadata("smollm")
        metadata["tokenizer.ggml.token_type"][-1] = 4
        tokenizer = tokenizer_from_gguf(metadata)
        ids = tokenizer.encode("a<|im_end|>")
        assert len(ids) == 2
        assert tokenizer.decode(ids) == "a<|im_end|>"


class TestSentencePiece:
    @pytest.mark.parametrize("prefix", [True, False])
    def test_known_ids(self, prefix: bool) -> None:
        tokenizer = tokenizer_from_gguf(spm_metadata(add_space_prefix=prefix))
        cases = table("tiny_spm.json")["with_prefix" if prefix else "without_prefix"]
        for text, ids in cases:
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text
            assert tokenizer.encode(text) == [1, *ids]

    @settings(deadline=None, max_examples=100)
    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
    def test_round_trip(self, text: str) -> None:
        """But for a written space after a special token, which the implied one hides."""
        tokenizer = tokenizer_from_gguf(spm_metadata())
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_half_a_character(self) -> None:
        tokenizer = tokenizer_from_gguf(spm_metadata())
        ids = tokenizer.encode("🦩")  # in no piece: four bytes
        assert tokenizer.decode(ids) == "🦩"
        assert tokenizer.decode(ids[:-1]).startswith("\ufffd")

    def test_missing_byte_pieces(self) -> None:
        metadata = spm_metadata()
        metadata["tokenizer.ggml.tokens"][3 + 0xC3] = "<gone>"
        metadata["tokenizer.ggml.token_type"][3 + 0xC3] = 1
        with pytest.raises(CheckpointError, match="0xC3"):
            tokenizer_from_gguf(metadata)


class TestRefused:
    def test_unknown_model(self, bpe_metadata: Any) -> None:
        with pytest.raises(CheckpointError, match=r"'t5'.*gpt2, llama"):
            tokenizer_from_gguf(bpe_metadata("smollm", model="t5"))

    def test_model_that_is_no_name(self, bpe_metadata: Any) -> None:
        with pytest.raises(CheckpointError, match=r"\['gpt2'\] is not known"):
            tokenizer_from_gguf(bpe_metadata("smollm", model=["gpt2"]))

    def test_chat_template_that_is_no_text(self, bpe_metadata: Any) -> None:
        metadata = {**bpe_metadata("smollm"), "tokenizer.chat_template": 5}
        with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template .*a string, got 5"):
            tokenizer_from_gguf(metadata)

    def test_unknown_pattern(self, bpe_metadata: Any) -> None:
        with pytest.raises(CheckpointError, match=r"'gpt-4o'.*smollm"):
            tokenizer_from_gguf(bpe_metadata("gpt-4o"))

    @pytest.mark.parametrize("name", ["tokens", "merges"])
    def test_missing_lists(self, name: str, bpe_metadata: Any) -> None:
        with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{name}"):
            tokenizer_from_gguf(bpe_metadata("smollm", **{name: None}))

    def test_types_for_other_tokens(self, bpe_metadata: Any) -> None:
        with pytest.raises(CheckpointError, match=r"token_type has 3 entries"):
            tokenizer_from_gguf(bpe_metadata("smollm", token_type=[1, 1, 1]))

    def test_merges_of_unknown_tokens(self, bpe_metadata: Any) -> None:
        with pytest.raises(CheckpointError, match="damaged"):
            tokenizer_from_gguf(bpe_metadata("smollm", merges=["never seen"]))

    def test_id_out_of_range(self, bpe_metadata: Any) -> None:
        with pytest.raises(CheckpointError, match="bos_token_id = 99999"):
            tokenizer_from_gguf(bpe_metadata("smollm", bos_token_id=99999))

    def test_text_that_is_none(self, bpe_metadata: Any) -> None:
        tokenizer = tokenizer_from_gguf(bpe_metadata("smollm"))
        with pytest.raises(RequestError, match="int"):
            tokenizer.encode(5)
        with pytest.raises(RequestError, match="Unicode"):
            tokenizer.encode("lone \ud800 surrogate")

    def test_no_chat_template(self, bpe_metadata: Any) -> None:
        tokenizer = tokenizer_from_gguf(bpe_metadata("smollm"))
        assert not tokenizer.has_chat_template
        with pytest.raises(RequestError, match="no chat template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
