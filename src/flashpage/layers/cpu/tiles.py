"""AMX: 16 rows of activations times 16 rows of weights, a block of 32 columns at a time.

The tile unit sums the products of a block exactly, as the other forms do; the float32 arithmetic
is theirs (`dots.add_block`): of its operations this processor has only one place for products
while the tile unit works, and two for additions. Imported only where numba is installed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from flashpage.layers.cpu import forms
from flashpage.layers.cpu.dots import (
    X_BYTES,
    XS_BYTES,
    XS_ROW,
    add_block,
    finish,
    load_scales,
    weight_vectors,
)
from flashpage.layers.cpu.packing import BLOCK_BYTES, Q4, Q4_WIDE, Q6_WIDE, Q8
from flashpage.layers.cpu.vectors import (
    I8,
    VI32,
    ZERO,
    declare,
    i,
    i64,
    integers,
    keep_order,
    load,
    loop,
    outlined,
    prefetch,
    scaled,
    store,
)

TILE_ROWS = 16
"""rows of activations of one tile"""

_SUMS, _X, _W, _X_HALF, _W_HALF, _X_QUARTER, _W_QUARTER = range(7)
# Rows and bytes per row of the tiles above.
_SHAPES = ((16, 64), (16, 64), (16, 64), (16, 32), (8, 64), (16, 16), (4, 64))

# The products of a block: tiles of x and of w, and where in the block each begins. With 4-bit
# weights, in bytes both times 16 and as they are, one product sums high and low parts of x.
_PRODUCTS = {
    4: ((_X, _W, 0, 0),),
    8: ((_X_HALF, _W_HALF, 0, 0), (_X_HALF, _W_HALF, 32, 0)),
    6: tuple((_X_QUARTER, _W_QUARTER, 16 * half + part, 256 * half)
             for half in (0, 1) for part in (0, 32)),
}  # fmt: skip
_BITS = {Q4: 4, Q8: 8, Q4_WIDE: 4, Q6_WIDE: 6}

TILE_BYTES = 4 * 4 * 1024
"""scratch of one call: sums of up to four products of four blocks"""

UNPACKED_BYTES = 1024
"""of a block of 4-bit weights as tiles want them"""

_VOID, _BYTES = ir.VoidType(), ir.PointerType(I8)


def _tile(number: int) -> Any:
    return ir.Constant(I8, number)


def _call(b: Any, name: str, *arguments: Any) -> None:
    kinds = [argument.type for argument in arguments]
    b.call(declare(b, f"llvm.x86.{name}", _VOID, kinds), arguments)


@intrinsic
def begin_tiles(typing_context, form):  # type: ignore[no-untyped-def]
    """Configure this thread's tile registers; nothing in the forms that have none."""
    which = form.count

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        if which == forms.AMX:
            layout = bytearray(64)
            layout[0] = 1
            for number, (rows, row_bytes) in enumerate(_SHAPES):
                layout[16 + 2 * number] = row_bytes
                layout[48 + number] = rows
            kind = ir.ArrayType(I8, 64)
            place = cgutils.alloca_once(b, kind)
            b.store(ir.Constant(kind, layout), place)
            _call(b, "ldtilecfg", b.bitcast(place, _BYTES))
        return context.get_dummy_value()

    return types.void(form), generate


@intrinsic
def end_tiles(typing_context, form):  # type: ignore[no-untyped-def]
    """Give this thread's tile registers back."""
    which = form.count

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        if which == forms.AMX:
            _call(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(form), generate


@intrinsic
def unpack_q4(typing_context, w, out, num_blocks):  # type: ignore[no-untyped-def]
    """Blocks of 4-bit values to bytes: 512 of each block times 16, then 512 as they are."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        w, out, num_blocks = arguments

        def body(block: Any, _: list[Any]) -> list[Any]:
            vectors = weight_vectors(b, w, scaled(b, block, BLOCK_BYTES[Q4]), 4)
            for j, vector in enumerate(vectors):
                at = b.add(scaled(b, block, UNPACKED_BYTES), i(64 * j))
                store(b, b.shl(vector, integers(4)), out, at, 64)
                store(b, vector, out, b.add(at, i(512)), 64)
            return []

        loop(b, num_blocks, 1, [], body)
        return context.get_dummy_value()

    return types.void(i64, i64, i64), generate


class _Products:
    """Emits the products of one block, piece by piece, so that other work can stand between.

    The tile unit and vectors work at the same time, but a sum takes its time through both and
    memory: the products of a block are begun two blocks ahead of the vectors, and stored one ahead.
    """

    def __init__(self, b: Any, kind: int, x_step: Any, scratch: Any) -> None:
        self.b, self.x_step, self.scratch = b, x_step, scratch
        self.products = _PRODUCTS[_BITS[kind]]
        self.w_bytes = UNPACKED_BYTES if len(self.products) == 1 else 512

    def _call(self, name: str, tile: int, address: Any, offset: Any, step: Any) -> None:
        place = self.b.inttoptr(self.b.add(address, offset), _BYTES)
        _call(self.b, name, _tile(tile), place, step)

    def sums(self, step: Any) -> Any:
        """Address of the sums of a block; step: its number, over all tiles of rows."""
        slot = self.b.mul(self.b.and_(step, i(3)), i(1024 * len(self.products)))
        return self.b.add(self.scratch, slot)

    def load(self, number: int, x: Any, w: Any) -> None:
        x_tile, w_tile, x_at, w_at = self.products[number]
        self._call("tileloadd64", x_tile, x, i(x_at), self.x_step)
        self._call("tileloadd64", w_tile, w, i(w_at), i(64))

    def multiply(self, number: int) -> None:
        x_tile, w_tile = self.products[number][:2]
        _call(self.b, "tilezero", _tile(_SUMS))
        _call(self.b, "tdpbsud", _tile(_SUMS), _tile(x_tile), _tile(w_tile))

    def store(self, number: int, step: Any) -> None:
        self._call("tilestored64", _SUMS, self.sums(step), i(1024 * number), i(64))


def _make(kind: int) -> Any:
    @intrinsic
    def tiles_by_16(  # type: ignore[no-untyped-def]
        typing_context, form, w, s, x, x_step, xs, num_blocks, num_tiles, out, out_step,
        add, scratch,
    ):  # fmt: skip
        """`dots`' product for `num_tiles` times 16 rows.

        w: 8-bit weights, or what `unpack_q4` made; scratch: TILE_BYTES; both aligned to 64.
        """
        which = form.count

        def emit(b: Any, arguments: list[Any]) -> None:
            w, s, x, x_step, xs, num_blocks, num_tiles, out, out_step, add, scratch = arguments
            products = _Products(b, kind, x_step, scratch)
            count = len(products.products)
            num_halves = 2 if kind == Q6_WIDE else 1
            wants = b.icmp_signed("!=", add, i(0))
            step_back = b.sub(b.mul(x_step, i(TILE_ROWS)), scaled(b, num_blocks, X_BYTES))

            def advance(place: list[Any]) -> list[Any]:
                """Block, address of x and tiles that are left, of the product that comes next."""
                block, at, left = place
                following = b.add(block, i(1))
                wraps = b.icmp_signed("==", following, num_blocks)
                # After the last tile come products that nobody takes, of that tile again.
                more = b.icmp_signed(">", left, i(1))
                jump = b.select(more, step_back, b.neg(scaled(b, num_blocks, X_BYTES)))
                at = b.add(b.add(at, i(X_BYTES)), b.select(wraps, jump, i(0)))
                left = b.select(b.and_(wraps, more), b.sub(left, i(1)), left)
                return [b.select(wraps, i(0), following), at, left]

            def w_of(place: list[Any]) -> Any:
                return b.add(w, scaled(b, place[0], products.w_bytes))

            place = [i(0), x, num_tiles]
            for block in range(2):
                for number in range(count):
                    products.load(number, place[1], w_of(place))
                    if block or number:
                        products.store((number - 1) % count, i(block if number else 0))
                    products.multiply(number)
                place = advance(place)

            def one_tile(tile: Any, carried: list[Any]) -> list[Any]:
                tile_xs = b.add(xs, b.mul(tile, scaled(b, num_blocks, XS_BYTES)))
                tile_out = b.add(out, b.mul(tile, b.mul(out_step, i(TILE_ROWS))))
                for m in range(TILE_ROWS):  # these lines may be in another core's cache
                    prefetch(b, tile_out, b.mul(out_step, i(m)), to_write=True)

                def body(block: Any, carried: list[Any]) -> list[Any]:
                    step, *place = carried[:4]
                    totals = carried[4:]
                    sums = products.sums(step)
                    scales = load_scales(b, s, block, kind)
                    w_next = w_of(place)
                    new = []
                    for m in range(TILE_ROWS):
                        number, turn = divmod(m, TILE_ROWS // count)
                        if turn == 0:
                            products.load(number, place[1], w_next)
                        if turn == TILE_ROWS // count // 3:
                            stored = b.add(step, i(2 if number else 1))
                            products.store((number - 1) % count, stored)
                            products.multiply(number)
                        parts = [
                            load(b, sums, i(1024 * n + 64 * m), VI32, 64) for n in range(count)
                        ]
                        each = count // num_halves
                        halves = [parts[h * each : (h + 1) * each] for h in range(num_halves)]
                        at = b.add(scaled(b, block, XS_BYTES), i(XS_ROW * m))
                        new.append(add_block(b, totals[m], halves, scales, tile_xs, at))
                        keep_order(b)  # the compiler would run out of registers otherwise
                    return [b.add(step, i(1)), *advance(place), *new]

                carried = loop(b, num_blocks, 1, [*carried, *[ZERO] * TILE_ROWS], body)
                for m in range(TILE_ROWS):
                    finish(b, carried[4 + m], tile_out, b.mul(out_step, i(m)), wants)
                return carried[:4]

            loop(b, num_tiles, 1, [i(0), *place], one_tile)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            if which == forms.AMX:
                outlined(b, f"flashpage_tiles_{kind}", arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(form, *[i64] * 11), generate

    return tiles_by_16


q4_tiles, q8_tiles, q4_wide_tiles, q6_wide_tiles = (_make(k) for k in (Q4, Q8, Q4_WIDE, Q6_WIDE))
