"""Writing tokens to slots: both ways against a loop; what is refused before memory is touched."""

from __future__ import annotations

import sys

import pytest
import torch

from flashpage.attention.cpu import numba_runtime
from flashpage.cache.kv_cache import KVCache, store_kvcache
from flashpage.errors import ArgumentError


@pytest.fixture(params=["numba", "torch"])
def _way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setitem(sys.modules, "numba", None)  # makes `import numba` fail
        numba_runtime.why_unavailable.cache_clear()
    yield
    numba_runtime.why_unavailable.cache_clear()


def pools(dtype, layout):
    """k and v pages `[6, 4, 2, 8]`, in one pool of which the rest must not be touched."""
    if layout == "contiguous":
        pool = torch.zeros(2, 6, 4, 2, 8, dtype=dtype)
        return pool, pool[0], pool[1]
    if layout == "padded":
        pool = torch.zeros(2, 6, 5, 3, 11, dtype=dtype)
        return pool, *(pool[i, :, 1:, :2, 2:10] for i in range(2))
    pool = torch.zeros(2, 6, 2, 4, 8, dtype=dtype)
    return pool, *(pool[i].transpose(1, 2) for i in range(2))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "padded", "heads_first"])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_each_token_goes_to_its_slot_and_nowhere_else(dtype, layout, slot_dtype):
    pool, k_cache, v_cache = pools(dtype, layout)
    qkv = torch.randint(1, 100, (9, 3, 2, 8)).to(dtype)
    _, k, v = qkv.unbind(1)  # strided, as from a fused projection
    slots = torch.randperm(24)[:9].to(slot_dtype)
    slots[[2, 7]] = -1
    expected, k_expected, v_expected = pools(dtype, layout)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_expected[slot // 4, slot % 4] = k[t]
            v_expected[slot // 4, slot % 4] = v[t]
    store_kvcache(k, v, k_cache, v_cache, slots)
    assert torch.equal(pool, expected)
    assert pool.count_nonzero() == 2 * 7 * 16


@pytest.mark.usefixtures("_way")
def test_nothing_to_store():
    _, k_cache, v_cache = pools(torch.float32, "contiguous")
    empty = torch.empty(0, 2, 8)
    store_kvcache(empty, empty, k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    one = torch.ones(1, 2, 8)
    store_kvcache(one, one, k_cache, v_cache, torch.tensor([-1]))
    assert not k_cache.any()
    assert not v_cache.any()


K = torch.ones(3, 2, 8)
CACHE = torch.zeros(6, 4, 2, 8)
SLOTS = torch.tensor([0, 1, 2])


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([0, 1, 24])}, "slot_mapping must be between -1 and 23.*24"),
        ({"slot_mapping": torch.tensor([0, 1, -2])}, "slot_mapping must be between -1 and 23.*-2"),
        ({"slot_mapping": torch.tensor([0, 1])}, r"slot_mapping must be .*\(3,\).*\(2,\)"),
        ({"slot_mapping": torch.ones(3)}, "slot_mapping must be int32 or int64.*float32"),
        ({"k": torch.ones(3, 2, 4)}, r"k and v must both have shape.*\(3, 2, 4\)"),
        ({"k": torch.ones(6, 8), "v": torch.ones(6, 8)}, "k and v must both have shape"),
        ({"k": K.half(), "v": K.half()}, "same dtype.*float16"),
        ({"v": K.half()}, "same dtype.*float16"),
        ({"v_cache": torch.zeros(1, 4, 2, 8)}, r"same shape.*\(6, 4, 2, 8\) and \(1, 4, 2, 8\)"),
        ({"v_cache": torch.zeros(3, 8, 2, 8)}, "same shape"),
        ({"v_cache": torch.zeros(6, 4, 1, 8)}, r"v_cache must have shape.*\(6, 4, 1, 8\)"),
        ({"k_cache": torch.zeros(6, 4, 1, 8).expand(-1, -1, 2, -1)}, "must not be expanded"),
        ({"v_cache": torch.zeros(6, 4, 2, 8, device="meta")}, "on one device.*meta"),
    ],
    ids=range(13),
)
def test_refused_with_nothing_written(changes, message):
    arguments = {
        "k": K,
        "v": K,
        "k_cache": CACHE.clone(),
        "v_cache": CACHE.clone(),
        "slot_mapping": SLOTS,
        **changes,
    }
    with pytest.raises(ArgumentError, match=message):
        store_kvcache(**arguments)
    for name in ("k_cache", "v_cache"):
        assert arguments[name].is_meta or not arguments[name].any()


def test_the_operator_itself_guards_memory():
    small = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ArgumentError, match="v_cache must have the shape of k_cache"):
        torch.ops.flashpage.store_kv(K, K, CACHE.clone(), small, torch.tensor([20, 21, 22]))


def test_kv_cache():
    cache = KVCache(3, 5, 4, 2, 8, torch.bfloat16)
    assert len(cache.k) == len(cache.v) == 3
    assert cache.k[0].shape == (5, 4, 2, 8)
    size = sum(x.numel() * x.element_size() for x in (*cache.k, *cache.v))
    assert size == 5 * KVCache.bytes_per_block(3, 4, 2, 8, torch.bfloat16)
    cache.fill_(torch.nan)
    assert all(torch.isnan(x).all() for x in (*cache.k, *cache.v))
    for bad in ({"num_blocks": 0}, {"block_size": 0}):
        sizes = {"num_layers": 1, "num_blocks": 1, "block_size": 1, **bad}
        with pytest.raises(ArgumentError, match=f"{next(iter(bad))} must be at least 1, got 0"):
            KVCache(**sizes, num_kv_heads=1, head_dim=1, dtype=torch.float32)
