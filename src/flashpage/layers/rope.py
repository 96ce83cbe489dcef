"""Rotary position embedding in its published variants; knows positions and heads, no model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles.

    Attributes:
        kind: one of `ROPE_KINDS`.
        theta: base of the geometric series of wavelengths.
        factor: context extension factor; not used by "default".
        original_max_position_embeddings: context length of pre-training; for dynamic, llama3, yarn.
        low_freq_factor, high_freq_factor: borders of llama3's smooth zone, in turns of the context.
        beta_fast, beta_slow: borders of yarn's ramp, in turns of the original context.
        truncate: whether yarn's ramp begins and ends at whole dimensions.
        attention_factor: multiplies cos and sin, and so scales the scores by its square (yarn).
        frequency_factors: divisors of each of the head_dim / 2 frequencies, as some checkpoints
            carry them instead of the parameters that they were computed from.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] | None = None


class Rotation(NamedTuple):
    """The angles of one step, shared by all layers: each `[T, 1, head_dim]`.

    `sin` carries the sign of the half it multiplies: `[-sin, sin]`.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """Angles for positions; Su et al., "RoFormer", 2021, section 3.4, half-split layout.

    They are computed from the positions of the step: a few small operations, and no maximum length
    has to be known. On a GPU each is a launch: there `tabulate` looks them up instead.
    """

    def __init__(
        self, head_dim: int, config: RopeConfig, *, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.config = config
        inv_freq = inverse_frequencies(head_dim, config).to(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._table: Rotation | None = None

    def tabulate(self, num_positions: int, dtype: torch.dtype) -> None:
        """Compute the angles of positions below `num_positions` once; no other may come then."""
        positions = torch.arange(num_positions, device=self.inv_freq.device)
        self._table = self._angles(positions, dtype)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """`[T]` int64 or int32 -> cos and sin in `dtype`, of angles that are float32."""
        if self._table is None or self._table.cos.dtype != dtype:
            return self._angles(positions, dtype)
        return Rotation(*(x.index_select(0, positions) for x in self._table))

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        positions = positions.float().unsqueeze(-1)
        if self.config.kind == "dynamic":
            angles = positions * self._dynamic_inverse_frequencies(positions)
        else:
            angles = positions * self.inv_freq
        # In float32 the vectorised cos may differ in the last bit from that of a tensor's odd
        # end, and a token's angles would depend on its chunk; rounding from float64 hides it.
        angles = angles.double()
        cos = angles.cos() * self.config.attention_factor
        sin = angles.sin() * self.config.attention_factor
        return Rotation(
            torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype),
        )

    def _dynamic_inverse_frequencies(self, positions: Tensor) -> Tensor:
        """`[T, 1]` float32 -> `[T, head_dim / 2]`: the base grows with the length so far.

        "The length so far" is that of the token itself, so that a token's angles do not depend on
        the chunk that it was computed in: what a token-by-token run of the formula gives.
        """
        original = self.config.original_max_position_embeddings
        length = (positions.double() + 1).clamp(min=original)
        growth = self.config.factor * length / original - (self.config.factor - 1)
        theta = self.config.theta * growth ** (self.head_dim / (self.head_dim - 2))
        return (1.0 / theta ** _exponents(self.head_dim).to(positions.device)).float()


def inverse_frequencies(head_dim: int, config: RopeConfig) -> Tensor:
    """Angle per position of each of the head_dim / 2 planes, `[head_dim / 2]` float32."""
    inv_freq = 1.0 / config.theta ** _exponents(head_dim)
    if config.kind == "linear":
        inv_freq = inv_freq / config.factor
    elif config.kind == "llama3":
        inv_freq = _llama3(inv_freq, config)
    elif config.kind == "yarn":
        inv_freq = _yarn(inv_freq, head_dim, config)
    if config.frequency_factors is not None:
        inv_freq = inv_freq / torch.tensor(config.frequency_factors, dtype=torch.float32)
    return inv_freq


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The factor of cos and sin that yarn recommends; Peng et al., "YaRN", 2023, equation 22."""
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Keep short wavelengths, divide long ones by `factor`, interpolate smoothly between."""
    turns = config.original_max_position_embeddings * inv_freq / (2 * math.pi)
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inv_freq / config.factor + smooth * inv_freq


def _yarn(inv_freq: Tensor, head_dim: int, config: RopeConfig) -> Tensor:
    """Blend interpolated and original frequencies along a ramp; "YaRN", section 3.2."""

    def dimension_of(turns: float) -> float:
        wavelength = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / config.factor * ramp + inv_freq * (1 - ramp)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
