"""The decode kernel for Hopper against the oracle: on a Hopper GPU, and without one emulated.
Unused slots of every cache hold NaN, unused entries of every table garbage."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flashpage import flash_attn_with_kvcache
from flashpage.attention import dispatch
from flashpage.attention.hopper import decode as hopper
from flashpage.attention.triton import runtime
from flashpage.attention.triton.backend import TritonBackend
from kernels import DEVICE, ON_GPU, poisoned
from oracles import assert_as_good, dense, max_error

__all__ = ["poisoned"]
BF16, FP16 = torch.bfloat16, torch.float16
# Triton's interpreter, which joins the parts where there is no GPU, does not round to bfloat16.
DTYPE = BF16 if ON_GPU else FP16

pytestmark = [
    pytest.mark.usefixtures("poisoned", "hopper_backend"),
    pytest.mark.skipif(
        ON_GPU and runtime.capability(DEVICE) != 90,
        reason="needs compute capability 9.0, or no GPU",
    ),
]


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Call:
    """Queries over a cache with these many keys a sequence, and what they must give."""

    def __init__(
        self,
        lengths: list[int],
        seqlen_q: int = 16,
        heads: tuple[int, int, int] = (16, 2, 128),
        page: int = 16,
        dtype: torch.dtype = DTYPE,
        capacity: int = 0,
    ) -> None:
        h, hk, d = heads
        capacity = capacity or max(*lengths, 1) + 10
        self.lengths = lengths
        self.q = torch.randn(len(lengths), seqlen_q, h, d, device=DEVICE).to(dtype)
        self.kv = [torch.randn(2, n, hk, d, device=DEVICE).to(dtype) for n in lengths]
        self.table = None
        shape = (len(lengths), capacity, hk, d)
        if page:
            per_sequence = -(-capacity // page)
            shape = (per_sequence * len(lengths) + 1, page, hk, d)
            self.table = torch.randperm(shape[0])[:-1].view(len(lengths), per_sequence).int()
        self.cache = torch.full((2, *shape), torch.nan, device=DEVICE, dtype=dtype)
        for i, n in enumerate(lengths):
            if page:
                slots = self.table[i].repeat_interleave(page)[:n].long() * page
                slots += torch.arange(n) % page
                self.cache.flatten(1, 2)[:, slots.to(DEVICE)] = self.kv[i]
                self.table[i, -(-n // page) :] = -(2**31) if i % 2 else 2**31 - 1
            else:
                self.cache[:, i, :n] = self.kv[i]
        if page:
            self.table = self.table.to(DEVICE)

    def run(self, lengths: torch.Tensor | None = None, **options: Any) -> Any:
        return flash_attn_with_kvcache(
            self.q,
            *self.cache,
            cache_seqlens=ints(self.lengths) if lengths is None else lengths,
            block_table=self.table,
            return_softmax_lse=True,
            **options,
        )

    def check(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Against float64, allowing twice the error of the same formula in the dtype of q."""
        out, lse = result = self.run(**options)
        options.pop("num_splits", None)
        assert out.is_contiguous()
        assert out.dtype == self.q.dtype
        for i, (k, v) in enumerate(self.kv):
            q, k, v = self.q[i : i + 1], k[None], v[None]
            exact_out, exact_lse = dense(q.double(), k.double(), v.double(), **options)
            low_out, _ = dense(q, k, v, **options)
            assert_as_good(out[i : i + 1], exact_out, low_out)
            size = exact_lse[torch.isfinite(exact_lse)].abs()
            atol = 1e-5 * max(1.0, float(size.max()) if size.numel() else 0.0)
            assert max_error(lse[i : i + 1], exact_lse) <= atol
        return result


LENGTHS = [300, 0, 1, 129, 128, 15]


@pytest.mark.parametrize("num_splits", [0, 1, 2, 5])
@pytest.mark.parametrize("page", [0, 8, 16, 24, 128, 256])
def test_lengths_at_the_edge(num_splits, page):
    """Empty sequences, rows that see no key, parts without any."""
    Call(LENGTHS, page=page).check(causal=True, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "seqlen_q"),
    [
        ((8, 8), 100),
        ((7, 1), 16),
        ((9, 3), 40),
        ((12, 2), 11),
        ((16, 1), 1),
        ((64, 1), 3),
        ((71, 1), 2),
        ((130, 1), 1),
    ],
    ids=str,
)
def test_any_group_of_heads_and_rows_that_fill_no_tile(heads, seqlen_q, num_splits):
    Call([150, 7, 290], seqlen_q, (*heads, 64)).check(causal=True, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_any_head_dim(head_dim, dtype, num_splits):
    if dtype != DTYPE and num_splits > 1 and not ON_GPU:
        pytest.skip("see DTYPE")
    call = Call([270, 130], heads=(8, 1, head_dim), dtype=dtype)
    call.check(causal=True, num_splits=num_splits)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (40, 0)},
        {"window_size": (3, 200)},
        {"window_size": (-1, 5)},
        {"window_size": (200, -1)},
        {"window_size": (10**9, 10**9)},
        {"softcap": 2.5, "causal": True},
        {"softmax_scale": -0.5, "causal": True},
        {"softmax_scale": 0.0},
        {"softmax_scale": 3.0, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_options(options, num_splits):
    Call([400, 40, 5], heads=(14, 2, 64)).check(num_splits=num_splits, **options)


@pytest.mark.parametrize("residue", [0, 1, 15, 16, 17, 63, 64, 127])
def test_tails_of_any_length(residue):
    Call([256 + residue, 128 - residue]).check(causal=True, num_splits=2)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_scores_of_any_magnitude(offset, num_splits):
    call = Call([300], heads=(8, 1, 64), page=0)
    call.q[..., 0] = 100.0
    call.kv[0][0][..., 0] = call.cache[0, 0, :300, ..., 0] = offset / 25
    call.check(causal=True, num_splits=num_splits)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("ping_pong", [True, False])
def test_every_way_of_working(persistent, ping_pong, monkeypatch):
    """More parts than multiprocessors, and one program for each."""
    tiles = {
        d: replace(t, persistent=persistent, ping_pong=ping_pong) for d, t in hopper.TILES.items()
    }
    monkeypatch.setattr(hopper, "TILES", tiles)
    call = Call([random.Random(i).randrange(400) for i in range(5)], heads=(16, 2, 64))
    for num_splits in (1, 4):
        call.check(causal=True, num_splits=num_splits)


def test_new_keys_and_lengths_beyond_the_cache():
    call = Call([40, 21], heads=(8, 1, 64))
    expected = call.check(causal=True)
    new = [torch.stack([kv[x, -16:] for kv in call.kv]) for x in range(2)]
    again = flash_attn_with_kvcache(
        call.q, *call.cache, *new, cache_seqlens=ints([24, 5]), block_table=call.table,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    assert all(map(torch.equal, again, expected))
    full = Call([48, 48], heads=(8, 1, 64), capacity=48)
    expected = full.check(causal=True)
    assert all(map(torch.equal, full.run(ints([10**9, 49]), causal=True), expected))
    out, lse = full.run(ints([-1, -(2**31)]), causal=True)
    assert not out.any()
    assert (lse == torch.inf).all()


def test_queries_of_any_strides():
    call = Call([200, 90], heads=(8, 2, 64))
    expected = call.run(causal=True)
    packed = torch.cat([call.q, call.q], 2)
    call.q = packed[:, :, :8]
    assert all(map(torch.equal, call.run(causal=True), expected))
    call.q = packed[:, :, :8].transpose(1, 2).contiguous().transpose(1, 2)
    assert all(map(torch.equal, call.run(causal=True), expected))


def test_what_can_not_be_addressed_is_served_by_triton(monkeypatch):
    """And only that."""
    served = []

    def stand_in(name):
        def serve(*args):
            served.append(name)
            q = args[-1].q
            return torch.zeros_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1]).float()

        return serve

    monkeypatch.setattr(hopper, "decode", stand_in("hopper"))
    monkeypatch.setattr(TritonBackend, "decode", stand_in("triton"))

    def serving(call, **options):
        served.clear()
        call.run(**options)
        return served

    small = {"lengths": [20, 3], "heads": (2, 1, 64)}
    assert serving(Call(**small)) == ["hopper"]
    assert serving(Call(**small, page=0)) == ["hopper"]
    assert serving(Call(**small, page=20)) == ["triton"]
    assert serving(Call(**small, page=0), cache_leftpad=ints([1, 0])) == ["triton"]
    assert serving(Call(**small, page=0), cache_batch_idx=ints([1, 0])) == ["triton"]
    shared = Call(**small)
    shared.cache = shared.cache.movedim(0, 1).contiguous().movedim(1, 0)
    assert serving(shared) == ["triton"]
    odd = Call(**small)
    odd.q = torch.randn(odd.q.numel() + 1, device=DEVICE).to(DTYPE)[1:].view(odd.q.shape)
    assert serving(odd) == ["triton"]


# ---------------------------------------------------------------------------------------------
# On a GPU only
# ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_graph_is_replayed_with_other_lengths(num_splits):
    """On two streams at once; more parts than multiprocessors, so that each launch counts."""
    calls = [Call([700] * 40, heads=(64, 8, 128), page=page) for page in (16, 256)]
    lengths = [ints([700] * 40) for _ in calls]
    options = {"causal": True, "num_splits": num_splits}
    streams, graphs, results = [torch.cuda.Stream() for _ in calls], [], []
    for call, n, stream in zip(calls, lengths, streams, strict=True):
        call.run(n, **options)
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append(call.run(n, **options))
        graphs.append(graph)
    rng = random.Random(0)
    for _ in range(5):
        for n in lengths:
            n.copy_(ints([rng.choice([0, 1, 700, rng.randint(0, 700)]) for _ in range(40)]))
        torch.cuda.synchronize()
        for result in results:
            for x in result:
                x.fill_(torch.nan)
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for call, n, result in zip(calls, lengths, results, strict=True):
            assert all(map(torch.equal, call.run(n, **options), result))


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_same_bits_every_time(num_splits):
    call = Call(list(range(0, 2000, 61)), heads=(64, 8, 128))
    expected = call.check(causal=True, num_splits=num_splits)
    for _ in range(200):
        again = call.run(causal=True, num_splits=num_splits)
        assert all(map(torch.equal, again, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed):
    rng = random.Random(seed)
    for _ in range(50):
        kv_heads, group = rng.choice([1, 2, 8]), rng.choice([5, 7, 8])
        call = Call(
            [rng.choice([0, 1, rng.randint(0, 900)]) for _ in range(rng.randint(1, 30))],
            rng.randint(2, 40),
            (kv_heads * group, kv_heads, 128),
            rng.choice([16, 256]),
        )
        call.check(causal=True, num_splits=rng.choice([0, 0, 1, 2, 9]))


def test_says_what_it_does_not_serve():
    report = str(dispatch.backends(DEVICE, BF16, layout="paged"))
    assert "decode    hopper     serves, but for tensors or pages that are not aligned" in report
    assert "has no ALiBi" in str(dispatch.backends(DEVICE, BF16, alibi=True))
