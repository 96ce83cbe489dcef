"""The innermost loop of quantised linear layers: rows of activations times 16 rows of weights.

A weight is kept in blocks of 16 output rows and 32 columns. Its bytes lie so that one vector holds
four neighbouring columns of each of the 16 rows (`packing`), and a block's sum of products is
exact in 32-bit integers, in any order. An activation is `16 * high + low`, two bytes with a sum
each. Then `out += m * x_sum + d * (x_scale * sum)`, block after block, in float32: the same
operations in the same order in every form; what is in brackets is exact.
Imported only where numba is installed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from flashpage.layers.cpu import forms
from flashpage.layers.cpu.packing import BLOCK_BYTES, Q4, Q4_WIDE, Q6_WIDE, Q8, SCALE_BYTES
from flashpage.layers.cpu.vectors import (
    AHEAD_IN,
    F32,
    I8,
    I16,
    I32,
    VF16,
    VF32,
    VI32,
    ZERO,
    ZERO_I,
    declare,
    fma,
    i,
    i64,
    integers,
    load,
    loop,
    outlined,
    prefetch,
    scaled,
    splat,
    store,
)

X_BYTES, XS_ROW, XS_BYTES = 64, 16, 256
"""of a block of activations: its integers, its scales, and the scales of 16 rows, which lie
together (`linear.scales_of`)"""

PAIRS_AT = 12
"""where the scales of a row and block have what `pairs` begins its sum with"""

_AHEAD = 4096
"""bytes by which weights are asked for before they are needed, and their scales by as many blocks:
the next group follows in memory."""


def _parts(b: Any, x: Any, count: int) -> list[Any]:
    """A vector of 16 x i32 in `count` equal pieces."""
    lanes = 16 // count
    undefined = ir.Constant(VI32, ir.Undefined)
    kind = ir.VectorType(I32, lanes)
    return [
        b.shuffle_vector(x, undefined, ir.Constant(kind, list(range(first, first + lanes))))
        for first in range(0, 16, lanes)
    ]


def _join(b: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        lanes = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        parts = [
            b.shuffle_vector(*pair, order) for pair in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _avx2(b: Any, acc: Any, w: Any, x: Any, bits: int) -> Any:
    v8i, v16s, v32b = ir.VectorType(I32, 8), ir.VectorType(I16, 16), ir.VectorType(I8, 32)
    multiply = declare(b, "llvm.x86.avx2.pmadd.wd", v8i, [v16s] * 2)
    if bits == 4:  # pairs of products of 0..15 and -127..127 fit into 16 bits
        pairs = declare(b, "llvm.x86.avx2.pmadd.ub.sw", v16s, [v32b] * 2)
        products = b.call(pairs, [b.bitcast(w, v32b), b.bitcast(x, v32b)])
        return b.add(acc, b.call(multiply, [products, ir.Constant(v16s, [1] * 16)]))
    eight = ir.Constant(v16s, [8] * 16)
    w, x = b.bitcast(w, v16s), b.bitcast(x, v16s)
    even = [b.lshr(b.shl(w, eight), eight), b.ashr(b.shl(x, eight), eight)]
    odd = [b.lshr(w, eight), b.ashr(x, eight)]
    return b.add(acc, b.add(b.call(multiply, even), b.call(multiply, odd)))


def _sdot(b: Any, acc: Any, w: Any, x: Any, bits: int) -> Any:
    v4i, v16b = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
    dot = declare(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", v4i, [v4i, v16b, v16b])
    w, x = b.bitcast(w, v16b), b.bitcast(x, v16b)
    if bits == 4:
        return b.call(dot, [acc, w, x])
    # The instruction takes signed bytes: w = (w - 128) + 64 + 64.
    w = b.xor(w, ir.Constant(v16b, [-128] * 16))
    half = ir.Constant(v16b, [64] * 16)
    return b.call(dot, [b.call(dot, [b.call(dot, [acc, w, x]), half, x]), half, x])


def _portable(b: Any, acc: Any, w: Any, x: Any) -> Any:
    for byte in range(4):
        up = integers(24 - 8 * byte)
        weight = b.lshr(b.shl(w, up), integers(24))
        acc = b.add(acc, b.mul(weight, b.ashr(b.shl(x, up), integers(24))))
    return acc


def dot(b: Any, form: int, acc: Any, w: Any, x: Any, bits: int) -> Any:
    """`acc + sum of four products` in each of 16 lanes: unsigned bytes of w, signed ones of x."""
    if form in (forms.AMX, forms.VNNI, forms.PAIRS):
        # With operands of bytes, as LLVM has them since 21, older ones do not know the function;
        # newer ones take these.
        return b.call(declare(b, "llvm.x86.avx512.vpdpbusd.512", VI32, [VI32] * 3), [acc, w, x])
    if form == forms.PORTABLE:
        return _portable(b, acc, w, x)
    count = 4 if form == forms.SDOT else 2
    parts = zip(*(_parts(b, v, count) for v in (acc, w, x)), strict=True)
    if form == forms.SDOT:
        return _join(b, [_sdot(b, *part, bits) for part in parts])
    if form == forms.AVX2:
        return _join(b, [_avx2(b, *part, bits) for part in parts])
    v8i = ir.VectorType(I32, 8)
    function = declare(b, "llvm.x86.avx512.vpdpbusd.256", v8i, [v8i] * 3)
    return _join(b, [b.call(function, list(part)) for part in parts])


def request_block(b: Any, w: Any, s: Any, block: Any, kind: int) -> None:
    """Ask for a block of weights and for its scales."""
    w_at = scaled(b, block, BLOCK_BYTES[kind])
    for line in range(0, BLOCK_BYTES[kind], 64):
        prefetch(b, w, b.add(w_at, i(line)), cache_level=AHEAD_IN)
    s_at = scaled(b, block, SCALE_BYTES[kind])
    for line in range(0, SCALE_BYTES[kind], 64):
        prefetch(b, s, b.add(s_at, i(line)), cache_level=AHEAD_IN)


def request_ahead(b: Any, w: Any, s: Any, block: Any, kind: int) -> None:
    """Ask for the weights and scales that are needed _AHEAD bytes after this block."""
    request_block(b, w, s, b.add(block, i(_AHEAD // BLOCK_BYTES[kind])), kind)


def weight_vectors(b: Any, address: Any, offset: Any, bits: int) -> list[Any]:
    """The eight vectors of one block, 32 columns four by four."""
    if bits == 8:
        return [load(b, address, b.add(offset, i(64 * j)), VI32, 64) for j in range(8)]
    packed = [load(b, address, b.add(offset, i(64 * j)), VI32, 64) for j in range(4)]
    mask = integers(0x0F0F0F0F)
    low = [b.and_(v, mask) for v in packed]
    return low + [b.and_(b.lshr(v, integers(4)), mask) for v in packed]


def load_scales(b: Any, address: Any, block: Any, kind: int) -> list[Any]:
    """d and m of 16 rows; for Q6_WIDE those of both halves."""
    offset = scaled(b, block, SCALE_BYTES[kind])
    if kind in (Q4, Q8):
        halves = [load(b, address, b.add(offset, i(32 * j)), VF16, 32) for j in range(2)]
        return [b.fpext(half, VF32) for half in halves]
    count = SCALE_BYTES[kind] // 64
    return [load(b, address, b.add(offset, i(64 * j)), VF32, 64) for j in range(count)]


def _joined(b: Any, high: Any, low: Any) -> Any:
    """Of 4-bit weights the whole sum is below 2**22."""
    return b.add(b.shl(high, integers(4)), low)


def scaled_sum(b: Any, parts: list[Any], magic: Any) -> Any:
    """`scale * sum` in float32, exactly; parts: 16 x i32, of the sum, or of high and low parts."""
    low, bits = parts[-1], b.bitcast(magic, VI32)
    total = b.fsub(b.bitcast(b.add(low, bits), VF32), magic)
    if len(parts) == 1:
        return total
    bits = b.add(bits, integers(4 << 23))  # of 16 * magic
    high = b.fsub(b.bitcast(b.add(parts[0], bits), VF32), b.bitcast(bits, VF32))
    return b.fadd(high, total)


def scale_at(b: Any, xs: Any, xs_at: Any, place: int) -> Any:
    """One of the float32 that `row_quantize` wrote for a row and block, in all lanes."""
    return splat(b, load(b, xs, b.add(xs_at, i(4 * place)), F32, 4))


def sum_of_half(b: Any, xs: Any, xs_at: Any, half: int | None) -> Any:
    """The sum of a block's activations, or of one half of them: exactly what they add up to."""
    if half is None:
        return scale_at(b, xs, xs_at, 1)
    first = scale_at(b, xs, xs_at, 2)
    return first if half == 0 else b.fsub(scale_at(b, xs, xs_at, 1), first)


def add_half(b: Any, total: Any, value: Any, d: Any, m: Any, x_sum: Any) -> Any:
    """`total` and one block's part of it, or that of half a block: the float32 arithmetic that all
    forms share."""
    return fma(b, d, value, fma(b, m, x_sum, total))


def add_block(
    b: Any, total: Any, sums: list[list[Any]], scales: list[Any], xs: Any, xs_at: Any
) -> Any:
    """`total` and one block's part of it.

    sums: of the block or of its halves, each as one part or two. xs: address of the activations'
    scales (`row_quantize`), of which those of this row and block begin `xs_at` bytes further.
    """
    magic = scale_at(b, xs, xs_at, 0)
    for half, parts in enumerate(sums):
        d, m = scales[2 * half : 2 * half + 2]
        x_sum = sum_of_half(b, xs, xs_at, half if len(sums) == 2 else None)
        total = add_half(b, total, scaled_sum(b, parts, magic), d, m, x_sum)
    return total


def finish(b: Any, total: Any, out: Any, offset: Any, add: Any) -> None:
    """Store 16 results, or add them to what is there."""
    old = load(b, out, offset, VF32, 4)
    store(b, b.select(add, b.fadd(old, total), total), out, offset, 4)


def _make(num_rows: int, kind: int) -> Any:
    bits = 4 if kind in (Q4, Q4_WIDE) else 8

    @intrinsic
    def rows_by_16(  # type: ignore[no-untyped-def]
        typing_context, form, w, s, x, x_step, xs, num_blocks, out, out_step, add
    ):
        """`out[m][:16] = x[m] @ w.T` for `num_rows` rows and 16 output columns.

        Args:
            form: of `forms`.
            w, s: addresses of `num_blocks` blocks of weights and of their scales.
            x, xs: addresses of the rows' integers, the next row `x_step` bytes further, and of
                their scales (`row_quantize`), all in the same 16 rows.
            out: address of float32, the next row `out_step` bytes further.
            add: add to `out` instead of replacing it.
        """
        which = form.count

        def emit(b: Any, arguments: list[Any]) -> None:
            w, s, x, x_step, xs, num_blocks, out, out_step, add = arguments
            rows = range(num_rows)
            x_rows = [b.mul(x_step, i(m)) for m in rows]
            num_sums = 2 if kind == Q6_WIDE else 1

            def body(block: Any, totals: list[Any]) -> list[Any]:
                offset = scaled(b, block, BLOCK_BYTES[kind])
                request_ahead(b, w, s, block, kind)
                vectors = weight_vectors(b, w, offset, bits)
                # Of each row and half of the block: the sums of high and of low parts.
                sums = [[[ZERO_I, ZERO_I] for _ in range(num_sums)] for _ in rows]
                for j, vector in enumerate(vectors):
                    half = j // 4 if num_sums == 2 else 0
                    for m in rows:
                        for part in range(2):
                            at = b.add(scaled(b, block, X_BYTES), i(32 * part + 4 * j))
                            four = splat(b, load(b, x, b.add(x_rows[m], at), I32, 4))
                            old = sums[m][half][part]
                            sums[m][half][part] = dot(b, which, old, vector, four, bits)
                scales = load_scales(b, s, block, kind)
                new = []
                for m in rows:
                    parts = sums[m] if bits == 8 else [[_joined(b, *sums[m][0])]]
                    where = b.add(scaled(b, block, XS_BYTES), i(XS_ROW * m))
                    new.append(add_block(b, totals[m], parts, scales, xs, where))
                return new

            totals = loop(b, num_blocks, 1, [ZERO] * num_rows, body)
            wants = b.icmp_signed("!=", add, i(0))
            for m in rows:
                finish(b, totals[m], out, b.mul(out_step, i(m)), wants)

        def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
            outlined(b, f"flashpage_rows_{num_rows}_{kind}_{which}", arguments[1:], emit)
            return context.get_dummy_value()

        return types.void(form, *[i64] * 9), generate

    return rows_by_16


q4_by_1, q4_by_4, q4_by_8 = (_make(n, Q4) for n in (1, 4, 8))
q8_by_1, q8_by_4, q8_by_8 = (_make(n, Q8) for n in (1, 4, 8))
q4_wide_by_1, q4_wide_by_4 = (_make(n, Q4_WIDE) for n in (1, 4))
q6_wide_by_1, q6_wide_by_4 = (_make(n, Q6_WIDE) for n in (1, 4))
