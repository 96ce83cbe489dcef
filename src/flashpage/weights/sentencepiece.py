"""SentencePiece's BPE from a list of scored pieces, giving the ids that llama.cpp gives."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPACE = "\u2581"  # how pieces spell a space


class SentencePieceBackend:
    """A `TokenizerBackend` that joins, always, the neighbours whose piece has the best score.

    A list of ranked merges, which is all that the tokenizers library knows, can not express this:
    there two ways to make one piece differ in rank, here they tie, and the leftmost wins.

    Args:
        pieces: text of each id.
        scores: of each id; higher is joined earlier.
        kinds: one of the constants above for each id.
        bos, eos: ids to put around a text, or None.
        add_space_prefix: whether a text begins with a space that was not written.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        kinds: Sequence[int],
        *,
        bos: int | None,
        eos: int | None,
        add_space_prefix: bool,
    ) -> None:
        self.vocab_size = len(pieces)
        self._scores = scores
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        self._bos, self._eos = bos, eos
        self._add_space_prefix = add_space_prefix
        matched = (UNKNOWN, CONTROL, USER_DEFINED)
        written = [i for i, kind in enumerate(kinds) if kind in matched and pieces[i]]
        self._written = sorted(written, key=lambda i: len(pieces[i].encode()), reverse=True)
        self._pieces = pieces
        self._skipped = frozenset(i for i, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL))
        self._bytes = [_bytes_of(piece, kind) for piece, kind in zip(pieces, kinds, strict=True)]
        self._byte_ids = _byte_ids(self._ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of the text; special pieces written in it count as such."""
        ids = [self._bos] if add_special_tokens and self._bos is not None else []
        after_special = True
        for fragment in self._split_at_special(text):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                prefix = _SPACE if self._add_space_prefix and after_special else ""
                ids.extend(self._encode_words(prefix + fragment.replace(" ", _SPACE)))
            after_special = isinstance(fragment, int)
        if add_special_tokens and self._eos is not None:
            ids.append(self._eos)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of the ids, without the space that `encode` puts first."""
        shown = [i for i in ids if not (skip_special_tokens and i in self._skipped)]
        data = b"".join(self._bytes[i] for i in shown if 0 <= i < self.vocab_size)
        text = data.decode("utf-8", errors="replace")
        return text[1:] if self._add_space_prefix and text.startswith(" ") else text

    def _split_at_special(self, text: str) -> list[str | int]:
        """Longer special pieces are cut out first, wherever they stand."""
        fragments: list[str | int] = [text] if text else []
        for i in self._written:
            piece = self._pieces[i]
            if piece in text:
                fragments = [part for f in fragments for part in _cut(f, piece, i)]
        return fragments

    def _encode_words(self, text: str) -> Iterator[int]:
        """Join neighbours, best score first and leftmost among equals, until no pair is a piece."""
        symbols: list[str] = list(text)
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            joined = symbols[left] + symbols[right]
            if (i := self._ids.get(joined)) is not None:
                heapq.heappush(queue, (-self._scores[i], left, right, len(joined)))

        for right in range(1, len(symbols)):
            offer(right - 1, right)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            # A symbol that was joined away is empty; one that grew no longer has this length.
            if not symbols[left] or not symbols[right]:
                continue
            if len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        for symbol in filter(None, symbols):
            if (i := self._ids.get(symbol)) is not None:
                yield i
            else:
                yield from (self._byte_ids[byte] for byte in symbol.encode())


def _cut(fragment: str | int, piece: str, i: int) -> Iterator[str | int]:
    if isinstance(fragment, int):
        yield fragment
        return
    for n, part in enumerate(fragment.split(piece)):
        if n:
            yield i
        if part:
            yield part


def _bytes_of(piece: str, kind: int) -> bytes:
    if kind == BYTE:
        return bytes([int(piece[3:5], 16)])  # spelled <0x0A>
    if kind == UNUSED:
        return b""
    return (piece.replace(_SPACE, " ") if kind == NORMAL else piece).encode()


def _byte_ids(ids: Mapping[str, int]) -> list[int]:
    """The id that stands for each byte of characters that are no piece."""
    found = [ids.get(f"<0x{byte:02X}>", ids.get(chr(byte))) for byte in range(256)]
    missing = [byte for byte, i in enumerate(found) if i is None]
    if missing:
        raise ValueError(f"there is no piece for the byte 0x{missing[0]:02X}")
    return [i for i in found if i is not None]
