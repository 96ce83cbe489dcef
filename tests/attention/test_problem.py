"""What is refused, and how: errors name the argument, its value and the rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashpage import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flashpage.errors import ArgumentError, FlashpageError


def dense(**changes):
    shapes = {"q": (2, 4, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 8)}
    arguments = {name: torch.randn(shape) for name, shape in shapes.items()}
    return flash_attn_func(**{**arguments, **changes})


def cu(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def varlen(**changes):
    arguments = {
        "q": torch.randn(6, 4, 8),
        "k": torch.randn(7, 2, 8),
        "v": torch.randn(7, 2, 8),
        "cu_seqlens_q": cu(0, 2, 6),
        "cu_seqlens_k": cu(0, 3, 7),
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    return flash_attn_varlen_func(**{**arguments, **changes})


def kvcache(**changes):
    arguments = {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.zeros(2, 8, 2, 16),
        "v_cache": torch.zeros(2, 8, 2, 16),
        "cache_seqlens": cu(3, 4),
    }
    return flash_attn_with_kvcache(**{**arguments, **changes})


def new(seqlen=1, **changes):
    k, v = torch.ones(2, seqlen, 2, 16), torch.ones(2, seqlen, 2, 16)
    return {"k": k, "v": v, **changes}


def rotary(rows=8, columns=8, dtype=torch.float32):
    return {
        "rotary_cos": torch.ones(rows, columns, dtype=dtype),
        "rotary_sin": torch.zeros(rows, columns, dtype=dtype),
    }


PAGES = {"k_cache": torch.zeros(4, 4, 2, 16), "v_cache": torch.zeros(4, 4, 2, 16)}
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)

CASES = [
    # dtype, device
    (dense, {"q": torch.ones(2, 4, 4, 8, dtype=torch.int32)}, "only support fp16 and bf16.*int32"),
    (dense, {"k": torch.ones(2, 6, 2, 8).half()}, "query and key must have the same dtype.*16"),
    (dense, {"v": torch.ones(2, 6, 2, 8).half()}, "query and value must have the same dtype"),
    (dense, {"k": torch.ones(2, 6, 2, 8, device="meta")}, "k must be on the device of q.*meta"),
    # shapes
    (dense, {"q": torch.ones(4, 4, 8)}, r"q must have shape .*got \(4, 4, 8\)"),
    (dense, {"k": torch.ones(3, 6, 2, 8)}, r"k must have shape .*got \(3, 6, 2, 8\)"),
    (dense, {"v": torch.ones(2, 5, 2, 8)}, r"v must have shape .*got \(2, 5, 2, 8\)"),
    (dense, {"v": torch.ones(2, 6, 2, 16)}, r"v must have shape .*got \(2, 6, 2, 16\)"),
    (dense, {"k": torch.ones(2, 6, 3, 8)}, "heads in key/value must divide.*3.*4"),
    (dense, {"k": torch.ones(2, 6, 0, 8)}, "heads in key/value must divide.*0"),
    (dense, {n: torch.ones(2, 4, 1, 257) for n in "qkv"}, "head dimension at most 256.*257"),
    (dense, {n: torch.ones(2, 4, 1, 0) for n in "qkv"}, "head dimension.*got 0"),
    (dense, {n: torch.ones(0, 4, 1, 8) for n in "qkv"}, "batch size must be positive.*0"),
    # scalars
    (dense, {"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\).*1.0"),
    (dense, {"dropout_p": -0.1}, "dropout_p.*-0.1"),
    (dense, {"dropout_p": float("nan")}, "dropout_p.*nan"),
    (dense, {"softcap": -1.0}, "softcap.*-1.0"),
    (dense, {"softcap": float("inf")}, "softcap.*inf"),
    (dense, {"softcap": 1.0, "dropout_p": 0.1}, "Softcapping does not support dropout for now"),
    (dense, {"softmax_scale": float("nan")}, "softmax_scale.*nan"),
    (dense, {"window_size": (1, 2, 3)}, "window_size must be a pair"),
    (dense, {"softcap": 1e-46}, "softcap.*1e-46"),
    (dense, {"softcap": 1e39}, "softcap.*1e\\+39"),
    (dense, {"softcap": "1"}, "softcap must be a finite number, got '1'"),
    (dense, {"softmax_scale": 1e39}, "softmax_scale.*1e\\+39"),
    (dense, {"softmax_scale": "x"}, "softmax_scale must be a finite number, got 'x'"),
    (dense, {"dropout_p": "0"}, "dropout_p must be a finite number, got '0'"),
    (dense, {"dropout_p": None}, "dropout_p must be a finite number, got None"),
    (dense, {"window_size": None}, "window_size must be a pair.*None"),
    (dense, {"window_size": 3}, "window_size must be a pair.*3"),
    (dense, {"window_size": "ab"}, "window_size must be a pair.*'ab'"),
    (dense, {"window_size": (None, None)}, "window_size must be an integer, got None"),
    (dense, {"window_size": (1.7, 0)}, "window_size must be an integer, got 1.7"),
    (dense, {"window_size": torch.tensor([1.5, 0])}, "window_size must be an integer"),
    (dense, {"causal": "no"}, "causal must be True or False, got 'no'"),
    (dense, {"causal": 2}, "causal must be True or False, got 2"),
    # alibi
    (dense, {"alibi_slopes": torch.ones(4).half()}, "ALiBi slopes must have dtype fp32.*16"),
    (dense, {"alibi_slopes": torch.ones(2)}, r"alibi_slopes must have shape.*\(2,\)"),
    (dense, {"alibi_slopes": torch.ones(3, 4)}, r"alibi_slopes must have shape.*\(3, 4\)"),
    (dense, {"alibi_slopes": torch.ones(4, 2).T}, "ALiBi slopes.*contiguous last dimension"),
    # varlen
    (
        varlen,
        {"cu_seqlens_q": cu(0, 2, 6, dtype=torch.int64)},
        "cu_seqlens_q must have dtype int32",
    ),
    (
        varlen,
        {"cu_seqlens_k": cu(0, 2, 6, dtype=torch.int64)},
        "cu_seqlens_k must have dtype int32",
    ),
    (varlen, {"cu_seqlens_q": cu(0, 9, 2, 9, 6)[::2]}, "cu_seqlens_q must be contiguous"),
    (varlen, {"cu_seqlens_k": cu(0, 3, 5, 7)}, r"cu_seqlens_k must have shape.*\(3,\).*\(4,\)"),
    (varlen, {"cu_seqlens_q": cu(0)}, "batch size must be positive"),
    (varlen, {"cu_seqlens_q": cu(1, 2, 6)}, "cu_seqlens_q must begin with 0, got 1"),
    (varlen, {"cu_seqlens_q": cu(0, 5, 4)}, "cu_seqlens_q must be nondecreasing, got 5 then 4"),
    (varlen, {"cu_seqlens_k": cu(0, 3, 8)}, r"cu_seqlens_k must end at or before.*\(7\), got 8"),
    (varlen, {"k": torch.randn(7, 2, 16)}, "k must have shape"),
    (varlen, {"q": torch.randn(1, 6, 4, 8)}, "q must have shape"),
    (varlen, {"max_seqlen_q": -1}, "max_seqlen_q must be at least 0 and at most.*got -1"),
    (varlen, {"block_table": TABLE}, "k must have shape.*num_blocks"),
    (
        varlen,
        {"k": torch.ones(4, 4, 2, 8), "v": torch.ones(4, 4, 2, 8), "block_table": TABLE.long()},
        "block_table must have dtype torch.int32.*int64",
    ),
    (
        varlen,
        {"k": torch.ones(4, 4, 2, 8), "v": torch.ones(4, 4, 2, 8), "block_table": TABLE[:1]},
        r"block_table must have shape.*batch = 2.*\(1, 2\)",
    ),
    (
        varlen,
        {"k": torch.ones(4, 4, 2, 8), "v": torch.ones(4, 4, 2, 8), "block_table": TABLE + 2},
        "block_table must hold page ids from 0 to 3.*got 4",
    ),
    (
        varlen,
        {"k": torch.ones(4, 1, 2, 8), "v": torch.ones(4, 1, 2, 8), "block_table": TABLE},
        "block_table holds 2 pages of 1 tokens.*sequence of 4",
    ),
    (
        varlen,
        {"k": torch.ones(4, 0, 2, 8), "v": torch.ones(4, 0, 2, 8), "block_table": TABLE},
        "at least one page of at least one token",
    ),
    # cache
    (kvcache, {"k_cache": torch.zeros(2, 8, 16, 2).mT}, "k_cache must have contiguous last"),
    (kvcache, {"v_cache": torch.zeros(2, 8, 16, 2).mT}, "v_cache must have contiguous last"),
    (kvcache, {"k_cache": torch.zeros(3, 8, 2, 16)}, r"k_cache must have shape.*\(3, 8, 2, 16\)"),
    (kvcache, {"v_cache": torch.zeros(2, 9, 2, 16)}, "v_cache must have shape"),
    (kvcache, {"k_cache": torch.zeros(2, 8, 2, 16).half()}, "same dtype"),
    (kvcache, {"cache_seqlens": cu(3, 4, dtype=torch.int64)}, "seqlens_k must have dtype int32"),
    (kvcache, {"cache_seqlens": cu(3, 4, 5)}, r"cache_seqlens must have shape.*\(3,\)"),
    (kvcache, {"cache_seqlens": cu(3, 9)}, "cache_seqlens must be at most.*8.*9"),
    (kvcache, {"cache_seqlens": 9}, "cache_seqlens must be between 0 and.*8.*9"),
    (kvcache, {"cache_batch_idx": cu(0, 1, dtype=torch.int64)}, "cache_batch_idx must have dtype"),
    (kvcache, {"cache_leftpad": cu(0)}, "cache_leftpad must have shape"),
    (kvcache, {"cache_leftpad": cu(0, -1)}, "cache_leftpad must not be negative, got -1"),
    (kvcache, {"num_splits": 129}, "num_splits must be between 0.*128.*129"),
    (kvcache, {"num_splits": -1}, "num_splits must be between 0.*-1"),
    (kvcache, {"num_splits": 1.5}, "num_splits must be an integer, got 1.5"),
    (kvcache, {"num_splits": None}, "num_splits must be an integer, got None"),
    (kvcache, {"cache_seqlens": [1, 2]}, r"cache_seqlens must be an integer or an int32 tensor"),
    (kvcache, {"cache_seqlens": 2.7}, "cache_seqlens must be an integer, got 2.7"),
    (kvcache, {"cache_seqlens": "3"}, "cache_seqlens must be an integer, got '3'"),
    (kvcache, {"softcap": -2.0}, "softcap.*-2.0"),
    (kvcache, {**PAGES, "block_table": TABLE, "cache_batch_idx": cu(0, 1)}, "cache_batch_idx"),
    (kvcache, {**PAGES, "block_table": TABLE, "cache_leftpad": cu(0, 1)}, "leftpad_k"),
    (kvcache, {**PAGES, "block_table": TABLE.T}, "block_table must have contiguous last"),
    # append
    (kvcache, {"k": torch.ones(2, 1, 2, 16)}, "If key is supplied, value must also"),
    (kvcache, {"v": torch.ones(2, 1, 2, 16)}, "If value is supplied, key must also"),
    (kvcache, new(cache_seqlens=None), "If key is supplied, seqlens_k must also"),
    (kvcache, new(9), "must have seqlen <= the seqlen of the KV cache: got 9.*8"),
    (kvcache, new(k=torch.ones(2, 1, 1, 16)), "k must have shape"),
    (kvcache, new(v=torch.ones(2, 2, 2, 16)), "v must have shape"),
    (kvcache, new(k=torch.ones(2, 1, 2, 16).half()), "same dtype"),
    (kvcache, rotary(), "If rotary cos/sin are provided, new key / value"),
    (kvcache, new(rotary_cos=torch.ones(8, 8)), "rotary_cos and rotary_sin must be given together"),
    (kvcache, new(**rotary(7)), "cos/sin seqlen must be at least the seqlen of KV cache.*7.*8"),
    (kvcache, new(**rotary(8, 9)), "rotary_dim must be <= headdim.*18.*16"),
    (kvcache, new(**rotary(dtype=torch.float64)), "same dtype"),
    (
        kvcache,
        new(rotary_cos=torch.ones(8, 8), rotary_sin=torch.ones(8, 4)),
        "rotary_sin must have shape",
    ),
    (
        kvcache,
        new(rotary_cos=torch.ones(8, 8).T, rotary_sin=torch.ones(8, 8)),
        "rotary_cos must be contiguous",
    ),
]


@pytest.mark.parametrize(("function", "changes", "message"), CASES, ids=range(len(CASES)))
def test_refused(function, changes, message):
    function()  # the unchanged call is fine
    with pytest.raises(ArgumentError, match=message) as error:
        function(**changes)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, RuntimeError)
    assert isinstance(error.value, FlashpageError)


def test_packed_shapes_are_refused():
    with pytest.raises(ArgumentError, match=r"qkv must have shape \(batch, seqlen, 3"):
        flash_attn_qkvpacked_func(torch.ones(1, 4, 2, 2, 8))
    with pytest.raises(ArgumentError, match="qkv must have shape"):
        flash_attn_qkvpacked_func(torch.ones(4, 3, 2, 8))
    with pytest.raises(ArgumentError, match=r"kv must have shape \(batch, seqlen, 2"):
        flash_attn_kvpacked_func(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 3, 2, 8))


def test_numbers_of_other_kinds_are_fine():
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    expected = flash_attn_func(q, k, v, window_size=(2, 1), softmax_scale=0.5)
    sides = (np.int64(2), torch.tensor(1))
    out = flash_attn_func(q, k, v, window_size=sides, softmax_scale=np.float32(0.5), causal=0)
    assert torch.equal(out, expected)
    causal = flash_attn_func(q, k, v, causal=True)
    for switch in (1, np.True_, torch.tensor(True)):
        assert torch.equal(flash_attn_func(q, k, v, causal=switch), causal)
    unbounded = flash_attn_func(q, k, v, window_size=(2**70, -(2**70)))
    assert torch.equal(unbounded, flash_attn_func(q, k, v))
    cache = torch.randn(1, 8, 2, 8)
    out = flash_attn_with_kvcache(q[:, :1], cache, cache, cache_seqlens=np.int32(3))
    assert torch.equal(out, flash_attn_with_kvcache(q[:, :1], cache, cache, cache_seqlens=3))
