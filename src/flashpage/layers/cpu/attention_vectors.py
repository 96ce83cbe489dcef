"""The inner loops of attention over pages: scores, softmax, and adding values.

Pages are units of 16 tokens. Of each kv head a unit holds K as `[dim, 16]` and V as `[16, dim]`, so
that 16 keys are the lanes of a vector. Rows (queries) are worked on a few at a time, which changes
no row's result. Imported only where numba is installed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from flashpage.layers.cpu.vectors import (
    AHEAD_IN,
    F32,
    I32,
    I64,
    LANES,
    VF32,
    VI32,
    ZERO,
    constant,
    exp2,
    f32,
    fma,
    i,
    i64,
    larger,
    load,
    load_bfloat16,
    loop,
    outlined,
    prefetch,
    reduce_rows,
    scaled,
    splat,
    store,
)

SPLIT = 128
"""keys of one call of `softmax` and of `values`: where the work of one row can be cut in two"""

UNITS = SPLIT // LANES

AHEAD = 4
"""units of keys that are asked for while others are worked on"""

FLOAT32_KV, BFLOAT16_KV = 1, 2
"""Kinds of pages; given to kernels as a tuple of that length (as `forms` are)."""

LOG2_E = 1.4426950408889634
"""Queries are multiplied by it, and 2 is raised to scores."""


def _load_kv(b: Any, kind: int, address: Any, element: Any) -> Any:
    if kind == BFLOAT16_KV:
        return load_bfloat16(b, address, scaled(b, element, 2))
    return load(b, address, scaled(b, element, 4), VF32, 4)


def _make_scores(num_rows: int, num_units: int) -> Any:
    @intrinsic
    def scores(typing_context, kv, q, s, units, dim):  # type: ignore[no-untyped-def]
        """`s[row][:16 * num_units] = q[row] . k`; q `[num_rows, dim]`, s `[num_rows, SPLIT]`.

        units: address of int64, where the K of these units is, and of others up to AHEAD later,
        which are asked for meanwhile.
        """
        which = kv.count
        turn = 2 if which == BFLOAT16_KV else 1  # values of d whose 16 keys are a cache line

        def emit(b: Any, arguments: list[Any]) -> None:
            q, s, table, dim = arguments
            units = [load(b, table, i(8 * n), I64, 8) for n in range(num_units)]
            next_units = [load(b, table, i(8 * (AHEAD + n)), I64, 8) for n in range(num_units)]
            rows = range(num_rows)
            q_rows = [b.add(q, b.mul(scaled(b, dim, 4), i(row))) for row in rows]

            def body(first: Any, sums: list[Any]) -> list[Any]:
                for unit in next_units:
                    line = scaled(b, first, LANES * (2 if turn == 2 else 4))
                    prefetch(b, unit, line, cache_level=AHEAD_IN)
                for d in (b.add(first, i(n)) for n in range(turn)):
                    keys = [_load_kv(b, which, unit, scaled(b, d, LANES)) for unit in units]
                    new = []
                    for row in rows:
                        factor = splat(b, load(b, q_rows[row], scaled(b, d, 4), F32, 4))
                        old = sums[row * num_units : (row + 1) * num_units]
                        new += [fma(b, factor, key, x) for key, x in zip(keys, old, strict=True)]
                    sums = new
                return sums

            sums = loop(b, dim, turn, [ZERO] * (num_rows * num_units), body)
            for at, total in enumerate(sums):
                row, unit = divmod(at, num_units)
                store(b, total, s, i(4 * (SPLIT * row + LANES * unit)), 4)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            name = f"flashpage_scores_{num_rows}_{num_units}_{which}"
            outlined(b, name, arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(kv, *[i64] * 4), generate

    return scores


def _make_values(num_rows: int, width: int) -> Any:
    @intrinsic
    def values(typing_context, kv, p, count, units, offset, dim, o, state, step):  # type: ignore[no-untyped-def]
        """Bring `sum_t p[row][t] * v[t][:width]` into `o[row][:width]`, each times its factor.

        For the first `count` >= 1 of SPLIT keys. p `[num_rows, SPLIT]`, o `[num_rows, dim]`; state
        and step: see `softmax`. units: address of int64, where the V of the split's units is and
        of AHEAD later ones, which are asked for meanwhile, all `offset` bytes further.
        """
        which = kv.count

        def emit(b: Any, arguments: list[Any]) -> None:
            p, count, units, offset, dim, o, state, step = arguments
            size = 2 if which == BFLOAT16_KV else 4
            across = width // LANES

            def one_unit(number: Any, sums: list[Any]) -> list[Any]:
                at = scaled(b, number, 8)
                v = b.add(load(b, units, at, I64, 8), offset)
                next_v = b.add(load(b, units, b.add(at, i(8 * AHEAD)), I64, 8), offset)
                unit_p = b.add(p, scaled(b, number, 4 * LANES))
                left = b.sub(count, scaled(b, number, LANES))
                keys = b.select(b.icmp_signed("<", left, i(LANES)), left, i(LANES))

                def body(t: Any, sums: list[Any]) -> list[Any]:
                    first = b.mul(t, dim)
                    for line in range(0, width * size, 64):
                        where = b.add(scaled(b, first, size), i(line))
                        prefetch(b, next_v, where, cache_level=AHEAD_IN)
                    row_v = [
                        _load_kv(b, which, v, b.add(first, i(part)))
                        for part in range(0, width, LANES)
                    ]
                    new = []
                    for row in range(num_rows):
                        where = b.add(i(4 * SPLIT * row), scaled(b, t, 4))
                        weight = splat(b, load(b, unit_p, where, F32, 4))
                        old = sums[row * across : (row + 1) * across]
                        new += [fma(b, weight, x, y) for x, y in zip(row_v, old, strict=True)]
                    return new

                return loop(b, keys, 1, sums, body)

            num_units = b.udiv(b.add(count, i(LANES - 1)), i(LANES))
            sums = loop(b, num_units, 1, [ZERO] * (num_rows * across), one_unit)
            for row in range(num_rows):
                factors = [
                    splat(b, load(b, state, b.add(b.mul(step, i(place)), i(4 * row)), F32, 4))
                    for place in (2, 3)
                ]
                for part in range(across):
                    where = b.add(b.mul(scaled(b, dim, 4), i(row)), i(64 * part))
                    old = load(b, o, where, VF32, 4)
                    store(b, _merged(b, old, sums[row * across + part], *factors), o, where, 4)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            outlined(b, f"flashpage_values_{num_rows}_{width}_{which}", arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(kv, *[i64] * 8), generate

    return values


def _merged(b: Any, x: Any, y: Any, factor_x: Any, factor_y: Any) -> Any:
    return fma(b, y, factor_y, b.fmul(x, factor_x))


def _merged_state(b: Any, m: Any, l: Any, other_m: Any, other_l: Any) -> list[Any]:  # noqa: E741
    """m and l of the keys of both, and the factors of the one's and the other's values."""
    top = larger(b, m, other_m)
    factors = [exp2(b, b.fsub(x, top)) for x in (m, other_m)]
    return [top, _merged(b, l, other_l, *factors), *factors]


def _make_softmax(num_rows: int) -> Any:
    few = ir.VectorType(F32, num_rows)

    def narrowed(b: Any, x: Any) -> Any:
        lanes = ir.Constant(ir.VectorType(I32, num_rows), list(range(num_rows)))
        return b.shuffle_vector(x, ir.Constant(VF32, ir.Undefined), lanes)

    def widened(b: Any, x: Any) -> Any:
        lanes = [min(lane, num_rows - 1) for lane in range(LANES)]
        return b.shuffle_vector(x, ir.Constant(few, ir.Undefined), ir.Constant(VI32, lanes))

    @intrinsic
    def softmax(typing_context, s, valid, count, state, step):  # type: ignore[no-untyped-def]
        """Of each row the first `valid[row]` >= 1 of SPLIT scores become weights; then 0.

        Up to `count` >= all of valid, a tuple. s `[num_rows, SPLIT]`. state: address of float32 m
        and l of the keys before, brought up to date, and of the factors of the values before and
        of these ones; the rows are neighbours, m and l and so on `step` bytes apart.
        """

        def emit(b: Any, arguments: list[Any]) -> None:
            s, count, state, step, *valid = arguments
            rows = range(num_rows)
            valid = [splat(b, b.trunc(x, I32)) for x in valid]
            lanes = ir.Constant(VI32, list(range(LANES)))

            def seen(at: Any) -> list[Any]:
                indices = b.add(lanes, splat(b, b.trunc(at, I32)))
                return [b.icmp_signed("<", indices, x) for x in valid]

            def where(row: int, at: Any) -> Any:
                return b.add(i(4 * SPLIT * row), scaled(b, at, 4))

            def find_top(at: Any, tops: list[Any]) -> list[Any]:
                new = []
                for row, is_seen in zip(rows, seen(at), strict=True):
                    x = load(b, s, where(row, at), VF32, 4)
                    new.append(larger(b, tops[row], b.select(is_seen, x, lowest)))
                return new

            lowest = constant(float("-inf"))
            tops = loop(b, count, LANES, [lowest] * num_rows, find_top)
            tops = reduce_rows(b, tops, larger)
            of_row = [
                b.shuffle_vector(
                    tops, ir.Constant(VF32, ir.Undefined), ir.Constant(VI32, [row] * LANES)
                )
                for row in rows
            ]

            def weigh(at: Any, totals: list[Any]) -> list[Any]:
                new = []
                for row, is_seen in zip(rows, seen(at), strict=True):
                    x = b.fsub(load(b, s, where(row, at), VF32, 4), of_row[row])
                    weight = b.select(is_seen, exp2(b, x), ZERO)
                    store(b, weight, s, where(row, at), 4)
                    new.append(b.fadd(totals[row], weight))
                return new

            totals = loop(b, count, LANES, [ZERO] * num_rows, weigh)
            totals = reduce_rows(b, totals, lambda b, x, y: b.fadd(x, y))
            m, l = (widened(b, load(b, state, at, few, 4)) for at in (i(0), step))  # noqa: E741
            for place, value in enumerate(_merged_state(b, m, l, tops, totals)):
                store(b, narrowed(b, value), state, b.mul(step, i(place)), 4)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            s, valid, *others = arguments
            valid = [b.extract_value(valid, row) for row in range(num_rows)]
            outlined(b, f"flashpage_softmax_{num_rows}", [s, *others, *valid], emit)
            return context.get_dummy_value()

        return types.void(i64, types.UniTuple(i64, num_rows), i64, i64, i64), generate

    return softmax


@intrinsic
def row_multiply(typing_context, x, factor, out, n):  # type: ignore[no-untyped-def]
    """`out = x * factor` for n float32, n a multiple of 16."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        x, factor, out, n = arguments
        factor = splat(b, factor)

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            store(b, b.fmul(load(b, x, where, VF32, 4), factor), out, where, 4)
            return []

        loop(b, n, LANES, [], body)
        return context.get_dummy_value()

    return types.void(i64, f32, i64, i64), generate


@intrinsic
def row_copy(typing_context, x, out, n):  # type: ignore[no-untyped-def]
    """`out = x` for n float32, n a multiple of 16."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        x, out, n = arguments

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            store(b, load(b, x, where, VF32, 4), out, where, 4)
            return []

        loop(b, n, LANES, [], body)
        return context.get_dummy_value()

    return types.void(*[i64] * 3), generate


@intrinsic
def merge_row(typing_context, x, x_state, y, y_state, step, n):  # type: ignore[no-untyped-def]
    """Bring a row's result of other keys, y, into x, n float32 each, n a multiple of 16.

    x_state and y_state: addresses of m, and `step` bytes further l; x's are brought up to date.
    """

    def emit(b: Any, arguments: list[Any]) -> None:
        x, x_state, y, y_state, step, n = arguments
        states = [
            splat(b, load(b, state, at, F32, 4))
            for state in (x_state, y_state)
            for at in (i(0), step)
        ]
        *merged, factor_x, factor_y = _merged_state(b, *states)
        for at, value in zip((i(0), step), merged, strict=True):
            store(b, b.extract_element(value, ir.Constant(I32, 0)), x_state, at, 4)

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            old, other = (load(b, address, where, VF32, 4) for address in (x, y))
            store(b, _merged(b, old, other, factor_x, factor_y), x, where, 4)
            return []

        loop(b, n, LANES, [], body)

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        outlined(b, "flashpage_merge_row", arguments, emit)
        return context.get_dummy_value()

    return types.void(*[i64] * 6), generate


@intrinsic
def write_rotated(typing_context, x, cos, sin, factor, out, dim):  # type: ignore[no-untyped-def]
    """`out = (x * cos + roll(x, dim / 2) * sin) * factor` for one head, dim a multiple of 32."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        x, cos, sin, factor, out, dim = arguments
        factor, half = splat(b, factor), b.udiv(dim, i(2))
        half_bytes = scaled(b, half, 4)

        def body(at: Any, _: list[Any]) -> list[Any]:
            low = scaled(b, at, 4)
            high = b.add(low, half_bytes)
            x_low, x_high = (load(b, x, where, VF32, 4) for where in (low, high))
            for where, mine, other in ((low, x_low, x_high), (high, x_high, x_low)):
                turned = b.fmul(mine, load(b, cos, where, VF32, 4))
                turned = fma(b, other, load(b, sin, where, VF32, 4), turned)
                store(b, b.fmul(turned, factor), out, where, 4)
            return []

        loop(b, half, LANES, [], body)
        return context.get_dummy_value()

    return types.void(i64, i64, i64, f32, i64, i64), generate


def _bfloat16_bits(b: Any, x: Any) -> Any:
    """Rounded to nearest, ties to even; NaN stays NaN."""
    bits = b.bitcast(x, VI32)
    sixteen = ir.Constant(VI32, [16] * LANES)
    odd = b.and_(b.lshr(bits, sixteen), ir.Constant(VI32, [1] * LANES))
    rounded = b.add(b.add(bits, ir.Constant(VI32, [0x7FFF] * LANES)), odd)
    nan = ir.Constant(VI32, [0x7FC00000] * LANES)
    rounded = b.select(b.fcmp_unordered("uno", x, x), nan, rounded)
    return b.trunc(b.lshr(rounded, sixteen), ir.VectorType(ir.IntType(16), LANES))


@intrinsic
def store_value(typing_context, kv, x, out, dim):  # type: ignore[no-untyped-def]
    """One head's value of one token to its place in a unit, dim a multiple of 16."""
    which = kv.count

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        _, x, out, dim = arguments

        def body(at: Any, _: list[Any]) -> list[Any]:
            value = load(b, x, scaled(b, at, 4), VF32, 4)
            if which == BFLOAT16_KV:
                store(b, _bfloat16_bits(b, value), out, scaled(b, at, 2), 2)
            else:
                store(b, value, out, scaled(b, at, 4), 4)
            return []

        loop(b, dim, LANES, [], body)
        return context.get_dummy_value()

    return types.void(kv, i64, i64, i64), generate


@intrinsic
def store_key(typing_context, kv, x, out, dim):  # type: ignore[no-untyped-def]
    """One head's key of one token to its lane of a unit: element d goes 16 * d further."""
    which = kv.count

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        _, x, out, dim = arguments

        def body(at: Any, _: list[Any]) -> list[Any]:
            value = load(b, x, scaled(b, at, 4), VF32, 4)
            size = 4
            if which == BFLOAT16_KV:
                value, size = _bfloat16_bits(b, value), 2
            for lane in range(LANES):
                element = b.extract_element(value, ir.Constant(I32, lane))
                where = scaled(b, b.add(scaled(b, at, LANES), i(LANES * lane)), size)
                store(b, element, out, where, size)
            return []

        loop(b, dim, LANES, [], body)
        return context.get_dummy_value()

    return types.void(kv, i64, i64, i64), generate


scores_1, scores_2, scores_3, scores_4, scores_6 = (_make_scores(n, 4) for n in (1, 2, 3, 4, 6))
scores_6_of_unit = _make_scores(6, 1)
softmax_1, softmax_2, softmax_3, softmax_4, softmax_6 = (_make_softmax(n) for n in (1, 2, 3, 4, 6))
values_1, values_2, values_3, values_4, values_6 = (_make_values(n, 64) for n in (1, 2, 3, 4, 6))
narrow_values_1, narrow_values_3 = (_make_values(n, 32) for n in (1, 3))
