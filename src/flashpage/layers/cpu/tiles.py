"""AMX: 16 rows of activations times 16 rows of weights, a block of 32 columns at a time.

The tile unit sums the products of a block exactly, as the other forms do; the float32 arithmetic
is theirs (`dots.add_block`). Imported only where numba is installed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from flashpage.layers.cpu import forms
from flashpage.layers.cpu.dots import add_block, finish, load_scales, weight_vectors
from flashpage.layers.cpu.packing import BLOCK_BYTES, Q4, Q4_WIDE, Q6_WIDE, Q8
from flashpage.layers.cpu.vectors import (
    I8,
    I64,
    VI32,
    ZERO,
    declare,
    i,
    i64,
    load,
    loop,
    outlined,
    scaled,
    store,
)

TILE_ROWS = 16
"""rows of activations of one call"""

_SUMS, _X, _W, _X_HALF, _W_HALF = range(5)
# Rows and bytes per row of the tiles above.
_SHAPES = ((16, 64), (16, 32), (8, 64), (16, 16), (4, 64))

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
    """Blocks of 4-bit values to blocks of bytes, 512 each."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        w, out, num_blocks = arguments

        def body(block: Any, _: list[Any]) -> list[Any]:
            vectors = weight_vectors(b, w, scaled(b, block, BLOCK_BYTES[Q4]), 4)
            for j, vector in enumerate(vectors):
                store(b, vector, out, b.add(scaled(b, block, 512), i(64 * j)), 64)
            return []

        loop(b, num_blocks, 1, [], body)
        return context.get_dummy_value()

    return types.void(i64, i64, i64), generate


def _make(kind: int) -> Any:
    @intrinsic
    def tile_by_16(  # type: ignore[no-untyped-def]
        typing_context, form, w, s, x, x_step, xs, xs_step, num_blocks, out, out_step, add, scratch
    ):
        """`dots`' product for 16 rows; w in bytes, scratch 4 KiB, both aligned to 64."""
        which = form.count
        sizes = ((_X, _W, 0, 0),)
        if kind == Q6_WIDE:
            sizes = ((_X_HALF, _W_HALF, 0, 0), (_X_HALF, _W_HALF, 16, 256))

        def emit(b: Any, arguments: list[Any]) -> None:
            w, s, x, x_step, xs, xs_step, num_blocks, out, out_step, add, scratch = arguments

            def at(address: Any, offset: Any) -> Any:
                return b.inttoptr(b.add(address, offset), _BYTES)

            def sums_of(block: Any) -> Any:
                return b.add(scratch, b.mul(b.and_(block, i(1)), i(2048)))

            def start(block: Any, sums: Any) -> None:
                """Multiply a block; its sums go to memory, from where vectors can have them."""
                for half, (x_tile, w_tile, x_at, w_at) in enumerate(sizes):
                    _call(b, "tilezero", _tile(_SUMS))
                    columns = at(x, b.add(scaled(b, block, 32), i(x_at)))
                    _call(b, "tileloadd64", _tile(x_tile), columns, x_step)
                    rows = at(w, b.add(scaled(b, block, 512), i(w_at)))
                    _call(b, "tileloadd64", _tile(w_tile), rows, ir.Constant(I64, 64))
                    _call(b, "tdpbsud", _tile(_SUMS), _tile(x_tile), _tile(w_tile))
                    place = at(sums, i(1024 * half))
                    _call(b, "tilestored64", _tile(_SUMS), place, ir.Constant(I64, 64))

            def body(block: Any, totals: list[Any]) -> list[Any]:
                following, last = b.add(block, i(1)), b.sub(num_blocks, i(1))
                is_last = b.icmp_signed("==", block, last)
                start(b.select(is_last, last, following), sums_of(following))
                sums = sums_of(block)
                scales = load_scales(b, s, block, kind)
                new = []
                for m in range(TILE_ROWS):
                    parts = [
                        load(b, sums, i(1024 * half + 64 * m), VI32, 64)
                        for half in range(len(sizes))
                    ]
                    where = b.add(b.mul(xs_step, i(m)), scaled(b, block, 16))
                    new.append(add_block(b, kind, totals[m], parts, scales, xs, where))
                return new

            # While one block's sums are scaled, the next one is multiplied.
            start(i(0), sums_of(i(0)))
            totals = loop(b, num_blocks, 1, [ZERO] * TILE_ROWS, body)
            wants = b.icmp_signed("!=", add, i(0))
            for m in range(TILE_ROWS):
                finish(b, totals[m], out, b.mul(out_step, i(m)), wants)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            if which == forms.AMX:
                outlined(b, f"flashpage_tile_{kind}", arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(form, *[i64] * 11), generate

    return tile_by_16


q4_tile, q8_tile, q4_wide_tile, q6_wide_tile = (_make(k) for k in (Q4, Q8, Q4_WIDE, Q6_WIDE))
