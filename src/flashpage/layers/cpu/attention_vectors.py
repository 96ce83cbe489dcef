"""The inner loops of attention over pages: scores of 64 keys, their softmax, and adding values.

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
    LANES,
    VF32,
    VI32,
    ZERO,
    constant,
    exp,
    f32,
    fma,
    i,
    i64,
    load,
    load_bfloat16,
    loop,
    maximum,
    outlined,
    prefetch,
    reduce_add,
    reduce_max,
    scaled,
    splat,
    store,
)

KEYS = 64
"""keys of one call of `scores`"""

FLOAT32_KV, BFLOAT16_KV = 1, 2
"""Kinds of pages; given to kernels as a tuple of that length (as `forms` are)."""

_GROUPS = KEYS // LANES


def _load_kv(b: Any, kind: int, address: Any, element: Any) -> Any:
    if kind == BFLOAT16_KV:
        return load_bfloat16(b, address, scaled(b, element, 2))
    return load(b, address, scaled(b, element, 4), VF32, 4)


def _make_scores(num_rows: int) -> Any:
    @intrinsic
    def scores(typing_context, kv, q, s, k0, k1, k2, k3, n0, n1, n2, n3, dim):  # type: ignore[no-untyped-def]
        """`s[row][:64] = q[row] . k` for 4 units of 16 keys; q `[num_rows, dim]`, s `[.., 64]`.

        n0 ... n3: the units that come next, which are asked for meanwhile.
        """
        which = kv.count
        turn = 2 if which == BFLOAT16_KV else 1  # values of d whose 16 keys are a cache line

        def emit(b: Any, arguments: list[Any]) -> None:
            q, s, *units, dim = arguments
            units, next_units = units[:_GROUPS], units[_GROUPS:]
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
                        old = sums[row * _GROUPS : (row + 1) * _GROUPS]
                        new += [fma(b, factor, key, x) for key, x in zip(keys, old, strict=True)]
                    sums = new
                return sums

            sums = loop(b, dim, turn, [ZERO] * (num_rows * _GROUPS), body)
            for at, total in enumerate(sums):
                store(b, total, s, i(64 * at), 4)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            outlined(b, f"flashpage_scores_{num_rows}_{which}", arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(kv, *[i64] * 11), generate

    return scores


def _make_values(num_rows: int, width: int) -> Any:
    @intrinsic
    def values(typing_context, kv, p, count, v0, v1, v2, v3, n0, n1, n2, n3, dim, o, state):  # type: ignore[no-untyped-def]
        """`o[row][:width] = o[row][:width] * state[row][2] + sum_t p[row][t] * v[t][:width]`.

        For the first `count` >= 1 of 64 keys, in units of 16. p `[num_rows, 64]`, v0 ... v3
        `[16, dim]`, o `[num_rows, dim]`, state `[num_rows, 4]` (`softmax`). n0 ... n3: the units
        that come next, which are asked for meanwhile.
        """
        which = kv.count

        def emit(b: Any, arguments: list[Any]) -> None:
            p, count, *units, dim, o, state = arguments
            units, next_units = units[:_GROUPS], units[_GROUPS:]
            size = 2 if which == BFLOAT16_KV else 4
            across = width // LANES
            parts = [
                b.add(b.mul(scaled(b, dim, 4), i(row)), i(4 * part))
                for row in range(num_rows)
                for part in range(0, width, LANES)
            ]

            def one_of(addresses: list[Any], number: Any) -> Any:
                chosen = addresses[0]
                for at, address in enumerate(addresses[1:], 1):
                    chosen = b.select(b.icmp_signed("==", number, i(at)), address, chosen)
                return chosen

            def one_unit(number: Any, sums: list[Any]) -> list[Any]:
                v, next_v = one_of(units, number), one_of(next_units, number)
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
                        where = b.add(i(4 * KEYS * row), scaled(b, t, 4))
                        weight = splat(b, load(b, unit_p, where, F32, 4))
                        old = sums[row * across : (row + 1) * across]
                        new += [fma(b, weight, x, y) for x, y in zip(row_v, old, strict=True)]
                    return new

                return loop(b, keys, 1, sums, body)

            old = []
            for at, part in enumerate(parts):
                rescale = splat(b, load(b, state, i(16 * (at // across) + 8), F32, 4))
                old.append(b.fmul(load(b, o, part, VF32, 4), rescale))
            num_units = b.udiv(b.add(count, i(LANES - 1)), i(LANES))
            sums = loop(b, num_units, 1, old, one_unit)
            for part, total in zip(parts, sums, strict=True):
                store(b, total, o, part, 4)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            outlined(b, f"flashpage_values_{num_rows}_{width}_{which}", arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(kv, *[i64] * 13), generate

    return values


@intrinsic
def softmax(typing_context, s, valid, state):  # type: ignore[no-untyped-def]
    """Online softmax of the first `valid` >= 1 of 64 scores, which become weights; the rest, 0.

    state: float32 m, l and what everything from before is to be multiplied with. m and l are
    brought up to date.
    """

    def emit(b: Any, arguments: list[Any]) -> None:
        s, valid, state = arguments
        valid = splat(b, b.trunc(valid, I32))
        lowest = constant(float("-inf"))
        seen, scores = [], []
        for group in range(_GROUPS):
            lanes = ir.Constant(VI32, list(range(LANES * group, LANES * (group + 1))))
            seen.append(b.icmp_signed("<", lanes, valid))
            scores.append(b.select(seen[-1], load(b, s, i(64 * group), VF32, 4), lowest))
        top = reduce_max(b, maximum(b, maximum(b, *scores[:2]), maximum(b, *scores[2:])))
        m = load(b, state, i(0), F32, 4)
        new_m = b.select(b.fcmp_ordered(">", m, top), m, top)
        total = ZERO
        for group, x in enumerate(scores):
            weight = b.select(seen[group], exp(b, b.fsub(x, splat(b, new_m))), ZERO)
            store(b, weight, s, i(64 * group), 4)
            total = b.fadd(total, weight)
        rescale = exp(b, splat(b, b.fsub(m, new_m)))
        rescale = b.extract_element(rescale, ir.Constant(I32, 0))
        new_l = b.fadd(b.fmul(load(b, state, i(4), F32, 4), rescale), reduce_add(b, total))
        for at, value in enumerate((new_m, new_l, rescale)):
            store(b, value, state, i(4 * at), 4)

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        outlined(b, "flashpage_softmax", arguments, emit)
        return context.get_dummy_value()

    return types.void(*[i64] * 3), generate


@intrinsic
def row_multiply(typing_context, x, factor, n):  # type: ignore[no-untyped-def]
    """`x *= factor` for n float32, n a multiple of 16."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        x, factor, n = arguments
        factor = splat(b, factor)

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            store(b, b.fmul(load(b, x, where, VF32, 4), factor), x, where, 4)
            return []

        loop(b, n, LANES, [], body)
        return context.get_dummy_value()

    return types.void(i64, f32, i64), generate


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
def row_expand(typing_context, kv, x, out, n):  # type: ignore[no-untyped-def]
    """n values of pages as float32, n a multiple of 16."""
    which = kv.count

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        _, x, out, n = arguments

        def body(at: Any, _: list[Any]) -> list[Any]:
            store(b, _load_kv(b, which, x, at), out, scaled(b, at, 4), 4)
            return []

        loop(b, n, LANES, [], body)
        return context.get_dummy_value()

    return types.void(kv, i64, i64, i64), generate


@intrinsic
def merge_row(typing_context, x, x_state, y, y_state, n):  # type: ignore[no-untyped-def]
    """Bring a row's result of other keys, y, into x, n float32 each, n a multiple of 16.

    x_state and y_state: float32 m and l, as in `softmax`; x's are brought up to date.
    """

    def emit(b: Any, arguments: list[Any]) -> None:
        x, x_state, y, y_state, n = arguments
        m, other = (load(b, state, i(0), F32, 4) for state in (x_state, y_state))
        top = b.select(b.fcmp_ordered(">", other, m), other, m)
        exponents = splat(b, b.fsub(m, top))
        second = ir.Constant(I32, 1)
        factors = exp(b, b.insert_element(exponents, b.fsub(other, top), second))
        a, c = (b.extract_element(factors, ir.Constant(I32, lane)) for lane in (0, 1))
        scaled_l = b.fmul(load(b, x_state, i(4), F32, 4), a)
        new_l = b.fadd(scaled_l, b.fmul(load(b, y_state, i(4), F32, 4), c))
        for at, value in enumerate((top, new_l)):
            store(b, value, x_state, i(4 * at), 4)
        a, c = splat(b, a), splat(b, c)

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            old = b.fmul(load(b, x, where, VF32, 4), a)
            store(b, fma(b, load(b, y, where, VF32, 4), c, old), x, where, 4)
            return []

        loop(b, n, LANES, [], body)

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        outlined(b, "flashpage_merge_row", arguments, emit)
        return context.get_dummy_value()

    return types.void(*[i64] * 5), generate


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


scores_1, scores_2, scores_3, scores_4, scores_6 = (_make_scores(n) for n in (1, 2, 3, 4, 6))
values_1, values_2, values_3, values_4, values_6 = (_make_values(n, 64) for n in (1, 2, 3, 4, 6))
narrow_values_1, narrow_values_4 = (_make_values(n, 16) for n in (1, 4))
