"""The Triton kernels of the layers against their twins in torch: on a GPU, or interpreted."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from flashpage.cache.kv_cache import KVCache
from flashpage.layers import fused, sampler, triton_kernels, triton_sampler
from kernels import DEVICE, ON_GPU

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The interpreter cuts bfloat16 where it should round.
    [(torch.float32, 3e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)][: 3 if ON_GPU else 2],
    ids=str,
)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * 2).to(dtype)


def close(actual, expected, tolerance) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (5, 1), (3, 2, 22), (4, 1030), (0, 16)])
def test_add_rms_norm(shape, dtype, tolerance):
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1])
    weight = weight.to(dtype)
    out, total = triton_kernels.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = fused.add_rms_norm_torch(x, residual, weight, 1e-6)
    assert out.dtype == total.dtype == dtype
    assert torch.equal(total, expected_total)
    close(out, expected, tolerance)
    alone, same = triton_kernels.add_rms_norm(x, None, weight, 1e-6)
    assert same is x
    close(alone, fused.rms_norm_torch(x, weight, 1e-6), tolerance)


def test_norm_rows_are_their_own():
    x = randn(9, 70)
    x[3] = torch.nan
    wide = randn(9, 100)
    wide[:, 10:80] = x
    weight = randn(70)
    out, _ = triton_kernels.add_rms_norm(wide[:, 10:80], None, weight, 1e-6)
    for i in range(9):
        alone, _ = triton_kernels.add_rms_norm(x[i : i + 1], None, weight, 1e-6)
        assert torch.equal(out[i : i + 1], alone) or i == 3
    assert out[3].isnan().all()
    assert not out[[0, 1, 2, 4, 8]].isnan().any()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (3, 2, 22), (4, 1030), (0, 16), (7, 2)])
def test_silu_and_mul(shape, dtype, tolerance):
    wide = randn(*shape[:-1], shape[-1] + 6, dtype=dtype)
    x = wide[..., 3 : 3 + shape[-1]]
    out = triton_kernels.silu_and_mul(x)
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    gate, up = x.double().chunk(2, dim=-1)
    close(out, gate * torch.sigmoid(gate) * up, tolerance)


def test_silu_of_extreme_gates():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE)
    out = triton_kernels.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert out.tolist() == [[0.0, pytest.approx(0.0, abs=1e-30), 0.0, 100.0, 1e4]]


@DTYPES
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_q_heads", "num_kv_heads", "head_dim"),
    [(1, 4, 2, 16), (5, 3, 1, 22), (7, 9, 3, 64), (0, 2, 1, 8), (2, 1, 1, 2), (3, 16, 8, 128)],
)
def test_rotate_and_store(num_tokens, num_q_heads, num_kv_heads, head_dim, norm, dtype, tolerance):
    num_heads = num_q_heads + 2 * num_kv_heads
    wide = randn(num_tokens, num_heads * head_dim + 5, dtype=dtype)
    qkv = wide[:, 2 : 2 + num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    angles = randn(num_tokens, 1, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    cos = torch.cat((cos, cos), dim=-1).to(dtype)
    sin = torch.cat((-sin, sin), dim=-1).to(dtype)
    weights = [randn(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    caches = []
    for _ in range(2):
        cache = KVCache(1, 9, 4, num_kv_heads, head_dim, dtype, DEVICE)
        cache.fill_(torch.nan)
        # Strides that are not the shape's.
        caches.append([cache.k[0].transpose(1, 2).contiguous().transpose(1, 2), cache.v[0]])
    slots = torch.randperm(36, device=DEVICE)[:num_tokens]
    if num_tokens > 2:
        slots[1] = -1
    arguments = (num_q_heads, num_kv_heads, *weights, 1e-6, cos, sin)
    before = wide.clone()
    expected = _twin(qkv.clone(), *arguments, *caches[0], slots)
    got = triton_kernels.rotate_and_store(qkv, *arguments, *caches[1], slots)
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        close(x, y, tolerance)
    assert torch.equal(got[2], expected[2])
    for x, y in zip(caches[1], caches[0], strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        close(x.nan_to_num(), y.nan_to_num(), tolerance)
    # Beside the heads nothing has changed.
    assert torch.equal(wide[:, :2], before[:, :2])
    assert torch.equal(wide[:, -3:], before[:, -3:])
    if num_tokens:
        assert got[0].data_ptr() == qkv.data_ptr()


def _twin(
    qkv, num_q_heads, num_kv_heads, q_weight, k_weight, eps, cos, sin, k_cache, v_cache, slots
):
    q, k, v = qkv.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None:
        q, k = fused.rms_norm_torch(q, q_weight, eps), fused.rms_norm_torch(k, k_weight, eps)
    q, k = fused.rope_torch(q, cos, sin), fused.rope_torch(k, cos, sin)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_cache[slot // 4, slot % 4] = k[token]
            v_cache[slot // 4, slot % 4] = v[token]
    return q, k, v


# ---------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------


def wishes(num_rows: int):
    """temperature, min_p, uniform, top_k, top_p."""
    temperature = torch.rand(num_rows, device=DEVICE) * 2
    uniform = torch.rand(num_rows, dtype=torch.float64, device=DEVICE)
    return temperature, torch.zeros(num_rows, device=DEVICE), uniform, *no_cut(num_rows)


def no_cut(num_rows: int):
    top_k = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    return top_k, torch.ones(num_rows, device=DEVICE)


@pytest.mark.parametrize("vocab_size", [1, 2, 100, 4096, 4097, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_sample_plain_takes_what_its_twin_takes(vocab_size, dtype):
    logits = randn(12, vocab_size + 3, dtype=dtype)[:, 1 : 1 + vocab_size]
    wanted = wishes(12)
    temperature, min_p, uniform, _, _ = wanted
    temperature[::4] = 0.0
    min_p[1::3] = 0.05
    got = triton_sampler.sample_plain(logits, *wanted)
    expected = sampler.sample_plain_torch(logits, *wanted)
    differ = (got != expected).nonzero().flatten().tolist()
    for row in differ:
        # Only where the random number lies on the border of two tokens.
        assert temperature[row] > 0
        lower = min(int(got[row]), int(expected[row]))
        scores = (logits[row].double() - logits[row].double().max()) / temperature[row].double()
        if min_p[row] > 0:
            scores = scores.masked_fill(scores < min_p[row].double().log(), -torch.inf)
        cdf = scores.exp().cumsum(0)
        assert abs(float(cdf[lower] / cdf[-1] - uniform[row])) < 1e-5
    assert len(differ) <= 1
    assert got.dtype == torch.int64
    assert int(got.min()) >= 0
    assert int(got.max()) < vocab_size


def test_sample_plain_of_extreme_rows():
    nan, inf = math.nan, math.inf
    rows = [
        ([0.0, nan, 1.0], 1.0, -1),
        ([0.0, inf, 1.0], 0.0, -1),
        ([-inf, -inf, -inf], 1.0, -1),
        ([-inf, -inf, -inf], 0.0, -1),
        ([-inf, 3.0, -inf], 1.0, 1),
        ([1e30, -1e30, 1e30], 0.0, 0),
        ([-1e30, -2e30, -3e30], 1.0, 0),
        ([5.0, 6.0, 5.9], 1e-6, 1),
        ([nan, nan, nan], 0.0, -1),
        ([2.0, 7.0, 7.0], 0.0, 1),
    ]
    logits = torch.tensor([row for row, _, _ in rows], device=DEVICE)
    temperature = torch.tensor([t for _, t, _ in rows], device=DEVICE)
    for u in (0.0, 0.5, 1 - 2**-53):
        uniform = torch.full((len(rows),), u, dtype=torch.float64, device=DEVICE)
        wanted = (temperature, torch.zeros_like(temperature), uniform)
        got = triton_sampler.sample_plain(logits, *wanted, *no_cut(len(rows)))
        assert got.tolist() == [token for _, _, token in rows]
        twin = sampler.sample_plain_torch(logits, *wanted, *no_cut(len(rows)))
        assert twin.tolist() == got.tolist()
        # A cut that keeps all, or all that has a weight, changes nothing; nor do bad rows trap it.
        for k, p in ((3, 1.0), (2, 1.0), (0, 0.9999), (3, 0.9999)):
            cut = (
                torch.full_like(temperature, k, dtype=torch.int32),
                torch.full_like(temperature, p),
            )
            again = triton_sampler.sample_plain(logits, *wanted, *cut)
            assert (again.tolist() == got.tolist()) or k == 2
            assert again.tolist() == sampler.sample_plain_torch(logits, *wanted, *cut).tolist()


def test_sample_plain_draws_with_the_right_frequencies():
    vocab_size, count = 5000, 600
    logits = torch.full((1, vocab_size), -20.0, device=DEVICE)
    chosen = [3, 4095, 4096, 4999]
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    logits[0, chosen] = shares.log().float().to(DEVICE)
    uniform = (torch.arange(count, dtype=torch.float64, device=DEVICE) + 0.5) / count
    ones = torch.ones(count, device=DEVICE)
    wanted = (ones, ones * 0.01, uniform, *no_cut(count))
    got = triton_sampler.sample_plain(logits.expand(count, -1), *wanted)
    for token, share in zip(chosen, shares.tolist(), strict=True):
        assert abs(int((got == token).sum()) - share * count) <= 1
    assert set(got.tolist()) == set(chosen)


def test_sample_plain_of_no_rows_and_of_rows_in_other_company():
    nothing = triton_sampler.sample_plain(randn(0, 7), *wishes(0))
    assert nothing.shape == (0,)
    logits = randn(6, 5000)
    wanted = wishes(6)
    wanted[3][1:4] = 5
    wanted[4][3:] = 0.7
    together = triton_sampler.sample_plain(logits, *wanted)
    logits2 = logits.clone()
    logits2[::2] = torch.nan
    mixed = triton_sampler.sample_plain(logits2, *wanted)
    assert torch.equal(mixed[1::2], together[1::2])
    assert (mixed[::2] == -1).all()


def kept_by_sorting(logits, temperature, min_p, top_k, top_p) -> dict[int, float]:
    """Token -> share of the draw, of one row, in float64."""
    x = logits.double().cpu()
    weights = ((x - x.max()) / temperature).exp()
    if min_p > 0:
        weights[weights < min_p] = 0.0
    order = x.sort(descending=True, stable=True).indices.tolist()
    kept = order[: top_k or None]
    total = sum(float(weights[token]) for token in kept)
    shares, mass = {}, 0.0
    for token in kept:
        if top_p < 1 and mass >= top_p * total:
            break
        mass += float(weights[token])
        shares[token] = float(weights[token])
    return {token: share / mass for token, share in shares.items() if share > 0}


CUTS = [(1, 1.0), (5, 1.0), (40, 1.0), (0, 0.5), (0, 0.95), (0, 1e-6), (12, 0.8), (3, 0.3)]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.bfloat16][: 3 if ON_GPU else 1], ids=str
)
@pytest.mark.parametrize(("top_k", "top_p"), CUTS)
@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "peaked"])
def test_a_cut_row_is_drawn_from_what_a_sort_would_keep(kind, top_k, top_p, dtype):
    """With uniforms on a fine grid, in the order of token ids, each token gets its share."""
    vocab_size, count = (9000, 256) if ON_GPU else (4200, 5)
    x = randn(vocab_size)
    if kind == "ties":
        x = x.round()
    elif kind == "flat":
        x = x * 1e-3 - 40
    elif kind == "peaked":
        x = x * 30
    x = x.to(dtype)
    x[7] = -torch.inf
    temperature, min_p = 0.8, 0.0 if kind != "normal" else 0.02
    shares = kept_by_sorting(x.float(), temperature, min_p, top_k, top_p)
    ones = torch.ones(count, device=DEVICE)
    uniform = (torch.arange(count, dtype=torch.float64, device=DEVICE) + 0.5) / count
    got = triton_sampler.sample_plain(
        x.expand(count, -1),
        ones * temperature,
        ones * min_p,
        uniform,
        torch.full((count,), top_k, dtype=torch.int32, device=DEVICE),
        ones * top_p,
    ).tolist()
    assert got == sorted(got)
    ids = sorted(shares)
    ends = torch.tensor([shares[token] for token in ids], dtype=torch.float64).cumsum(0)
    for u, token in zip(uniform.tolist(), got, strict=True):
        expected = ids[min(int((ends <= u).sum()), len(ids) - 1)]
        if token != expected:
            # Only at the border of two tokens, or where the last token of top_p is in doubt.
            start = sum(shares.get(t, 0.0) for t in ids if t < token)
            end = start + shares.get(token, 0.0)
            assert start - 2e-3 <= u <= end + 2e-3, (u, token, expected)
    if kind in ("ties", "peaked") or top_p == 1.0:
        assert set(got) <= set(shares)


def test_cut_rows_beside_others_take_what_their_twins_take():
    logits = randn(16, 5001)
    temperature, min_p, uniform, top_k, top_p = wishes(16)
    temperature[::8] = 0.0
    top_k[1::3] = torch.randint(1, 400, (5,), dtype=torch.int32, device=DEVICE)
    top_p[2::4] = torch.rand(4, device=DEVICE) * 0.98 + 0.01
    top_k[5], top_k[9] = 5001, 100_000
    top_p[10] = 0.0  # keeps the likeliest
    min_p[3::5] = 0.01
    wanted = (temperature, min_p, uniform, top_k, top_p)
    got = triton_sampler.sample_plain(logits, *wanted)
    expected = sampler.sample_plain_torch(logits, *wanted)
    assert int((got != expected).sum()) <= 2  # random numbers on the border of two tokens
    assert torch.equal(got[::8], logits[::8].argmax(1))
