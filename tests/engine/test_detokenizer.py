"""Detokenizer: whole characters, stop strings, and equality with decoding the whole at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpage.engine.detokenizer import IncrementalDetokenizer, StopMatcher

TEXTS = [
    "plain ASCII, 1 2  3\n\ttabs",
    "naïve café, Größe, ñandú, ça",
    "日本語の文章と中文字符、한국어",
    "👩‍👩‍👧‍👦 family, 🇨🇭 flag, 👍🏽 skin",
    "e\u0301a\u0308 combining, \u200bzero width\u200d",
    "\ufffd is a character too \ufffd",
    "mixed 漢字🎉é\n" * 8,
]


class PieceTokenizer:
    """Like a byte-level BPE: tokens are byte strings that may begin or end inside a character."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def split(self, data: bytes, rng: random.Random, longest: int) -> list[int]:
        ids = []
        while data:
            size = rng.randint(1, longest)
            ids.append(len(self.pieces))
            self.pieces.append(data[:size])
            data = data[size:]
        return ids

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        pieces = [self.pieces[i] if i >= 0 else b"" for i in ids]
        if not skip_special_tokens:
            pieces = [self.pieces[i] if i >= 0 else b"<s>" for i in ids]
        return b"".join(pieces).decode(errors="replace")


class WordTokenizer:
    """Like SentencePiece: a word brings its space along, which the first word of a text loses."""

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(f" w{i}" for i in ids).removeprefix(" ")


class ByteFallbackTokenizer:
    """Like SentencePiece without a vocabulary: as long as any of a run of bytes is unfinished, the
    whole run is not text."""

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


def check_pieces(tokenizer, ids: list[int], **options) -> None:
    """At every prefix the pieces are the decoded whole, but for an unfinished end."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push(token_id)
        whole = tokenizer.decode(ids[:count], **options)
        assert whole.startswith(text)
        assert set(whole[len(text) :]) <= {"\ufffd"}
    text += detokenizer.flush()
    assert text == tokenizer.decode(ids, **options)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("longest", [1, 2, 3, 7])
def test_pieces_are_the_whole(text, longest):
    tokenizer = PieceTokenizer()
    check_pieces(tokenizer, tokenizer.split(text.encode(), random.Random(text), longest))


@settings(deadline=None, max_examples=80)
@given(st.text(), st.integers(0, 2**32), st.integers(1, 6))
def test_any_text(text, seed, longest):
    tokenizer = PieceTokenizer()
    check_pieces(tokenizer, tokenizer.split(text.encode(), random.Random(seed), longest))


@settings(deadline=None, max_examples=80)
@given(st.binary(max_size=80), st.integers(0, 2**32), st.integers(1, 4))
def test_any_bytes(data, seed, longest):
    """Models of random weights write what is no UTF-8 at all."""
    tokenizer = PieceTokenizer()
    check_pieces(tokenizer, tokenizer.split(data, random.Random(seed), longest))


@pytest.mark.parametrize("data", [b"\x80", b"\xe2", b"\xf0\x9f", b"\xf0\x9f\x98"], ids=repr)
def test_endless_garbage_is_shown_and_stays_cheap(data):
    tokenizer = PieceTokenizer()
    ids = tokenizer.split(data * 200, random.Random(0), 1)
    check_pieces(tokenizer, ids)
    assert longest_window(tokenizer, ids) <= 64


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_in_between(skip):
    tokenizer = PieceTokenizer()
    ids = tokenizer.split("añ🎉漢".encode() * 5, random.Random(0), 4)
    mixed = [token for i in ids for token in ([i, -1] if i % 3 == 0 else [i])]
    if not skip:  # shown, they must not stand inside a character
        mixed = [*ids, -1, -1, *ids]
    check_pieces(tokenizer, mixed, skip_special_tokens=skip)
    check_pieces(tokenizer, [-1] * 40 + ids + [-1] * 40, skip_special_tokens=skip)


def test_the_window_stays_short():
    tokenizer = PieceTokenizer()
    ids = tokenizer.split("日本語 and 🎉 ".encode() * 60, random.Random(0), 3)
    assert longest_window(tokenizer, ids) <= 20


def longest_window(tokenizer, ids: list[int]) -> int:
    """The most tokens that were decoded at once."""
    sizes = []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **options: sizes.append(len(ids)) or decode(ids, **options)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in ids:
        detokenizer.push(token_id)
    tokenizer.decode = decode
    return max(sizes)


@pytest.mark.parametrize("context", [[1], [1, 2, 3], list(range(50))])
def test_a_leading_space_survives_after_a_prompt(context):
    detokenizer = IncrementalDetokenizer(WordTokenizer(), context=context)
    pieces = [detokenizer.push(i) for i in range(60)]
    assert pieces == [f" w{i}" for i in range(60)]


def test_a_text_of_its_own_begins_without_a_space():
    check_pieces(WordTokenizer(), list(range(60)))


@pytest.mark.parametrize("text", ["é日🎉", "ça 🎉" * 20, "a" + "🎉" * 40, "日" * 50, "é" * 70])
def test_bytes_that_are_text_only_together(text):
    detokenizer = IncrementalDetokenizer(ByteFallbackTokenizer())
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert "\ufffd" not in pieces
    assert detokenizer.flush() == ""


def test_a_prompt_that_ends_inside_a_character():
    tokenizer = PieceTokenizer()
    ids = tokenizer.split("é日".encode(), random.Random(0), 1)
    detokenizer = IncrementalDetokenizer(tokenizer, context=ids[:1])
    text = "".join(detokenizer.push(i) for i in ids[1:]) + detokenizer.flush()
    assert text == "\ufffd日"


def slow_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text as it would be cut if it came character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    text = ""
    for piece in pieces:
        shown, stop = matcher.push(piece)
        text += shown
        if stop is not None:
            return text, stop
    return text + matcher.flush(), None


@settings(deadline=None, max_examples=200)
@given(
    st.text("abé", max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_stop_strings_cut_where_they_end_first(text, stops, include, rng):
    """However the text is split into pieces, even empty ones."""
    pieces, rest = [], text
    while rest:
        size = rng.randint(0, 4)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert feed(StopMatcher(stops, include), pieces) == slow_cut(text, stops, include)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["a", "EN", "x"], ["a", "", "ENx"]),
        (["END"], ["aE", "ND", ""], ["a", "", ""]),
        (["aab"], ["aa", "a", "ab"], ["", "a", "a"]),
        (["\n\n"], ["x\n", "y\n", "\n"], ["x", "\ny", ""]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_only_a_possible_beginning_is_held_back(stops, pieces, shown):
    matcher = StopMatcher(stops)
    assert [matcher.push(piece)[0] for piece in pieces] == shown
