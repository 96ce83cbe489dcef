"""What the attention tests compare with: `standard_attention`, applied to every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashpage.attention.standard import standard_attention


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`(out, softmax_lse)` in the dtype of the inputs."""
    result = standard_attention(q, k, v, **options)
    return result.out, result.softmax_lse


def _slopes_of(options: dict[str, Any], i: int) -> dict[str, Any]:
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        return {**options, "alibi_slopes": slopes[i : i + 1]}
    return options


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """One sequence after the other; rows of no sequence are 0 and +inf."""
    outs, lses = [], []
    for i in range(len(cu_q) - 1):
        out, lse = dense(
            q[None, cu_q[i] : cu_q[i + 1]],
            k[None, cu_k[i] : cu_k[i + 1]],
            v[None, cu_k[i] : cu_k[i + 1]],
            **_slopes_of(options, i),
        )
        outs.append(out[0])
        lses.append(lse[0])
    tail = q.shape[0] - cu_q[-1]
    outs.append(q.new_zeros(tail, *q.shape[1:]))
    lses.append(q.new_full((q.shape[1], tail), torch.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def sequence_of_pages(pages: Tensor, table_row: Tensor, length: int) -> Tensor:
    """Tokens `0 ... length` of one sequence, token by token: `[length, heads, head_dim]`."""
    block_size = pages.shape[1]
    tokens = [pages[int(table_row[t // block_size]), t % block_size] for t in range(length)]
    return torch.stack(tokens) if tokens else pages.new_zeros(0, *pages.shape[2:])


def rotate_slowly(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x `[heads, head_dim]` at one position (cos, sin `[rotary_dim / 2]`), pair by pair."""
    out = x.clone()
    half = cos.shape[0]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        out[:, a] = x[:, a] * cos[i] - x[:, b] * sin[i]
        out[:, b] = x[:, a] * sin[i] + x[:, b] * cos[i]
    return out


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference; infinities must match exactly, NaN counts as infinitely wrong."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    a, b = actual.detach().double(), expected.detach().double()
    infinite = torch.isinf(b)
    if not torch.equal(torch.where(infinite, a, 0.0), torch.where(infinite, b, 0.0)):
        return float("inf")
    error = torch.where(infinite, 0.0, a - b).abs()
    return float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0


def assert_as_good(
    actual: Tensor, exact: Tensor, low: Tensor, name: str = "out", atol: float = 1e-5
) -> None:
    """The error of `actual` against `exact` (float64) is at most twice that of `low`, the same
    formula in the precision of the inputs."""
    bound = 2 * max_error(low, exact) + atol
    error = max_error(actual, exact)
    assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g}"
