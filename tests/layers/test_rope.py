"""Rotary embedding: the rotation by its definition, each kind's frequencies by its formula."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from flashpage.layers.fused import rope
from flashpage.layers.rope import (
    RopeConfig,
    RotaryEmbedding,
    inverse_frequencies,
    yarn_attention_factor,
)

LLAMA3 = RopeConfig("llama3", 10000.0, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeConfig("yarn", 10000.0, 4.0, 64, attention_factor=yarn_attention_factor(4.0))


def test_rotates_each_plane_by_its_angle() -> None:
    """Dimensions i and i + head_dim / 2 are the parts of one complex number."""
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 1, 1000])
    rotated = rope(x, *RotaryEmbedding(8, RopeConfig())(positions, torch.float32))
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            for i in range(4):
                number = complex(x[t, head, i], x[t, head, i + 4])
                turned = number * cmath.exp(1j * position * 10000.0 ** (-2 * i / 8))
                assert abs(rotated[t, head, i] - turned.real) < 1e-3
                assert abs(rotated[t, head, i + 4] - turned.imag) < 1e-3


def test_input_is_not_written_and_may_be_strided() -> None:
    fused = torch.randn(5, 6, 16)
    before = fused.clone()
    rotation = RotaryEmbedding(16, RopeConfig())(torch.arange(5), torch.float32)
    strided = rope(fused[:, 1:4], *rotation)
    assert torch.equal(strided, rope(fused[:, 1:4].contiguous(), *rotation))
    assert torch.equal(fused, before)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(1, 1, 32).double(), torch.randn(1, 1, 32).double()
    rotary = RotaryEmbedding(32, RopeConfig())

    def score(i: int, j: int) -> float:
        at_i, at_j = (
            rotary(torch.tensor([i]), torch.float64),
            rotary(torch.tensor([j]), torch.float64),
        )
        return (rope(q, *at_i) * rope(k, *at_j)).sum().item()

    assert score(3, 1) == pytest.approx(score(102, 100), abs=1e-4)


def test_linear_divides_positions() -> None:
    plain = RotaryEmbedding(16, RopeConfig())(torch.tensor([5]), torch.float32)
    scaled = RotaryEmbedding(16, RopeConfig("linear", factor=4.0))(
        torch.tensor([20]), torch.float32
    )
    torch.testing.assert_close(plain.cos, scaled.cos)
    torch.testing.assert_close(plain.sin, scaled.sin)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = (inverse_frequencies(64, c) for c in (RopeConfig(), LLAMA3))
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        turns = 64 * before / (2 * math.pi)
        if turns >= 4:
            assert after == pytest.approx(before, rel=1e-6)
        elif turns <= 1:
            assert after == pytest.approx(before / 8, rel=1e-6)
        else:
            assert before / 8 < after < before


def test_yarn_keeps_the_first_and_stretches_the_last() -> None:
    plain, scaled = (inverse_frequencies(64, c) for c in (RopeConfig(), YARN))
    assert scaled[0] == plain[0]
    assert scaled[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-6)
    assert (scaled[:-1] > scaled[1:]).all()
    rotation = RotaryEmbedding(64, YARN)(torch.tensor([0]), torch.float32)
    assert rotation.cos.unique().item() == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factor() -> None:
    assert yarn_attention_factor(1.0) == 1.0
    assert yarn_attention_factor(40.0, 1.0, 1.0) == 1.0
    assert yarn_attention_factor(40.0, 0.707, 1.0) == pytest.approx(
        (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    )


def test_frequency_factors_divide() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    plain = inverse_frequencies(8, RopeConfig())
    divided = inverse_frequencies(8, RopeConfig(frequency_factors=factors))
    torch.testing.assert_close(divided * torch.tensor(factors), plain)


def test_dynamic_changes_only_beyond_the_original_context() -> None:
    config = RopeConfig("dynamic", 10000.0, 2.0, 32)
    positions = torch.tensor([0, 31, 32, 63])
    dynamic = RotaryEmbedding(16, config)(positions, torch.float32)
    plain = RotaryEmbedding(16, RopeConfig())(positions, torch.float32)
    torch.testing.assert_close(dynamic.cos[:2], plain.cos[:2])
    assert not torch.allclose(dynamic.cos[2:], plain.cos[2:])
    theta = 10000.0 * (2.0 * 64 / 32 - 1) ** (16 / 14)
    grown = RotaryEmbedding(16, RopeConfig(theta=theta))(positions[3:], torch.float32)
    torch.testing.assert_close(dynamic.cos[3:], grown.cos, atol=1e-4, rtol=1e-4)


KINDS = pytest.mark.parametrize(
    "config", [RopeConfig(), RopeConfig("dynamic", 10000.0, 2.0, 8), LLAMA3, YARN]
)


@KINDS
def test_angles_do_not_depend_on_the_chunk(config: RopeConfig) -> None:
    rotary = RotaryEmbedding(16, config)
    whole = rotary(torch.arange(40), torch.float32)
    for start, end in ((0, 7), (7, 8), (8, 40)):
        part = rotary(torch.arange(start, end), torch.float32)
        assert torch.equal(part.cos, whole.cos[start:end])
        assert torch.equal(part.sin, whole.sin[start:end])


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_gives_the_same_bits(config: RopeConfig, dtype: torch.dtype) -> None:
    computed, looked_up = RotaryEmbedding(32, config), RotaryEmbedding(32, config)
    looked_up.tabulate(300, dtype)
    positions = torch.randint(0, 300, (77,))
    for index in (positions, positions.int()):
        for a, b in zip(computed(positions, dtype), looked_up(index, dtype), strict=True):
            assert torch.equal(a, b)
    # Of another dtype there is no table.
    assert looked_up(positions, torch.float16).cos.dtype == torch.float16
