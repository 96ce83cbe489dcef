"""Text to token ids and back, with the special tokens and chat template of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flashpage.errors import CheckpointError, RequestError, require
from flashpage.models.fields import Fields
from flashpage.weights.chat_template import ChatTemplate
from flashpage.weights.safetensors import read_json_if_present, read_text


class TokenizerBackend(Protocol):
    """What turns text into ids; `FastBackend` for all that the tokenizers library can run."""

    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of the text; special tokens written in it count as such."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of the ids; bytes that are not (yet) UTF-8 become U+FFFD."""


class FastBackend:
    """A `tokenizers.Tokenizer`.

    Args:
        vocab_size: one more than its largest id; None looks for it, in tens of milliseconds.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        # Limits for training batches, which some files carry, must not cut or fill prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if vocab_size is None:
            ids = tokenizer.get_vocab(with_added_tokens=True).values()
            vocab_size = 1 + max(ids, default=-1)
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


class Tokenizer:
    """The tokenizer of one checkpoint.

    Attributes:
        vocab_size: one more than the largest id.
        bos_token_id: the id that begins a text, or None.
        eos_token_ids: the ids that end one; may be empty.
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.vocab_size = backend.vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`.

        Special tokens that are spelled out in the text become their ids.

        Args:
            add_special_tokens: whether to add what the checkpoint puts around a text (often a
                beginning-of-text token, for many models nothing).

        Raises:
            RequestError: `text` is not a string, or holds lone surrogates.
        """
        if not isinstance(text, str):
            raise RequestError(f"text must be a str, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"text is not valid Unicode: {error}") from error
        return self._backend.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes at the end that are not yet a character become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return self._chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; encode it with `add_special_tokens=False`.

        Args:
            messages: dicts with "role" and "content".
            add_generation_prompt: whether to end with the opening of the assistant's reply.

        Raises:
            RequestError: the checkpoint has no template, or it refuses these messages.
        """
        if self._chat_template is None:
            raise RequestError("this model has no chat template: pass its prompt as text")
        return self._chat_template.render(messages, add_generation_prompt)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, of a `tokenizer.json`, or of a GGUF file.

    Raises:
        CheckpointError: there is none, or it is damaged or of an unknown kind.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from flashpage.weights.gguf import GGUFFile
        from flashpage.weights.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(GGUFFile(path).metadata)
    directory = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return _from_transformers(directory)
    require("tokenizers", "engine")
    from tokenizers import Tokenizer as FastTokenizer

    try:
        tokenizer = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from error
    config_file = directory / "tokenizer_config.json"
    config = Fields(read_json_if_present(config_file) or {}, str(config_file))
    special = _special_tokens(directory, config.values)
    bos, eos = (special.get(name) for name in ("bos_token", "eos_token"))
    eos_id = None if eos is None else tokenizer.token_to_id(eos)
    return Tokenizer(
        FastBackend(tokenizer),
        bos_token_id=None if bos is None else tokenizer.token_to_id(bos),
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_template=_chat_template(directory, config, special),
    )


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds files that `load_tokenizer` can try."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return any((directory / name).is_file() for name in names)


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text; a token is stored as its text or as a dict with "content"."""
    tokens: dict[str, str] = {}
    extra = read_json_if_present(directory / "special_tokens_map.json") or {}
    for name, value in {**extra, **config}.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _chat_template(
    directory: Path, config: Fields, special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """From the newest place to the oldest: its own file, a JSON file, the tokenizer's config."""
    file = directory / "chat_template.jinja"
    source = read_text(file) if file.is_file() else None
    if source is None:
        json_file = directory / "chat_template.json"
        source = _template_source(Fields(read_json_if_present(json_file) or {}, str(json_file)))
    if source is None:
        source = _template_source(config)
    return None if source is None else ChatTemplate(source, special_tokens)


def _template_source(fields: Fields) -> str | None:
    """One template, or the default one of several: by name, or as a list of named ones."""
    value = source = fields.get("chat_template")
    if isinstance(value, Mapping):
        source = value.get("default")
    elif isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        named = (entry.get("template") for entry in value if entry.get("name") == "default")
        source = next(named, None)
    if source is not None and not isinstance(source, str):
        rule = "a template as a string, or a list of objects with name and template"
        raise fields.refusal("chat_template", value, rule)
    return source


def _from_transformers(directory: Path) -> Tokenizer:
    """For directories with only the older vocabulary files, which transformers can convert."""
    if not has_tokenizer(directory):
        raise CheckpointError(f"{directory} has no tokenizer.json and no other vocabulary")
    require("transformers", "engine")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever the many converters raise
        raise CheckpointError(f"the tokenizer of {directory} can not be read: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(
            f"the tokenizer of {directory} ({type(converted).__name__}) has no fast version: "
            "convert it to tokenizer.json"
        )
    eos = converted.eos_token_id
    special = {name: str(value) for name, value in converted.special_tokens_map.items()}
    config = Fields({"chat_template": converted.chat_template}, f"the tokenizer of {directory}")
    return Tokenizer(
        FastBackend(backend),
        bos_token_id=converted.bos_token_id,
        eos_token_ids=() if eos is None else (eos,),
        chat_template=_chat_template(directory, config, special),
    )
