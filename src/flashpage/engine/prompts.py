"""The shapes in which a prompt may come: text, token ids or a chat; knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashpage.engine.values import show
from flashpage.errors import RequestError

if TYPE_CHECKING:
    from flashpage.weights.tokenizer import Tokenizer

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids, and its text where it came as text or as a chat."""

    text: str | None
    token_ids: list[int]


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of prompts, as a list of prompts.

    A list of ints is one prompt (token ids), and so is a list of messages (a chat).
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(
            f"prompts must be a string, token ids, a chat, or a list of these, not {show(prompts)}"
        )
    if prompts and all(isinstance(item, (int, Mapping)) for item in prompts):
        return [prompts]
    return list(prompts)


def split_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Any]:
    """One chat or a list of chats, as a list of chats; `encode_chat` checks each."""
    if not isinstance(messages, (list, tuple)) or not messages or isinstance(messages[0], Mapping):
        return [messages]
    return list(messages)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> EncodedPrompt:
    """Token ids of one prompt; raises `RequestError` if it has none of the known shapes."""
    if isinstance(prompt, str):
        return EncodedPrompt(prompt, _need(tokenizer, "a text").encode(prompt))
    if not isinstance(prompt, (list, tuple)):
        raise RequestError(f"a prompt is a string, token ids or a chat, not {show(prompt)}")
    if prompt and isinstance(prompt[0], Mapping):
        return encode_chat(prompt, tokenizer)
    return EncodedPrompt(None, list(prompt))


def encode_chat(messages: Sequence[Any], tokenizer: Tokenizer | None) -> EncodedPrompt:
    """Token ids of a conversation, up to where the assistant's next answer begins."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError(f"a chat is a list of at least one message, not {show(messages)}")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise RequestError(
                f"message {position} of a chat must have a 'role' and a 'content', both strings: "
                f"got {show(message)}"
            )
    tokenizer = _need(tokenizer, "a chat")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return EncodedPrompt(text, tokenizer.encode(text, add_special_tokens=False))


def _need(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise RequestError(f"{what} as prompt needs a tokenizer; this model has none: give ids")
    return tokenizer
