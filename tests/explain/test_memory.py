"""Peak memory: quadratic for standard attention, linear for tiled; each in a process of its own."""

from __future__ import annotations

import pytest

from flashpage.errors import ArgumentError, UnsupportedError
from flashpage.explain import memory
from flashpage.explain.memory import MemoryPoint, halvings, measure_memory
from flashpage.explain.roofline import Workload

WORK = Workload((1,), (1,), 1, 1, 32)


def test_standard_holds_s_and_tiled_does_not() -> None:
    said: list[str] = []
    points = measure_memory(WORK, [2048], names=("standard", "tiled"), progress=said.append)
    standard, tiled = (p.peak_bytes for p in points)
    scores = 2048 * 2048 * 4
    assert standard is not None
    assert tiled is not None
    assert 2 * scores < standard < memory.SCORE_COPIES * scores
    # Beyond N x d: tiles, and whatever libraries touch for the first time.
    assert 2048 * 32 * 4 <= tiled < scores / 2
    assert said == ["standard, N = 2048", "tiled, N = 2048"]


def test_what_would_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**20)
    points = measure_memory(WORK, [4096], names=("standard",))
    assert points == [MemoryPoint("standard", 4096, None)]


def test_a_process_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "executable", "/bin/false")
    with pytest.raises(
        UnsupportedError, match="memory of tiled at seqlen 64 .* code 1: no message"
    ):
        measure_memory(WORK, [64], names=("tiled",))


def test_halvings() -> None:
    assert halvings(8192) == [512, 1024, 2048, 4096, 8192]
    assert halvings(3) == [1, 3]


@pytest.mark.parametrize(
    "work",
    [
        Workload((4,), (4,), causal=True),
        Workload((4, 5), (4, 5)),
        Workload((1,), (5,), block_size=4),
        Workload((1,), (5,)),
    ],
    ids=lambda work: work.describe(),
)
def test_refused(work: Workload) -> None:
    with pytest.raises(ArgumentError, match="memory must be of dense attention without mask"):
        measure_memory(work, [4])
    with pytest.raises(ArgumentError, match="names must be from .*got 'magic'"):
        measure_memory(WORK, [4], names=("magic",))
