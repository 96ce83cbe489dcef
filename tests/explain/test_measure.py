"""All implementations compute the same attention, and are measured by the same rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashpage.attention.standard import standard_attention
from flashpage.errors import ArgumentError
from flashpage.explain import measure as module
from flashpage.explain.hardware import Device, this_torch_device
from flashpage.explain.measure import (
    IMPLEMENTATIONS,
    fitting,
    make_inputs,
    measure,
    runner,
)
from flashpage.explain.roofline import Workload, standard_cost, tiled_cost

DEVICE = this_torch_device()
MACHINE = Device("m", "M", fp32=0.1, bf16=None, fp16=None, bandwidth=20, l2=None, source="test")

WORKLOADS = {
    "dense": Workload((33, 33), (33, 33), 4, 2, 16),
    "one token": Workload((1,), (1,), 1, 1, 8),
    "several tiles": Workload((600,), (600,), 1, 1, 16),
    "causal": Workload((20, 20), (20, 20), 4, 1, 16, causal=True),
    "causal, more keys": Workload((5,), (20,), 2, 2, 16, causal=True),
    "varlen": Workload((7, 30, 1), (7, 30, 1), 4, 2, 16),
    "varlen, causal": Workload((7, 30, 1), (7, 30, 1), 4, 2, 16, causal=True),
    "decode": Workload((1, 1), (37, 37), 4, 2, 16, block_size=8),
    "decode, causal": Workload((1, 1), (37, 37), 4, 2, 16, causal=True, block_size=8),
    "decode, lengths": Workload((1, 1, 1), (5, 37, 8), 4, 2, 16, block_size=8),
    "pages, new tokens": Workload((2, 9), (5, 37), 4, 2, 16, block_size=8),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_all_agree(name: str) -> None:
    work = WORKLOADS[name]
    inputs = make_inputs(work, DEVICE)
    expected = torch.cat(
        [standard_attention(*part, causal=work.causal).out.flatten(0, 1) for part in inputs.dense()]
    )
    assert expected.shape == (sum(work.seqlens_q), work.num_q_heads, work.head_dim)
    for implementation in IMPLEMENTATIONS:
        out = runner(implementation, inputs)()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_pages_lie_scattered() -> None:
    inputs = make_inputs(WORKLOADS["decode, lengths"], DEVICE)
    assert inputs.k.shape == (1 + 5 + 1, 8, 2, 16)
    assert inputs.block_table is not None
    assert inputs.block_table.shape == (3, 5)
    used = [int(inputs.block_table[i, j]) for i, n in enumerate((1, 5, 1)) for j in range(n)]
    assert sorted(used) == list(range(7))


@pytest.mark.parametrize("backward", [False, True])
def test_measure(backward: bool) -> None:
    work = WORKLOADS["dense"]
    results = measure(work, DEVICE, backward=backward, seconds=0.01)
    assert tuple(m.name for m in results) == IMPLEMENTATIONS
    for m in results:
        if backward and m.name == "tiled":
            assert m.seconds is None
            assert "forward alone" in m.why_not
        else:
            assert 0 < m.seconds < 10
            assert m.flops_per_second == m.cost.flops / m.seconds
    assert results[0].cost == standard_cost(work, backward=backward)
    assert results[3].cost == tiled_cost(work, backward=backward)


def test_gathering_is_counted() -> None:
    costs = {m.name: m.cost for m in measure(WORKLOADS["decode"], DEVICE, seconds=0.01)}
    assert costs["torch SDPA"].bytes > 2 * costs["flashpage"].bytes


def test_unknown_implementation() -> None:
    with pytest.raises(ArgumentError, match="name must be one of .*got 'magic'"):
        runner("magic", make_inputs(WORKLOADS["one token"], DEVICE))


class TestFitting:
    def test_what_fits_stays(self) -> None:
        work = WORKLOADS["varlen"]
        assert fitting(work, MACHINE, DEVICE) is work

    def test_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "free_bytes", lambda device: 2**29)
        work = Workload((8192, 4096), (8192, 4096), 4, 1)
        fits = fitting(work, MACHINE, DEVICE)
        assert fits == replace(work, seqlens_q=(1024, 512), seqlens_k=(1024, 512))
        assert max(fitting(work, MACHINE, DEVICE, backward=True).seqlens_q) == 512

    def test_time(self) -> None:
        slow = replace(MACHINE, fp32=1e-4)
        fits = fitting(Workload((4096,), (4096,)), slow, DEVICE)
        assert fits.seqlens_k == (256,)

    def test_never(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "free_bytes", lambda device: 2**10)
        with pytest.raises(ArgumentError, match="batch and heads must leave .* 64 x N = 1"):
            fitting(Workload((64,) * 64, (64,) * 64, 8, 8), MACHINE, DEVICE)
