"""Builds the tokenizer that a GGUF file describes, so that its ids equal llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashpage.errors import CheckpointError, require
from flashpage.models.fields import Fields
from flashpage.weights.chat_template import ChatTemplate
from flashpage.weights.sentencepiece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceBackend,
)
from flashpage.weights.tokenizer import FastBackend, Tokenizer, TokenizerBackend

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

# tokenizer.ggml.pre -> the patterns that split a text into words, each applied to the pieces of
# the one before: a text that splits differently gets other ids, and looks right all the same.
_WORD_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2_WORDS,
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
    "llama-bpe": (_LLAMA3_WORDS,),
    "llama3": (_LLAMA3_WORDS,),
    "llama-v3": (_LLAMA3_WORDS,),
    "qwen2": (_QWEN2_WORDS,),
    "deepseek-r1-qwen": (_QWEN2_WORDS,),
}
# These take a word that is in the vocabulary as it is, and begin every text with a bos token.
_LLAMA3_KINDS = ("llama-bpe", "llama3", "llama-v3")

# Tokens that end a turn whatever the metadata says: files name only one of theirs.
_END_OF_TURN = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata.

    Raises:
        CheckpointError: no vocabulary, or a kind of tokenizer that is not known here.
    """
    model = _one_of(_BACKENDS, "tokenizer.ggml.model", metadata.get("tokenizer.ggml.model"))
    tokens = _list(metadata, "tokens", str)
    kinds = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = _list(metadata, "token_type", int, len(tokens))
    return Tokenizer(
        _BACKENDS[model](metadata, tokens, kinds),
        bos_token_id=_token_id(metadata, "bos", len(tokens)),
        eos_token_ids=_eos_ids(metadata, tokens, kinds),
        chat_template=_chat_template(metadata, tokens),
    )


def _gpt2_backend(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> TokenizerBackend:
    """Byte-level BPE with ranked merges."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    pre = _one_of(_WORD_PATTERNS, "tokenizer.ggml.pre", pre)
    tokenizer = _byte_level_bpe(tokens, _list(metadata, "merges", str), kinds, pre)
    bos, eos = _frame_ids(metadata, len(tokens), add_bos=pre in _LLAMA3_KINDS)
    _frame(tokenizer, tokens, bos, eos)
    return FastBackend(tokenizer, len(tokens))


def _llama_backend(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> TokenizerBackend:
    """SentencePiece BPE with scores."""
    bos, eos = _frame_ids(metadata, len(tokens), add_bos=True)
    scores = _list(metadata, "scores", float, len(tokens))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    try:
        return SentencePieceBackend(
            tokens, scores, kinds, bos=bos, eos=eos, add_space_prefix=prefix
        )
    except ValueError as error:
        raise CheckpointError(f"the tokenizer of the GGUF file is damaged: {error}") from error


_BACKENDS = {"gpt2": _gpt2_backend, "llama": _llama_backend}


def _byte_level_bpe(tokens: list[str], merges: list[str], kinds: list[int], pre: str) -> Any:
    """A `tokenizers.Tokenizer` without post-processor."""
    require("tokenizers", "engine")
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocabulary, pairs, ignore_merges=pre in _LLAMA3_KINDS)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"the tokenizer of the GGUF file is damaged: {error}") from error
    tokenizer = FastTokenizer(bpe)
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _WORD_PATTERNS[pre]
    ]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    added = [
        AddedToken(token, special=special[kind], normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in special
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _frame_ids(
    metadata: Mapping[str, Any], num_tokens: int, *, add_bos: bool
) -> tuple[int | None, int | None]:
    """The ids to put before and after a text; `add_bos` is what holds if the file does not say."""
    bos, eos = (_token_id(metadata, name, num_tokens) for name in ("bos", "eos"))
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    return bos if add_bos else None, eos if add_eos else None


def _frame(tokenizer: Any, tokens: list[str], bos: int | None, eos: int | None) -> None:
    """Make the tokenizer put these ids around a text."""
    from tokenizers import processors

    ends = [(f"framing_{end}", i) for end, i in (("bos", bos), ("eos", eos)) if i is not None]
    if not ends:
        return
    before = "framing_bos " if bos is not None else ""
    after = " framing_eos" if eos is not None else ""
    special = [{"id": name, "ids": [i], "tokens": [tokens[i]]} for name, i in ends]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before}$A{after}", special_tokens=special
    )


def _one_of(known: Mapping[str, Any], key: str, value: Any) -> str:
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(f"{key} = {value!r} is not known; known: {', '.join(known)}")
    return value


def _list(
    metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None
) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(issubclass(t, kind) for t in set(map(type, values))):
        raise CheckpointError(f"the GGUF file has no list tokenizer.ggml.{name} of {kind.__name__}")
    if length is not None and len(values) != length:
        raise CheckpointError(
            f"tokenizer.ggml.{name} has {len(values)} entries for {length} tokens"
        )
    return values


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < num_tokens):
        raise CheckpointError(f"{key} = {value!r} is not an id of the {num_tokens} tokens")
    return value


def _eos_ids(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> tuple[int, ...]:
    named = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
    known = [i for i, token in enumerate(tokens) if token in _END_OF_TURN and kinds[i] == CONTROL]
    return tuple(dict.fromkeys(i for i in [*named, *known] if i is not None))


def _chat_template(metadata: Mapping[str, Any], tokens: list[str]) -> ChatTemplate | None:
    source = Fields(metadata, "the GGUF metadata").string("tokenizer.chat_template")
    if source is None:
        return None
    special: dict[str, str] = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        i = _token_id(metadata, key, len(tokens))
        if i is not None:
            special[f"{name}_token"] = tokens[i]
    return ChatTemplate(source, special)
