"""The numba kernels of the small layers; called through `fused`, which documents them.

Tensors come as addresses of contiguous rows. Imported only where numba is installed.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from flashpage.attention.cpu.numba_math import exp, jit, load_from, store_to


@jit(parallel=True)
def add_rms_norm(x, residual, weight, out, total, num_rows, size, eps, kind):  # type: ignore[no-untyped-def]
    """out = norm(x + residual) * weight, total = x + residual; residual 0: norm(x) alone."""
    for row in numba.prange(num_rows):
        a, b = np.empty(size, np.float32), np.empty(size, np.float32)
        load_from(a, 0, x, row * size, size, kind)
        if residual != 0:
            load_from(b, 0, residual, row * size, size, kind)
            for i in range(size):
                a[i] += b[i]
            store_to(total, row * size, a, 0, size, kind)
            # What the next layer will see: the sum, rounded.
            load_from(a, 0, total, row * size, size, kind)
        squares = np.float32(0.0)
        for i in range(size):
            squares += a[i] * a[i]
        scale = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(size) + eps))
        load_from(b, 0, weight, 0, size, kind)
        for i in range(size):
            a[i] *= scale * b[i]
        store_to(out, row * size, a, 0, size, kind)


@jit(parallel=True)
def silu_and_mul(gate_up, out, num_rows, size, kind):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up for rows of gate and up."""
    for row in numba.prange(num_rows):
        a, b = np.empty(size, np.float32), np.empty(size, np.float32)
        load_from(a, 0, gate_up, row * 2 * size, size, kind)
        load_from(b, 0, gate_up, row * 2 * size + size, size, kind)
        for i in range(size):
            x = a[i]
            e = exp(-abs(x))
            # 1 / (1 + exp(-x)), without an exp that overflows.
            sigmoid = np.float32(1.0) / (np.float32(1.0) + e)
            sigmoid = sigmoid if x >= 0 else e * sigmoid
            a[i] = x * sigmoid * b[i]
        store_to(out, row * size, a, 0, size, kind)


@jit(parallel=True)
def rope(x, cos, sin, out, num_tokens, num_heads, dim, x_stride, kind):  # type: ignore[no-untyped-def]
    """out = x * cos + roll(x, dim / 2) * sin for every head of every token."""
    half = dim // 2
    for token in numba.prange(num_tokens):
        c, s = np.empty(dim, np.float32), np.empty(dim, np.float32)
        a, b = np.empty(dim, np.float32), np.empty(dim, np.float32)
        load_from(c, 0, cos, token * dim, dim, kind)
        load_from(s, 0, sin, token * dim, dim, kind)
        for head in range(num_heads):
            load_from(a, 0, x, token * x_stride + head * dim, dim, kind)
            for i in range(half):
                b[i] = a[i] * c[i] + a[half + i] * s[i]
            for i in range(half):
                b[half + i] = a[half + i] * c[half + i] + a[i] * s[half + i]
            store_to(out, (token * num_heads + head) * dim, b, 0, dim, kind)
