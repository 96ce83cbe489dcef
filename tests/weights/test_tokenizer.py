"""Tokenizers of Hugging Face directories: as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flashpage.errors import CheckpointError, RequestError
from flashpage.weights.tokenizer import load_tokenizer

TEXTS = ("", "Hello world", "a  b\n\n12é", "<s>x</s>", "日本 🦙")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A byte-level tokenizer that begins every text with <s>, saved by transformers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "He", "ll"])}
    fast = FastTokenizer(models.BPE(vocabulary, [("H", "e"), ("l", "l")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>")])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = "{% for m in messages %}{{ bos_token + m.content }}{% endfor %}"
    wrapped.save_pretrained(tmp_path)
    return tmp_path


def test_equals_transformers(directory: Path) -> None:
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                want = theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
                assert ours.decode(ids, skip_special_tokens=skip) == want
    chat = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat, tokenize=False)


def test_path_of_the_file_itself(directory: Path) -> None:
    ids = load_tokenizer(directory).encode("Hello")
    assert load_tokenizer(directory / "tokenizer.json").encode("Hello") == ids


def test_training_limits_do_not_cut_prompts(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert len(load_tokenizer(directory).encode("xyz" * 50)) == 151


@pytest.mark.parametrize("place", ["jinja", "json", "config", "mapping", "list"])
def test_places_of_the_chat_template(place: str, directory: Path) -> None:
    config_path = directory / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(config_path.read_text())
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config.pop("chat_template", None)
    if place == "jinja":
        (directory / "chat_template.jinja").write_text("T", encoding="utf-8")
    elif place == "json":
        (directory / "chat_template.json").write_text('{"chat_template": "T"}')
    elif place == "config":
        config["chat_template"] = "T"
    elif place == "mapping":
        config["chat_template"] = {"tool_use": "U", "default": "T"}
    else:
        config["chat_template"] = [
            {"name": "tool_use", "template": "U"},
            {"name": "default", "template": "T"},
        ]
    config_path.write_text(json.dumps(config))
    assert load_tokenizer(directory).apply_chat_template([]) == "T"


def test_without_chat_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(directory).apply_chat_template([{"role": "user", "content": "Hi"}])


def test_old_vocabulary_files_go_through_transformers(directory: Path) -> None:
    """A directory of GPT-2's time: vocab.json and merges.txt, no tokenizer.json."""
    content = json.loads((directory / "tokenizer.json").read_text())
    expected = load_tokenizer(directory).encode("Hello world", add_special_tokens=False)
    vocabulary = content["model"]["vocab"] | {"<|endoftext|>": 258}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\nH e\nl l\n")
    (directory / "config.json").write_text('{"model_type": "gpt2"}')
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink()
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("Hello world", add_special_tokens=False) == expected
    assert tokenizer.decode(expected) == "Hello world"


class TestRefused:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        "template",
        [5, [5], [["name", "default"]], [{"name": "default", "template": 5}], {"default": []}],
    )
    @pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
    def test_chat_template_that_is_no_text(self, template: Any, file: str, directory: Path) -> None:
        (directory / "chat_template.jinja").unlink()
        (directory / file).write_text(json.dumps({"chat_template": template}))
        with pytest.raises(CheckpointError, match=rf"chat_template in .*{file} must be a template"):
            load_tokenizer(directory)

    def test_chat_template_of_other_bytes(self, directory: Path) -> None:
        (directory / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
            load_tokenizer(directory)

    def test_config_nested_too_deeply(self, directory: Path) -> None:
        (directory / "tokenizer_config.json").write_text("[" * 100_000 + "]" * 100_000)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json .*nested too deeply"):
            load_tokenizer(directory)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Nothing"}}'])
    def test_damaged(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)
