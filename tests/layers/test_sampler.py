"""Sampler: against a slow twin in plain Python, and against the distributions it must draw from."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpage.layers import sampler
from flashpage.layers.sampler import RowSampling, gather_logprobs, sample


def slow_logits(logits: list[float], row: RowSampling) -> list[float]:
    """Penalties, biases and masks of one row, one token at a time."""
    result = list(logits)
    for token in set(row.seen_tokens):
        factor = row.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token, count in row.output_counts.items():
        result[token] -= row.presence_penalty + row.frequency_penalty * count
    for token, bias in row.logit_bias.items():
        result[token] += bias
    for token in row.masked_tokens:
        result[token] = -math.inf
    return result


def slow_distribution(logits: list[float], row: RowSampling) -> dict[int, float]:
    """The distribution that a row with a temperature is drawn from."""
    top = max(logits)
    weights = {i: math.exp((x - top) / row.temperature) for i, x in enumerate(logits)}
    kept = [i for i in weights if weights[i] >= row.min_p and weights[i] > 0]
    kept.sort(key=lambda i: -weights[i])
    if row.top_k:
        kept = kept[: row.top_k]
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if row.top_p < 1 and mass >= row.top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    return {i: weights[i] / mass for i in nucleus}


def random_row(rng: random.Random, vocab_size: int) -> RowSampling:
    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    def tokens(most: int) -> list[int]:
        return rng.sample(range(vocab_size), rng.randint(0, min(most, vocab_size - 1)))

    return RowSampling(
        temperature=maybe(rng.uniform(0.3, 2), 0.0),
        uniform=rng.random(),
        top_k=maybe(rng.randint(1, vocab_size + 3), 0),
        top_p=maybe(rng.uniform(0.05, 0.99), 1.0),
        min_p=maybe(rng.uniform(0, 0.5), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        output_counts={t: rng.randint(1, 4) for t in tokens(4)},
        seen_tokens=tokens(5),
        logit_bias={t: rng.uniform(-5, 5) for t in tokens(3)},
        masked_tokens=tokens(2),
        num_logprobs=maybe(rng.randint(0, min(5, vocab_size)), None),
    )


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([2, 7, 40]))
def test_random_rows_equal_the_slow_twin(seed, num_rows, vocab_size):
    rng = random.Random(seed)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    rows = [random_row(rng, vocab_size) for _ in range(num_rows)]
    results = sample(logits, rows)
    assert torch.equal(logits, before)
    for values, row, result in zip(logits.tolist(), rows, results, strict=True):
        assert result.error is None
        edited = slow_logits(values, row)
        if row.temperature == 0:
            assert edited[result.token_id] >= max(edited) - 1e-5
        else:
            assert result.token_id in slow_distribution(edited, row)
        if row.num_logprobs is None:
            assert result.logprobs is None
        else:
            check_logprobs(values, result.logprobs, result.token_id, row.num_logprobs)


def check_logprobs(logits, reported, token_id, count):
    log_total = math.log(sum(math.exp(x) for x in logits))
    assert reported.token_id == token_id
    assert reported.logprob == pytest.approx(logits[token_id] - log_total, abs=1e-4)
    assert reported.rank == 1 + sum(x > logits[token_id] for x in logits)
    likeliest = sorted(range(len(logits)), key=lambda i: -logits[i])[:count]
    assert reported.top_token_ids == likeliest
    expected = [logits[i] - log_total for i in likeliest]
    assert reported.top_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.8},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.1, "temperature": 1.4},
        {"top_p": 1e-9},
        {"top_k": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("candidates", [(256, 4096), (4, 9)], ids=["one round", "all rounds"])
def test_an_even_grid_of_draws_has_the_right_shares(options, candidates, monkeypatch):
    """With uniforms on a fine grid, each token's share of draws is its probability."""
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    num_draws = 4000
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(3)) * 1.5
    rows = [
        RowSampling(**{"temperature": 1.0, "uniform": (i + 0.5) / num_draws, **options})
        for i in range(num_draws)
    ]
    counts = [0] * 24
    for result in sample(logits.expand(num_draws, -1), rows):
        counts[result.token_id] += 1
    expected = slow_distribution(logits[0].tolist(), rows[0])
    for token, count in enumerate(counts):
        # A share may be off by one grid point at either end of its interval.
        assert abs(count - num_draws * expected.get(token, 0.0)) <= 2, f"token {token}"


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_a_large_vocabulary_is_cut_where_a_full_sort_would_cut_it(top_p, scale):
    """Flat rows need every round of candidates, peaked ones the first; all in one batch."""
    logits = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits = (logits * scale).float()
    probabilities, order = logits.double().softmax(-1)[0].sort(descending=True)
    size = int((probabilities.cumsum(0) < top_p).sum()) + 1
    kept = torch.zeros(20_000, dtype=torch.float64)
    kept[order[:size]] = probabilities[:size]
    ends = kept.cumsum(0) / kept.sum()
    uniforms = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 2**-53)
    rows = [RowSampling(temperature=1.0, top_p=top_p, uniform=u) for u in uniforms]
    peaked = torch.zeros(1, 20_000)
    peaked[0, 7] = 50.0
    results = sample(torch.cat([logits.expand(len(rows), -1), peaked]), [*rows, rows[0]])
    rank = {token: i for i, token in enumerate(order.tolist())}
    for u, result in zip(uniforms, results, strict=False):
        token = result.token_id
        assert rank[token] <= size - 1 + max(2, size // 1000)
        # In the order of token ids, each token where its share of the kept lies.
        start = float(ends[token - 1]) if token else 0.0
        assert start - 1e-3 <= u <= float(ends[token]) + 1e-3
    assert results[-1].token_id == 7


@pytest.mark.parametrize("top_k", [1, 7, 40, 300])
def test_of_equal_logits_the_first_are_kept(top_k):
    """Whichever of them `topk` prefers."""
    logits = torch.randn(1, 8193, generator=torch.Generator().manual_seed(top_k)).mul(2).round()
    first = logits[0].sort(descending=True, stable=True).indices[:top_k].sort().values
    weights = logits[0].double().exp()[first]
    ends = (weights.cumsum(0) / weights.sum()).tolist()
    uniforms = [(i + 0.5) / 50 for i in range(50)]
    rows = [RowSampling(temperature=1.0, top_k=top_k, uniform=u) for u in uniforms]
    for u, result in zip(uniforms, sample(logits.expand(50, -1), rows), strict=True):
        place = first.tolist().index(result.token_id)
        assert (ends[place - 1] if place else 0.0) - 1e-6 <= u <= ends[place] + 1e-6


def test_a_row_does_not_notice_its_batch_mates():
    rng = random.Random(1)
    logits = torch.randn(12, 5000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    rows = [random_row(rng, 5000) for _ in range(12)]
    together = sample(logits, rows)
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], [row]) == [together[i]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad):
    logits = torch.randn(4, 10)
    logits[1, 3] = bad
    logits[2] = -math.inf
    rows = [RowSampling(temperature=t, num_logprobs=1, uniform=0.5) for t in (0.0, 1.0, 1.0, 1.0)]
    results = sample(logits, rows)
    assert [result.error is None for result in results] == [True, False, False, True]
    assert "logits are not finite" in results[1].error
    assert results[0].token_id == int(logits[0].argmax())
    assert sample(logits[3:], rows[3:]) == results[3:]


def test_single_minus_inf_logits_are_meant():
    logits = torch.zeros(1, 4)
    logits[0, 2:] = -math.inf
    draws = {
        sample(logits, [RowSampling(temperature=1.0, uniform=u / 10)])[0].token_id
        for u in range(10)
    }
    assert draws == {0, 1}


def test_a_mask_that_leaves_nothing_is_an_error_of_that_row():
    logits = torch.randn(2, 3)
    results = sample(logits, [RowSampling(masked_tokens=[0, 1, 2]), RowSampling()])
    assert "leave no token to choose" in results[0].error
    assert results[1].error is None


def test_penalties_that_overflow_are_an_error_of_that_row():
    logits = torch.full((2, 3), 1e30)
    rows = [RowSampling(repetition_penalty=1e-20, seen_tokens=[1], temperature=1.0), RowSampling()]
    results = sample(logits, rows)
    assert "overflow the logits" in results[0].error
    assert results[1].error is None


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 1e30])
def test_no_temperature_overflows(temperature):
    logits = torch.tensor([[1e30, -1e30, 9e29]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        (result,) = sample(logits, [RowSampling(temperature=temperature, uniform=uniform)])
        assert result.error is None
        assert 0 <= result.token_id < 3


def test_logprobs_ignore_temperature_and_penalties():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    row = RowSampling(logit_bias={0: 50.0}, num_logprobs=3)
    (result,) = sample(logits, [row])
    assert result.token_id == 0
    check_logprobs([1.0, 2.0, 3.0], result.logprobs, 0, 3)
    assert result.logprobs.rank == 3


def test_logprobs_of_given_tokens():
    logits = torch.randn(3, 9)
    results = gather_logprobs(logits, torch.tensor([8, 0, 4]), [0, 2, 9])
    for values, result, token, count in zip(
        logits.tolist(), results, [8, 0, 4], [0, 2, 9], strict=True
    ):
        check_logprobs(values, result, token, count)


def test_no_rows():
    assert sample(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e39, math.inf, 1e-60, math.nan])
def test_a_temperature_that_float32_can_not_hold_fails_its_row_alone(temperature, options):
    torch.manual_seed(3)
    logits = torch.randn(4, 50)
    logits[:, 7] = -math.inf
    good = [RowSampling(temperature=0.7, uniform=u, top_k=5) for u in (0.2, 0.9)]
    # Comparisons with NaN are false, so that such a row counts as greedy.
    bad = RowSampling(temperature=temperature, uniform=0.5, masked_tokens=[1], **options)
    results = sample(logits, [good[0], bad, RowSampling(), good[1]])
    if temperature == temperature:
        assert "no distribution to draw from" in results[1].error
    else:
        assert results[1].error is None
    expected = sample(logits[[0, 2, 3]], [good[0], RowSampling(), good[1]])
    assert [results[i] for i in (0, 2, 3)] == expected
    assert all(result.error is None for result in expected)


def test_the_largest_temperature_draws_from_all_tokens_alike():
    logits = torch.randn(1, 10) * 30
    tokens = {
        sample(logits, [RowSampling(temperature=1e9, uniform=(i + 0.5) / 10)])[0].token_id
        for i in range(10)
    }
    assert tokens == set(range(10))


@pytest.mark.parametrize("penalty", [1e-60, 1e39, math.inf, math.nan])
def test_a_penalty_that_float32_can_not_hold_fails_its_row_alone(penalty):
    logits = torch.zeros(2, 6)
    logits[:, 1] = 1.0
    seen = RowSampling(temperature=1, repetition_penalty=penalty, seen_tokens=[0, 1])
    results = sample(logits, [seen, RowSampling()])
    assert "overflow the logits" in results[0].error
    assert (results[1].token_id, results[1].error) == (1, None)
