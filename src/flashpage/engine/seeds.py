"""Random numbers that depend on a seed and an index alone, one by one and all at once."""

from __future__ import annotations

from typing import Any

import numpy as np

MASK_64 = (1 << 64) - 1


def mix_seed(seed: int, index: int) -> int:
    """A 64-bit number that looks random, from two numbers (splitmix64's output function)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def mix_seeds(seeds: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """`mix_seed` of every pair of two arrays of uint64, whose products overflow silently."""
    z = seeds + (indexes + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(mixed: Any) -> Any:
    """A float64 in [0, 1) of a 64-bit number, or of each of an array: its first 53 bits."""
    return (mixed >> 11) / (1 << 53)
