"""Penalties from a table of counts: kernel, twin, and the sampler's edits from lists."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from flashpage.layers import triton_penalties
from flashpage.layers.penalties import PROMPT, count_tokens, penalize, penalize_torch
from flashpage.layers.sampler import RowSampling, apply_edits
from kernels import DEVICE, ON_GPU, poisoned  # noqa: F401 - a fixture

DTYPES = (torch.float32, torch.float16, torch.bfloat16)[: 3 if ON_GPU else 2]


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def floats(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 2049])
def test_a_table_says_what_lists_say(vocab_size, dtype, poisoned):  # noqa: F811
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(5, vocab_size + 3, generator=generator) * 4).to(DEVICE, dtype)
    logits = logits[:, 2 : 2 + vocab_size]
    logits[0, 0] = -torch.inf
    table = torch.zeros(4, vocab_size, dtype=torch.int32, device=DEVICE)
    owners = [2, 0, 3, 1, 0]
    factors = [1.3, 7.0, 0.6, 1.0, 1.0]
    presences = [0.5, 9.0, -1.0, 0.0, 0.0]
    frequencies = [0.25, 9.0, 0.5, 2.0, 0.0]
    rows = []
    for owner, factor, presence, frequency in zip(
        owners, factors, presences, frequencies, strict=True
    ):
        if owner == 0:
            rows.append(RowSampling())
            continue
        prompt = torch.randint(vocab_size, (3,), generator=generator).tolist()
        counts: dict[int, int] = {}
        for token in torch.randint(vocab_size, (6,), generator=generator).tolist():
            counts[token] = counts.get(token, 0) + 1
        table[owner, prompt] = PROMPT
        for token, count in counts.items():
            table[owner, token] += count
        rows.append(
            RowSampling(
                repetition_penalty=factor,
                presence_penalty=presence,
                frequency_penalty=frequency,
                output_counts=counts,
                seen_tokens=sorted({*prompt, *counts}),
            )
        )
    expected = apply_edits(logits.float(), rows)
    wishes = (ints(owners), floats(factors), floats(presences), floats(frequencies))
    before = table.clone()
    for function in (penalize, penalize_torch, triton_penalties.penalize):
        out = function(logits, table, *wishes)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-6)
        assert torch.equal(out[[1, 4]], logits[[1, 4]].float())
    assert torch.equal(table, before)


def test_what_is_not_finite_stays_so():
    logits = floats([[torch.nan, torch.inf, -torch.inf, 1.0]])
    table = ints([[0] * 4, [1] * 4])
    wishes = (ints([1]), floats([2.0]), floats([1.0]), floats([1.0]))
    for function in (penalize_torch, triton_penalties.penalize):
        out = function(logits, table, *wishes)[0].tolist()
        assert out[0] != out[0]
        assert out[1:] == [torch.inf, -torch.inf, -1.5]


def test_tokens_are_counted_and_taken_back():
    table = torch.zeros(4, 9, dtype=torch.int32, device=DEVICE)
    table[2, 5] = PROMPT
    rows, tokens = ints([2, 0, 3, 1, 2]), torch.tensor([5, 7, -1, 0, 8], device=DEVICE)
    count_tokens(table, rows, tokens)
    expected = torch.zeros_like(table)
    expected[2, 5], expected[1, 0], expected[2, 8] = PROMPT + 1, 1, 1
    assert torch.equal(table, expected)
    count_tokens(table, rows, tokens, times=-1)
    expected[2, 5], expected[1, 0], expected[2, 8] = PROMPT, 0, 0
    assert torch.equal(table, expected)
