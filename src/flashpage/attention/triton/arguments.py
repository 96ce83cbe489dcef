"""From a problem and its tensors to what kernels take: strides, switches, windows."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from torch import Tensor

from flashpage.attention.problem import FLOAT32_TINY, Problem

MAX_WINDOW = 2**29
"""A wider side is as good as unbounded, and this one can be added to positions in int32."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's own takes microseconds on the host.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """The side of the tiles that hold a head: a power of two, at least 16 for a matrix unit."""
    return max(16, next_power_of_2(head_dim))


@lru_cache(maxsize=4096)
def switches(problem: Problem) -> dict[str, bool]:
    """What is compiled into a kernel or left out. Not to be changed: it is kept."""
    return {
        "HAS_LEFT": problem.window_left >= 0,
        "HAS_RIGHT": problem.window_right >= 0,
        "HAS_ALIBI": problem.has_alibi,
        "HAS_SOFTCAP": problem.softcap > 0.0,
        "HAS_DROPOUT": problem.dropout_p > 0.0,
    }


def raw_scores(problem: Problem) -> bool:
    """Scores can stay unscaled until the exponent: nothing but a positive scale changes them."""
    plain = problem.softcap == 0.0 and not problem.has_alibi
    return plain and problem.softmax_scale >= FLOAT32_TINY


def window(problem: Problem) -> tuple[int, int]:
    """Both sides of the window, in the range that kernels compute with."""
    return min(problem.window_left, MAX_WINDOW), min(problem.window_right, MAX_WINDOW)


def keys_per_row(problem: Problem, max_seqlen_q: int, max_seqlen_k: int) -> int:
    """How many keys a query row of the longest sequence sees on average, to choose tiles by."""
    if problem.window_right < 0 and problem.window_left < 0:
        return max_seqlen_k
    past = max_seqlen_k - max_seqlen_q // 2
    left = past if problem.window_left < 0 else min(problem.window_left, past)
    right = max_seqlen_k if problem.window_right < 0 else problem.window_right
    return min(left + 1 + right, max_seqlen_k)


def slopes_stride(alibi_slopes: Tensor | None) -> int:
    """From one sequence's slopes to the next one's."""
    return alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0


def as_batch(x: Tensor) -> Tensor:
    """Flat tokens `[total, heads, head_dim]` as a batch of one entry; batches as they are."""
    return x.unsqueeze(0) if x.dim() == 3 else x


def alignment(*tensors: Tensor) -> int:
    """The largest power of two, up to 16, that divides every stride but the last, in elements."""
    return gcd(16, *(stride for x in tensors for stride in x.stride()[:-1]))


def strides_of(x: Tensor) -> tuple[int, int, int]:
    """Of batch entry (or page), row and head.

    A dimension of size 1 has stride 0, whatever torch says, so that it makes no new kernel.
    """
    (entry, row, head, _), (a, b, c, _) = x.shape, x.stride()
    return (a if entry > 1 else 0), (b if row > 1 else 0), (c if head > 1 else 0)
