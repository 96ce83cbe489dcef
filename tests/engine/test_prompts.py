"""Prompts: every shape they may come in, and those they may not."""

from __future__ import annotations

import pytest

from flashpage.engine.prompts import EncodedPrompt, encode_chat, encode_prompt, split_prompts
from flashpage.errors import RequestError

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [(1, 2)]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (CHAT, [CHAT]),
        ([CHAT, CHAT], [CHAT, CHAT]),
        (["a", [1], CHAT], ["a", [1], CHAT]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_split(prompts, expected):
    assert split_prompts(prompts) == expected


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, b"bytes"])
def test_not_a_prompt(prompts):
    with pytest.raises(RequestError, match="prompts must be"):
        split_prompts(prompts)


def test_encode(tokenizer):
    assert encode_prompt("hi", tokenizer) == EncodedPrompt("hi", [256, 104, 105])
    assert encode_prompt([5, 6], None) == EncodedPrompt(None, [5, 6])
    text = "user: hi\nassistant: "
    expected = EncodedPrompt(text, list(text.encode()))
    assert encode_prompt(CHAT, tokenizer) == encode_chat(CHAT, tokenizer) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "a prompt is a string"),
        ([{"role": "user"}], "message 0 of a chat"),
        ([*CHAT, {"role": "user", "content": None}], "message 1 of a chat"),
        ([*CHAT, "hi"], "message 1 of a chat"),
    ],
)
def test_not_to_be_encoded(tokenizer, prompt, message):
    with pytest.raises(RequestError, match=message):
        encode_prompt(prompt, tokenizer)


@pytest.mark.parametrize("prompt", ["text", CHAT])
def test_text_needs_a_tokenizer(prompt):
    with pytest.raises(RequestError, match="needs a tokenizer"):
        encode_prompt(prompt, None)
