"""AVX-512 VNNI, many rows: half of the products of pairs of columns are replaced by additions.

In integers `x0 w0 + x1 w1 = (x0 + w1) (x1 + w0) - x0 x1 - w0 w1` (S. Winograd, "A new algorithm for
inner products", 1968): one product instead of two, and what is taken away belongs to the row alone
or to the weights alone. A processor that multiplies one vector a cycle and adds beside it (AMD
since Zen 4) is quickest if half of the columns go this way: of the 16 products that a row needs of
a block of 16 by 32 weights, 4 give way to 8 additions, and no low and high bytes are left to join.
Sums are exact, so bits are those of every other form. Imported only where numba is installed.

Weights and activations are 16-bit integers here, in pairs: four neighbouring columns c give the
words (c0, c2) and (c1, c3). Activations of the first half of a block, whose columns are
multiplied in pairs, have `WORD_OFFSET` added (`vectors.row_quantize`): a pair is then added as one
32-bit integer, nothing being carried from word to word.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from flashpage.layers.cpu import forms
from flashpage.layers.cpu.dots import (
    PAIRS_AT,
    X_BYTES,
    XS_BYTES,
    XS_ROW,
    add_half,
    finish,
    load_scales,
    request_ahead,
    request_block,
    scale_at,
    scaled_sum,
    sum_of_half,
)
from flashpage.layers.cpu.packing import BLOCK_BYTES, Q4, Q4_WIDE, Q6_WIDE, Q8
from flashpage.layers.cpu.vectors import (
    I32,
    VF32,
    VI32,
    WORD_OFFSET,
    ZERO,
    ZERO_I,
    declare,
    i,
    i64,
    integers,
    load,
    loop,
    outlined,
    scaled,
    splat,
    store,
)

PAIR_ROWS = 8
"""rows of activations that are multiplied at once"""

UNPACKED_BYTES = 1088
"""of a block of weights as words: 16 vectors, of each four columns c those of (c0, c2) and
(c1, c3), first those of the first half; then what is to be taken away, negative"""

_CORRECTION = 1024


def _dot(b: Any, acc: Any, x: Any, y: Any) -> Any:
    """`acc` and two products of signed words in each of 16 lanes."""
    return b.call(declare(b, "llvm.x86.avx512.vpdpwssd.512", VI32, [VI32] * 3), [acc, x, y])


def _words(b: Any, w: Any, offset: Any, kind: int) -> list[Any]:
    """The 16 vectors of a block, from `packing`'s bytes."""
    packed = [load(b, w, b.add(offset, i(at)), VI32, 64) for at in range(0, BLOCK_BYTES[kind], 64)]
    if len(packed) == 4:  # a byte holds a column of the first half and one of the second
        shifts, mask = ((0, 8), (4, 12)), integers(0x000F000F)
    else:
        shifts, mask = ((0, 8),), integers(0x00FF00FF)
    return [
        b.and_(b.lshr(vector, integers(shift)), mask)
        for pair in shifts
        for vector in packed
        for shift in pair
    ]


def _make_unpack(kind: int) -> Any:
    @intrinsic
    def unpack(typing_context, form, w, s, out, num_blocks):  # type: ignore[no-untyped-def]
        """Blocks of packed weights to UNPACKED_BYTES each; their scales, s, are asked for."""
        which = form.count

        def emit(b: Any, arguments: list[Any]) -> None:
            w, s, out, num_blocks = arguments

            def body(block: Any, _: list[Any]) -> list[Any]:
                request_ahead(b, w, s, block, kind)
                words = _words(b, w, scaled(b, block, BLOCK_BYTES[kind]), kind)
                at = scaled(b, block, UNPACKED_BYTES)
                for j, vector in enumerate(words):
                    store(b, vector, out, b.add(at, i(64 * j)), 64)
                offset = integers(WORD_OFFSET * 0x10001)
                total = ZERO_I  # of w0 w1 + offset (w0 + w1)
                for even, odd in zip(words[:8:2], words[1:8:2], strict=True):
                    total = _dot(b, total, even, b.add(odd, offset))
                    total = _dot(b, total, odd, offset)
                store(b, b.sub(ZERO_I, total), out, b.add(at, i(_CORRECTION)), 64)
                return []

            loop(b, num_blocks, 1, [], body)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            if which == forms.PAIRS:
                outlined(b, f"flashpage_unpack_{kind}", arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(form, *[i64] * 4), generate

    return unpack


class _Block:
    """Emits the product of one block for PAIR_ROWS rows."""

    def __init__(self, b: Any, w: Any, x: Any, xs: Any, block: Any) -> None:
        self.b = b
        self.w = b.add(w, scaled(b, block, UNPACKED_BYTES))
        self.x = b.add(x, scaled(b, block, PAIR_ROWS * X_BYTES))
        self.xs = b.add(xs, scaled(b, block, XS_BYTES))

    def _weight(self, half: int, j: int, odd: int) -> Any:
        return load(self.b, self.w, i(512 * half + 128 * j + 64 * odd), VI32, 64)

    def _two(self, m: int, half: int, j: int, odd: int) -> Any:
        """Two activations of a row, in all lanes."""
        at = i(X_BYTES * m + 32 * half + 8 * j + 4 * odd)
        return splat(self.b, load(self.b, self.x, at, I32, 4))

    def sums(self, halves: tuple[int, ...]) -> list[Any]:
        """Of each row: the sum of the products of these halves of the block."""
        b, sums = self.b, [ZERO_I] * PAIR_ROWS
        if 0 in halves:
            correction = load(b, self.w, i(_CORRECTION), VI32, 64)
            for m in range(PAIR_ROWS):
                of_row = splat(b, load(b, self.xs, i(XS_ROW * m + PAIRS_AT), I32, 4))
                sums[m] = b.add(correction, of_row)
        for j in range(4):
            weights = [[self._weight(half, j, odd) for odd in range(2)] for half in range(2)]
            for m in range(PAIR_ROWS):
                if 0 in halves:
                    even, odd = weights[0]
                    x, y = b.add(odd, self._two(m, 0, j, 0)), b.add(even, self._two(m, 0, j, 1))
                    sums[m] = _dot(b, sums[m], x, y)
                if 1 in halves:
                    for odd in range(2):
                        sums[m] = _dot(b, sums[m], weights[1][odd], self._two(m, 1, j, odd))
        return sums

    def add(
        self, totals: list[Any], sums: list[Any], scales: list[Any], half: int | None, large: bool
    ) -> list[Any]:
        """The rows' totals with these sums; half: as in `sum_of_half`; large: of up to 24 bits."""
        b, new = self.b, []
        for m, total in enumerate(totals):
            magic = scale_at(b, self.xs, i(XS_ROW * m), 0)
            x_sum = sum_of_half(b, self.xs, i(XS_ROW * m), half)
            if large:
                value = b.fmul(b.sitofp(sums[m], VF32), _scale_of(b, magic))
            else:
                value = scaled_sum(b, [sums[m]], magic)
            new.append(add_half(b, total, value, *scales, x_sum))
        return new


def _scale_of(b: Any, magic: Any) -> Any:
    """The power of two s of `MAGIC * s`; of NaN a number, but then sums of activations are NaN."""
    power = b.and_(b.bitcast(magic, VI32), integers(0xFF800000))
    return b.bitcast(b.sub(power, integers(23 << 23)), VF32)


def _make(kind: int) -> Any:
    @intrinsic
    def pairs_by_16(  # type: ignore[no-untyped-def]
        typing_context, form, packed, w, s, x, xs, num_blocks, num_tiles, out, out_step, add
    ):
        """`dots`' product for `num_tiles` >= 1 times PAIR_ROWS rows.

        w: what unpacking made of weights, and s: their scales; packed: the weights themselves,
        after which those come that are needed next: they are asked for.
        """
        which = form.count

        def emit(b: Any, arguments: list[Any]) -> None:
            packed, w, s, x, xs, num_blocks, num_tiles, out, out_step, add = arguments
            wants = b.icmp_signed("!=", add, i(0))

            def one_tile(tile: Any, requests: bool) -> None:
                tile_x = b.add(x, b.mul(tile, scaled(b, num_blocks, PAIR_ROWS * X_BYTES)))
                # Scales of 16 rows lie together.
                group = b.mul(b.lshr(tile, i(1)), scaled(b, num_blocks, XS_BYTES))
                tile_xs = b.add(xs, b.add(group, b.mul(b.and_(tile, i(1)), i(PAIR_ROWS * XS_ROW))))

                def body(block: Any, totals: list[Any]) -> list[Any]:
                    if requests:
                        request_block(b, packed, s, b.add(block, num_blocks), kind)
                    product = _Block(b, w, tile_x, tile_xs, block)
                    scales = load_scales(b, s, block, kind)
                    if kind != Q6_WIDE:
                        return product.add(totals, product.sums((0, 1)), scales, None, kind == Q8)
                    for half in range(2):
                        sums, half_scales = product.sums((half,)), scales[2 * half : 2 * half + 2]
                        totals = product.add(totals, sums, half_scales, half, False)
                    return totals

                totals = loop(b, num_blocks, 1, [ZERO] * PAIR_ROWS, body)
                first = b.mul(tile, i(PAIR_ROWS))
                for m in range(PAIR_ROWS):
                    finish(b, totals[m], out, b.mul(out_step, b.add(first, i(m))), wants)

            def following(tile: Any, _: list[Any]) -> list[Any]:
                one_tile(tile, requests=False)
                return []

            one_tile(i(0), requests=True)
            with b.if_then(b.icmp_signed(">", num_tiles, i(1))):
                loop(b, num_tiles, 1, [], following, start=i(1))

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            if which == forms.PAIRS:
                outlined(b, f"flashpage_pairs_{kind}", arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(form, *[i64] * 10), generate

    return pairs_by_16


q4_pairs, q8_pairs, q4_wide_pairs, q6_wide_pairs = (_make(k) for k in (Q4, Q8, Q4_WIDE, Q6_WIDE))
unpack_q4_words, unpack_q8_words, unpack_q4_wide_words, unpack_q6_wide_words = (
    _make_unpack(k) for k in (Q4, Q8, Q4_WIDE, Q6_WIDE)
)
