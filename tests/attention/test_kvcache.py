"""`flash_attn_with_kvcache` on the CPU, through both backends, against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpage import flash_attn_with_kvcache
from flashpage.attention import dispatch
from flashpage.errors import ArgumentError, CacheOverflowError
from oracles import assert_as_good, dense, rotate_slowly, sequence_of_pages

BACKENDS = pytest.mark.parametrize("backend", ["cpu_numba", "cpu_torch"])


@dataclass
class Call:
    """One call, and what it must give. Unused slots of the cache hold NaN."""

    lengths: list[int]
    seqlen_q: int = 1
    seqlen_new: int = 0
    capacity: int = 48
    heads: tuple[int, int, int] = (4, 2, 16)
    dtype: torch.dtype = torch.float32
    block_size: int | None = None
    """None: a cache without pages"""
    rotary: tuple[int, bool] | None = None
    """(rotary_dim, interleaved)"""
    leftpad: list[int] | None = None
    batch_idx: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> None:
        h, hk, d = self.heads
        batch, dtype = len(self.lengths), self.dtype
        self.q = torch.randn(batch, self.seqlen_q, h, d).to(dtype)
        self.new_k, self.new_v = (
            torch.randn(batch, self.seqlen_new, hk, d).to(dtype) for _ in range(2)
        )
        self.table = None
        rows = self.batch_idx or list(range(batch))
        if self.block_size is None:
            shape = (max(rows) + 1, self.capacity, hk, d)
        else:
            per_sequence = -(-self.capacity // self.block_size)
            pages = torch.randperm(per_sequence * batch + 3)[: per_sequence * batch]
            self.table = pages.view(batch, per_sequence).int()
            shape = (per_sequence * batch + 3, self.block_size, hk, d)
            self.capacity = per_sequence * self.block_size
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan).to(dtype) for _ in range(2))
        self.places = []
        for i, n in enumerate(self.lengths):
            places = []
            for t in range(n + self.seqlen_new):
                if self.table is None:
                    places.append((rows[i], t))
                else:
                    place = int(self.table[i, t // self.block_size]), t % self.block_size
                    places.append(place)
            self.places.append(places)
            pad = self.leftpad[i] if self.leftpad else 0
            for place in places[pad:n]:
                for cache in (self.k_cache, self.v_cache):
                    cache[place] = torch.randn(hk, d).to(dtype)
        if self.table is not None:
            used = [-(-(n + self.seqlen_new) // self.block_size) for n in self.lengths]
            for i, n in enumerate(used):
                self.table[i, n:] = -(2**31)  # garbage where it must not be read
        self.cos = self.sin = None
        if self.rotary:
            angle = torch.rand(self.capacity + self.seqlen_q, self.rotary[0] // 2) * 6
            self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        def ints(x):
            return None if x is None else torch.tensor(x, dtype=torch.int32)

        new = {"k": self.new_k, "v": self.new_v} if self.seqlen_new else {}
        if self.rotary:
            new |= {"rotary_cos": self.cos, "rotary_sin": self.sin}
            new |= {"rotary_interleaved": self.rotary[1]}
        self.k_before, self.v_before = self.k_cache.clone(), self.v_cache.clone()
        seqlens = ints(self.lengths)
        result = flash_attn_with_kvcache(
            self.q,
            self.k_cache,
            self.v_cache,
            cache_seqlens=seqlens,
            cache_batch_idx=ints(self.batch_idx),
            cache_leftpad=ints(self.leftpad),
            block_table=self.table,
            return_softmax_lse=True,
            **new,
            **self.options,
        )
        assert seqlens.tolist() == self.lengths
        return result

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        if not self.rotary:
            return x
        compute = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self.cos[position].to(compute), self.sin[position].to(compute)
        return rotate_slowly(x.to(compute), cos, sin, self.rotary[1]).to(x.dtype)

    def expected(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Computed in `dtype` from the caches as they were, and the new tokens."""
        outs, lses = [], []
        causal = self.options.get("causal", False)
        by_row = causal or any(int(w) >= 0 for w in self.options.get("window_size", (-1, -1)))
        for i, n in enumerate(self.lengths):
            k, v = self.k_before.clone(), self.v_before.clone()
            for t in range(self.seqlen_new):
                k[self.places[i][n + t]] = self.rotated(self.new_k[i, t], n + t)
                v[self.places[i][n + t]] = self.new_v[i, t]
            pad = self.leftpad[i] if self.leftpad else 0
            places = self.places[i][pad:]
            k, v = (
                torch.stack([x[p] for p in places]) if places else x.new_zeros(0, *x.shape[2:])
                for x in (k, v)
            )
            q = torch.stack(
                [self.rotated(self.q[i, r], n + (r if by_row else 0)) for r in range(self.seqlen_q)]
            )
            options = {key: x for key, x in self.options.items() if key != "num_splits"}
            if (slopes := options.get("alibi_slopes")) is not None and slopes.dim() == 2:
                options["alibi_slopes"] = slopes[i]
            out, lse = dense(*(x[None].to(dtype) for x in (q, k, v)), **options)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.stack(outs), torch.stack(lses)

    def check_cache(self) -> None:
        """New tokens at their places, bit for bit; every other slot untouched."""
        for i, n in enumerate(self.lengths):
            for t in range(self.seqlen_new):
                place = self.places[i][n + t]
                assert torch.equal(self.v_cache[place], self.new_v[i, t])
                expected = self.rotated(self.new_k[i, t], n + t)
                tolerance = 1e-6 if self.dtype == torch.float32 else 1e-3
                torch.testing.assert_close(
                    self.k_cache[place], expected, atol=tolerance, rtol=tolerance
                )
                self.k_before[place] = self.k_cache[place]
                self.v_before[place] = self.v_cache[place]
        for before, after in ((self.k_before, self.k_cache), (self.v_before, self.v_cache)):
            assert torch.equal(before.nan_to_num(nan=7.0), after.nan_to_num(nan=7.0))


def check(call: Call, backend: str) -> None:
    call.build()
    with dispatch.only(backend, "cpu_torch"):
        out, lse = call.run()
    assert out.dtype == call.dtype
    exact, exact_lse = call.expected(torch.float64)
    low, low_lse = call.expected(call.dtype)
    assert_as_good(out, exact, low)
    assert_as_good(lse, exact_lse, low_lse, "lse")
    call.check_cache()


LENGTHS = [5, 0, 33, 16, 48]


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("block_size", [None, 1, 5, 16, 256])
def test_dtypes_and_page_sizes(backend, dtype, block_size):
    check(Call(LENGTHS, dtype=dtype, block_size=block_size), backend)


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "left": {"causal": True, "window_size": (3, -1)},
    "right": {"window_size": (-1, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    "alibi_batch": {"alibi_slopes": torch.rand(5, 4), "causal": True},
    "scale": {"softmax_scale": 2.0},
    "negative_scale": {"softmax_scale": -2.0, "causal": True},
    "splits": {"num_splits": 7},
    "one_split": {"num_splits": 1},
    "many_splits": {"num_splits": 128, "causal": True, "window_size": (20, -1)},
}


@BACKENDS
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seqlen_q", [1, 3, 20])
@pytest.mark.parametrize("block_size", [None, 16])
def test_options(backend, name, seqlen_q, block_size):
    call = Call(LENGTHS, seqlen_q=seqlen_q, block_size=block_size, options=OPTIONS[name])
    check(call, backend)


@BACKENDS
@pytest.mark.parametrize("heads", [(1, 1, 1), (9, 3, 64), (71, 1, 8), (6, 6, 59), (8, 2, 256)])
def test_heads(backend, heads):
    check(Call(LENGTHS, seqlen_q=2, heads=heads, block_size=16, options={"causal": True}), backend)


@BACKENDS
@pytest.mark.parametrize("rotary", [None, (16, True), (16, False), (8, True), (8, False)])
@pytest.mark.parametrize("seqlen_new", [1, 4, 15])
@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 4)}], ids=str)
def test_append(backend, rotary, seqlen_new, block_size, options):
    call = Call(
        [5, 0, 33],
        seqlen_q=3,
        seqlen_new=seqlen_new,
        rotary=rotary,
        block_size=block_size,
        options=options,
    )
    check(call, backend)
    check(replace(call, dtype=torch.bfloat16), backend)


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"causal": True}, OPTIONS["alibi"]], ids=str)
def test_leftpad(backend, options):
    for seqlen_new in (0, 2):
        call = Call(
            [5, 0, 33, 20],
            seqlen_q=2,
            seqlen_new=seqlen_new,
            leftpad=[2, 0, 32, 20],
            options=options,
        )
        check(call, backend)


@BACKENDS
def test_leftpad_beyond_the_length_sees_nothing(backend):
    cache = torch.full((1, 8, 1, 4), torch.nan)
    q = torch.randn(1, 1, 1, 4)
    five, three = (torch.tensor([n], dtype=torch.int32) for n in (5, 3))
    with dispatch.only(backend):
        out, lse = flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=three, cache_leftpad=five, return_softmax_lse=True
        )
    assert torch.equal(out, torch.zeros_like(q))
    assert lse.item() == torch.inf


@BACKENDS
def test_cache_batch_idx(backend):
    check(Call([5, 0, 33], seqlen_q=2, seqlen_new=2, batch_idx=[4, 0, 2]), backend)
    # Rows may repeat for reads.
    check(Call([7, 7], batch_idx=[1, 1]), backend)


@BACKENDS
def test_shared_pages(backend):
    """Two sequences with the same prefix pages, as a prefix cache makes them."""
    pages = torch.randn(4, 2, 1, 8)
    q = torch.randn(2, 1, 2, 8)
    table = torch.tensor([[3, 1], [3, 0]], dtype=torch.int32)
    with dispatch.only(backend):
        out = flash_attn_with_kvcache(
            q, pages, pages, cache_seqlens=torch.tensor([4, 3], dtype=torch.int32),
            block_table=table,
        )  # fmt: skip
    for i, n in enumerate((4, 3)):
        k = sequence_of_pages(pages, table[i], n)[None]
        torch.testing.assert_close(out[i : i + 1], dense(q[i : i + 1], k, k)[0])


@BACKENDS
@pytest.mark.parametrize("seqlens", [None, 6, torch.tensor([6, 6], dtype=torch.int32)], ids=str)
def test_forms_of_cache_seqlens(backend, seqlens):
    cache = torch.randn(2, 10, 2, 8)
    q = torch.randn(2, 1, 4, 8)
    n = 10 if seqlens is None else 6
    with dispatch.only(backend):
        out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=seqlens)
    torch.testing.assert_close(out, dense(q, cache[:, :n], cache[:, :n])[0])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_caches_are_read_and_written_in_place(backend, dtype):
    """K and V as slices of one tensor, heads before tokens, and a storage offset."""
    pool = torch.full((2, 3, 8, 2, 7, 4), torch.nan).to(dtype)
    k_cache, v_cache = (pool[1, :, 2:, i].permute(0, 2, 1, 3) for i in range(2))
    assert k_cache.shape == (3, 7, 6, 4)
    k_cache, v_cache = k_cache[:, :, 1:3], v_cache[:, :, 1:3]
    before = pool.clone()
    k, v = (torch.randn(3, 5, 2, 4).to(dtype) for _ in range(2))
    q = torch.randn(3, 5, 2, 4).to(dtype)
    with dispatch.only(backend):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True)
    low, exact = (dense(q.to(t), k.to(t), v.to(t), causal=True)[0] for t in (dtype, torch.float64))
    assert_as_good(out, exact, low)
    assert torch.equal(k_cache[:, :5], k)
    assert torch.equal(v_cache[:, :5], v)
    written = torch.zeros_like(pool, dtype=torch.bool)
    for i in range(2):
        written[1, :, 2:, i].permute(0, 2, 1, 3)[:, :5, 1:3] = True
    assert torch.isnan(pool[~written]).all()
    assert torch.isnan(before).all()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_used_may_be_anything(backend, dtype):
    """NaN and infinity in keys that count do reach the output; extreme finite values are exact."""
    for bad in (torch.nan, torch.inf):
        v = torch.ones(1, 40, 1, 4).to(dtype)
        v[0, 3] = bad
        k = torch.zeros(1, 40, 1, 4).to(dtype)
        with dispatch.only(backend):
            out = flash_attn_with_kvcache(torch.ones(1, 1, 1, 4).to(dtype), k, v)
        assert torch.equal(torch.isnan(out), torch.isnan(torch.full_like(out, bad)))
        assert not torch.isfinite(out).any()
        k[0, 3] = torch.nan
        with dispatch.only(backend):
            out = flash_attn_with_kvcache(torch.ones(1, 1, 1, 4).to(dtype), k, torch.ones_like(v))
        assert torch.isnan(out).all()
    big = torch.finfo(dtype).max / 8  # sums of a few must stay finite in float32
    tiny = torch.finfo(dtype).smallest_normal / 4  # subnormal
    # Processors' bfloat16 products (VDPBF16PS, AMX), which torch may use, take these for zeros.
    flushed = dtype == torch.bfloat16 and backend == "cpu_torch"
    for x in (big, -big, tiny, -tiny, 0.0):
        v = torch.full((1, 3, 1, 4), x).to(dtype)
        with dispatch.only(backend):
            out = flash_attn_with_kvcache(torch.zeros(1, 1, 1, 4).to(dtype), torch.zeros_like(v), v)
        atol = tiny if flushed and abs(x) == tiny else 0
        torch.testing.assert_close(out.double(), v[:, :1].double(), rtol=1e-2, atol=atol)


@BACKENDS
@pytest.mark.parametrize("magnitude", [1e3, 1e6, 1e15])
def test_scores_of_any_magnitude(backend, magnitude):
    q = torch.rand(2, 1, 2, 16) + 0.5
    k = (torch.rand(2, 30, 2, 16) - 2) * magnitude
    v = torch.randn(2, 30, 2, 16)
    exact = dense(q.double(), k.double(), v.double())[0]
    for splits in (1, 4):
        with dispatch.only(backend):
            out = flash_attn_with_kvcache(q, k, v, num_splits=splits)
        assert_as_good(out, exact, dense(q, k, v)[0])


@BACKENDS
def test_long_contexts_are_split_and_joined(backend):
    lengths = [1500, 513, 512, 511, 1, 0]
    check(Call(lengths, capacity=1536, block_size=16, heads=(6, 2, 32)), backend)
    check(Call(lengths, capacity=1536, block_size=16, options=OPTIONS["left"]), backend)


def test_a_sequence_does_not_depend_on_its_batch_mates():
    """Bit for bit: splits depend on a sequence's own length alone."""
    pages = torch.randn(200, 16, 2, 32)
    table = torch.randperm(200)[:192].view(3, 64).int()
    lengths = torch.tensor([1000, 40, 700], dtype=torch.int32)
    q = torch.randn(3, 1, 4, 32)

    def run(rows):
        return flash_attn_with_kvcache(
            q[rows], pages, pages, cache_seqlens=lengths[rows], block_table=table[rows]
        )

    together = run([0, 1, 2])
    for i in range(3):
        assert torch.equal(run([i])[0], together[i])


@BACKENDS
@pytest.mark.parametrize(("seqlen_q", "capacity"), [(0, 4), (1, 0), (0, 0)])
def test_empty(backend, seqlen_q, capacity):
    q = torch.randn(2, seqlen_q, 2, 4)
    cache = torch.randn(2, capacity, 1, 4)
    with dispatch.only(backend):
        out, lse = flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, 2, seqlen_q), torch.inf))


def test_inputs_with_gradients_are_read_without_autograd():
    q = torch.randn(1, 1, 1, 4, requires_grad=True)
    cache = torch.zeros(1, 4, 1, 4, requires_grad=True)
    out = flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=0)
    assert not out.requires_grad
    assert torch.equal(cache[:, 0], q[:, 0])


# ---------------------------------------------------------------------------------------------
# What is refused, with nothing written
# ---------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("table", [None, torch.tensor([[0, 1], [2, 3]]).int()], ids=["row", "page"])
def test_overflow_raises_and_writes_nothing(backend, table):
    cache = torch.zeros(2, 16, 1, 4) if table is None else torch.zeros(4, 8, 1, 4)
    lengths = torch.tensor([3, 15], dtype=torch.int32)
    q, new = torch.randn(2, 1, 1, 4), torch.ones(2, 2, 1, 4)
    with dispatch.only(backend), pytest.raises(CacheOverflowError, match="16 tokens") as error:
        flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lengths, block_table=table)
    assert isinstance(error.value, RuntimeError)
    assert ("block_table" in str(error.value)) == (table is not None)
    assert torch.equal(cache, torch.zeros_like(cache))


@BACKENDS
@pytest.mark.parametrize("seqlen_new", [0, 1])
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_page_ids_in_use_are_checked(backend, bad, seqlen_new):
    pages = torch.zeros(4, 2, 1, 4)
    table = torch.tensor([[0, bad, 99], [3, 2, 99]], dtype=torch.int32)
    lengths = torch.tensor([3 - seqlen_new, 4 - seqlen_new], dtype=torch.int32)
    q = torch.randn(2, 1, 1, 4)
    new = (torch.ones(2, seqlen_new, 1, 4),) * 2 if seqlen_new else ()
    with dispatch.only(backend), pytest.raises(ArgumentError, match=f"block_table.*{bad}"):
        flash_attn_with_kvcache(q, pages, pages, *new, cache_seqlens=lengths, block_table=table)
    assert torch.equal(pages, torch.zeros_like(pages))


@BACKENDS
@pytest.mark.parametrize("table", [None, torch.zeros(1, 2, dtype=torch.int32)], ids=["row", "page"])
@pytest.mark.parametrize("length", [-1, 9])
def test_lengths_are_checked(backend, table, length):
    cache = torch.randn(1, 8, 1, 4) if table is None else torch.randn(2, 4, 1, 4)
    lengths = torch.tensor([length], dtype=torch.int32)
    q = torch.randn(1, 1, 1, 4)
    with dispatch.only(backend), pytest.raises(ArgumentError, match=r"cache_seqlens|block_table"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=table)
    with pytest.raises(ArgumentError, match="cache_seqlens"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length, block_table=table)


@BACKENDS
@pytest.mark.parametrize("row", [-1, 2])
@pytest.mark.parametrize("append", [False, True])
def test_rows_are_checked(backend, row, append):
    cache = torch.zeros(2, 4, 1, 4)
    q = torch.randn(1, 1, 1, 4)
    index = torch.tensor([row], dtype=torch.int32)
    new = (q, q) if append else ()
    with dispatch.only(backend), pytest.raises(ArgumentError, match="cache_batch_idx"):
        flash_attn_with_kvcache(q, cache, cache, *new, cache_seqlens=1, cache_batch_idx=index)


# ---------------------------------------------------------------------------------------------
# Random problems
# ---------------------------------------------------------------------------------------------


@st.composite
def calls(draw):
    group, num_kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    capacity = draw(st.integers(1, 70))
    seqlen_new = draw(st.integers(0, min(3, capacity)))
    lengths = draw(st.lists(st.integers(0, capacity - seqlen_new), min_size=1, max_size=4))
    paged = draw(st.booleans())
    leftpad = None
    if not paged and draw(st.booleans()):
        leftpad = [draw(st.integers(0, n)) for n in lengths]
    rotary = None
    if seqlen_new and draw(st.booleans()):
        rotary = (draw(st.sampled_from([2, 8])), draw(st.booleans()))
    window = st.integers(-1, 20)
    options = {
        "causal": draw(st.booleans()),
        "window_size": (draw(window), draw(window)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])),
        "num_splits": draw(st.sampled_from([0, 1, 2, 9])),
    }
    return Call(
        lengths,
        seqlen_q=draw(st.integers(1, 18)),
        seqlen_new=seqlen_new,
        capacity=capacity,
        heads=(group * num_kv_heads, num_kv_heads, draw(st.sampled_from([8, 12]))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        block_size=draw(st.integers(1, 20)) if paged else None,
        rotary=rotary,
        leftpad=leftpad,
        options=options,
    )


@BACKENDS
@settings(max_examples=100, deadline=None)
@given(call=calls(), seed=st.integers(0, 2**32))
def test_random_calls(backend, call, seed):
    torch.manual_seed(seed)
    check(call, backend)


# ---------------------------------------------------------------------------------------------
# Found by trying to break it
# ---------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 5, 8, 12, 15, 24])
@pytest.mark.parametrize("layout", ["padded", "heads_first"])
def test_head_strides_other_than_head_dim(backend, dtype, dim, layout):
    """The kernel's scratch rows are 16, 32 ... apart: no stride of the cache may be taken for it.

    What lies between the heads is NaN.
    """
    pages, block_size, heads = 7, 4, 2
    if layout == "padded":
        padded = -(-dim // 16) * 16
        pool = torch.full((2, pages, block_size, heads, padded), torch.nan).to(dtype)
        k_pages, v_pages = pool[..., :dim]
    else:
        width = max(16 // max(dim, 1), 1)
        pool = torch.full((2, pages, heads, max(block_size, width), dim), torch.nan).to(dtype)
        k_pages, v_pages = pool.permute(0, 1, 3, 2, 4)[:, :, :block_size]
    lengths = [9, 4, 0, 12]
    table = torch.randperm(pages)[:3].repeat(4, 1).int()
    tokens = table[0].tolist()
    for cache in (k_pages, v_pages):
        cache[tokens] = torch.randn(3, block_size, heads, dim).to(dtype)
    q = torch.randn(4, 2, 6, dim).to(dtype)
    with dispatch.only(backend):
        out = flash_attn_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=torch.tensor(lengths).int(), block_table=table,
            causal=True,
        )  # fmt: skip
    for i, n in enumerate(lengths):
        k, v = (sequence_of_pages(x, table[i], n)[None] for x in (k_pages, v_pages))
        exact = dense(q[i : i + 1].double(), k.double(), v.double(), causal=True)[0]
        low = dense(q[i : i + 1], k, v, causal=True)[0]
        assert_as_good(out[i : i + 1], exact, low)


@BACKENDS
def test_keys_of_no_weight_add_nothing(backend):
    """exp(-2000) is 0 in float32, also times the largest number."""
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1
    k = torch.zeros(1, 2, 1, 16)
    k[0, :, 0, 0] = torch.tensor([1000.0, -1000.0])
    v = torch.ones(1, 2, 1, 16)
    v[0, 1] = 3e38
    with dispatch.only(backend):
        out = flash_attn_with_kvcache(q, k, v, softmax_scale=1.0)
    assert torch.equal(out, torch.ones_like(out))


def test_a_written_cache_must_not_be_expanded():
    cache = torch.zeros(1, 8, 1, 4).expand(2, -1, -1, -1)
    q = torch.randn(2, 1, 1, 4)
    with pytest.raises(ArgumentError, match="k_cache is written in place and must not be expanded"):
        flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=0)
    flash_attn_with_kvcache(q, cache, cache)  # reading is fine


@BACKENDS
def test_a_call_that_raises_writes_nothing(backend):
    q, new, cache = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.zeros(2, 4, 2, 8)
    lengths, pad = (torch.tensor(x, dtype=torch.int32) for x in ([1, 1], [-1, 0]))
    with dispatch.only(backend), pytest.raises(ArgumentError, match="cache_leftpad must not be"):
        flash_attn_with_kvcache(
            q, cache, cache.clone(), new, new, cache_seqlens=lengths, cache_leftpad=pad
        )
    assert not cache.any()
