"""Triton's writes into a KV cache: the right slots, bit for bit, and no others."""

from __future__ import annotations

import pytest
import torch

from flashpage.attention.triton.cache import append_kv, store_kv
from flashpage.errors import ArgumentError
from kernels import DEVICE, DTYPES
from oracles import rotate_slowly


def ints(values):
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.double().nan_to_num(nan=7e7), b.double().nan_to_num(nan=7e7))


class Append:
    """One call, and the caches that it should leave."""

    def __init__(
        self,
        lengths,
        *,
        seqlen_new=1,
        seqlen_q=1,
        capacity=12,
        heads=(4, 2, 16),
        dtype=torch.float32,
        block_size=None,
        rotary=None,
        batch_idx=None,
        by_row=True,
    ):
        h, hk, d = heads
        batch = len(lengths)
        self.lengths, self.rotary, self.by_row, self.dtype = lengths, rotary, by_row, dtype
        self.q = randn(batch, seqlen_q, h, d, dtype=dtype)
        self.k, self.v = (randn(batch, seqlen_new, hk, d, dtype=dtype) for _ in range(2))
        self.batch_idx = batch_idx
        self.table = None
        if block_size is None:
            shape = (max(batch_idx or [batch - 1]) + 1, capacity, hk, d)
        else:
            per_sequence = -(-capacity // block_size)
            shape = (per_sequence * batch + 2, block_size, hk, d)
            capacity = per_sequence * block_size
            self.table = torch.randperm(shape[0])[: per_sequence * batch].view(batch, -1).int()
        self.capacity = capacity
        self.k_cache, self.v_cache = (randn(*shape, dtype=dtype) for _ in range(2))
        self.cos = self.sin = None
        if rotary:
            angle = torch.rand(capacity, rotary[0] // 2, device=DEVICE) * 6
            self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def place(self, i, position):
        """Where a token goes, None if nowhere."""
        if self.lengths[i] < 0 or not 0 <= position < self.capacity:
            return None
        if self.table is None:
            row = self.batch_idx[i] if self.batch_idx else i
            return (row, position) if 0 <= row < len(self.k_cache) else None
        block_size = self.k_cache.shape[1]
        page = int(self.table[i, position // block_size])
        return (page, position % block_size) if 0 <= page < len(self.k_cache) else None

    def rotated(self, x, position):
        if not self.rotary:
            return x
        position = min(max(position, 0), len(self.cos) - 1)
        compute = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self.cos[position].to(compute), self.sin[position].to(compute)
        return rotate_slowly(x.to(compute), cos, sin, self.rotary[1]).to(x.dtype)

    def check(self):
        k_expected, v_expected = self.k_cache.clone(), self.v_cache.clone()
        for i, n in enumerate(self.lengths):
            for t in range(self.k.shape[1]):
                if (place := self.place(i, n + t)) is not None:
                    k_expected[place] = self.rotated(self.k[i, t], n + t)
                    v_expected[place] = self.v[i, t]
        q_before, seqlens = self.q.clone(), ints(self.lengths)
        q_rotated = append_kv(
            self.q,
            self.k,
            self.v,
            self.k_cache,
            self.v_cache,
            seqlens,
            self.cos,
            self.sin,
            None if self.table is None else self.table.to(DEVICE),
            ints(self.batch_idx),
            None,
            bool(self.rotary and self.rotary[1]),
            self.by_row,
        )
        assert same(self.v_cache, v_expected)
        if self.rotary:
            tolerance = 1e-6 if self.dtype == torch.float32 else 1e-3
            torch.testing.assert_close(
                self.k_cache, k_expected, rtol=tolerance, atol=tolerance, equal_nan=True
            )
            rest = slice(self.rotary[0], None)
            assert same(self.k_cache[..., rest], k_expected[..., rest])
            assert q_rotated.is_contiguous()
            expected = self.q.clone()
            for i, n in enumerate(self.lengths):
                for t in range(self.q.shape[1]):
                    expected[i, t] = self.rotated(self.q[i, t], n + (t if self.by_row else 0))
            torch.testing.assert_close(q_rotated, expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(q_rotated[..., rest], expected[..., rest])
        else:
            assert same(self.k_cache, k_expected)
            assert q_rotated.shape == (0,)
            assert q_rotated.dtype == self.dtype
        assert torch.equal(self.q, q_before)
        assert seqlens.tolist() == self.lengths


ROTARY = [None, (16, True), (16, False), (8, True), (6, False), (2, True)]


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("block_size", [None, 1, 5])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_append(rotary, block_size, dtype):
    Append([5, 0, 9], seqlen_new=3, rotary=rotary, block_size=block_size, dtype=dtype).check()


@pytest.mark.parametrize("rotary", [(16, True), (10, False)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(4, 1), (1, 4), (0, 2), (2, 0)])
@pytest.mark.parametrize("by_row", [True, False])
def test_lengths_of_q_and_of_the_new_tokens_differ(rotary, seqlen_q, seqlen_new, by_row):
    call = Append([5, 1], seqlen_q=seqlen_q, seqlen_new=seqlen_new, rotary=rotary, by_row=by_row)
    call.check()


@pytest.mark.parametrize(
    ("heads", "rotary"),
    [
        ((1, 1, 1), None),
        ((71, 1, 8), (8, True)),
        ((9, 3, 59), (58, False)),
        ((6, 6, 256), (64, True)),
        ((10, 5, 80), (80, False)),
        ((4, 2, 16), (0, True)),
    ],
)
def test_heads(heads, rotary):
    Append([5, 1], seqlen_new=2, heads=heads, rotary=rotary, block_size=4).check()


def test_cache_batch_idx():
    Append([5, 0, 9], batch_idx=[4, 0, 2], rotary=(16, True)).check()
    Append([5, 0, 9], batch_idx=[4, -1, 2]).check()
    call = Append([5, 0, 9], batch_idx=[4, 0, 2])
    call.batch_idx = [4, 5, -(2**31)]
    call.check()


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("rotary", [None, (16, False)])
def test_what_does_not_fit_is_dropped(block_size, rotary):
    """Lengths negative, at the end, beyond it and far beyond it."""
    lengths = [-1, -(2**31), 10, 12, 2**31 - 2, 0]
    Append(lengths, seqlen_new=4, seqlen_q=3, block_size=block_size, rotary=rotary).check()


def test_garbage_page_ids_are_skipped():
    call = Append([3, 3, 3], seqlen_new=3, block_size=4)
    call.table[0] = -1
    call.table[1] = 2**31 - 1
    call.table[2, 1] = len(call.k_cache)
    call.check()


def test_only_the_pages_that_are_written_are_looked_up():
    call = Append([4, 0], seqlen_new=3, block_size=4)
    call.table[0, 0] = call.table[0, 2] = -(2**31)
    call.check()


@pytest.mark.parametrize("rotary", [None, (12, True), (8, False)])
def test_strides(rotary):
    call = Append([5, 1], seqlen_new=2, seqlen_q=2, heads=(6, 2, 12), rotary=rotary)
    qkv = randn(2, 2, 10, 14)
    call.q, call.k, call.v = qkv[..., :6, :12], qkv[..., 6:8, 1:13], qkv[..., 8:, 2:]
    pool = torch.full((2, 2, 4, 15, 13), torch.nan, device=DEVICE)
    call.k_cache = pool[1, :, 1:3, 2:14, 1:].transpose(1, 2)
    call.v_cache = torch.full((2, 12, 5, 20), torch.nan, device=DEVICE)[:, :, 1:4:2, 3:15]
    call.check()
    assert torch.isnan(pool).sum() == pool.numel() - 2 * 2 * 2 * 12
    # A last dimension that is not contiguous.
    call.k = randn(2, 2, 12, 2).transpose(2, 3)
    call.v = randn(2, 2, 2, 24)[..., ::2]
    call.check()


def test_nothing_to_append():
    call = Append([5, 1], seqlen_new=0, seqlen_q=2)
    call.check()


# ---------------------------------------------------------------------------------------------
# store_kv
# ---------------------------------------------------------------------------------------------

BITS = [torch.int8, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32]
BITS += [torch.float64, torch.int64, torch.float8_e4m3fn]


def tokens_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return (torch.randn(*shape) * 3).to(dtype).to(DEVICE)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype).to(DEVICE)


def check_store(k, v, k_cache, v_cache, slots):
    expected = [k_cache.clone(), v_cache.clone()]
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    for cache, new in zip(expected, (k, v), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < num_slots:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = new[token]
    store_kv(k, v, k_cache, v_cache, slots)
    assert same(k_cache, expected[0])
    assert same(v_cache, expected[1])


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_store(dtype, slot_dtype):
    k, v = (tokens_of(dtype, 7, 3, 20) for _ in range(2))
    k_cache, v_cache = (tokens_of(dtype, 4, 5, 3, 20) for _ in range(2))
    slots = torch.tensor([19, -1, 0, 7, 20, 8, -5], dtype=slot_dtype, device=DEVICE)
    check_store(k, v, k_cache, v_cache, slots)


def test_slots_far_beyond_the_pool():
    k = randn(4, 1, 4)
    cache = randn(2, 2, 1, 4)
    slots = torch.tensor([2**62, -(2**62), 2**31, 3], device=DEVICE)
    check_store(k, k, cache, cache.clone(), slots)


@pytest.mark.parametrize("heads", [(1, 1), (71, 8), (2, 256), (128, 128)])
def test_store_heads(heads):
    k, v = (randn(3, *heads) for _ in range(2))
    k_cache, v_cache = (randn(2, 3, *heads) for _ in range(2))
    check_store(k, v, k_cache, v_cache, torch.tensor([4, 0, 5], device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_store_strides(dtype):
    """Every dimension of every tensor, the last included; slots too."""
    k = tokens_of(dtype, 12, 5, 16).permute(2, 1, 0)[::2, 1:4, :8]
    v = tokens_of(dtype, 8, 3, 16)[..., ::2]
    pool = tokens_of(dtype, 8, 3, 6, 8)
    k_cache = pool.permute(2, 0, 1, 3)[::2]
    v_cache = tokens_of(dtype, 3, 8, 8, 3).transpose(2, 3)
    slots = torch.arange(16, device=DEVICE)[::2].flip(0)
    untouched = pool.permute(2, 0, 1, 3)[1::2].clone()
    check_store(k, v, k_cache, v_cache, slots)
    assert same(pool.permute(2, 0, 1, 3)[1::2], untouched)


def test_store_nothing():
    cache = randn(2, 3, 1, 4)
    check_store(
        cache[0, :0], cache[0, :0], cache, cache.clone(), torch.zeros(0, device=DEVICE).int()
    )


def test_caches_of_different_shapes_are_refused():
    k = randn(1, 1, 4)
    slots = torch.tensor([5], device=DEVICE)
    with pytest.raises(ArgumentError, match="v_cache must have the shape of k_cache"):
        store_kv(k, k, randn(2, 3, 1, 4), randn(1, 3, 1, 4), slots)


@pytest.mark.gpu
def test_store_offsets_beyond_32_bits():
    cache = torch.zeros(2**31 // 4096 + 3, 16, 1, 256, device=DEVICE, dtype=torch.int8)
    k = torch.randint(1, 100, (2, 1, 256), device=DEVICE, dtype=torch.int8)
    last = cache.shape[0] * 16 - 1
    store_kv(k, k, cache, cache, torch.tensor([last, 0], device=DEVICE))
    assert torch.equal(cache[-1, -1], k[0])
    assert torch.equal(cache[0, 0], k[1])
    assert int((cache != 0).sum()) == 512


def test_empty_rotary_tables_are_refused():
    """One row is read for each query, new keys or not."""
    cache, table = torch.zeros(2, 0, 2, 8, device=DEVICE), torch.zeros(0, 4, device=DEVICE)
    q, new = torch.ones(2, 1, 4, 8, device=DEVICE), torch.zeros(2, 0, 2, 8, device=DEVICE)
    seqlens = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ArgumentError, match="rotary_cos must have a row"):
        append_kv(
            q, new, new, cache, cache.clone(), seqlens, table, table, None, None, None, True, False
        )
