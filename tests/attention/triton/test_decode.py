"""Triton's decode kernels against the oracle; unused slots of every cache hold NaN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from flashpage.attention.dispatch import DecodeInputs
from flashpage.attention.problem import Problem, resolve_window
from flashpage.attention.triton.decode import (
    Tile,
    choose_num_splits,
    choose_tile,
    decode,
    launch,
)
from kernels import DEVICE, DTYPES, poisoned  # noqa: F401 - a fixture
from oracles import assert_as_good, dense

SMALL = Tile(16, 16, 4, 1, 2)
"""Many blocks and row tiles in a small problem."""


def ints(values: Any) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass
class Call:
    """One decode and what it must give."""

    lengths: list[int]
    seqlen_q: int = 1
    capacity: int = 48
    heads: tuple[int, int, int] = (4, 2, 16)
    dtype: torch.dtype = torch.float32
    block_size: int | None = None
    leftpad: list[int] | None = None
    batch_idx: list[int] | None = None
    num_new_tokens: int = 0
    num_splits: int = 0
    tile: Tile | None = SMALL
    """None: as chosen"""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        h, hk, d = self.heads
        batch = len(self.lengths)
        self.q = torch.randn(batch, self.seqlen_q, h, d).to(DEVICE, self.dtype)
        rows = self.batch_idx or list(range(batch))
        self.table = None
        if self.block_size is None:
            shape = (max(rows) + 1, self.capacity, hk, d)
        else:
            per_sequence = -(-self.capacity // self.block_size)
            shape = (per_sequence * batch + 2, self.block_size, hk, d)
            pages = torch.randperm(shape[0])[: per_sequence * batch]
            self.table = pages.view(batch, per_sequence).int()
        caches = [torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2)]
        self.keys, self.values = [], []
        for i, n in enumerate(self.lengths):
            start = self.leftpad[i] if self.leftpad else 0
            kept = []
            for cache in caches:
                tokens = torch.randn(max(n - start, 0), hk, d).to(self.dtype)
                for t in range(len(tokens)):
                    if self.table is None:
                        cache[rows[i], start + t] = tokens[t]
                    else:
                        cache[self.table[i, t // self.block_size], t % self.block_size] = tokens[t]
                kept.append(tokens.to(DEVICE))
            self.keys.append(kept[0])
            self.values.append(kept[1])
            if self.table is not None:  # garbage where nothing may be read
                self.table[i, -(-n // self.block_size) :] = -(2**31) if i % 2 else 2**31 - 1
        self.k_cache, self.v_cache = (cache.to(DEVICE) for cache in caches)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        h, hk, d = self.heads
        options = self.options
        left, right = resolve_window(
            options.get("window_size", (-1, -1)), options.get("causal", False)
        )
        slopes = options.get("alibi_slopes")
        problem = Problem(
            "dense" if self.table is None else "paged",
            self.q.device,
            self.q.dtype,
            h,
            hk,
            d,
            options.get("softmax_scale", d**-0.5),
            left,
            right,
            options.get("softcap", 0.0),
            has_alibi=slopes is not None,
        )
        inputs = DecodeInputs(
            self.q,
            self.k_cache,
            self.v_cache,
            ints([n - self.num_new_tokens for n in self.lengths]),
            self.num_new_tokens,
            None if self.table is None else self.table.to(DEVICE),
            ints(self.batch_idx),
            ints(self.leftpad),
            None if slopes is None else slopes.to(DEVICE),
            self.num_splits,
        )
        if self.tile is None:
            return decode(problem, inputs)
        out = torch.full(self.q.shape, 7.0, device=DEVICE, dtype=self.dtype)
        lse = torch.full((len(self.lengths), h, self.seqlen_q), 7.0, device=DEVICE)
        launch(problem, inputs, out, lse, self.tile, self.num_splits or 3)
        return out, lse

    def expected(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = [], []
        for i in range(len(self.lengths)):
            options = dict(self.options)
            if (slopes := options.get("alibi_slopes")) is not None:
                options["alibi_slopes"] = (slopes[i] if slopes.dim() == 2 else slopes).to(DEVICE)
            q, k, v = (x[None].to(dtype) for x in (self.q[i], self.keys[i], self.values[i]))
            out, lse = dense(q, k, v, **options)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.stack(outs), torch.stack(lses)

    def check(self) -> None:
        out, lse = self.run()
        assert out.dtype == self.dtype
        assert out.is_contiguous()
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()
        exact, exact_lse = self.expected(torch.float64)
        low, low_lse = self.expected(self.dtype)
        assert_as_good(out, exact, low)
        assert_as_good(lse, exact_lse, low_lse, "lse")


LENGTHS = [5, 0, 33, 16, 48]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [None, 1, 5, 16, 256])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_dtypes_and_page_sizes(dtype, block_size, num_splits):
    Call(LENGTHS, dtype=dtype, block_size=block_size, num_splits=num_splits).check()


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "left": {"causal": True, "window_size": (3, -1)},
    "left_only": {"window_size": (18, -1)},
    "right": {"window_size": (-1, 1)},
    "diagonal": {"window_size": (0, 0)},
    "huge_window": {"window_size": (2**31 - 1, 2**31 - 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    "alibi_batch": {"alibi_slopes": torch.rand(5, 4), "causal": True},
    "alibi_softcap": {"alibi_slopes": torch.rand(4).expand(5, -1), "softcap": 2.0},
    "scale": {"softmax_scale": 2.0},
    "negative_scale": {"softmax_scale": -2.0, "causal": True},
    "zero_scale": {"softmax_scale": 0.0, "causal": True},
    "tiny_scale": {"softmax_scale": 1e-44},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("seqlen_q", "block_size"), [(1, 16), (3, None), (20, 16)])
def test_options(name, seqlen_q, block_size):
    lengths = LENGTHS if seqlen_q < 20 else [5, 33]
    Call(lengths, seqlen_q=seqlen_q, block_size=block_size, options=OPTIONS[name]).check()


@pytest.mark.parametrize(
    "heads", [(1, 1, 1), (9, 3, 64), (71, 1, 8), (6, 6, 59), (4, 2, 256), (2, 1, 80)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads(heads, dtype):
    # Of few numbers the one that the error is compared with may happen to have nearly none.
    lengths = [17, 0] * (12 if heads[2] == 1 else 1)
    call = Call(
        lengths, seqlen_q=2, heads=heads, block_size=16, dtype=dtype, options={"causal": True}
    )
    call.check()
    replace(call, block_size=None, tile=None).check()


@pytest.mark.parametrize("num_splits", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("tile", [SMALL, Tile(32, 32, 4, 2, 2), Tile(64, 16, 4, 1, 1), None])
def test_splits_and_tiles(num_splits, tile):
    call = Call([33, 70], 9, 70, (2, 1, 16), block_size=8, num_splits=num_splits, tile=tile)
    call.check()
    replace(call, options={"causal": True, "window_size": (20, -1)}).check()


def test_a_long_context_is_split_by_itself():
    Call([300, 129, 1, 0], capacity=320, block_size=16, tile=None).check()


@pytest.mark.parametrize("options", [{}, {"causal": True}, OPTIONS["alibi"]], ids=str)
def test_leftpad(options):
    call = Call([5, 0, 33, 20], seqlen_q=2, leftpad=[2, 0, 32, 20], options=options)
    call.check()


def test_leftpad_beyond_the_length_sees_nothing():
    call = Call([3], leftpad=[5], num_splits=1)
    out, lse = call.run()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, torch.inf))


def test_cache_batch_idx():
    Call([5, 0, 33], seqlen_q=2, batch_idx=[4, 0, 2]).check()


@pytest.mark.parametrize("block_size", [None, 4])
def test_new_tokens_count(block_size):
    Call([5, 3, 33], block_size=block_size, num_new_tokens=3, seqlen_q=3).check()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("block_size", [None, 1, 16])
def test_keys_that_the_window_hides_are_not_read(num_splits, block_size):
    """An engine may have given their pages to someone else."""
    call = Call(
        [45, 20], 2, block_size=block_size, num_splits=num_splits,
        options={"causal": True, "window_size": (9, -1)},
    )  # fmt: skip
    for i, n in enumerate(call.lengths):
        hidden = n - 2 - 9
        for t in range(hidden):
            if block_size is None:
                place = i, t
            else:
                place = int(call.table[i, t // block_size]), t % block_size
            call.k_cache[place] = call.v_cache[place] = torch.nan
        if block_size is not None:
            call.table[i, : hidden // block_size] = -(2**31)
    call.check()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_strided_caches(num_splits):
    """K and V as slices of one pool, heads before tokens; other strides for each."""
    pool = torch.full((2, 3, 5, 24, 12), torch.nan, device=DEVICE)
    wide = torch.full((3, 20, 6, 16), torch.nan, device=DEVICE)
    call = Call([7, 20, 0], capacity=20, heads=(6, 2, 12), num_splits=num_splits)
    k_cache = pool[1, :, 1:3, 2:22].transpose(1, 2)
    v_cache = wide[:, :, 1:5:2, 3:15]
    k_cache.copy_(call.k_cache)
    v_cache.copy_(call.v_cache)
    call.q = call.q.repeat(1, 3, 2, 1)[:, ::3, :6].transpose(1, 2).contiguous().transpose(1, 2)
    call.check()
    call.k_cache = k_cache
    call.check()
    call.v_cache = v_cache
    call.check()
    call.k_cache = call.v_cache  # with strides in common, but not those of a whole tensor
    call.keys = call.values
    call.check()


@pytest.mark.parametrize("length", [-1, -(2**31), 49, 2**31 - 1])
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("new", [0, 3])
def test_lengths_outside_the_cache_end_with_it(length, block_size, new):
    call = Call([48, 48], block_size=block_size, num_new_tokens=new)
    expected, expected_lse = call.expected(torch.float64)
    call.lengths = [length + new if length < 2**31 - new else length, 48]
    out, lse = call.run()
    if length < 0:
        expected[0], expected_lse[0] = 0, torch.inf
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [4, 16])
def test_page_ids_outside_the_pool_harm_no_other_sequence(block_size):
    call = Call([40, 33], block_size=block_size)
    expected, _ = call.expected(torch.float64)
    call.table[0] = torch.tensor([-1, 2**31 - 1]).repeat(20)[: call.table.shape[1]]
    out, _ = call.run()
    torch.testing.assert_close(out[1].double(), expected[1], rtol=1e-5, atol=1e-5)


def test_rows_outside_the_cache_harm_no_other_sequence():
    call = Call([40, 33], batch_idx=[0, 1])
    expected, _ = call.expected(torch.float64)
    call.batch_idx = [-7, 1]
    out, _ = call.run()
    torch.testing.assert_close(out[1].double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [SMALL, None])
@pytest.mark.parametrize("shape", [(0, 4), (1, 0), (0, 0)], ids=str)
def test_empty(shape, tile):
    seqlen_q, capacity = shape
    call = Call([0, 0], seqlen_q, capacity, tile=tile if seqlen_q else None)
    out, lse = call.run()
    assert torch.equal(out, torch.zeros_like(call.q))
    assert torch.equal(lse, torch.full((2, 4, seqlen_q), torch.inf, device=DEVICE))
    call = replace(call, block_size=4, capacity=max(capacity, 4))
    call.table = call.table[:, :capacity]
    assert torch.equal(call.run()[0], torch.zeros_like(call.q))


@pytest.mark.parametrize("magnitude", [1e3, 1e6, 1e15])
@pytest.mark.parametrize("options", [{}, {"softmax_scale": -3.0}, {"softcap": 1e9}], ids=str)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_scores_of_any_magnitude(magnitude, options, num_splits):
    call = Call([30, 48], heads=(2, 2, 16), num_splits=num_splits, options=options)
    call.q = torch.rand_like(call.q) + 0.5
    call.k_cache *= magnitude
    call.keys = [k * magnitude for k in call.keys]
    assert_as_good(call.run()[0], call.expected(torch.float64)[0], call.expected(torch.float32)[0])


def test_parts_are_weighted_exactly():
    """Two parts with the same huge maximum, one with 16 keys of it and the other with one."""
    call = Call([17], heads=(1, 1, 16), num_splits=2)
    call.q.fill_(1.0)
    call.k_cache[:, :17] = 1e8
    call.v_cache[:, :16] = 1.0
    call.v_cache[:, 16:17] = 18.0
    out, _ = call.run()
    torch.testing.assert_close(out, torch.full_like(out, 2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_values_that_are_used_may_be_anything(dtype, num_splits):
    for bad in (torch.nan, torch.inf):
        call = Call([40], heads=(1, 1, 16), dtype=dtype, num_splits=num_splits)
        call.v_cache[0, 3] = bad
        assert not torch.isfinite(call.run()[0]).any()
        call = replace(call)
        call.k_cache[0, 3] = torch.nan
        assert torch.isnan(call.run()[0]).all()
    big = torch.finfo(dtype).max / 8
    tiny = torch.finfo(dtype).smallest_normal
    for x in (big, -big, tiny, 0.0):
        call = Call([3], heads=(1, 1, 16), dtype=dtype, num_splits=num_splits)
        call.q.zero_()
        call.v_cache[:, :3] = x
        torch.testing.assert_close(
            call.run()[0].double(), call.v_cache[:, :1].double(), rtol=1e-2, atol=0
        )


@pytest.mark.parametrize("num_splits", [1, 3])
def test_one_key_gives_its_value(num_splits):
    call = Call([1, 1], dtype=torch.float16, num_splits=num_splits)
    out, _ = call.run()
    expected = call.v_cache[:, :1].repeat_interleave(2, dim=2)
    assert torch.equal(out, expected)


# ---------------------------------------------------------------------------------------------
# The choices
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [0, 75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("head_dim", [1, 64, 96, 128, 256])
@pytest.mark.parametrize("element_size", [2, 4])
def test_tiles_are_legal(capability, head_dim, element_size):
    for num_rows in (1, 16, 17, 40, 1000):
        tile = choose_tile(capability, head_dim, element_size, num_rows)
        for size in (tile.block_m, tile.block_n):
            assert size >= 16
            assert size & (size - 1) == 0
        assert tile.block_m < 2 * max(num_rows, 16)


def test_number_of_splits():
    # Enough programs: none is split.
    assert choose_num_splits(2048, 264, 16) == 1
    assert choose_num_splits(264, 264, 1000) == 1
    # Few programs: as many parts as fill the GPU, and never more than there are blocks.
    assert choose_num_splits(8, 264, 1000) in range(28, 34)
    assert choose_num_splits(8, 264, 5) == 5
    assert choose_num_splits(1, 264, 10**6) in range(100, 129)
    # A second wave that would be almost empty is filled.
    assert choose_num_splits(270, 264, 1000) > 1
    assert choose_num_splits(1, 4, 0) == 1


# ---------------------------------------------------------------------------------------------
# What only a GPU can show
# ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [0, 1, 9])
def test_a_captured_graph_replays_with_other_lengths(num_splits):
    call = Call([300, 40], capacity=512, block_size=16, num_splits=num_splits, tile=None)
    problem = Problem("paged", call.q.device, call.q.dtype, *call.heads, 0.25)
    seqlens, table = ints([1, 1]), call.table.to(DEVICE)
    inputs = DecodeInputs(
        call.q, call.k_cache, call.v_cache, seqlens, 0, table, None, None, None, num_splits
    )
    decode(problem, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(problem, inputs)
    for lengths in ([300, 40], [300, 0], [17, 40]):
        seqlens.copy_(ints(lengths))
        graph.replay()
        expected = decode(problem, inputs)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        for i, n in enumerate(lengths):
            q, k, v = (x[None].double() for x in (call.q[i], call.keys[i], call.values[i]))
            exact = dense(q, k[:, :n], v[:, :n], softmax_scale=0.25)[0][0]
            torch.testing.assert_close(out[i].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 16), (128, 256)])
@pytest.mark.parametrize("seqlen_q", [1, 4, 8, 16])
@pytest.mark.parametrize("num_splits", [0, 1, 7])
def test_rows_of_several_queries_with_the_chosen_tile(head_dim, block_size, seqlen_q, num_splits):
    call = Call(
        [300, 16, 0, 1023], seqlen_q, 1024, (16, 2, head_dim), torch.bfloat16, block_size,
        num_splits=num_splits, tile=None, options={"causal": True},
    )  # fmt: skip
    call.check()


@pytest.mark.gpu
@pytest.mark.parametrize(("seqlen_q", "num_splits"), [(1, 0), (1, 7), (5, 1), (16, 9)])
def test_200_times_bitwise(seqlen_q, num_splits):
    call = Call(
        [900, 77, 0, 1024], seqlen_q, 1024, (16, 2, 128), torch.bfloat16, 16,
        num_splits=num_splits, tile=None,
    )  # fmt: skip
    out, lse = call.run()
    for _ in range(200):
        again = call.run()
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@pytest.mark.gpu
def test_more_sequences_than_a_grid_dimension_holds():
    batch = 70_000
    pages = torch.randn(4, 16, 1, 16, device=DEVICE, dtype=torch.float16)
    q = torch.randn(batch, 1, 1, 16, device=DEVICE, dtype=torch.float16)
    table = torch.randint(0, 4, (batch, 1), device=DEVICE, dtype=torch.int32)
    seqlens = torch.randint(0, 17, (batch,), device=DEVICE, dtype=torch.int32)
    problem = Problem("paged", q.device, q.dtype, 1, 1, 16, 0.25)
    out, _ = decode(problem, DecodeInputs(q, pages, pages, seqlens, 0, table, None, None, None, 0))
    for i in (0, 65_535, 65_536, batch - 1):
        k = pages[table[i, 0], : int(seqlens[i])][None].double()
        exact = dense(q[i : i + 1].double(), k, k)[0]
        torch.testing.assert_close(out[i : i + 1].double(), exact, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [True, False])
def test_offsets_beyond_32_bits(paged):
    rows = 2**31 // (4096 * 128) + 3
    cache = torch.empty(rows, 4096, 1, 128, device=DEVICE, dtype=torch.float16)
    cache[-1].normal_()
    q = torch.randn(1, 1, 1, 128, device=DEVICE, dtype=torch.float16)
    problem = Problem("paged" if paged else "dense", q.device, q.dtype, 1, 1, 128, 0.1)
    index = ints([[rows - 1]] if paged else [rows - 1])
    table, batch_idx = (index, None) if paged else (None, index)
    out, _ = decode(
        problem, DecodeInputs(q, cache, cache, ints([4096]), 0, table, batch_idx, None, None, 0)
    )
    k = cache[-1:].double()
    exact = dense(q.double(), k, k, softmax_scale=0.1)[0]
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-3)
