"""Products of some rows in Triton, whole and in parts: on a GPU, or interpreted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from flashpage.layers import fused
from flashpage.layers.linear import FEW_ROWS, SOME_GATED_ROWS, SOME_ROWS, Linear, add_norm_linear
from flashpage.layers.norm import RMSNorm
from flashpage.layers.triton_kernels import add_rms_norm
from flashpage.layers.triton_products import MAX_SPLITS, MIN_PART, Tile, choose_tile, product
from kernels import DEVICE, ON_GPU, poisoned  # noqa: F401 - a fixture

DTYPES = pytest.mark.parametrize(
    ("dtype", "unit"),
    # One rounding of the dtype. The interpreter's bfloat16 products are wrong.
    [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)][: 2 if ON_GPU else 1],
    ids=str,
)
SHAPES = pytest.mark.parametrize(
    ("num_rows", "n", "k"),
    [(1, 2, 8), (5, 64, 64), (17, 66, 200), (33, 130, 128), (70, 96, 136), (130, 64, 384)],
)


def inputs(num_rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x with NaN beside its columns, a weight whose products are of order 1, a bias."""
    wide = torch.full((num_rows, k + 24), torch.nan, device=DEVICE, dtype=dtype)
    wide[:, 8 : 8 + k] = torch.randn(num_rows, k, device=DEVICE)
    weight = (torch.randn(n, k, device=DEVICE) / k**0.5).to(dtype)
    bias = torch.randn(n, device=DEVICE).to(dtype)
    settle()
    return wide[:, 8 : 8 + k], weight, bias


def settle() -> None:
    """Weights are asked for before earlier kernels have ended: those that made them must have."""
    if ON_GPU:
        torch.cuda.synchronize()


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@DTYPES
@SHAPES
@pytest.mark.parametrize("with_bias", [False, True])
def test_whole(num_rows, n, k, with_bias, dtype, unit, poisoned):  # noqa: F811
    x, weight, bias = inputs(num_rows, n, k, dtype)
    bias = bias if with_bias else None
    out = product(x, weight, bias, tile=Tile(64, 32, 64, 2))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact(x, weight, bias), atol=unit, rtol=unit)


@DTYPES
@SHAPES
@pytest.mark.parametrize("splits", [2, 3, 8])
def test_parts(num_rows, n, k, splits, dtype, unit, poisoned):  # noqa: F811
    """Their sum is the product, with the bias once; a part without columns is zero."""
    x, weight, bias = inputs(num_rows, n, k, dtype)
    parts = product(x, weight, bias, tile=Tile(64, 16, 64, 2, splits))
    assert parts.shape == (splits, num_rows, n)
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts.double().sum(0), exact(x, weight, bias), atol=1e-5, rtol=1e-5)


@DTYPES
@SHAPES
def test_gated(num_rows, n, k, dtype, unit, poisoned):  # noqa: F811
    x, weight, bias = inputs(num_rows, n, k, dtype)
    out = product(x, weight, bias, gated=True, tile=Tile(64, 64, 64, 2))
    gate, up = exact(x, weight, bias).to(dtype).double().chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, atol=4 * unit, rtol=4 * unit)


def test_a_row_with_nan_leaves_the_others_alone():
    x, weight, _ = inputs(20, 64, 1024, torch.float16)
    x[3] = torch.nan
    settle()
    for out in (product(x, weight, None), product(x, weight, None, tile=Tile(64, 32, 64, 2))):
        nans = out.isnan().reshape(-1, 20, 64)
        assert nans[:, 3].all()
        assert nans.sum() == 64 * len(nans)


def test_the_sums_of_a_row_are_the_same_in_any_company_with_one_tile():
    x, weight, _ = inputs(40, 64, 256, torch.float16)
    tile = Tile(64, 16, 64, 2, 2)
    together = product(x, weight, None, tile=tile)
    for start, end in ((0, 1), (7, 12), (39, 40)):
        assert torch.equal(product(x[start:end], weight, None, tile=tile), together[:, start:end])


def test_tiles_fill_the_gpu_once():
    for n, k in ((1024, 2048), (1024, 3072), (2048, 2048), (4096, 1024), (64, 64), (7, 8)):
        for num_rows in range(5, SOME_ROWS + 1):
            tile = choose_tile(n, k, num_rows, False, 132)
            programs = -(-n // tile.block_n) * -(-num_rows // tile.block_m)
            assert 1 <= tile.splits <= MAX_SPLITS
            assert tile.splits == 1 or programs * tile.splits <= 132
            assert tile.splits == 1 or k >= tile.splits * MIN_PART
            # Stages of both operands in the shared memory of a Hopper GPU, 227 KB.
            for chosen in (tile, choose_tile(n, k, num_rows, True, 132)):
                size = 2 * (chosen.block_n + chosen.block_m) * chosen.block_k * chosen.stages
                assert size <= 200 * 1024


@DTYPES
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_the_norm_adds_up_parts(parts, dtype, unit, poisoned):  # noqa: F811
    x = torch.randn(parts, 7, 100, device=DEVICE)
    residual = torch.randn(7, 100, device=DEVICE).to(dtype)
    weight = torch.randn(100, device=DEVICE).to(dtype)
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    summed = x[0]
    for part in x[1:]:
        summed = summed + part
    expected, expected_total = fused.add_rms_norm_torch(summed.to(dtype), residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(out, expected, atol=4 * unit, rtol=2 * unit)
    # The same where there are no kernels.
    with fused.without_kernels():
        plain, plain_total = fused.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(plain_total, total, atol=4 * unit, rtol=2 * unit)
    torch.testing.assert_close(plain, out, atol=8 * unit, rtol=4 * unit)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [FEW_ROWS, FEW_ROWS + 1, 100, SOME_ROWS, SOME_ROWS + 1])
def test_a_layer_takes_it_where_it_is_served(num_rows):
    """A product, the norm of its sum, and a gated product, as the steps by themselves."""
    torch.manual_seed(num_rows)
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    down, up = Linear(768, 512, **options), Linear(512, 1024, bias=True, **options)
    norm = RMSNorm(512, 1e-6, **options)
    for parameter in (*down.parameters(), *up.parameters(), *norm.parameters()):
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    x = torch.randn(num_rows, 768, **options)
    residual = torch.randn(num_rows, 512, **options)
    settle()
    hidden = down.for_norm(x)
    in_parts = FEW_ROWS < num_rows <= SOME_ROWS and torch.cuda.get_device_capability() == (9, 0)
    assert (hidden.dim() == 3) == in_parts
    assert up.takes_some_rows(residual, SOME_GATED_ROWS) == (
        in_parts and num_rows <= SOME_GATED_ROWS
    )
    out, total = add_norm_linear(hidden, residual, norm, up, gated=True)
    with fused.without_kernels():
        expected, expected_total = add_norm_linear(down.for_norm(x), residual, norm, up, gated=True)
    torch.testing.assert_close(total, expected_total, atol=2**-6, rtol=2**-6)
    torch.testing.assert_close(out, expected, atol=2**-5, rtol=2**-5)
