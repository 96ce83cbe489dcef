"""The forward kernel against the oracle: edges first, then every option, then random problems."""

from __future__ import annotations

import sys

import pytest
import torch

from flashpage import flash_attn_func, flash_attn_varlen_func
from flashpage.attention import dispatch
from flashpage.attention.triton import forward, runtime
from kernels import BACKENDS, DEVICE, DTYPES, kernels, poisoned
from oracles import assert_as_good, dense, max_error, varlen

pytestmark = pytest.mark.usefixtures("poisoned")
__all__ = ["poisoned"]


def qkv(batch, seqlen_q, seqlen_k, heads, dtype=torch.float32):
    h, hk, d = heads
    shapes = (batch, seqlen_q, h, d), (batch, seqlen_k, hk, d), (batch, seqlen_k, hk, d)
    return [torch.randn(s, device=DEVICE).to(dtype) for s in shapes]


def check_dense(q, k, v, **options):
    """Against float64, allowing twice the error of the same formula in the dtype of q."""
    with kernels():
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    exact_out, exact_lse = dense(q.double(), k.double(), v.double(), **options)
    low_out, _ = dense(q, k, v, **options)
    assert_as_good(out, exact_out, low_out)
    atol = 1e-5 * max(1.0, float(exact_lse[torch.isfinite(exact_lse)].abs().max().nan_to_num(0)))
    assert max_error(lse, exact_lse) <= atol if exact_lse.numel() else True
    return out, lse


# ---------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 300), (300, 1), (0, 5), (5, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_at_the_edge(seqlen_q, seqlen_k, causal):
    q, k, v = qkv(2, seqlen_q, seqlen_k, (4, 2, 16))
    with kernels():
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    exact_out, exact_lse = dense(q.double(), k.double(), v.double(), causal=causal)
    assert max_error(out, exact_out) < 1e-5
    assert max_error(lse, exact_lse) < 1e-5
    if seqlen_k == 0:
        assert torch.equal(lse, torch.full_like(lse, torch.inf))


def test_one_key_gives_its_value_bit_for_bit():
    q, k, v = qkv(2, 5, 1, (4, 2, 64), torch.float16)
    with kernels():
        out = flash_attn_func(q * 5, k * 3, v * 3)
    assert torch.equal(out, (v * 3).repeat_interleave(2, dim=2).expand_as(out))


def test_rows_that_see_no_key_are_zero_with_infinite_lse():
    q, k, v = qkv(1, 90, 20, (2, 1, 32))
    out, lse = check_dense(q, k, v, causal=True)
    assert not out[:, :70].any()
    assert torch.isinf(lse[:, :, :70]).all()
    assert (lse[:, :, :70] > 0).all()


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_scores_of_any_magnitude(offset):
    q, k, v = qkv(1, 40, 70, (2, 2, 16))
    q[..., 0], k[..., 0] = 100.0, offset / 25
    check_dense(q, k, v, causal=True)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 3.0])
def test_any_softmax_scale(scale):
    check_dense(*qkv(1, 40, 70, (2, 1, 16)), softmax_scale=scale, causal=True)


@pytest.mark.parametrize("head_dim", [1, 3, 40, 59, 64, 96, 128, 200, 256])
def test_any_head_dim(head_dim):
    check_dense(*qkv(1, 40, 70, (2, 1, head_dim), torch.float16), causal=True)


@pytest.mark.parametrize("heads", [(1, 1, 16), (7, 1, 16), (9, 3, 16), (6, 6, 16)])
def test_any_group_of_heads(heads):
    check_dense(*qkv(2, 33, 65, heads), causal=True)


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (20, 7)},
    {"window_size": (0, 0)},
    {"window_size": (-1, 9)},
    {"window_size": (9, -1)},
    {"window_size": (9, 3), "causal": True},
    {"window_size": (10**9, 10**9)},
    {"softcap": 2.5},
    {"softcap": 1e4, "causal": True},
    {"alibi_slopes": 1},
    {"alibi_slopes": 2, "causal": True},
    {"alibi_slopes": 2, "softcap": 2.0, "window_size": (30, 4)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 150), (150, 70)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(options, seqlen_q, seqlen_k, dtype):
    q, k, v = qkv(2, seqlen_q, seqlen_k, (4, 2, 32), dtype)
    if "alibi_slopes" in options:
        slopes = torch.rand(2, 4, device=DEVICE)
        options = {**options, "alibi_slopes": slopes if options["alibi_slopes"] == 2 else slopes[0]}
    check_dense(q, k, v, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_mask_is_the_one_that_is_shown(causal):
    q, k, v = qkv(2, 70, 90, (4, 2, 16))
    torch.manual_seed(5)
    with kernels():
        out, lse, shown = flash_attn_func(q, k, v, 0.3, causal=causal, return_attn_probs=True)
        torch.manual_seed(5)
        again = flash_attn_func(q, k, v, 0.3, causal=causal)
    assert torch.equal(out, again)
    assert shown.shape == (2, 4, 128, 128)
    shown = shown[:, :, :70, :90]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)).double() / 4
    if causal:
        hidden = ~torch.ones(70, 90, device=DEVICE).tril(20).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1)
    expected = (p * (shown >= 0) / 0.7) @ v.repeat_interleave(2, 2).transpose(1, 2).double()
    assert max_error(out, expected.transpose(1, 2)) < 1e-5
    assert max_error(shown.abs(), (scores - scores.amax(-1, keepdim=True)).exp()) < 1e-5
    assert max_error(lse, scores.logsumexp(-1)) < 1e-5
    dropped = (shown < 0)[shown != 0].double().mean()
    assert abs(float(dropped) - 0.3) < 0.02


def test_dropout_mask_over_pages_and_with_too_small_bounds():
    """S_dmask of pages is that of the same keys laid flat; what its bounds leave out is cut off."""
    q = torch.randn(50, 4, 16, device=DEVICE)
    k, v = (torch.randn(64, 2, 16, device=DEVICE) for _ in range(2))
    cu_q = torch.tensor([0, 20, 50], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 32, 64], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    k_pages, v_pages = (
        torch.stack([x.view(4, 16, 2, 16)[i] for i in (2, 1, 3, 0)]) for x in (k, v)
    )

    def shown(k, v, bounds, **options):
        torch.manual_seed(1)
        with kernels():
            return flash_attn_varlen_func(
                q, k, v, cu_q, cu_k, *bounds, 0.2, causal=True, return_attn_probs=True, **options
            )

    flat, paged = shown(k, v, (30, 32)), shown(k_pages, v_pages, (30, 32), block_table=table)
    for a, b in zip(flat, paged, strict=True):
        assert max_error(a, b) < 1e-6
    small = shown(k, v, (7, 9))
    assert torch.equal(small[0], flat[0])
    assert max_error(small[2][:, :, :7, :9], flat[2][:, :, :7, :9]) < 1e-6
    assert not small[2][:, :, 7:].any()
    assert not small[2][:, :, :, 9:].any()


# ---------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------


def test_any_strides():
    """Transposed, expanded, sliced and misaligned views, each against the contiguous copy."""
    base = [torch.randn(2, 4, 41, 24, device=DEVICE) for _ in range(3)]
    views = [
        [x.transpose(1, 2) for x in base],
        [x.transpose(1, 2)[:, :, :1].expand(-1, -1, 4, -1) for x in base],
        [x.transpose(1, 2)[:, ::2, :, 1:21] for x in base],
        [torch.randn(41, 2, 4, 24, device=DEVICE).transpose(0, 1) for _ in range(3)],
        list(torch.randn(2, 41, 3, 4, 16, device=DEVICE).unbind(2)),
    ]
    for q, k, v in views:
        with kernels():
            out = flash_attn_func(q, k, v, causal=True)
            expected = flash_attn_func(*(x.contiguous() for x in (q, k, v)), causal=True)
        assert max_error(out, expected) < 1e-6


SPLIT_OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (110, 3)},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.3, 0.0, 1.0])},
    "large": {"softmax_scale": 1e6, "causal": True},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("full", layout) for layout in ("dense", "varlen", "paged")),
        ("causal", "paged"),
        ("window", "varlen"),
        ("softcap", "dense"),
        ("alibi", "varlen"),
        ("large", "paged"),
    ],
)
def test_few_rows_over_many_keys_in_parts(name, layout, monkeypatch, poisoned):
    monkeypatch.setattr(forward, "MIN_SPLIT_KEYS", 32)
    monkeypatch.setattr(forward.runtime, "num_multiprocessors", lambda device: 132)
    options = {
        key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
        for key, x in SPLIT_OPTIONS[name].items()
    }
    num_keys = [200, 0, 97]
    q = torch.randn(3, 37, 4, 16, device=DEVICE)
    k, v = (torch.randn(3, 200, 2, 16, device=DEVICE) for _ in range(2))
    parts = []
    original = forward.combine
    monkeypatch.setattr(forward, "combine", lambda *a: (parts.append(a[1]), original(*a)))
    cu_q = torch.arange(0, 112, 37, dtype=torch.int32, device=DEVICE)
    with kernels():
        if layout == "dense":
            num_keys = [200] * 3
            out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        else:
            cu_k = torch.tensor([0, 200, 200, 297], dtype=torch.int32, device=DEVICE)
            keys = [torch.cat([x[0], x[2, :97]]) for x in (k, v)]
            table = None
            if layout == "paged":
                table = torch.tensor([[4, 2], [-1, -1], [0, -1]], dtype=torch.int32, device=DEVICE)
                keys = [x.new_full((5, 128, 2, 16), torch.nan) for x in (k, v)]
                for pages, x in zip(keys, (k, v), strict=True):
                    pages[4], pages[2, :72], pages[0, :97] = x[0, :128], x[0, 128:], x[2, :97]
            out, lse, _ = flash_attn_varlen_func(
                q.flatten(0, 1), *keys, cu_q, cu_k, 37, 200, block_table=table,
                return_attn_probs=True, **options,
            )  # fmt: skip
            out, lse = out.view_as(q), lse.view(4, 3, 37).transpose(0, 1)
    assert parts
    assert parts[0].maxima.shape[-1] > 2
    for i, n in enumerate(num_keys):
        exact = [x[i : i + 1, :n].double() for x in (k, v)]
        exact_out, exact_lse = dense(q[i : i + 1].double(), *exact, **options)
        low_out, low_lse = dense(q[i : i + 1], *(x.float() for x in exact), **options)
        assert_as_good(out[i : i + 1], exact_out, low_out)
        assert_as_good(lse[i : i + 1], exact_lse, low_lse)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (11, 3)}], ids=str)
@pytest.mark.parametrize("too_small", [False, True])
def test_varlen(options, too_small):
    """Empty sequences, rows after the last, NaN in the next sequence; and a max_seqlen that is
    too small, which costs time and nothing else."""
    cu_q, cu_k = [0, 30, 30, 81, 81, 200], [0, 50, 61, 61, 61, 260]
    q = torch.randn(220, 4, 16, device=DEVICE)
    k, v = (torch.randn(270, 2, 16, device=DEVICE) for _ in range(2))
    k[260:], v[260:] = torch.nan, torch.nan
    lengths = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (cu_q, cu_k)]
    bounds = (17, 17) if too_small else (119, 199)
    with kernels():
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, *lengths, *bounds, return_attn_probs=True, **options
        )
    exact_out, exact_lse = varlen(q.double(), k.double(), v.double(), cu_q, cu_k, **options)
    assert max_error(out, exact_out) < 1e-5
    assert max_error(lse, exact_lse) < 1e-5


@pytest.mark.parametrize(
    ("count", "block_size", "options"),
    [
        (9, None, {}),
        (9, 16, {"causal": True}),
        (9, None, {"window_size": (11, 3)}),
        (70, 16, {"causal": True}),
    ],
    ids=str,
)
def test_varlen_of_one_long_and_many_short(count, block_size, options):
    """Of the tiles that all of them could have, most are not there: they are looked for."""
    lengths_q = [0, *torch.randint(0, 4, (count,)).tolist(), 130, 0, 33, 1, 0]
    lengths_k = [n and n + int(torch.randint(0, 40, ())) for n in lengths_q]
    cu_q, cu_k = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in (lengths_q, lengths_k))
    q = torch.randn(cu_q[-1] + 5, 2, 16, device=DEVICE)
    k, v = (torch.randn(cu_k[-1], 1, 16, device=DEVICE) for _ in range(2))
    call = [q, k, v]
    table = None
    if block_size is not None:
        per_sequence = -(-max(lengths_k) // block_size)
        shape = (len(lengths_q) * per_sequence, block_size, 1, 16)
        call[1:] = (torch.full(shape, torch.nan, device=DEVICE) for _ in range(2))
        table = torch.randperm(shape[0], device=DEVICE).view(-1, per_sequence).int()
        for i, n in enumerate(lengths_k):
            for t in range(n):
                place = int(table[i, t // block_size]), t % block_size
                call[1][place], call[2][place] = k[cu_k[i] + t], v[cu_k[i] + t]
    lengths = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (cu_q, cu_k)]
    with kernels():
        out, lse, _ = flash_attn_varlen_func(
            *call, *lengths, 130, max(lengths_k), block_table=table, return_attn_probs=True,
            **options,
        )  # fmt: skip
    assert not out[cu_q[-1] :].any()
    exact_out, exact_lse = varlen(q.double(), k.double(), v.double(), cu_q, cu_k, **options)
    assert max_error(out, exact_out) < 1e-5
    assert max_error(lse, exact_lse) < 1e-5


def test_varlen_with_the_largest_bounds():
    """max_seqlen_* may be as large as an int32: nothing is sized by it alone."""
    q = torch.randn(30, 2, 16, device=DEVICE)
    cu = torch.tensor([0, 10, 30], dtype=torch.int32, device=DEVICE)
    with kernels():
        out = flash_attn_varlen_func(q, q, q, cu, cu, 2**31 - 1, 2**31 - 1, causal=True)
        expected = flash_attn_varlen_func(q, q, q, cu, cu, 20, 20, causal=True)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64, 256])
def test_pages(block_size):
    """Shuffled pages, garbage ids beyond the lengths, NaN in every slot that holds no token."""
    cu_q, cu_k, heads, head_dim = [0, 40, 41, 41, 60], [0, 100, 163, 164, 164], (4, 2), 16
    q = torch.randn(60, heads[0], head_dim, device=DEVICE)
    k, v = (torch.randn(164, heads[1], head_dim, device=DEVICE) for _ in range(2))
    per_sequence = -(-100 // block_size)
    ids = torch.randperm(4 * per_sequence).view(4, per_sequence)
    table = torch.full((4, per_sequence + 2), -(2**31), dtype=torch.int32)
    shape = (4 * per_sequence, block_size, heads[1], head_dim)
    k_pages, v_pages = (torch.full(shape, torch.nan, device=DEVICE) for _ in range(2))
    for i in range(4):
        for t in range(cu_k[i + 1] - cu_k[i]):
            table[i, t // block_size] = ids[i, t // block_size]
            place = int(ids[i, t // block_size]), t % block_size
            k_pages[place], v_pages[place] = k[cu_k[i] + t], v[cu_k[i] + t]
    lengths = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (cu_q, cu_k)]
    for options in ({"causal": True}, {"window_size": (70, 5)}):
        with kernels():
            out, lse, _ = flash_attn_varlen_func(
                q, k_pages, v_pages, *lengths, 40, 100, block_table=table.to(DEVICE),
                return_attn_probs=True, **options,
            )  # fmt: skip
        exact_out, exact_lse = varlen(q.double(), k.double(), v.double(), cu_q, cu_k, **options)
        assert max_error(out, exact_out) < 1e-5
        assert max_error(lse, exact_lse) < 1e-5


def test_pointers_serve_what_descriptors_cannot():
    """The same call with 16-byte alignment and without gives the same bits."""
    q, k, v = qkv(1, 70, 130, (2, 1, 64), torch.float16)
    shifted = []
    for x in (q, k, v):
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
        shifted.append(moved.copy_(x))
    if DEVICE.type == "cpu" or runtime.capability(DEVICE) >= 90:
        assert runtime.descriptors_fit(q, k, v)
    assert not runtime.descriptors_fit(*shifted)
    with dispatch.only(BACKENDS[-1]):  # another before it may have kernels of its own for one
        a, b = flash_attn_func(q, k, v, causal=True), flash_attn_func(*shifted, causal=True)
    assert torch.equal(a, b)


def test_the_backend_says_what_it_does_not_serve():
    report = str(dispatch.backends("cpu", torch.float32))
    assert "triton" in report
    assert set(BACKENDS) <= {"hopper", "triton", "triton_interpreter"}
    assert "serves tensors on a GPU, not on cpu" in report


def test_old_gpus_are_told_what_they_lack():
    from flashpage.attention.triton.backend import TritonBackend

    def reason(capability, dtype, head_dim=64, function="forward"):
        problem = dispatch.backends("cuda", dtype, head_dim=head_dim).problem
        return TritonBackend()._why_not_capability(capability, problem, function)

    assert "7.5 or newer" in reason(70, torch.float16)
    assert "use float16" in reason(75, torch.bfloat16)
    assert "shared memory" in reason(75, torch.float32, 256, "backward")
    assert reason(75, torch.float16, 256, "backward") is None
    assert reason(80, torch.bfloat16) is None
    assert reason(0, torch.bfloat16) is None  # AMD


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("raise OSError('no driver')", "can not be imported: no driver"),
        ("", "something without a version is installed"),
        ("__version__ = '3.5.1'", "3.6 or newer is needed, 3.5.1 is installed"),
        ("__version__ = '3.6rc1'", None),
        ("__version__ = '10.0'", None),
    ],
)
def test_odd_installations_of_triton(module, reason, tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    found = runtime.why_no_triton.__wrapped__()
    assert (found is None) if reason is None else (reason in found)
