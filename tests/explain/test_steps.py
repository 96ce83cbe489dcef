"""The steps as data: the worked examples to four decimals, walks against the oracle, both maps."""

from __future__ import annotations

import math

import pytest
import torch

from flashpage.attention.functional import flash_attn_varlen_func
from flashpage.attention.standard import standard_attention
from flashpage.errors import ArgumentError
from flashpage.explain.steps import (
    MAX_SEQLEN,
    ORDERS,
    TraceProblem,
    map_sequences,
    paged_decode,
    random_problem,
    walk,
    worked_examples,
)

ORDER = pytest.mark.parametrize("order", ORDERS)


def rounded(x: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in x.flatten().tolist()]


class TestWorkedExamples:
    @ORDER
    def test_the_first(self, order: str) -> None:
        problem, _ = worked_examples()
        standard = problem.standard()
        assert standard.scores[0, 0].tolist() == [[2, 5], [1, 3]]
        assert standard.probs[0, 0].mul(100).round().tolist() == [[5, 95], [12, 88]]
        one, two = walk(problem, order).steps
        assert one.m.tolist() == [2, 1]
        assert one.rescale.tolist() == [0, 0]
        assert two.m_before.tolist() == [2, 1]
        assert two.m.tolist() == [5, 3]
        assert rounded(two.rescale) == [round(math.exp(-3), 4), round(math.exp(-2), 4)]
        assert rounded(two.o) == [0.0474, 1.9051, 1.0, 0.1192, 1.7616, 1.0]

    M_L = (
        ((1, 1.0000), (3, 1.1353), (3, 1.1851), (3, 1.5530)),
        ((2, 1.0000), (4, 1.1353), (4, 1.1851), (4, 1.2034)),
    )
    OUT = ((0.5930, 0.6760), (0.1843, 0.8723))

    @ORDER
    def test_the_second(self, order: str) -> None:
        _, problem = worked_examples()
        assert problem.standard().scores[0, 0].tolist() == [[1, 3, 0, 2], [2, 4, 1, 0]]
        walked = walk(problem, order)
        for step in walked.steps:
            for i, row in enumerate(step.rows):
                m, l = self.M_L[row][step.key_block]  # noqa: E741
                assert step.m[i].item() == m
                assert round(step.l[i].item(), 4) == l
                factor = (0, math.exp(-2), 1, 1)[step.key_block]
                assert step.rescale[i].item() == pytest.approx(factor, abs=1e-12)
        assert rounded(walked.out) == [*self.OUT[0], *self.OUT[1]]

    def test_reductions_are_counted(self) -> None:
        first, second = worked_examples()
        assert [walk(first, order).num_reductions for order in ORDERS] == [0, 0]
        assert [walk(second, order).num_reductions for order in ORDERS] == [4, 0]
        so_far = [step.num_reductions for step in walk(second, "FA1").steps]
        assert so_far == [1, 1, 2, 2, 3, 3, 4, 4]


class TestWalk:
    @ORDER
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        ("seqlen_q", "seqlen_k", "block_size", "workers"),
        [(1, 1, 1, 1), (1, 9, 4, 1), (5, 5, 2, 3), (3, 8, 64, 2), (7, 2, 1, 7), (64, 64, 16, 4)],
    )
    def test_ends_at_the_oracle(
        self, order: str, causal: bool, seqlen_q: int, seqlen_k: int, block_size: int, workers: int
    ) -> None:
        problem = random_problem(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=int(torch.randint(1, 65, ())),
            block_size_k=block_size,
            num_workers=workers,
            causal=causal,
            seed=int(torch.randint(2**31, ())),
        )
        walked = walk(problem, order)
        q, k, v = (x[None, :, None] for x in (problem.q, problem.k, problem.v))
        expected = standard_attention(q, k, v, causal=causal).out[0, :, 0]
        torch.testing.assert_close(walked.out, expected)
        last = {row: step.o[i] for step in walked.steps for i, row in enumerate(step.rows)}
        for row, o in last.items():  # rows that see no key may have no step
            torch.testing.assert_close(o, expected[row])
        assert set(last) == set(range(seqlen_q)) or seqlen_q > seqlen_k
        reduces = order == "FA1" and workers > 1
        assert walked.num_reductions == problem.num_key_blocks * reduces

    def test_masked_tiles_are_left_out_by_fa2_only(self) -> None:
        problem = random_problem(seqlen_q=8, block_size_k=2, num_workers=4, causal=True)
        assert [walk(problem, order).num_skipped for order in ORDERS] == [0, 3 + 2 + 1]
        assert walk(random_problem(seqlen_q=8, num_workers=4), "FA2").num_skipped == 0

    def test_the_seed_decides(self) -> None:
        same, again, other = (random_problem(seed=seed).q for seed in (5, 5, 6))
        assert torch.equal(same, again)
        assert not torch.equal(same, other)
        assert torch.equal(same, same.mul(10).round().div(10))  # one decimal

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"seqlen_q": 0}, "seqlen_q must be from 1 to 64, got 0"),
            ({"seqlen_k": MAX_SEQLEN + 1}, "seqlen_k must be from 1 to 64, got 65"),
            ({"head_dim": -1}, "head_dim must be from 1 to 64, got -1"),
            ({"block_size_k": 0}, "block_size must be from 1 to 64, got 0"),
            ({"num_workers": 0}, "workers must be from 1 to 4 .the query rows., got 0"),
            ({"seqlen_q": 2, "num_workers": 3}, "workers must be from 1 to 2 .* got 3"),
            ({"seed": -1}, "seed must be from 0 to 9223372036854775807, got -1"),
            ({"seed": 2**63}, "seed must be from 0"),
        ],
    )
    def test_refused(self, options: dict[str, int], words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            random_problem(**options)

    def test_tensors_that_do_not_go_together(self) -> None:
        q, k, v = torch.ones(2, 3), torch.ones(4, 3), torch.ones(5, 3)
        with pytest.raises(ArgumentError, match=r"seqlen of v, got q \(2, 3\), k \(4, 3\)"):
            TraceProblem("", q, k, v, 1.0, 1)

    def test_unknown_order(self) -> None:
        with pytest.raises(ArgumentError, match="order must be one of FA1, FA2, got 'FA9'"):
            walk(random_problem(), "FA9")


class TestSequenceMap:
    def test_bounds(self) -> None:
        sequences = map_sequences([3, 0, 1, 5])
        assert sequences.cu_seqlens == (0, 3, 3, 4, 9)
        assert sequences.sequences == (range(3), range(3, 3), range(3, 4), range(4, 9))
        assert sequences.sequence_of_token == (0, 0, 0, 2, 3, 3, 3, 3, 3)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("seqlens", [(1,), (3, 0, 1, 5), (0, 4), (7, 2)])
    def test_visible_is_what_varlen_attends_to(
        self, seqlens: tuple[int, ...], causal: bool
    ) -> None:
        """With V = identity the output is P, which is positive exactly where a token sees one."""
        sequences = map_sequences(seqlens, causal=causal)
        total = sum(seqlens)
        q, k = torch.randn(2, total, 1, total)
        v = torch.eye(total)[:, None]
        cu_seqlens = torch.tensor(sequences.cu_seqlens, dtype=torch.int32)
        longest = max(seqlens)
        probs = flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=causal
        )
        assert torch.equal(probs[:, 0] > 0, sequences.visible())

    @pytest.mark.parametrize(
        ("seqlens", "words"),
        [
            ([], "number of seqlens must be from 1 to 26, got 0"),
            ([1] * 27, "number of seqlens must be from 1 to 26, got 27"),
            ([2, -1], "seqlens must be from 0 to 64, got -1"),
            ([0, 0], "sum of seqlens must be from 1 to 64, got 0"),
            ([40, 40], "sum of seqlens must be from 1 to 64, got 80"),
        ],
    )
    def test_refused(self, seqlens: list[int], words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            map_sequences(seqlens)


class TestPagedDecode:
    @pytest.mark.parametrize(
        ("seqlens", "block_size", "shared"),
        [((1,), 1, 0), ((11, 10), 4, 8), ((5, 9, 64), 4, 4), ((8, 8), 4, 7), ((3, 3), 16, 2)],
    )
    def test_every_token_is_visited_once(
        self, seqlens: tuple[int, ...], block_size: int, shared: int
    ) -> None:
        decode = paged_decode(seqlens, block_size=block_size, num_shared_tokens=shared, seed=3)
        for n, pages, visits in zip(seqlens, decode.block_table, decode.visits, strict=True):
            assert [visit.page for visit in visits] == list(pages)
            assert [t for visit in visits for t in visit.tokens] == list(range(n))
            for j, visit in enumerate(visits):
                assert visit.logical_block == j
                assert {t // block_size for t in visit.tokens} == {j}
                assert visit.step.keys == visit.tokens
        torch.testing.assert_close(decode.tiled_out, decode.library_out)
        assert decode.library_out.isfinite().all()

    def test_full_pages_of_the_prefix_are_shared(self) -> None:
        decode = paged_decode((11, 10, 9), block_size=4, num_shared_tokens=8)
        first, second, third = decode.block_table
        assert first[:2] == second[:2] == third[:2] == decode.shared_pages(0, 1)
        assert decode.shared_pages(1, 2) == first[:2]
        assert len({first[2], second[2], third[2]}) == 3
        assert decode.requests_of_page(first[0]) == (0, 1, 2)
        assert decode.requests_of_page(second[2]) == (1,)
        assert decode.visits[1][0].requests == (0, 1, 2)
        held = {page for pages in decode.block_table for page in pages}
        assert held < set(range(decode.num_blocks))
        free = set(range(decode.num_blocks)) - held
        assert all(decode.requests_of_page(page) == () for page in free)

    @pytest.mark.parametrize(("shared", "pages"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
    def test_a_page_that_is_not_full_is_not_shared(self, shared: int, pages: int) -> None:
        decode = paged_decode((9, 12), block_size=4, num_shared_tokens=shared)
        assert len(decode.shared_pages(0, 1)) == pages

    def test_scores_of_a_shared_page_are_of_the_same_keys(self) -> None:
        """Requests differ in their queries only: dividing the scores by them gives one key."""
        decode = paged_decode((5, 6), block_size=4, num_shared_tokens=4, head_dim=1, seed=4)
        one, two = (visits[0].step.s[0] for visits in decode.visits)
        torch.testing.assert_close(one * two[0], two * one[0])

    @pytest.mark.parametrize(
        ("seqlens", "options", "words"),
        [
            ((), {}, "number of seqlens must be from 1 to 26, got 0"),
            ((0,), {}, "seqlens must be from 1 to 64, got 0"),
            ((3,), {"block_size": 0}, "block_size must be from 1 to 64, got 0"),
            ((3,), {"head_dim": 65}, "head_dim must be from 1 to 64, got 65"),
            ((3, 9), {"num_shared_tokens": 3}, "shared must be from 0 to 2 .*, got 3"),
            ((3,), {"num_shared_tokens": -1}, "shared must be from 0 to 2 .*, got -1"),
        ],
    )
    def test_refused(self, seqlens: tuple[int, ...], options: dict[str, int], words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            paged_decode(seqlens, **options)
