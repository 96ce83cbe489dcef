"""The two innermost loops of decode as LLVM vectors: scores of 16 keys, and adding their values.

What numba's own loops can not say: sixteen dot products share one tree of additions instead of
taking one each, and a row of O stays in registers while all keys of a chunk are added to it.
LLVM makes AVX-512, AVX2 or NEON code of them, whatever the processor has.
Imported only where numba is installed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
"""elements of a vector, and keys of one call of `dots`; rows must be padded to a multiple"""

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)


def _load(builder: Any, base: Any, index: Any) -> Any:
    pointer = builder.bitcast(builder.gep(base, [index]), ir.PointerType(_VECTOR))
    value = builder.load(pointer)
    value.align = 4
    return value


def _store(builder: Any, value: Any, base: Any, index: Any) -> None:
    pointer = builder.bitcast(builder.gep(base, [index]), ir.PointerType(_VECTOR))
    builder.store(value, pointer).align = 4


def _add(builder: Any, a: Any, n: int) -> Any:
    return builder.add(a, ir.Constant(_I64, n))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, undefined, zeros)


def _pairwise_sums(builder: Any, vectors: list[Any]) -> Any:
    """Sixteen vectors to one whose lane i is the sum of vector i.

    Each level interleaves two vectors in two ways and adds them, so that half as many are left,
    whose lanes belong to twice as many of the originals.
    """
    stride = 1
    while len(vectors) > 1:
        low, high = [], []
        for lane in range(LANES):
            group, inside = divmod(lane, 2 * stride)
            start = group * 2 * stride
            source, at = divmod(inside, stride)
            low.append(source * LANES + start + at)
            high.append(source * LANES + start + stride + at)
        masks = [ir.Constant(ir.VectorType(_I32, LANES), m) for m in (low, high)]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        stride *= 2
    return vectors[0]


def _loop(
    builder: Any, start: Any, stop: Any, step: int, initial: list[Any], body: Any
) -> list[Any]:
    """`for at in range(start, stop, step)`, at least once; carries vectors from turn to turn."""
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("loop", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_I64)
    at.add_incoming(start, before)
    carried = []
    for value in initial:
        carried.append(builder.phi(_VECTOR))
        carried[-1].add_incoming(value, before)
    new = body(at, carried)
    following = _add(builder, at, step)
    at.add_incoming(following, builder.block)
    for phi, value in zip(carried, new, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, stop), loop, after)
    builder.position_at_end(after)
    return new


def _bases(context: Any, builder: Any, signature: Any, arguments: Any, at: tuple[int, ...]) -> Any:
    return (context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in at)


@intrinsic
def dots(typing_context, s, s_at, q, q_at, k, k_at, k_step, dim, scale):  # type: ignore[no-untyped-def]
    """`s[s_at + t] = scale * (q . k_t)` for LANES keys, `k_t = k[k_at + t * k_step:][:dim]`."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        s_base, q_base, k_base = _bases(context, builder, signature, arguments, (0, 2, 4))
        _, s_at, _, q_at, _, k_at, k_step, dim, scale = arguments
        keys = [builder.add(k_at, builder.mul(k_step, ir.Constant(_I64, t))) for t in range(LANES)]

        def body(d: Any, sums: list[Any]) -> list[Any]:
            q_part = _load(builder, q_base, builder.add(q_at, d))
            return [
                _fma(builder, q_part, _load(builder, k_base, builder.add(key, d)), total)
                for key, total in zip(keys, sums, strict=True)
            ]

        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = _loop(builder, ir.Constant(_I64, 0), dim, LANES, [zero] * LANES, body)
        total = builder.fmul(_pairwise_sums(builder, sums), _splat(builder, scale))
        _store(builder, total, s_base, s_at)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(s, i64, q, i64, k, i64, i64, i64, types.float32), generate


def _make_add_values(width: int) -> Any:
    @intrinsic
    def add_values(typing_context, o, o_at, s, first, stop, v, v_at, v_step):  # type: ignore[no-untyped-def]
        """`o[o_at:][:width] += sum_t s[t] * v[v_at + t * v_step:][:width]`, first <= t < stop.

        At least one key.
        """

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            o_base, s_base, v_base = _bases(context, builder, signature, arguments, (0, 2, 5))
            _, o_at, _, first, stop, _, v_at, v_step = arguments
            parts = range(0, width, LANES)

            def body(t: Any, sums: list[Any]) -> list[Any]:
                weight = _splat(builder, builder.load(builder.gep(s_base, [t])))
                value = builder.add(v_at, builder.mul(t, v_step))
                return [
                    _fma(builder, weight, _load(builder, v_base, _add(builder, value, part)), total)
                    for part, total in zip(parts, sums, strict=True)
                ]

            sums = [_load(builder, o_base, _add(builder, o_at, part)) for part in parts]
            sums = _loop(builder, first, stop, 1, sums, body)
            for part, total in zip(parts, sums, strict=True):
                _store(builder, total, o_base, _add(builder, o_at, part))
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(o, i64, s, i64, i64, v, i64, i64), generate

    return add_values


# Four vectors of O are enough to keep two multipliers busy, and leave registers for the rest.
add_values_64, add_values_16 = _make_add_values(64), _make_add_values(16)
