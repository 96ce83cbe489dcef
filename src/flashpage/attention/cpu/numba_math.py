"""What the numba kernels share: compile options, exp, and 16-bit floats as their bits.

Imported only where numba is installed, through `numba_runtime`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from flashpage.attention.cpu import numba_cache

# numba knows no bfloat16: 16-bit values come and go as uint16, and one of these says what they are.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

# Sums may be reordered (that is what makes them vectors); NaN and infinity stay what they are.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def jit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """numba.njit, cached on disk where some folder can be written."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        settings = {"fastmath": _FAST, "nogil": True, "error_model": "numpy", **options}
        return numba_cache.keep(numba.njit(**settings)(function))

    return wrap


_ONE = np.float32(1.0)
_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts, so that n * ln 2 is exact to more than float32 (Cody and Waite).
_LN2_HI = np.float32(0.693359375)
_LN2_LO = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)


@jit(inline="always")
def exp(x):  # type: ignore[no-untyped-def]
    """exp for x <= 0, relative error under 2e-7; unlike math.exp it becomes vector code.

    Taylor's polynomial of degree 6 on [-ln2/2, ln2/2]. Below -87, where the result is no normal
    float32, it is 0.
    """
    too_low = x < _LOWEST
    x = _LOWEST if too_low else x
    n = np.floor(x * _LOG2E + np.float32(0.5))
    r = (x - n * _LN2_HI) - n * _LN2_LO
    p = np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + _ONE
    p = p * r + _ONE
    result = p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if too_low else result


@jit()
def load(dst, dst_at, src, src_at, n, kind):  # type: ignore[no-untyped-def]
    """n values to float32."""
    # Slices, because an index that is known not to be negative can be vectorised.
    x, y = src[src_at : src_at + n], dst[dst_at : dst_at + n]
    if kind == FLOAT32:
        for i in range(n):
            y[i] = x[i]
    elif kind == BFLOAT16:
        for i in range(n):
            bits = np.uint32(x[i]) << np.uint32(16)
            y[i] = np.uint32(bits).view(np.float32)
    else:
        for i in range(n):
            half = np.uint32(x[i])
            magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
            # The exponent, now float32's, is 112 too small; subnormals come out right as well.
            value = magnitude.view(np.float32) * np.float32(2.0**112)
            bits = np.float32(value).view(np.uint32)
            if magnitude >= np.uint32(0x0F800000):  # infinity and NaN
                bits = magnitude | np.uint32(0x7F800000)
            bits |= (half & np.uint32(0x8000)) << np.uint32(16)
            y[i] = np.uint32(bits).view(np.float32)


@jit(inline="always")
def _half_bits(bits):  # type: ignore[no-untyped-def]
    """float16 bits of float32 bits, rounded to nearest, ties to even."""
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude > np.uint32(0x7F800000):
        half = np.uint32(0x7E00)  # NaN
    elif magnitude >= np.uint32(0x477FF000):
        half = np.uint32(0x7C00)  # rounds to 65536 or more: infinity
    elif magnitude < np.uint32(0x38800000):
        # Below the smallest normal half: adding 0.5 leaves its steps of 2^-24 in the low bits.
        value = np.uint32(magnitude).view(np.float32) + np.float32(0.5)
        half = np.float32(value).view(np.uint32) - np.uint32(0x3F000000)
    else:
        odd = (magnitude >> np.uint32(13)) & np.uint32(1)
        half = (magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    return np.uint16(sign | half)


@jit()
def store(dst, dst_at, src, src_at, n, kind):  # type: ignore[no-untyped-def]
    """n float32 values to their dtype, rounded to nearest, ties to even."""
    x, y = src[src_at : src_at + n], dst[dst_at : dst_at + n]
    if kind == FLOAT32:
        for i in range(n):
            y[i] = x[i]
    elif kind == FLOAT16:
        for i in range(n):
            y[i] = _half_bits(np.float32(x[i]).view(np.uint32))
    else:
        for i in range(n):
            bits = np.float32(x[i]).view(np.uint32)
            even = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
            is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            y[i] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


# Tensors may also come as addresses: that costs less than a numpy array for each of them, and one
# compiled kernel serves all dtypes.


@intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An integer as a pointer."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@jit()
def float32_at(address, n):  # type: ignore[no-untyped-def]
    """n float32 values at an address, as an array."""
    return numba.carray(_pointer(address), n, dtype=np.float32)


@jit()
def int32_at(address, n):  # type: ignore[no-untyped-def]
    """n int32 values at an address, as an array."""
    return numba.carray(_pointer(address), n, dtype=np.int32)


@jit()
def bits_at(address, n):  # type: ignore[no-untyped-def]
    """n 16-bit words at an address, as an array."""
    return numba.carray(_pointer(address), n, dtype=np.uint16)


@jit()
def bytes_at(address, n):  # type: ignore[no-untyped-def]
    """n bytes at an address, as an array."""
    return numba.carray(_pointer(address), n, dtype=np.uint8)


@jit()
def load_from(dst, dst_at, address, at, n, kind):  # type: ignore[no-untyped-def]
    """`dst[dst_at:][:n]` = n values from element `at` of the memory at `address`, as float32."""
    if kind == FLOAT32:
        load(dst, dst_at, float32_at(address, at + n), at, n, kind)
    else:
        load(dst, dst_at, bits_at(address, at + n), at, n, kind)


@jit()
def store_to(address, at, src, src_at, n, kind):  # type: ignore[no-untyped-def]
    """The inverse of `load_from`."""
    if kind == FLOAT32:
        store(float32_at(address, at + n), at, src, src_at, n, kind)
    else:
        store(bits_at(address, at + n), at, src, src_at, n, kind)


@jit()
def copy_bits(dst, dst_at, src, src_at, n):  # type: ignore[no-untyped-def]
    """Copy n 16-bit words between addresses."""
    x, y = bits_at(src, src_at + n)[src_at:], bits_at(dst, dst_at + n)[dst_at:]
    for i in range(n):
        y[i] = x[i]


@intrinsic
def prefetch(typing_context, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at an address, to be read soon. Any address will do."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        i32 = ir.IntType(32)
        pointer = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32]),
            "llvm.prefetch.p0",
        )
        for_reading, into_all_caches, data_cache = 0, 3, 1
        flags = (ir.Constant(i32, n) for n in (for_reading, into_all_caches, data_cache))
        builder.call(function, [pointer, *flags])
        return context.get_dummy_value()

    return types.void(types.int64), generate
