"""FLOPs and bytes of attention, standard and tiled, and the time no device can beat; no tensors.

The model: a device needs at least `FLOPs / peak` and at least `bytes / bandwidth` seconds
(Williams, Waterman and Patterson 2009). FLOPs are those of the matrix products, a multiply-add
being two. Bytes are those that must cross the device's memory when every product and every softmax
is one pass over its inputs and outputs:

- standard: S and P live in memory, written once and read once each; the masked half of a causal
  S is computed like the rest. The backward keeps P and has dP and dS besides.
- tiled: S and P never leave the chip; Q, K, V and O cross once, and what the mask hides is not
  computed. Every tile of queries walks all its keys: whether those re-reads cross memory too
  depends on the L2 cache, so there is one cost with them absorbed and one without.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from flashpage.attention.problem import MAX_WINDOW, check_heads
from flashpage.errors import ArgumentError
from flashpage.explain.hardware import DTYPES, Device, resolve_dtype

TILE_ROWS = 128
"""rows of a tile: queries in the forward, keys in the backward"""
ACCUMULATOR_BYTES = 4
"""LSE, delta and running gradients are float32"""
PAGE_ID_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """One attention call: sequence i has `seqlens_q[i]` queries over `seqlens_k[i]` keys.

    Attributes:
        seqlens_q, seqlens_k: one entry for each sequence, 1 or more.
        num_q_heads, num_kv_heads, head_dim: as in `flash_attn_func`.
        dtype: of every matrix, S and P included: fp32, bf16 or fp16.
        causal: aligned to the bottom-right corner.
        block_size: tokens of a page if K and V are in pages, else None.
    """

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    num_q_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 128
    dtype: str = "fp32"
    causal: bool = False
    block_size: int | None = None

    def __post_init__(self) -> None:
        if not self.seqlens_q or len(self.seqlens_q) != len(self.seqlens_k):
            raise ArgumentError(
                "seqlens_q and seqlens_k must have one entry for each of the same sequences, got "
                f"{len(self.seqlens_q)} and {len(self.seqlens_k)}"
            )
        for seqlen in (*self.seqlens_q, *self.seqlens_k):
            check_size("seqlen", seqlen)
        check_size("num_q_heads", self.num_q_heads)
        check_size("num_kv_heads", self.num_kv_heads)
        check_heads(self.num_q_heads, self.num_kv_heads, self.head_dim)
        if self.block_size is not None:
            check_size("block_size", self.block_size)
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))

    @property
    def layout(self) -> str:
        """dense, varlen or paged"""
        if self.block_size is not None:
            return "paged"
        return "dense" if self.is_uniform else "varlen"

    @property
    def is_uniform(self) -> bool:
        """all sequences have the same lengths"""
        return len(set(zip(self.seqlens_q, self.seqlens_k, strict=True))) == 1

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def q_bytes(self) -> int:
        """size of Q, and of O, dO and dQ"""
        return sum(self.seqlens_q) * self.num_q_heads * self.head_dim * self.itemsize

    @property
    def k_bytes(self) -> int:
        """size of K, and of V, dK and dV"""
        return sum(self.seqlens_k) * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def num_scores(self) -> int:
        """entries of S over all sequences and heads, masked ones included"""
        return self.num_q_heads * sum(
            q * k for q, k in zip(self.seqlens_q, self.seqlens_k, strict=True)
        )

    @property
    def score_bytes(self) -> int:
        """size of S, and of P, dS and dP"""
        return self.num_scores * self.itemsize

    @property
    def num_visible(self) -> int:
        """entries of S that the mask leaves"""
        if not self.causal:
            return self.num_scores
        return self.num_q_heads * sum(
            _sum_clipped(range(k - q + 1, k + 1), k)
            for q, k in zip(self.seqlens_q, self.seqlens_k, strict=True)
        )

    @property
    def keys_walked(self) -> int:
        """keys that tiles of `TILE_ROWS` queries walk, over all sequences and query heads"""
        total = 0
        for q, k in zip(self.seqlens_q, self.seqlens_k, strict=True):
            if self.causal:  # a tile that ends at row e sees e + k - q keys, the last one all
                total += k + _sum_clipped(range(TILE_ROWS + k - q, k, TILE_ROWS), k)
            else:
                total += k * _num_tiles(q)
        return total * self.num_q_heads

    @property
    def queries_walked(self) -> int:
        """queries that tiles of `TILE_ROWS` keys walk, over all sequences and query heads"""
        total = 0
        for q, k in zip(self.seqlens_q, self.seqlens_k, strict=True):
            if self.causal:  # a tile that begins at key s is seen by the last k - s rows
                last = k - TILE_ROWS * (_num_tiles(k) - 1)
                total += _sum_clipped(range(last, k + 1, TILE_ROWS), q)
            else:
                total += q * _num_tiles(k)
        return total * self.num_q_heads

    def describe(self) -> str:
        """One line for tables and pictures."""
        n, longest = len(self.seqlens_k), max(self.seqlens_k)
        parts = [self.dtype, f"head_dim {self.head_dim}"]
        if self.num_q_heads == self.num_kv_heads:
            parts.append(f"{self.num_q_heads} head{'s' * (self.num_q_heads > 1)}")
        else:
            parts.append(f"{self.num_q_heads} query heads on {self.num_kv_heads} kv heads")
        if self.is_uniform:
            size = f"N = {longest}" if self.seqlens_q == self.seqlens_k else f"context {longest}"
            parts.insert(0, size if n == 1 else f"{n} x {size}")
        else:
            parts.insert(0, f"{n} sequences, {sum(self.seqlens_k)} keys, longest {longest}")
        if self.block_size is not None:
            parts.insert(0, f"decode from pages of {self.block_size}")
        return ", ".join([*parts, *["causal"] * self.causal])


@dataclass(frozen=True)
class Transfer:
    """What one tensor costs memory: its size, and the bytes of it read and written."""

    tensor: str
    size: int
    read: int = 0
    written: int = 0


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one algorithm on one workload."""

    algorithm: str
    flops: int
    transfers: tuple[Transfer, ...]

    @property
    def bytes(self) -> int:
        return sum(t.read + t.written for t in self.transfers)

    @property
    def intensity(self) -> float:
        """FLOP per byte"""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Bound:
    """The least time a device needs for a cost, and what that time makes of its peak."""

    seconds: float
    is_compute_bound: bool
    flops_per_second: float
    utilisation: float
    """FLOP/s over the device's peak, 0 to 1"""


def bound(cost: Cost, device: Device, dtype: str) -> Bound:
    """The roofline: the larger of the time for the FLOPs and the time for the bytes.

    Raises:
        ArgumentError: the device has no peak for that dtype.
    """
    peak = device.peak_flops(dtype)
    compute, memory = cost.flops / peak, cost.bytes / device.bytes_per_second
    seconds = max(compute, memory)
    return Bound(seconds, compute >= memory, cost.flops / seconds, compute / seconds)


# ---------------------------------------------------------------------------------------------
# Costs
# ---------------------------------------------------------------------------------------------


def standard_cost(work: Workload, *, backward: bool = False) -> Cost:
    """Standard attention; over pages it first gathers K and V into tensors of their own.

    Args:
        backward: the backward pass alone, P kept from the forward.
    """
    q, k, s = work.q_bytes, work.k_bytes, work.score_bytes
    product = 2 * work.num_scores * work.head_dim
    if backward:
        _refuse_pages(work)
        return Cost(
            "standard",
            4 * product,  # dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q
            (
                Transfer("dO", q, read=2 * q),
                *(Transfer(name, size, read=size) for name, size in (("Q", q), ("K", k), ("V", k))),
                Transfer("P", s, read=2 * s),  # for dV and for dS
                Transfer("dP", s, read=s, written=s),
                Transfer("dS", s, read=2 * s, written=s),  # for dQ and for dK
                *_gradients(q, k),
            ),
        )
    return Cost(
        "standard",
        2 * product,
        (
            Transfer("Q", q, read=q),
            *_keys_and_values(work, gathered=work.block_size is not None),
            Transfer("S", s, read=s, written=s),
            Transfer("P", s, read=s, written=s),
            Transfer("O", q, written=q),
        ),
    )


def tiled_cost(
    work: Workload, *, backward: bool = False, absorbed: bool = True, gathered: bool = False
) -> Cost:
    """Tiled attention. What training keeps besides O, the LSE, is counted in the backward.

    Args:
        backward: the backward pass alone, with S recomputed: five products where standard has four.
        absorbed: re-reads hit the cache, every byte crosses once. If not, each tile of queries of
            each query head reads its keys and values from memory (backward: each tile of keys its
            queries, and dQ is summed up there).
        gathered: K and V are in pages and this algorithm must gather them first.
    """
    name = "tiled" if absorbed else "tiled, no cache"
    q, k = work.q_bytes, work.k_bytes
    product = 2 * work.num_visible * work.head_dim
    row = work.head_dim * work.itemsize
    if backward:
        _refuse_pages(work)
        rows = sum(work.seqlens_q) * work.num_q_heads
        statistic = rows * ACCUMULATOR_BYTES
        walked = rows if absorbed else work.queries_walked
        statistic_read = walked * ACCUMULATOR_BYTES
        transfers = [
            Transfer("Q", q, read=walked * row),
            Transfer("K", k, read=k),
            Transfer("V", k, read=k),
            Transfer("O", q, read=q),  # for delta = rowsum(dO O), with dO
            Transfer("dO", q, read=q + walked * row),
            Transfer("LSE", statistic, read=statistic_read),
            Transfer("delta", statistic, read=statistic_read, written=statistic),
            *_gradients(q, k),
        ]
        if not absorbed:
            running = walked * work.head_dim * ACCUMULATOR_BYTES
            size = rows * work.head_dim * ACCUMULATOR_BYTES
            transfers.append(Transfer("dQ sum", size, read=running, written=running))
        return Cost(name, 5 * product, tuple(transfers))
    if absorbed:
        keys = _keys_and_values(work, gathered=gathered)
    else:
        keys = [Transfer(tensor, k, read=work.keys_walked * row) for tensor in ("K", "V")]
    if work.block_size is not None:
        table = sum(-(-n // work.block_size) for n in work.seqlens_k) * PAGE_ID_BYTES
        keys = [*keys, Transfer("block_table", table, read=table)]
    transfers = [Transfer("Q", q, read=q), *keys, Transfer("O", q, written=q)]
    return Cost(name, 2 * product, tuple(transfers))


def costs(work: Workload, *, backward: bool = False) -> list[Cost]:
    """Standard, tiled, and tiled where no cache absorbs the re-reads."""
    return [
        standard_cost(work, backward=backward),
        tiled_cost(work, backward=backward),
        tiled_cost(work, backward=backward, absorbed=False),
    ]


def _keys_and_values(work: Workload, *, gathered: bool) -> list[Transfer]:
    """K and V read once; gathering reads the pages and writes what is then read."""
    k = work.k_bytes
    read, written = (2 * k, k) if gathered else (k, 0)
    return [Transfer(name, k, read=read, written=written) for name in ("K", "V")]


def _gradients(q: int, k: int) -> list[Transfer]:
    sizes = (("dQ", q), ("dK", k), ("dV", k))
    return [Transfer(name, size, written=size) for name, size in sizes]


def _refuse_pages(work: Workload) -> None:
    if work.block_size is not None:
        raise ArgumentError(
            "backward must be False over pages (attention over pages has no backward), "
            f"got True with block_size {work.block_size}"
        )


# ---------------------------------------------------------------------------------------------
# Counting
# ---------------------------------------------------------------------------------------------


def check_size(name: str, value: int) -> None:
    """A number of something: 1 up to what an int32 holds."""
    if not 1 <= value <= MAX_WINDOW:
        raise ArgumentError(f"{name} must be from 1 to {MAX_WINDOW}, got {value}")


def _num_tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS)


def _sum_clipped(values: range, high: int) -> int:
    """Sum of ascending values, each clipped to 0 ... high, without visiting them."""
    inside = values[bisect_left(values, 0) : bisect_right(values, high)]
    num_above = len(values) - bisect_right(values, high)
    middle = (inside[0] + inside[-1]) * len(inside) // 2 if inside else 0
    return middle + num_above * high
