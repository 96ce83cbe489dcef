"""FLOPs and bytes: the figures of the literature, and counting by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpage.attention.standard import visible_mask
from flashpage.errors import ArgumentError
from flashpage.explain import roofline
from flashpage.explain.hardware import DEVICES
from flashpage.explain.roofline import Cost, Workload, bound, costs, standard_cost, tiled_cost

RTX4090 = DEVICES["rtx4090"]
LONG = Workload((8192,), (8192,))  # fp32, head_dim 128, one head


def sizes(cost: Cost) -> dict[str, int]:
    return {t.tensor: t.size for t in cost.transfers}


def traffic(cost: Cost) -> dict[str, tuple[int, int]]:
    return {t.tensor: (t.read, t.written) for t in cost.transfers}


class TestKnownFigures:
    """RTX 4090, N = 8192, d = 128, fp32."""

    def test_standard(self) -> None:
        cost = standard_cost(LONG)
        size = sizes(cost)
        for name in "QKVO":
            assert size[name] == pytest.approx(4.2e6, rel=0.01)
        for name in "SP":
            assert size[name] == pytest.approx(268e6, rel=0.01)
            assert traffic(cost)[name] == (size[name], size[name])
        assert cost.bytes == pytest.approx(1090e6, rel=0.001)
        assert cost.flops == pytest.approx(34.4e9, rel=0.002)
        assert cost.intensity == pytest.approx(32, abs=0.5)
        limit = bound(cost, RTX4090, "fp32")
        assert not limit.is_compute_bound
        assert limit.utilisation == pytest.approx(0.39, abs=0.006)
        assert limit.flops_per_second == pytest.approx(0.385 * 82.6e12, rel=0.01)

    def test_tiled(self) -> None:
        cost = tiled_cost(LONG)
        assert round(cost.intensity, -1) == 2050
        limit = bound(cost, RTX4090, "fp32")
        assert limit.is_compute_bound
        assert limit.utilisation == 1
        assert limit.seconds == pytest.approx(416e-6, abs=0.5e-6)
        speed_up = bound(standard_cost(LONG), RTX4090, "fp32").seconds / limit.seconds
        assert speed_up == pytest.approx(2.6, abs=0.01)

    def test_without_a_cache(self) -> None:
        """64 tiles of 128 rows read K and V each: 2 * 64 + 2 times 4.2 MB."""
        cost = tiled_cost(LONG, absorbed=False)
        assert cost.bytes == 130 * 8192 * 128 * 4
        assert not bound(cost, RTX4090, "fp32").is_compute_bound

    def test_bf16(self) -> None:
        size = sizes(standard_cost(Workload((8192,), (8192,), dtype="bfloat16")))
        assert size["S"] == size["P"] == 128 * 2**20

    def test_decode_is_bound_by_its_cache(self) -> None:
        """A layer of Llama-3-8B at 32768 tokens, bf16: 128 MiB a step, 40 us on an H100."""
        work = Workload((1,), (32768,), 32, 8, 128, "bf16", causal=True, block_size=16)
        cost = tiled_cost(work)
        assert traffic(cost)["K"] == traffic(cost)["V"] == (64 * 2**20, 0)
        assert traffic(cost)["block_table"] == (2048 * 4, 0)
        assert cost.intensity == pytest.approx(4, rel=0.01)  # as many FLOP/B as heads share a key
        assert bound(cost, DEVICES["h100"], "bf16").seconds == pytest.approx(40e-6, rel=0.01)
        gathering = standard_cost(work)
        assert traffic(gathering)["K"] == (2 * 64 * 2**20, 64 * 2**20)
        assert gathering.flops == cost.flops == 4 * 32 * 32768 * 128


class TestCounting:
    @given(
        seqlen_q=st.integers(1, 40),
        seqlen_k=st.integers(1, 40),
        tile=st.integers(1, 17),
        causal=st.booleans(),
    )
    def test_against_the_mask(self, seqlen_q: int, seqlen_k: int, tile: int, causal: bool) -> None:
        """Also where there are more queries than keys: the first rows see nothing."""
        mask = visible_mask(seqlen_q, seqlen_k, causal=causal)
        work = Workload((seqlen_q, 1), (seqlen_k, 1), 6, 2, causal=causal)
        keys = sum(int(rows.any(0).sum()) for rows in mask.split(tile)) + 1
        queries = sum(int(columns.any(1).sum()) for columns in mask.split(tile, dim=1)) + 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roofline, "TILE_ROWS", tile)
            assert work.num_scores == 6 * (mask.numel() + 1)
            assert work.num_visible == 6 * (int(mask.sum()) + 1)
            assert work.keys_walked == 6 * keys
            assert work.queries_walked == 6 * queries

    def test_long_sequences_are_not_walked(self) -> None:
        n = 2**31 - 1
        work = Workload((n,), (n,), causal=True)
        assert work.num_visible == n * (n + 1) // 2
        assert costs(work)[2].bytes > costs(work)[1].bytes

    def test_causal_halves_tiled_but_not_standard(self) -> None:
        causal = Workload((8192,), (8192,), causal=True)
        assert standard_cost(causal) == standard_cost(LONG)
        assert tiled_cost(causal).flops / tiled_cost(LONG).flops == pytest.approx(0.5, abs=1e-3)
        reads = [tiled_cost(w, absorbed=False).bytes for w in (causal, LONG)]
        assert reads[0] / reads[1] == pytest.approx(0.5, abs=0.02)

    def test_gqa_shares_keys_only_in_the_cache(self) -> None:
        shared = Workload((512,), (512,), 8, 2)
        alone = Workload((512,), (512,), 8, 8)
        assert traffic(tiled_cost(alone))["K"][0] == 4 * traffic(tiled_cost(shared))["K"][0]
        read = [traffic(tiled_cost(w, absorbed=False))["K"][0] for w in (shared, alone)]
        assert read[0] == read[1] == 8 * 4 * 512 * 128 * 4
        assert tiled_cost(shared).flops == tiled_cost(alone).flops

    def test_varlen_is_the_sum_of_its_sequences(self) -> None:
        lengths = (100, 7, 1000)
        for make in (standard_cost, tiled_cost):
            alone = [make(Workload((n,), (n,), 4, 2)) for n in lengths]
            together = make(Workload(lengths, lengths, 4, 2))
            assert together.flops == sum(c.flops for c in alone)
            assert together.bytes == sum(c.bytes for c in alone)


class TestBackward:
    def test_flops(self) -> None:
        """Four products where P was kept, five where S is computed again; two are the forward."""
        assert standard_cost(LONG, backward=True).flops == 2 * standard_cost(LONG).flops
        assert tiled_cost(LONG, backward=True).flops == 2.5 * tiled_cost(LONG).flops

    def test_bytes(self) -> None:
        n = 8192 * 128 * 4
        standard = standard_cost(LONG, backward=True)
        assert standard.bytes == 7 * 64 * n + 8 * n
        statistics = 4 * 8192 * 4 - 8192 * 4  # LSE read, delta written and read
        tiled = tiled_cost(LONG, backward=True)
        assert tiled.bytes == 6 * n + 3 * n + statistics
        assert traffic(tiled)["dQ"] == (0, n)
        apart = tiled_cost(LONG, backward=True, absorbed=False)
        assert traffic(apart)["Q"] == (64 * n, 0)
        assert traffic(apart)["dQ sum"] == (64 * n, 64 * n)

    def test_pages_have_none(self) -> None:
        work = Workload((1,), (64,), block_size=16)
        for make in (standard_cost, tiled_cost):
            with pytest.raises(ArgumentError, match="backward must be False over pages"):
                make(work, backward=True)


class TestWorkload:
    def test_layouts(self) -> None:
        assert Workload((4, 4), (4, 4)).layout == "dense"
        assert Workload((4, 5), (4, 5)).layout == "varlen"
        assert Workload((1, 1), (4, 5), block_size=2).layout == "paged"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"seqlens_q": ()}, "one entry for each of the same sequences, got 0 and 1"),
            ({"seqlens_q": (-8,)}, "seqlen must be from 1 to 2147483647, got -8"),
            ({"seqlens_k": (0,)}, "seqlen must be from 1 .*, got 0"),
            ({"seqlens_k": (2**31,)}, "got 2147483648"),
            ({"num_q_heads": 0}, "num_q_heads must be from 1 .*, got 0"),
            ({"num_kv_heads": -2}, "num_kv_heads must be from 1 .*, got -2"),
            ({"num_q_heads": 3, "num_kv_heads": 2}, "got 2 key/value heads and 3 query heads"),
            ({"head_dim": 257}, "head dimension at most 256 .* got 257"),
            ({"head_dim": -1}, "got -1"),
            ({"dtype": "fp8"}, "dtype must be one of fp32, bf16, fp16, got 'fp8'"),
            ({"block_size": 0}, "block_size must be from 1 .*, got 0"),
        ],
    )
    def test_refused(self, changes: dict, words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            Workload(**{"seqlens_q": (8,), "seqlens_k": (8,), **changes})
