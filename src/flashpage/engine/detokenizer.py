"""From tokens to text, piece by piece: whole characters only, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
CONTEXT_TOKENS = 6  # tokens before the first one whose text they may shape (leading spaces)
WINDOW_TOKENS = 16  # decoded again with each new token
MAX_OPEN_TOKENS = 8  # a character takes 4 bytes: what is open for longer is no character
MAX_OPEN_CHARACTERS = 4  # how many replacements the bytes of one open character can make


class Decoder(Protocol):
    """What is needed of a tokenizer here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some tokens."""
        ...


class IncrementalDetokenizer:
    """The text of a growing token sequence, in pieces that never split a character.

    The pieces and the last `flush` joined are the decoded whole. Each token decodes a short
    window of the latest tokens, so its cost does not grow with the sequence.

    `context` are the tokens before the first one (the end of the prompt): decoders of
    SentencePiece kind drop the space that begins a text, but not one that follows another word.
    """

    def __init__(
        self, tokenizer: Decoder, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(context[-CONTEXT_TOKENS:])
        self._window_limit = WINDOW_TOKENS
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            # The prompt ends inside a character; its beginning is not ours to show.
            self._window, text = [], ""
        self._released = len(text)  # characters of the window's text that were handed out
        self._num_open = 0  # tokens since a character was last completed, if one is open

    def push(self, token_id: int) -> str:
        """The text that has become certain with one more token; often, but not always, its own."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = text.rstrip(REPLACEMENT)
        if self._num_open >= MAX_OPEN_TOKENS:
            stable = max(stable, text[:-MAX_OPEN_CHARACTERS], key=len)
        piece = stable[self._released :]
        self._released += len(piece)
        self._num_open = 0 if piece or stable == text else self._num_open + 1
        if self._num_open == 0 and len(self._window) >= self._window_limit:
            self._shrink(text)
        return piece

    def flush(self) -> str:
        """What `push` held back, when no more tokens will come."""
        piece = self._decode(self._window)[self._released :]
        self._released += len(piece)
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _shrink(self, text: str) -> None:
        """Drop old tokens from the window, where the rest decodes to the end of its text."""
        held = len(text) - self._released
        for start in range(len(self._window) - CONTEXT_TOKENS, 0, -1):
            tail = self._decode(self._window[start:])
            if len(tail) >= held and text.endswith(tail) and (tail or start <= CONTEXT_TOKENS):
                del self._window[:start]
                self._released = len(tail) - held
                self._window_limit = WINDOW_TOKENS
                return
        # No cut is safe here (a very odd decoder): ask again after as many tokens, not each time.
        self._window_limit = 2 * len(self._window)


class StopMatcher:
    """Cuts a stream of text at the stop string that is complete first.

    Holds back only a suffix that may still become a stop string. Where the pieces are split does
    not change the result: of several stop strings the one that ends first counts, and of those
    that end together the longest.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that can be shown now, and the stop string if one is complete."""
        if not self._stop_strings:
            return piece, None
        text = self._held + piece
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop_strings
            if (start := text.find(stop)) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include_stop else start], stop
        num_held = max(_overlap(text, stop) for stop in self._stop_strings)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """What `push` held back, when no more text will come (or none may stop here)."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that begins, but does not complete, `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
