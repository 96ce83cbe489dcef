"""Vectors of 16 lanes for LLVM, at addresses; imported only where numba is installed.

LLVM makes AVX-512, AVX2 or NEON code of them. Nothing here may be reordered or contracted by the
compiler: additions happen in the order written, so that a row's result never depends on the kernel
that it was computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
F16, F32 = ir.HalfType(), ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
VF32, VF16 = ir.VectorType(F32, LANES), ir.VectorType(F16, LANES)
VI32, VI16, VI8 = (ir.VectorType(t, LANES) for t in (I32, I16, I8))
V2I16, V4I8 = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, 4 * LANES)
ZERO = ir.Constant(VF32, [0.0] * LANES)
ZERO_I = ir.Constant(VI32, [0] * LANES)
i64, f32 = types.int64, types.float32

MAGIC = 1.5 * 2.0**23
"""An integer below 2**22 added to the bits of `MAGIC * 2**e` makes those of
`(MAGIC + integer) * 2**e`: so integers become floats with additions, which are never rounded."""

WORD_OFFSET = 2048
"""makes an activation of 12 bits positive"""

_TOP_POWER = 10
"""the largest magnitude of a block is quantised to at least 2**10"""


def i(value: int) -> Any:
    return ir.Constant(I64, value)


def constant(value: float) -> Any:
    return ir.Constant(VF32, [float(value)] * LANES)


def integers(value: int) -> Any:
    return ir.Constant(VI32, [value] * LANES)


def pointer(b: Any, address: Any, byte_offset: Any, kind: Any) -> Any:
    """`address + byte_offset` as a pointer to `kind`; both are i64 values."""
    return b.inttoptr(b.add(address, byte_offset), ir.PointerType(kind))


def load(b: Any, address: Any, byte_offset: Any, kind: Any, align: int) -> Any:
    value = b.load(pointer(b, address, byte_offset, kind), typ=kind)
    value.align = align
    return value


def store(b: Any, value: Any, address: Any, byte_offset: Any, align: int) -> None:
    b.store(value, pointer(b, address, byte_offset, value.type)).align = align


def scaled(b: Any, index: Any, size: int) -> Any:
    return b.mul(index, i(size))


def splat(b: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, LANES)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ZERO_I)


def declare(b: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    kind = ir.FunctionType(result, arguments)
    return cgutils.get_or_insert_function(b.module, kind, name)


def unary(b: Any, name: str, x: Any) -> Any:
    return b.call(declare(b, f"llvm.{name}.v16f32", VF32, [VF32]), [x])


def maximum(b: Any, x: Any, y: Any) -> Any:
    return b.call(declare(b, "llvm.maxnum.v16f32", VF32, [VF32] * 2), [x, y])


def minimum(b: Any, x: Any, y: Any) -> Any:
    return b.call(declare(b, "llvm.minnum.v16f32", VF32, [VF32] * 2), [x, y])


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return b.call(declare(b, "llvm.fma.v16f32", VF32, [VF32] * 3), [x, y, z])


def _halves(b: Any, x: Any, lanes: int) -> tuple[Any, Any]:
    undefined = ir.Constant(x.type, ir.Undefined)
    low, high = (
        b.shuffle_vector(
            x,
            undefined,
            ir.Constant(ir.VectorType(I32, lanes // 2), list(range(first, first + lanes // 2))),
        )
        for first in (0, lanes // 2)
    )
    return low, high


def reduce_add(b: Any, x: Any) -> Any:
    """The sum of the lanes, always by the same tree."""
    lanes = LANES
    while lanes > 1:
        low, high = _halves(b, x, lanes)
        x = b.fadd(low, high) if x.type.element == F32 else b.add(low, high)
        lanes //= 2
    return b.extract_element(x, ir.Constant(I32, 0))


def _words(b: Any, x: Any, y: Any) -> Any:
    """The lower 16 bits of x's lanes, then of y's."""
    both = [b.bitcast(vector, V2I16) for vector in (x, y)]
    return b.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, 32), list(range(0, 64, 2))))


def _sums_of_two(b: Any, words: Any) -> Any:
    """Of the first 16 words, of the others, and of all: as int32 `[any, all, first, others]`."""
    undefined = ir.Constant(V2I16, ir.Undefined)
    for distance in (8, 4, 2, 1):
        moved = ir.Constant(ir.VectorType(I32, 32), [lane ^ distance for lane in range(32)])
        words = b.add(words, b.shuffle_vector(words, undefined, moved))
    four = ir.VectorType(I32, 4)
    first, others = (
        b.sext(b.shuffle_vector(words, undefined, ir.Constant(four, [lane] * 4)), four)
        for lane in (0, 16)
    )
    total = b.add(first, others)
    sums = b.shuffle_vector(first, others, ir.Constant(four, [0, 0, 0, 4]))
    return b.shuffle_vector(sums, total, ir.Constant(four, [4, 4, 2, 3]))


def larger(b: Any, x: Any, y: Any) -> Any:
    """The larger of two, y if one is NaN: one instruction, where `maximum` takes three."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def reduce_rows(b: Any, rows: Sequence[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """The lanes of up to 16 vectors combined, by the tree of `reduce_add`; row r's are in lane r.

    How many rows there are changes none's result.
    """
    rows, distance = list(rows), LANES // 2
    while distance > 0:
        pairs = [(rows[at], rows[min(at + 1, len(rows) - 1)]) for at in range(0, len(rows), 2)]
        # Of each vector: pieces of 2 * distance lanes, one a row; their halves are combined.
        low = [lane for lane in range(2 * LANES) if lane % (2 * distance) < distance]
        orders = [ir.Constant(VI32, [lane + more for lane in low]) for more in (0, distance)]
        rows = [combine(b, *(b.shuffle_vector(x, y, order) for order in orders)) for x, y in pairs]
        distance //= 2
    return rows[0]


AHEAD_IN = 2
"""Level of the cache that keys and weights are asked into: more requests can wait there than at the
first, and arithmetic goes on meanwhile."""


def prefetch(
    b: Any, address: Any, byte_offset: Any, *, to_write: bool = False, cache_level: int = 1
) -> None:
    """Ask for a cache line that is needed soon, into caches from `cache_level` on.

    Any address will do.
    """
    bytes_ = ir.PointerType(I8)
    function = declare(b, "llvm.prefetch.p0", ir.VoidType(), [bytes_, I32, I32, I32])
    purpose, caches, data_cache = (ir.Constant(I32, n) for n in (int(to_write), 4 - cache_level, 1))
    place = pointer(b, address, byte_offset, I8)
    b.call(function, [place, purpose, caches, data_cache])


def keep_order(b: Any) -> None:
    """The compiler moves no access to memory across this; it costs nothing when it runs."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def outlined(
    b: Any, name: str, arguments: Sequence[Any], emit: Callable[[Any, list[Any]], None]
) -> None:
    """Call a function of its own, made of what `emit(builder, arguments)` emits.

    LLVM would put long loops into every caller, which multiplies the time to compile.
    """
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, kind, name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        emit(inside, list(function.args))
        inside.ret_void()
    b.call(function, arguments)


def loop(
    b: Any,
    stop: Any,
    step: int,
    initial: Sequence[Any],
    body: Callable[[Any, list[Any]], Any],
    start: Any = None,
) -> list[Any]:
    """`for at in range(start, stop, step)`; carries values from turn to turn.

    Without `start`, from 0, and at least once.
    """
    before = b.block
    inside, after = b.append_basic_block("loop"), b.append_basic_block("after")
    if start is None:
        b.branch(inside)
    else:
        b.cbranch(b.icmp_signed("<", start, stop), inside, after)
    b.position_at_end(inside)
    at = b.phi(I64)
    at.add_incoming(i(0) if start is None else start, before)
    carried = []
    for value in initial:
        carried.append(b.phi(value.type))
        carried[-1].add_incoming(value, before)
    new = list(body(at, carried))
    last = b.block
    following = b.add(at, i(step))
    at.add_incoming(following, last)
    for phi, value in zip(carried, new, strict=True):
        phi.add_incoming(value, last)
    b.cbranch(b.icmp_signed("<", following, stop), inside, after)
    b.position_at_end(after)
    if start is None:
        return new
    results = []
    for old, value in zip(initial, new, strict=True):
        results.append(b.phi(value.type))
        results[-1].add_incoming(old, before)
        results[-1].add_incoming(value, last)
    return results


def exp(b: Any, x: Any) -> Any:
    """exp, relative error under 2e-7 (Cephes' polynomial); arguments below -87 count as -87, and
    above 88 as 88."""
    x = maximum(b, x, constant(-87.0))
    x = minimum(b, x, constant(88.0))
    n = unary(b, "rint", b.fmul(x, constant(1.4426950408889634)))
    r = fma(b, n, constant(-0.693359375), x)
    r = fma(b, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for c in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = fma(b, p, r, constant(c))
    p = fma(b, b.fmul(p, r), r, b.fadd(r, constant(1.0)))
    exponent = b.shl(b.add(b.fptosi(n, VI32), integers(127)), integers(23))
    return b.fmul(p, b.bitcast(exponent, VF32))


def exp2(b: Any, x: Any) -> Any:
    """2 to the power x <= 0, relative error under 2e-7, 2**0 = 1; x below -126 counts as -126, and
    NaN stays NaN.

    Of the operations of which processors have fewest units it takes five, those of the polynomial
    (of degree 5, made for the least relative error).
    """
    x = larger(b, constant(-126.0), x)
    shifted = b.fadd(x, constant(MAGIC))
    r = b.fsub(x, b.fsub(shifted, constant(MAGIC)))
    p = constant(1.326472731307149e-3)
    for c in (9.671512991189957e-3, 5.550733581185341e-2, 0.24022242426872253, 0.69314700365, 1.0):
        p = fma(b, p, r, constant(c))
    exponent = b.shl(b.bitcast(shifted, VI32), integers(23))
    power = b.bitcast(b.add(b.bitcast(p, VI32), exponent), VF32)
    return b.select(b.fcmp_ordered("ord", x, x), power, x)


def load_bfloat16(b: Any, address: Any, byte_offset: Any) -> Any:
    bits = b.zext(load(b, address, byte_offset, VI16, 2), VI32)
    return b.bitcast(b.shl(bits, integers(16)), VF32)


@intrinsic
def request(typing_context, address, num_bytes):  # type: ignore[no-untyped-def]
    """Ask for memory that is read soon, cache line by cache line."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        address, num_bytes = arguments

        def body(at: Any, _: list[Any]) -> list[Any]:
            prefetch(b, address, at, cache_level=AHEAD_IN)
            return []

        loop(b, num_bytes, 64, [], body)
        return context.get_dummy_value()

    return types.void(i64, i64), generate


@intrinsic
def row_squares(typing_context, x, n):  # type: ignore[no-untyped-def]
    """The sum of squares of n float32 at x, n a multiple of 16."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        x, n = arguments

        def body(at: Any, sums: list[Any]) -> list[Any]:
            value = load(b, x, scaled(b, at, 4), VF32, 4)
            return [fma(b, value, value, sums[0])]

        return reduce_add(b, loop(b, n, LANES, [ZERO], body)[0])

    return f32(i64, i64), generate


@intrinsic
def row_scale(typing_context, x, weight, scale, out, n):  # type: ignore[no-untyped-def]
    """`out = x * scale * weight` for n float32, n a multiple of 16."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        x, weight, scale, out, n = arguments
        factor = splat(b, scale)

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            value = b.fmul(load(b, x, where, VF32, 4), factor)
            store(b, b.fmul(value, load(b, weight, where, VF32, 4)), out, where, 4)
            return []

        loop(b, n, LANES, [], body)
        return context.get_dummy_value()

    return types.void(i64, i64, f32, i64, i64), generate


@intrinsic
def row_add(typing_context, x, y, n):  # type: ignore[no-untyped-def]
    """`x += y` for n float32, n a multiple of 16."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        x, y, n = arguments

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            total = b.fadd(load(b, x, where, VF32, 4), load(b, y, where, VF32, 4))
            store(b, total, x, where, 4)
            return []

        loop(b, n, LANES, [], body)
        return context.get_dummy_value()

    return types.void(i64, i64, i64), generate


@intrinsic
def row_silu_mul(typing_context, gate, up, out, n):  # type: ignore[no-untyped-def]
    """`out = gate / (1 + exp(-gate)) * up` for n float32, n a multiple of 16."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        gate, up, out, n = arguments

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            x = load(b, gate, where, VF32, 4)
            value = b.fdiv(x, b.fadd(constant(1.0), exp(b, b.fneg(x))))
            store(b, b.fmul(value, load(b, up, where, VF32, 4)), out, where, 4)
            return []

        loop(b, n, LANES, [], body)
        return context.get_dummy_value()

    return types.void(i64, i64, i64, i64), generate


def _store_words(b: Any, words: Any, first: Any, q: Any, at: Any) -> Any:
    """32 integers as `row_quantize` wants words; returns the sum of products of neighbours.

    first: the first 16 as 32 bits.
    """
    offset = ir.Constant(V2I16, [WORD_OFFSET] * LANES + [0] * LANES)
    order = [lane // 4 * 4 + (0, 2, 1, 3)[lane % 4] for lane in range(2 * LANES)]
    words = b.add(words, offset)
    places = ir.Constant(ir.VectorType(I32, 2 * LANES), order)
    store(b, b.shuffle_vector(words, words, places), q, at, 1)
    first = b.add(first, integers(WORD_OFFSET))
    half = ir.VectorType(I32, LANES // 2)
    even, odd = (
        b.shuffle_vector(first, first, ir.Constant(half, list(range(begin, LANES, 2))))
        for begin in (0, 1)
    )
    total = declare(b, "llvm.vector.reduce.add.v8i32", I32, [half])
    return b.call(total, [b.mul(even, odd)])


@intrinsic
def row_quantize(typing_context, x, q, xs, n, as_words):  # type: ignore[no-untyped-def]
    """n float32 to integers of 12 bits in blocks of 32, n a multiple of 32.

    A block's scale is the power of two with which its largest magnitude becomes 1,024 to 2,047.
    q gets 64 bytes per block: of all 32 integers `integer >> 4`, from -128 to 127, then what is
    left of each, 0 to 15. If as_words is not 0, it gets the integers themselves as 16 bits, of each
    four in the order 0, 2, 1, 3, the first 16 with WORD_OFFSET added (`pairs`), those of the next
    block 512 bytes further.
    xs gets four float32, those of the next block 256 bytes further: `MAGIC` times the scale, and
    the scale times the sum of all integers, of the first 16 and of the others; with words instead
    of the last the sum of the products of columns 0 and 1, 2 and 3, ... 14 and 15 with their
    offset, as a negative integer.
    A block with NaN, or with a magnitude of 2**100 and more, gets NaN for scale.
    """

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        x, q, xs, n, as_words = arguments

        def word(value: int) -> Any:
            return ir.Constant(I32, value)

        def body(at: Any, _: list[Any]) -> list[Any]:
            where = scaled(b, at, 4)
            parts = [load(b, x, b.add(where, i(64 * half)), VF32, 4) for half in (0, 1)]
            # As integers magnitudes are in the order that they have as floats, and NaN is the top.
            magnitudes = [b.and_(b.bitcast(p, VI32), integers(0x7FFFFFFF)) for p in parts]
            largest = declare(b, "llvm.smax.v16i32", VI32, [VI32] * 2)
            top = b.call(
                declare(b, "llvm.vector.reduce.smax.v16i32", I32, [VI32]),
                [b.call(largest, magnitudes)],
            )
            power = b.lshr(top, word(23))  # of two, and 127 more
            lowest = word(127 - 100)
            power = b.select(b.icmp_signed("<", power, lowest), lowest, power)
            inverse = b.shl(b.sub(word(2 * 127 + _TOP_POWER), power), word(23))
            inverse = splat(b, b.bitcast(inverse, F32))
            nan = word(0x7FC00000)
            is_number = b.icmp_signed("<", power, word(127 + 100))
            scale = b.shl(b.sub(power, word(_TOP_POWER)), word(23))
            scale = b.bitcast(b.select(is_number, scale, nan), F32)
            values = []
            for part in parts:
                rounded = unary(b, "rint", b.fmul(part, inverse))
                # NaN becomes a number here: its scale says what it was.
                rounded = minimum(b, maximum(b, rounded, constant(-2048.0)), constant(2047.0))
                values.append(b.fptosi(rounded, VI32))
            integers_ = _words(b, *values)
            # No sum is beyond 16 bits: 16 times -2,048 is -32,768.
            sums = b.sitofp(_sums_of_two(b, integers_), ir.VectorType(F32, 4))
            sums = b.insert_element(sums, ir.Constant(F32, MAGIC), ir.Constant(I32, 0))
            factor = ir.Constant(ir.VectorType(F32, 4), ir.Undefined)
            factor = b.insert_element(factor, scale, ir.Constant(I32, 0))
            factor = b.shuffle_vector(factor, factor, ir.Constant(ir.VectorType(I32, 4), [0] * 4))
            block = scaled(b, at, 8)  # 256 bytes per 32 values
            store(b, b.fmul(sums, factor), xs, block, 4)
            with b.if_else(b.icmp_signed("!=", as_words, i(0))) as (words, parts):
                with words:
                    pairs = _store_words(b, integers_, values[0], q, scaled(b, at, 16))
                    store(b, b.sub(word(0), pairs), xs, b.add(block, i(12)), 4)
                with parts:
                    high = b.ashr(integers_, ir.Constant(V2I16, [4] * 32))
                    low = b.and_(integers_, ir.Constant(V2I16, [15] * 32))
                    pieces = [b.bitcast(piece, V4I8) for piece in (high, low)]
                    lower_bytes = ir.Constant(ir.VectorType(I32, 64), list(range(0, 128, 2)))
                    store(b, b.shuffle_vector(*pieces, lower_bytes), q, scaled(b, at, 2), 1)
            return []

        loop(b, n, 32, [], body)
        return context.get_dummy_value()

    return types.void(i64, i64, i64, i64, i64), generate


@intrinsic
def half_at(typing_context, address):  # type: ignore[no-untyped-def]
    """The float16 at an address, as float32."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return b.fpext(load(b, arguments[0], i(0), F16, 2), F32)

    return f32(i64), generate
