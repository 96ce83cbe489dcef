"""Products of a few rows in Triton against the steps that they fuse: on a GPU, or interpreted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from flashpage.layers import fused, triton_linear
from flashpage.layers.linear import FEW_ROWS, Linear, add_norm_linear
from flashpage.layers.norm import RMSNorm
from flashpage.layers.triton_linear import Tile, choose_tile
from kernels import DEVICE, ON_GPU, poisoned  # noqa: F401 - a fixture

DTYPES = pytest.mark.parametrize(
    ("dtype", "unit"),
    # One rounding of the dtype. The interpreter cuts bfloat16 where it should round.
    [(torch.float32, 2**-23), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)][
        : 3 if ON_GPU else 2
    ],
    ids=str,
)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def inputs(num_rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows with other values between them, weights whose products are of order 1."""
    wide = torch.full((2, num_rows, k + 5), torch.nan, device=DEVICE, dtype=dtype)
    wide[:, :, 3 : 3 + k] = torch.randn(2, num_rows, k, device=DEVICE)
    x = {
        "x": wide[0, :, 3 : 3 + k],
        "residual": wide[1, :, 3 : 3 + k],
        "norm": 1 + torch.randn(k, device=DEVICE).to(dtype) / 4,
        "weight": (torch.randn(n, k, device=DEVICE) / k**0.5).to(dtype),
        "bias": torch.randn(n, device=DEVICE).to(dtype),
    }
    settle()
    return x


def settle() -> None:
    """Weights are read before earlier kernels have ended: those that made them must have."""
    if ON_GPU:
        torch.cuda.synchronize()


def product(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """In float64, rounded where the two steps round."""
    out = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not gated:
        return out
    gate, up = out.to(x.dtype).double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def close(actual: Tensor, expected: Tensor, unit: float) -> None:
    assert actual.shape == expected.shape
    # The gate and the up part may each fall to the next value, and their product is rounded again.
    torch.testing.assert_close(actual.double(), expected.double(), atol=8 * unit, rtol=4 * unit)


SHAPES = pytest.mark.parametrize(
    ("num_rows", "n", "k"),
    [(1, 2, 1), (1, 34, 64), (2, 6, 22), (3, 8, 1030), (4, 10, 2100)],
)


@DTYPES
@SHAPES
@GATED
def test_linear(num_rows, n, k, gated, dtype, unit, poisoned):  # noqa: F811
    t = inputs(num_rows, n, k, dtype)
    for bias in (None, t["bias"]):
        out = triton_linear.linear(t["x"], t["weight"], bias, gated=gated)
        assert out.dtype == dtype
        close(out, product(t["x"], t["weight"], bias, gated), unit)


@DTYPES
@SHAPES
@GATED
def test_add_norm_linear(num_rows, n, k, gated, dtype, unit, poisoned):  # noqa: F811
    t = inputs(num_rows, n, k, dtype)
    before = t["x"].clone(), t["residual"].clone()
    out, total = triton_linear.add_norm_linear(
        t["x"], t["residual"], t["norm"], 1e-6, t["weight"], t["bias"], gated=gated
    )
    normed, expected_total = fused.add_rms_norm_torch(t["x"], t["residual"], t["norm"], 1e-6)
    assert torch.equal(total, expected_total)
    assert torch.equal(t["x"], before[0])
    assert torch.equal(t["residual"], before[1])
    # A normed value on the border of two may be rounded to the other.
    close(out, product(normed, t["weight"], t["bias"], gated), 2 * unit)


@pytest.mark.parametrize("num_rows", [2, 3, FEW_ROWS])
def test_a_row_is_its_own(num_rows):
    """Bit for bit, alone or in company, of NaN too."""
    t = inputs(num_rows, 36, 1100, torch.float32)
    arguments = t["norm"], 1e-6, t["weight"], t["bias"]
    t["x"][1] = torch.nan
    settle()
    out, total = triton_linear.add_norm_linear(t["x"], t["residual"], *arguments)
    plain = triton_linear.linear(t["x"], t["weight"], None)
    for i in [0, *range(2, num_rows)]:
        x, residual = t["x"][i : i + 1], t["residual"][i : i + 1]
        alone = triton_linear.add_norm_linear(x, residual, *arguments)
        assert torch.equal(out[i : i + 1], alone[0])
        assert torch.equal(total[i : i + 1], alone[1])
        assert torch.equal(plain[i : i + 1], triton_linear.linear(x, t["weight"], None))
    assert out[1].isnan().all()
    assert plain[1].isnan().all()


@GATED
def test_every_tile_computes_the_same(gated):
    t = inputs(2, 50, 130, torch.float32)
    expected = product(t["x"], t["weight"], None, gated)
    for tile in (Tile(2, 32, 3), Tile(4, 64, 1, 1), Tile(8, 16, 2, 2), Tile(16, 256, 1, 8)):
        out = triton_linear.linear(t["x"], t["weight"], None, gated=gated, tile=tile)
        close(out, expected, 2**-23)


def test_tiles_keep_the_order_of_a_sum():
    for n, k in ((4096, 1024), (1024, 3072), (6144, 4096), (7, 5), (151936, 1024)):
        for size in (2, 4):
            tiles = [choose_tile(n, k, size, rows) for rows in range(1, FEW_ROWS + 1)]
            assert len({(tile.block_k, tile.num_warps) for tile in tiles}) == 1
            for tile in tiles:
                assert tile.block_n >= 4
                assert 1 <= tile.depth <= -(-k // tile.block_k)


def test_a_weight_inside_another():
    """Rows with a stride, three dimensions of x."""
    t = inputs(6, 12, 40, torch.float32)
    wide = torch.full((12, 48), torch.nan, device=DEVICE)
    wide[:, 4:44] = t["weight"]
    settle()
    x = t["x"].reshape(3, 2, 40)
    out = triton_linear.linear(x, wide[:, 4:44], None)
    close(out, product(x, t["weight"], None, False), 2**-23)


# ---------------------------------------------------------------------------------------------
# The layer that decides
# ---------------------------------------------------------------------------------------------


def layer(n: int, k: int, dtype: torch.dtype, *, bias: bool = True) -> tuple[Linear, RMSNorm]:
    t = inputs(1, n, k, dtype)
    linear = Linear(k, n, bias=bias, dtype=dtype, device=DEVICE)
    norm = RMSNorm(k, 1e-6, dtype=dtype, device=DEVICE)
    linear.weight.data.copy_(t["weight"])
    norm.weight.data.copy_(t["norm"])
    if bias:
        linear.bias.data.copy_(t["bias"])
    settle()
    return linear, norm


@GATED
@pytest.mark.parametrize("num_rows", [0, 1, FEW_ROWS + 1])
def test_the_layers_function_is_its_steps(num_rows, gated):
    linear, norm = layer(12, 40, torch.float32)
    x, residual = torch.randn(2, num_rows, 40, device=DEVICE)
    out, total = add_norm_linear(x, residual, norm, linear, gated=gated)
    normed, expected_total = fused.add_rms_norm_torch(x, residual, norm.weight, norm.eps)
    assert torch.equal(total, expected_total)
    close(out, product(normed, linear.weight, linear.bias, gated), 2**-21)


def test_a_cpu_computes_in_steps():
    linear = Linear(40, 12)
    assert not linear.takes_few_rows(torch.randn(1, 40))


@pytest.mark.gpu
def test_who_is_served(monkeypatch):
    linear, _ = layer(12, 40, torch.bfloat16)
    x = torch.randn(FEW_ROWS, 40, device=DEVICE).bfloat16()
    assert linear.takes_few_rows(x)
    assert linear.takes_few_rows(x[0])
    assert not linear.takes_few_rows(x[:0])
    assert not linear.takes_few_rows(x.float())
    assert not linear.takes_few_rows(torch.cat((x, x[:1])))
    monkeypatch.setattr("flashpage.layers.linear.FEW_ROWS_BYTES", 12 * 40 * 2 - 1)
    assert not linear.takes_few_rows(x)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_a_chain_in_a_graph(num_rows):
    """Kernels that start before the one before has ended still see all that it wrote."""
    size, count = 1024, 12
    layers = [(layer(3 * size, size, torch.bfloat16), layer(size, 3 * size, torch.bfloat16))]
    layers += [(layer(6 * size, size, torch.bfloat16), layer(size, 3 * size, torch.bfloat16))]
    x = torch.randn(num_rows, size, device=DEVICE).bfloat16()

    def chain() -> tuple[Tensor, Tensor]:
        hidden, residual = x, torch.zeros_like(x)
        for i in range(count):
            (first, norm), (second, _) = layers[i % 2]
            wide, residual = add_norm_linear(hidden, residual, norm, first, gated=i % 2 == 1)
            hidden = second(wide)
        return hidden, residual

    # Every kernel ends before the next is launched.
    expected = x, torch.zeros_like(x)
    for i in range(count):
        (first, norm), (second, _) = layers[i % 2]
        wide, total = add_norm_linear(*expected, norm, first, gated=i % 2 == 1)
        settle()
        expected = second(wide), total
        settle()
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden, residual = chain()
    for _ in range(20):
        hidden.fill_(torch.nan)
        residual.fill_(torch.nan)
        graph.replay()
        assert torch.equal(hidden, expected[0])
        assert torch.equal(residual, expected[1])
