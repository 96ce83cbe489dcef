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
"""keys of one call of `tops` and all after it: where the work of one row can be cut in two"""

UNITS = SPLIT // LANES

AHEAD = 4
"""units of keys that are asked for while others are worked on"""

FLOAT32_KV, BFLOAT16_KV = 1, 2
"""Kinds of pages; given to kernels as a tuple of that length (as `forms` are)."""

LOWEST = -3.4028234663852886e38
"""the lowest number that float32 has"""

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
    def values(typing_context, kv, p, seen, units, offset, dim, o, state, step):  # type: ignore[no-untyped-def]
        """Bring `sum_t p[row][t] * v[t][:width]` into `o[row][:width]`, each times its factor.

        For the first `seen[row]` of SPLIT keys: 0 times what others hold may be NaN. p
        `[num_rows, SPLIT]`, o `[num_rows, dim]`; seen, state and step: see `tops`. units: address
        of int64, where the V of the split's units is and of AHEAD later ones, which are asked for
        meanwhile, all `offset` bytes further.
        """
        which = kv.count

        def emit(b: Any, arguments: list[Any]) -> None:
            p, seen, units, offset, dim, o, state, step = arguments
            size = 2 if which == BFLOAT16_KV else 4
            across = width // LANES
            seen = [load(b, seen, i(8 * row), I64, 8) for row in range(num_rows)]
            fewest, most = seen[0], seen[-1]

            def unit_at(number: Any) -> tuple[Any, Any, Any]:
                at = scaled(b, number, 8)
                v = b.add(load(b, units, at, I64, 8), offset)
                next_v = b.add(load(b, units, b.add(at, i(8 * AHEAD)), I64, 8), offset)
                return v, next_v, b.add(p, scaled(b, number, 4 * LANES))

            def one_key(unit: tuple[Any, Any, Any], t: Any, sums: list[Any]) -> list[Any]:
                v, next_v, unit_p = unit
                first = b.mul(t, dim)
                for line in range(0, width * size, 64):
                    where = b.add(scaled(b, first, size), i(line))
                    prefetch(b, next_v, where, cache_level=AHEAD_IN)
                row_v = [
                    _load_kv(b, which, v, b.add(first, i(part))) for part in range(0, width, LANES)
                ]
                new = []
                for row in range(num_rows):
                    where = b.add(i(4 * SPLIT * row), scaled(b, t, 4))
                    weight = splat(b, load(b, unit_p, where, F32, 4))
                    old = sums[row * across : (row + 1) * across]
                    new += [fma(b, weight, x, y) for x, y in zip(row_v, old, strict=True)]
                return new

            def one_unit(number: Any, sums: list[Any]) -> list[Any]:
                unit = unit_at(number)
                left = b.sub(fewest, scaled(b, number, LANES))
                keys = b.select(b.icmp_signed("<", left, i(LANES)), left, i(LANES))
                return loop(b, keys, 1, sums, lambda t, sums: one_key(unit, t, sums))

            def one_of_the_last(key: Any, sums: list[Any]) -> list[Any]:
                unit = unit_at(b.udiv(key, i(LANES)))
                new = one_key(unit, b.urem(key, i(LANES)), sums)
                # As vectors, or there would be branches.
                place, *ends = (splat(b, b.trunc(x, I32)) for x in (key, *seen))
                has_part = [b.icmp_signed("<", place, end) for end in ends for _ in range(across)]
                return [b.select(*each) for each in zip(has_part, new, sums, strict=True)]

            num_units = b.udiv(b.add(fewest, i(LANES - 1)), i(LANES))
            sums = loop(b, num_units, 1, [ZERO] * (num_rows * across), one_unit)
            if num_rows > 1:
                sums = loop(b, most, 1, sums, one_of_the_last, start=fewest)
            for row in range(num_rows):
                factors = [
                    splat(b, load(b, state, b.add(b.mul(step, i(place)), i(4 * row)), F32, 4))
                    for place in (FACTOR, NEW_FACTOR)
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


def _merged_m(b: Any, m: Any, other: Any) -> tuple[Any, Any, Any]:
    """m of the keys of both, and the factors of the one's and the other's l and values."""
    top = larger(b, m, other)
    shift = _shift(b, top)
    factor, other_factor = (exp2(b, b.fsub(x, shift)) for x in (m, other))
    return top, factor, other_factor


def _shift(b: Any, top: Any) -> Any:
    """What is subtracted from scores up to `top`: not -inf, which less itself would be NaN."""
    return larger(b, constant(LOWEST), top)


M, L, FACTOR, NEW_FACTOR, TOP = range(5)
"""Lines of the state of rows: of the keys before, the largest score and the sum of weights; the
factors of their values and of those of the split that is worked on; its largest score, at least
LOWEST."""

_NONE = ir.Constant(VF32, ir.Undefined)


class _Softmax:
    """What the kernels of softmax have in common: rows of scores, each of which sees some keys."""

    def __init__(self, num_rows: int, b: Any, arguments: list[Any]):
        self.s, seen, self.count, self.state, self.step = arguments
        self.b, self.rows = b, range(num_rows)
        self.seen = [load(b, seen, i(8 * row), I64, 8) for row in self.rows]
        self.few = ir.VectorType(F32, num_rows)

    def over_keys(self, initial: Any, body: Any) -> Any:
        """`values[row] = body(row, scores' offset, value, seen lanes or None)`, 16 keys at a time.

        Returns what `reduce_rows` takes.
        """
        b = self.b
        whole = b.and_(self.seen[0], i(-LANES))  # later rows see no fewer keys

        def some(masked: bool) -> Any:
            def turn(at: Any, values: list[Any]) -> list[Any]:
                new = []
                for row in self.rows:
                    seen = None
                    if masked:
                        left = splat(b, b.trunc(b.sub(self.seen[row], at), I32))
                        lanes = ir.Constant(VI32, list(range(LANES)))
                        seen = b.icmp_signed("<", lanes, left)
                    where = b.add(i(4 * SPLIT * row), scaled(b, at, 4))
                    new.append(body(row, where, values[row], seen))
                return new

            return turn

        values = loop(b, whole, LANES, [initial] * len(self.rows), some(False), start=i(0))
        return loop(b, self.count, LANES, values, some(True), start=whole)

    def line(self, line: int) -> Any:
        value = load(self.b, self.state, self.b.mul(self.step, i(line)), self.few, 4)
        lanes = [min(lane, len(self.rows) - 1) for lane in range(LANES)]
        undefined = ir.Constant(self.few, ir.Undefined)
        return self.b.shuffle_vector(value, undefined, ir.Constant(VI32, lanes))

    def set_line(self, line: int, value: Any) -> None:
        lanes = ir.Constant(ir.VectorType(I32, len(self.rows)), list(self.rows))
        value = self.b.shuffle_vector(value, _NONE, lanes)
        store(self.b, value, self.state, self.b.mul(self.step, i(line)), 4)


def _make_tops(num_rows: int) -> Any:
    @intrinsic
    def tops(typing_context, s, seen, count, state, step):  # type: ignore[no-untyped-def]
        """The largest of each row's first `seen[row]` >= 1 scores, to TOP; M and factors with it.

        A split whose scores are all -inf has no part in its row. If every split of a row is so, its
        L stays 0.

        s `[num_rows, SPLIT]`; seen: address of int64 `[num_rows]`, in ascending order, at most
        `count`; state: of the first row, whose lines are `step` bytes apart.
        """

        def emit(b: Any, arguments: list[Any]) -> None:
            rows = _Softmax(num_rows, b, arguments)
            minus_infinity = constant(float("-inf"))

            def body(row: int, where: Any, top: Any, seen: Any) -> Any:
                x = load(b, rows.s, where, VF32, 4)
                return larger(b, top, x if seen is None else b.select(seen, x, minus_infinity))

            top = reduce_rows(b, rows.over_keys(minus_infinity, body), larger)
            m, factor, new_factor = _merged_m(b, rows.line(M), top)
            has_none = b.fcmp_ordered("==", top, minus_infinity)
            new_factor = b.select(has_none, ZERO, new_factor)
            rows.set_line(M, m)
            rows.set_line(FACTOR, factor)
            rows.set_line(NEW_FACTOR, new_factor)
            rows.set_line(TOP, _shift(b, top))

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            outlined(b, f"flashpage_tops_{num_rows}", arguments, emit)
            return context.get_dummy_value()

        return types.void(*[i64] * 5), generate

    return tops


def _make_weights(num_rows: int) -> Any:
    @intrinsic
    def weights(typing_context, s, seen, count, state, step):  # type: ignore[no-untyped-def]
        """After `tops`: weights instead of scores, 0 from `seen[row]` to `count`; L with them."""

        def emit(b: Any, arguments: list[Any]) -> None:
            rows = _Softmax(num_rows, b, arguments)
            tops = [
                splat(b, load(b, rows.state, b.add(b.mul(rows.step, i(TOP)), i(4 * row)), F32, 4))
                for row in rows.rows
            ]

            def body(row: int, where: Any, total: Any, seen: Any) -> Any:
                weight = exp2(b, b.fsub(load(b, rows.s, where, VF32, 4), tops[row]))
                if seen is not None:
                    weight = b.select(seen, weight, ZERO)
                store(b, weight, rows.s, where, 4)
                return b.fadd(total, weight)

            total = reduce_rows(b, rows.over_keys(ZERO, body), lambda b, x, y: b.fadd(x, y))
            factors = rows.line(FACTOR), rows.line(NEW_FACTOR)
            rows.set_line(L, _merged(b, rows.line(L), total, *factors))

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            outlined(b, f"flashpage_weights_{num_rows}", arguments, emit)
            return context.get_dummy_value()

        return types.void(*[i64] * 5), generate

    return weights


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

    x_state and y_state: addresses of M, and `step` bytes further L; x's are brought up to date.
    """

    def emit(b: Any, arguments: list[Any]) -> None:
        x, x_state, y, y_state, step, n = arguments
        m, l, other_m, other_l = (  # noqa: E741
            splat(b, load(b, state, at, F32, 4))
            for state in (x_state, y_state)
            for at in (i(0), step)
        )
        m, factor, other_factor = _merged_m(b, m, other_m)
        merged = m, _merged(b, l, other_l, factor, other_factor)
        for at, value in zip((i(0), step), merged, strict=True):
            store(b, b.extract_element(value, ir.Constant(I32, 0)), x_state, at, 4)

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            old, other = (load(b, address, where, VF32, 4) for address in (x, y))
            store(b, _merged(b, old, other, factor, other_factor), x, where, 4)
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
tops_1, tops_2, tops_3, tops_4, tops_6 = (_make_tops(n) for n in (1, 2, 3, 4, 6))
weights_1, weights_2, weights_3, weights_4, weights_6 = (_make_weights(n) for n in (1, 2, 3, 4, 6))
values_1, values_2, values_3, values_4, values_6 = (_make_values(n, 64) for n in (1, 2, 3, 4, 6))
narrow_values_1, narrow_values_3 = (_make_values(n, 32) for n in (1, 3))
