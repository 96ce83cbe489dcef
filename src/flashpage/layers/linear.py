"""A dense layer, packed for the processor where that pays, and its fusions; knows no model."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashpage.attention.triton.runtime import capability
from flashpage.layers import fused
from flashpage.layers.norm import RMSNorm

FEW_ROWS = 4
"""rows of x up to which the kernels of `triton_linear` serve a weight of at most ..."""
FEW_ROWS_BYTES = 2**24
"""... so many bytes; and for one row of x"""
ONE_ROW_BYTES = 2**28
"""so many. Measured on an H200 with benchmarks/linear.py: with the steps around them, products of
Qwen3-0.6B take 0.3 (1 row) to 0.8 (4 rows) of cuBLAS's time, and 1.2 at 8 rows; those of Llama-3-8B
0.7 to 1.0 at 1 row and twice as long at 8; a head of 300 MB is read at full speed by cuBLAS."""
SOME_ROWS = 256
"""rows of x up to which, from FEW_ROWS on, the kernel of `triton_products` serves a weight of at
most FEW_ROWS_BYTES, if its sums can be left in parts for a norm; and"""
SOME_GATED_ROWS = 128
"""if a gate follows. On an H200, with the norm or SiLU after it, 0.6 (8 rows) to 0.8 (256) of
cuBLAS's time, and 0.7 to 0.8; a product that nothing follows is as fast by cuBLAS."""


class Linear(nn.Module):
    """`y = x @ weight.T + bias`, with a weight that `prepare` may repack for speed.

    Several projections of one input (q, k and v; gate and up) are one `Linear` whose rows are the
    projections one after the other: one product instead of three, for whoever fills the weight.

    Attributes:
        weight: `[out_features, in_features]`, or None once `prepare` has packed it.
        bias: `[out_features]` or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight: nn.Parameter | None = _empty_parameter(
            (out_features, in_features), dtype, device
        )
        self.bias = _empty_parameter((out_features,), dtype, device) if bias else None
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`, in the dtype of the weight."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        if self.takes_few_rows(x):
            return _few_rows().linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def for_norm(self, x: Tensor) -> Tensor:
        """`forward`, or where that is faster parts whose sum it is, for `RMSNorm.add`.

        x `[rows, in_features]` -> `[rows, out_features]`, or float32 `[parts, rows, out_features]`.
        """
        if self.takes_some_rows(x, SOME_ROWS):
            return _some_rows().product(x, self.weight, self.bias)
        return self(x)

    def takes_few_rows(self, x: Tensor) -> bool:
        """Whether the kernels for a few rows serve this x: the one place that decides it."""
        num_rows = x.numel() // self.in_features
        return (
            self.weight is not None
            and 0 < num_rows <= FEW_ROWS
            and self.weight.nbytes <= (ONE_ROW_BYTES if num_rows == 1 else FEW_ROWS_BYTES)
            and self._fits_kernels(x)
            and capability(x.device) >= 80
        )

    def takes_some_rows(self, x: Tensor, up_to: int) -> bool:
        """Whether the kernel for some rows serves this x, if something it can do follows."""
        return (
            self.weight is not None
            and x.dim() == 2
            and FEW_ROWS < x.shape[0] <= up_to
            and x.stride(1) == 1
            and x.element_size() == 2
            and self.weight.nbytes <= FEW_ROWS_BYTES
            and self._fits_kernels(x)
            and capability(x.device) == 90  # where it was measured
        )

    def _fits_kernels(self, x: Tensor) -> bool:
        assert self.weight is not None
        return (
            self.weight.dtype == x.dtype
            and self.weight.stride(1) == 1
            and fused.on_gpu(x, self.weight)
        )

    def prepare(self) -> None:
        """Pack the weight where that is faster, and drop the plain copy; call once, after loading.

        Packing pays where oneDNN has kernels for the dtype: `F.linear` reorders a bfloat16 weight
        again in every call, and takes another library for float32 (of which oneDNN's packed
        product was 2 to 2.7 times as fast on the EPYC that it was measured on).
        A weight that another module also holds (a tied head) stays alive there, and exists twice.
        """
        if self.weight is not None and can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
            self.weight = None

    @property
    def is_packed(self) -> bool:
        """Whether `forward` uses the packed weight."""
        return self._packed is not None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, packed={self.is_packed}"
        )


def add_norm_linear(
    x: Tensor, residual: Tensor, norm: RMSNorm, linear: Linear, *, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """`(linear(norm(x + residual)), x + residual)`; with `gated`, `silu_and_mul` of the first.

    Args:
        x: `[..., in_features]`, or parts of it from `Linear.for_norm`.
        residual: `[..., in_features]`.

    Returns:
        `[..., out_features]` (gated: half of that), and the sum, rounded, `[..., in_features]`.
    """
    if linear.takes_few_rows(residual):
        return _few_rows().add_norm_linear(
            x, residual, norm.weight, norm.eps, linear.weight, linear.bias, gated=gated
        )
    normed, total = norm.add(x, residual)
    if gated and linear.takes_some_rows(normed, SOME_GATED_ROWS):
        return _some_rows().product(normed, linear.weight, linear.bias, gated=True), total
    out = linear(normed)
    return (fused.silu_and_mul(out) if gated else out), total


def _few_rows() -> ModuleType:
    from flashpage.layers import triton_linear

    return triton_linear


def _some_rows() -> ModuleType:
    from flashpage.layers import triton_products

    return triton_products


def can_pack(weight: Tensor) -> bool:
    """Whether this weight can be kept in oneDNN's packed layout here."""
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and has_fast_bfloat16())
        )
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def has_fast_bfloat16() -> bool:
    """Whether this CPU computes bfloat16 products with instructions of its own."""
    if not torch.backends.mkldnn.is_available():
        return False
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def _empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
