"""Runs attention on this machine: standard, tiled, torch's and flashpage's, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from flashpage.attention.functional import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flashpage.attention.standard import standard_attention
from flashpage.attention.tiled import fa2_attention
from flashpage.errors import ArgumentError
from flashpage.explain.hardware import DTYPES, Device, free_bytes, median_seconds
from flashpage.explain.roofline import Cost, Workload, bound, standard_cost, tiled_cost

IMPLEMENTATIONS = ("standard", "tiled", "torch SDPA", "flashpage")

# A tile of `tiled` is large, because each costs a dozen calls of torch: 512 KiB of scores in fp32,
# which a core's cache still holds.
TILE_QUERIES = 256
TILE_KEYS = 512

# How many matrices of the size of S are alive in standard attention at its peak, at most.
SCORE_COPIES = 8
SCORE_COPIES_BACKWARD = 16
MAX_STANDARD_SECONDS = 1.0


@dataclass(frozen=True)
class Measurement:
    """One implementation on one workload: what it took, or why it was not run."""

    name: str
    cost: Cost
    seconds: float | None
    why_not: str = ""

    @property
    def flops_per_second(self) -> float:
        """of the algorithm's own FLOPs"""
        assert self.seconds is not None, self.why_not
        return self.cost.flops / self.seconds


@dataclass(frozen=True)
class Inputs:
    """Random tensors of a workload.

    Attributes:
        q: `[total_q, num_q_heads, head_dim]`
        k, v: `[total_k, num_kv_heads, head_dim]`; paged
            `[num_blocks, block_size, num_kv_heads, head_dim]`
        block_table: int32 `[batch, max_blocks]`, paged only
    """

    work: Workload
    q: Tensor
    k: Tensor
    v: Tensor
    block_table: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.q.device

    def dense(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """q, k, v as `[batch, seqlen, heads, head_dim]`: one batch if all lengths agree, else one
        sequence each. Pages are gathered anew by each call, all else is a view."""
        work = self.work
        if work.is_uniform:
            batch, seqlen_k = len(work.seqlens_k), work.seqlens_k[0]
            q = self.q.unflatten(0, (batch, work.seqlens_q[0]))
            if self.block_table is None:
                return [(q, *(x.unflatten(0, (batch, seqlen_k)) for x in (self.k, self.v)))]
            pages = (x[self.block_table].flatten(1, 2)[:, :seqlen_k] for x in (self.k, self.v))
            return [(q, *pages)]
        queries = self.q.split(work.seqlens_q)
        if self.block_table is None:
            keys, values = (x.split(work.seqlens_k) for x in (self.k, self.v))
        else:
            keys, values = (
                [
                    x[row].flatten(0, 1)[:n]
                    for row, n in zip(self.block_table, work.seqlens_k, strict=True)
                ]
                for x in (self.k, self.v)
            )
        parts = zip(queries, keys, values, strict=True)
        return [(q[None], k[None], v[None]) for q, k, v in parts]


def make_inputs(work: Workload, device: torch.device, *, grad: bool = False) -> Inputs:
    """Standard normal q, k and v; pages lie scattered, in an order drawn at random."""

    def randn(*shape: int) -> Tensor:
        x = torch.randn(*shape, work.num_kv_heads, work.head_dim, device=device)
        return x.to(DTYPES[work.dtype])

    q = torch.randn(sum(work.seqlens_q), work.num_q_heads, work.head_dim, device=device)
    q = q.to(DTYPES[work.dtype])
    block_table = None
    if work.block_size is None:
        total = sum(work.seqlens_k)
        k, v = randn(total), randn(total)
    else:
        counts = [-(-n // work.block_size) for n in work.seqlens_k]
        order = torch.randperm(sum(counts), dtype=torch.int32, device=device)
        k, v = (randn(sum(counts), work.block_size) for _ in range(2))
        block_table = torch.nn.utils.rnn.pad_sequence(order.split(counts), batch_first=True)
    for x in (q, k, v):
        x.requires_grad_(grad)
    return Inputs(work, q, k, v, block_table)


# ---------------------------------------------------------------------------------------------
# The four implementations: each returns a call of no arguments that gives `[total_q, heads, dim]`
# ---------------------------------------------------------------------------------------------


def runner(name: str, inputs: Inputs) -> Callable[[], Tensor]:
    """What runs implementation `name` on these inputs, host-side preparation done.

    Raises:
        ArgumentError: a name that is none of `IMPLEMENTATIONS`.
    """
    if name == "flashpage":
        return _flashpage_runner(inputs)
    each = {"standard": _standard, "tiled": _tiled, "torch SDPA": _sdpa}.get(name)
    if each is None:
        raise ArgumentError(f"name must be one of {IMPLEMENTATIONS}, got {name!r}")
    causal = inputs.work.causal
    return lambda: torch.cat([each(*part, causal).flatten(0, 1) for part in inputs.dense()])


def _standard(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return standard_attention(q, k, v, causal=causal).out


def _tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    group = q.shape[2] // k.shape[2]
    out = torch.empty_like(q)
    num_workers = -(-q.shape[1] // TILE_QUERIES)
    with q.device:  # fa2_attention makes its tensors on the default device
        for batch in range(q.shape[0]):
            for head in range(q.shape[2]):
                keys, values = (x[batch, :, head // group] for x in (k, v))
                out[batch, :, head] = fa2_attention(
                    q[batch, :, head],
                    keys,
                    values,
                    block_size_k=TILE_KEYS,
                    num_workers=num_workers,
                    causal=causal,
                ).out
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    mask = None
    if causal and seqlen_q != seqlen_k and seqlen_q > 1:  # torch's flag means the top-left corner
        mask = causal_lower_right(seqlen_q, seqlen_k)
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=mask,
        is_causal=causal and seqlen_q == seqlen_k and seqlen_q > 1,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _flashpage_runner(inputs: Inputs) -> Callable[[], Tensor]:
    work, q, k, v = inputs.work, inputs.q, inputs.k, inputs.v
    if work.layout == "dense":
        ((q, k, v),) = inputs.dense()
        return lambda: flash_attn_func(q, k, v, causal=work.causal).flatten(0, 1)
    if inputs.block_table is not None and len(set(work.seqlens_q)) == 1:
        new = q.unflatten(0, (len(work.seqlens_q), work.seqlens_q[0]))
        lengths = torch.tensor(work.seqlens_k, dtype=torch.int32, device=q.device)
        return lambda: flash_attn_with_kvcache(
            new, k, v, cache_seqlens=lengths, block_table=inputs.block_table, causal=work.causal
        ).flatten(0, 1)
    cu_seqlens = [_cumulative(lengths, q.device) for lengths in (work.seqlens_q, work.seqlens_k)]
    return lambda: flash_attn_varlen_func(
        q,
        k,
        v,
        *cu_seqlens,
        max(work.seqlens_q),
        max(work.seqlens_k),
        causal=work.causal,
        block_table=inputs.block_table,
    )


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 `[batch + 1]`, from 0"""
    ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return F.pad(ends, (1, 0)).to(device)


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


def measure(
    work: Workload, device: torch.device, *, backward: bool = False, seconds: float = 0.5
) -> list[Measurement]:
    """Time every implementation on the same random inputs.

    Args:
        backward: time the backward pass alone.
        seconds: for how long to time each, about; a call that takes longer is timed three times.

    Returns:
        one entry for each of `IMPLEMENTATIONS`, in that order.
    """
    inputs = make_inputs(work, device, grad=backward)
    results = []
    for name in IMPLEMENTATIONS:
        cost = cost_of(name, work, backward=backward)
        why_not = _why_not(name, backward)
        took = None
        if not why_not:
            call = runner(name, inputs)
            with torch.set_grad_enabled(backward):
                timed = _backward_of(call, inputs) if backward else call
                took = median_seconds(timed, device, seconds=seconds)
        results.append(Measurement(name, cost, took, why_not))
    return results


def cost_of(name: str, work: Workload, *, backward: bool = False) -> Cost:
    """The FLOPs and bytes that an implementation is judged by."""
    if name == "standard":
        return standard_cost(work, backward=backward)
    reads_pages = name == "flashpage" or work.block_size is None
    return tiled_cost(work, backward=backward, gathered=not reads_pages)


def fitting(
    work: Workload, machine: Device, device: torch.device, *, backward: bool = False
) -> Workload:
    """The workload, with all lengths halved until standard attention fits this machine.

    It fits if it takes half of the free memory and, by its roofline, a second at most.

    Raises:
        ArgumentError: even one token of each sequence does not fit.
    """
    copies = SCORE_COPIES_BACKWARD if backward else SCORE_COPIES
    limit = free_bytes(device) // 2
    while True:
        # Inputs, what is gathered from pages or expanded for GQA, gradients: a few copies of each.
        needed = copies * work.score_bytes + 4 * (work.q_bytes + work.k_bytes * _group(work))
        took = bound(standard_cost(work, backward=backward), machine, work.dtype).seconds
        if needed <= limit and took <= MAX_STANDARD_SECONDS:
            return work
        if max(work.seqlens_k) == 1:
            raise ArgumentError(
                f"batch and heads must leave standard attention {limit} bytes and "
                f"{MAX_STANDARD_SECONDS} s at seqlen 1 already, got {work.describe()}: "
                f"{needed} bytes, {took:.1f} s"
            )
        work = replace(
            work,
            seqlens_q=tuple(max(1, n // 2) for n in work.seqlens_q),
            seqlens_k=tuple(max(1, n // 2) for n in work.seqlens_k),
        )


def _group(work: Workload) -> int:
    return work.num_q_heads // work.num_kv_heads


def _why_not(name: str, backward: bool) -> str:
    if name == "tiled" and backward:
        return "attention/tiled.py is the forward alone"
    return ""


def _backward_of(call: Callable[[], Tensor], inputs: Inputs) -> Callable[[], object]:
    out = call()
    dout = torch.randn_like(out)
    leaves = (inputs.q, inputs.k, inputs.v)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
