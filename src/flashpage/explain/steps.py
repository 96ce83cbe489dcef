"""The steps of attention as data: tiles, sequences of a pack, pages of a decode; prints nothing.

Every m, l, factor and O is what the recorder of `attention/tiled.py` saw, and every reference is
`attention/standard.py`: nothing is computed here a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flashpage.attention.functional import flash_attn_with_kvcache
from flashpage.attention.standard import StandardResult, standard_attention, visible_mask
from flashpage.attention.tiled import Step, fa1_attention, fa2_attention
from flashpage.errors import ArgumentError

ORDERS = {"FA1": fa1_attention, "FA2": fa2_attention}
OWNERS = {"FA1": "workers split the keys of a block", "FA2": "workers own query rows"}

MAX_SEQLEN = 64
MAX_HEAD_DIM = 64
MAX_SEQUENCES = 26
MAX_SEED = 2**63 - 1
FREE_PAGES = 2  # that the pool of a drawn page table has left


def check_range(name: str, value: int, low: int, high: int, why: str = "") -> None:
    """What a person can still follow.

    Raises:
        ArgumentError: a value below `low` or above `high`; `why` says where the bound is from.
    """
    if not low <= value <= high:
        raise ArgumentError(f"{name} must be from {low} to {high}{why}, got {value}")


# ---------------------------------------------------------------------------------------------
# The walk of the tiles
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceProblem:
    """One head of attention, small enough to be followed by eye.

    Attributes:
        title: what it is, in some words.
        q: `[seqlen_q, head_dim]`, any float dtype.
        k, v: `[seqlen_k, head_dim]`; the head_dim of v may differ.
        softmax_scale: what Q K^T is multiplied by.
        block_size_k: keys of a block.
        num_workers: who share the work, at most one a query row.
        causal: aligned to the bottom-right corner.

    Raises:
        ArgumentError: sizes that do not go together, or that nobody could follow.
    """

    title: str
    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    block_size_k: int
    num_workers: int = 1
    causal: bool = False

    def __post_init__(self) -> None:
        check_range("seqlen_q", self.q.shape[0], 1, MAX_SEQLEN)
        check_range("seqlen_k", self.k.shape[0], 1, MAX_SEQLEN)
        check_range("head_dim", self.q.shape[1], 1, MAX_HEAD_DIM)
        check_range("block_size", self.block_size_k, 1, MAX_SEQLEN)
        check_range("workers", self.num_workers, 1, self.q.shape[0], " (the query rows)")
        if self.k.shape[1] != self.q.shape[1] or self.v.shape[0] != self.k.shape[0]:
            raise ArgumentError(
                "k must have the head_dim of q and the seqlen of v, got "
                f"q {tuple(self.q.shape)}, k {tuple(self.k.shape)}, v {tuple(self.v.shape)}"
            )

    @property
    def num_key_blocks(self) -> int:
        return -(-self.k.shape[0] // self.block_size_k)

    def describe(self) -> str:
        """The sizes, in one line."""
        (seqlen_q, head_dim), seqlen_k = self.q.shape, self.k.shape[0]
        parts = [
            _count(seqlen_q, "query row"),
            _count(seqlen_k, "key"),
            f"head_dim {head_dim}",
            f"blocks of {_count(self.block_size_k, 'key')}",
            _count(self.num_workers, "worker"),
            f"scale {self.softmax_scale:.4g}",
        ]
        return ", ".join([*parts, *["causal"] * self.causal])

    def standard(self) -> StandardResult:
        """The same by standard attention, S and P in memory, as one batch of one head."""
        q, k, v = (x[None, :, None] for x in (self.q, self.k, self.v))
        return standard_attention(q, k, v, softmax_scale=self.softmax_scale, causal=self.causal)


def worked_examples() -> tuple[TraceProblem, TraceProblem]:
    """The two examples that the tests of `tiled.py` hold to four decimals."""
    first = TraceProblem(
        title="Example 1: two queries, two keys",
        q=_matrix([1, 0, 2], [0, 1, 1]),
        k=_matrix([2, 1, 0], [1, 1, 2]),
        v=_matrix([1, 0, 1], [0, 2, 1]),
        softmax_scale=1.0,
        block_size_k=1,
    )
    scores = _matrix([1, 3, 0, 2], [2, 4, 1, 0])
    second = TraceProblem(
        title="Example 2: two workers, four key blocks of one key",
        q=torch.eye(2, dtype=torch.float64),  # picks the rows of K^T: they are the scores
        k=scores.T.contiguous(),
        v=_matrix([1, 0], [0, 1], [1, 1], [2, 0]),
        softmax_scale=1.0,
        block_size_k=1,
        num_workers=2,
    )
    return first, second


def random_problem(
    *,
    seqlen_q: int = 4,
    seqlen_k: int | None = None,
    head_dim: int = 2,
    block_size_k: int = 2,
    num_workers: int | None = None,
    causal: bool = False,
    seed: int = 0,
) -> TraceProblem:
    """Inputs drawn with one decimal, so that a person can follow with pencil and paper.

    Args:
        seqlen_k: default seqlen_q.
        num_workers: default 2, or 1 for a single query row.
        seed: the same seed gives the same inputs.

    Raises:
        ArgumentError: a size or seed out of range.
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    check_range("seqlen_q", seqlen_q, 1, MAX_SEQLEN)
    check_range("seqlen_k", seqlen_k, 1, MAX_SEQLEN)
    check_range("head_dim", head_dim, 1, MAX_HEAD_DIM)
    generator = _generator(seed)
    return TraceProblem(
        title=f"Random inputs, seed {seed}",
        q=_draw(generator, seqlen_q, head_dim),
        k=_draw(generator, seqlen_k, head_dim),
        v=_draw(generator, seqlen_k, head_dim),
        softmax_scale=head_dim**-0.5,
        block_size_k=block_size_k,
        num_workers=min(2, seqlen_q) if num_workers is None else num_workers,
        causal=causal,
    )


@dataclass(frozen=True)
class Walk:
    """All steps of one loop order over one problem, in the order in which they were taken.

    Attributes:
        order: a name of `ORDERS`.
        steps: a `Step` of tiled.py for each worker and key block that was visited.
        out: `[seqlen_q, head_dim]`
        num_reductions: how often all workers exchanged partial results.
    """

    order: str
    problem: TraceProblem
    steps: tuple[Step, ...]
    out: Tensor
    num_reductions: int

    @property
    def num_visited(self) -> int:
        """Tiles that some worker computes; a worker without keys in a block has none."""
        return sum(bool(step.keys) for step in self.steps)

    @property
    def num_skipped(self) -> int:
        """Tiles that no worker visits, as the mask hides all of them."""
        return self.problem.num_key_blocks * self.problem.num_workers - len(self.steps)


def walk(problem: TraceProblem, order: str) -> Walk:
    """Run `order` over the problem and keep what its recorder sees.

    Raises:
        ArgumentError: an order that is not in `ORDERS`.
    """
    if order not in ORDERS:
        raise ArgumentError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    steps: list[Step] = []
    result = ORDERS[order](
        problem.q,
        problem.k,
        problem.v,
        block_size_k=problem.block_size_k,
        num_workers=problem.num_workers,
        softmax_scale=problem.softmax_scale,
        causal=problem.causal,
        recorder=steps.append,
    )
    return Walk(order, problem, tuple(steps), result.out, result.num_reductions)


# ---------------------------------------------------------------------------------------------
# cu_seqlens -> sequences
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceMap:
    """Sequences that lie end to end in one tensor `[total_tokens, heads, head_dim]`.

    Attributes:
        cu_seqlens: where each begins, and the total: `[batch + 1]` entries, the first 0.
        causal: whether a token sees only itself and what is before it.
    """

    cu_seqlens: tuple[int, ...]
    causal: bool = False

    @property
    def sequences(self) -> tuple[range, ...]:
        """The tokens of each sequence: `cu_seqlens[i]` up to, without, `cu_seqlens[i + 1]`."""
        return tuple(range(start, stop) for start, stop in pairwise(self.cu_seqlens))

    @property
    def sequence_of_token(self) -> tuple[int, ...]:
        return tuple(i for i, tokens in enumerate(self.sequences) for _ in tokens)

    def visible(self) -> Tensor:
        """Which token sees which, bool `[total_tokens, total_tokens]`: a block a sequence."""
        blocks = (visible_mask(len(t), len(t), causal=self.causal) for t in self.sequences)
        return torch.block_diag(*(block.int() for block in blocks)).bool()


def map_sequences(seqlens: Sequence[int], *, causal: bool = False) -> SequenceMap:
    """The map of sequences of these lengths.

    Args:
        seqlens: of each sequence; 0 is a sequence without tokens.

    Raises:
        ArgumentError: a negative length, too many sequences, no or too many tokens.
    """
    check_range("number of seqlens", len(seqlens), 1, MAX_SEQUENCES)
    for n in seqlens:
        check_range("seqlens", n, 0, MAX_SEQLEN)
    check_range("sum of seqlens", sum(seqlens), 1, MAX_SEQLEN)
    return SequenceMap(tuple(accumulate(seqlens, initial=0)), causal)


# ---------------------------------------------------------------------------------------------
# block_table -> pages
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageVisit:
    """One page that the decode of a request reads.

    Attributes:
        logical_block: the column of the block table.
        page: what stands there: the row of the cache `[num_blocks, block_size, heads, head_dim]`.
        tokens: positions of the request that lie there, slots 0 upwards.
        requests: all whose block tables hold this page, in order.
        step: what tiled attention holds after it, its key block being this page.
    """

    logical_block: int
    page: int
    tokens: range
    requests: tuple[int, ...]
    step: Step


@dataclass(frozen=True)
class PagedDecode:
    """One decode step of some requests over a paged cache of one head.

    Attributes:
        seqlens: tokens in the cache of each request, the new one included.
        block_size: tokens of a page.
        num_blocks: pages of the pool, free ones included.
        num_shared_tokens: how many first tokens all requests have in common.
        block_table: the pages of each request, without padding.
        visits: the walk of each request through its pages.
        tiled_out: `[batch, head_dim]`, O at the end of each walk.
        library_out: `[batch, head_dim]`, of `flash_attn_with_kvcache` reading the pages in place;
            unused slots and free pages hold NaN, so that a read of them would show.
    """

    seqlens: tuple[int, ...]
    block_size: int
    num_blocks: int
    num_shared_tokens: int
    block_table: tuple[tuple[int, ...], ...]
    visits: tuple[tuple[PageVisit, ...], ...]
    tiled_out: Tensor
    library_out: Tensor

    def positions_of_page(self, page: int) -> range:
        """The positions that lie there, the same for all who hold it; none if it is free."""
        visits = (visit for walk in self.visits for visit in walk if visit.page == page)
        return next((visit.tokens for visit in visits), range(0))

    def requests_of_page(self, page: int) -> tuple[int, ...]:
        """Who holds the page; nobody if it is free."""
        return _holders(self.block_table, page)

    def shared_pages(self, first: int, second: int) -> tuple[int, ...]:
        """The pages that two requests read both, in the order of the first one's table."""
        return tuple(p for p in self.block_table[first] if p in self.block_table[second])


def paged_decode(
    seqlens: Sequence[int],
    *,
    block_size: int = 4,
    num_shared_tokens: int = 0,
    head_dim: int = 2,
    seed: int = 0,
) -> PagedDecode:
    """Lay requests into pages drawn at random, and follow the decode of one new token of each.

    Only full pages are shared: a page that is not full is still written, by its one owner.

    Args:
        seqlens: tokens of each request, the new one included.
        num_shared_tokens: of a prefix that all requests have in common.

    Raises:
        ArgumentError: a size out of range.
    """
    check_range("number of seqlens", len(seqlens), 1, MAX_SEQUENCES)
    for n in seqlens:
        check_range("seqlens", n, 1, MAX_SEQLEN)
    check_range("block_size", block_size, 1, MAX_SEQLEN)
    check_range("head_dim", head_dim, 1, MAX_HEAD_DIM)
    why = " (all tokens of the shortest request but its new one)"
    check_range("shared", num_shared_tokens, 0, min(seqlens) - 1, why)
    generator = _generator(seed)
    block_table, num_blocks = _lay_out(
        seqlens, block_size, num_shared_tokens // block_size, generator
    )

    prefix = _draw(generator, 2, num_shared_tokens, head_dim)  # K and V
    queries = _draw(generator, len(seqlens), head_dim)
    k_cache, v_cache = torch.full(
        (2, num_blocks, block_size, 1, head_dim), torch.nan, dtype=torch.float64
    )
    walks = []
    for i, (n, pages) in enumerate(zip(seqlens, block_table, strict=True)):
        own = _draw(generator, 2, n - num_shared_tokens, head_dim)
        k, v = torch.cat((prefix, own), dim=1)
        for start, page in zip(range(0, n, block_size), pages, strict=True):
            end = min(start + block_size, n)
            k_cache[page, : end - start, 0] = k[start:end]
            v_cache[page, : end - start, 0] = v[start:end]
        problem = TraceProblem(
            f"request {i}", queries[i : i + 1], k, v, head_dim**-0.5, block_size_k=block_size
        )
        walks.append(walk(problem, "FA2"))

    library_out = flash_attn_with_kvcache(
        queries[:, None, None],
        k_cache,
        v_cache,
        cache_seqlens=torch.tensor(seqlens, dtype=torch.int32),
        block_table=torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(pages, dtype=torch.int32) for pages in block_table], batch_first=True
        ),
    )
    visits = tuple(
        tuple(
            PageVisit(j, page, step.keys, _holders(block_table, page), step)
            for j, (page, step) in enumerate(zip(pages, each.steps, strict=True))
        )
        for pages, each in zip(block_table, walks, strict=True)
    )
    return PagedDecode(
        tuple(seqlens),
        block_size,
        num_blocks,
        num_shared_tokens,
        block_table,
        visits,
        tiled_out=torch.cat([each.out for each in walks]),
        library_out=library_out[:, 0, 0],
    )


def largest_gap(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference of two results of the same shape."""
    return float((one - other).abs().max())


def _lay_out(
    seqlens: Sequence[int], block_size: int, num_shared_pages: int, generator: torch.Generator
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Page numbers of each request, scattered over a pool, and the size of that pool."""
    own_counts = [-(-n // block_size) - num_shared_pages for n in seqlens]
    num_blocks = num_shared_pages + sum(own_counts) + FREE_PAGES
    pages = iter(torch.randperm(num_blocks, generator=generator).tolist())
    shared = [next(pages) for _ in range(num_shared_pages)]
    table = tuple((*shared, *(next(pages) for _ in range(count))) for count in own_counts)
    return table, num_blocks


def _holders(block_table: Sequence[Sequence[int]], page: int) -> tuple[int, ...]:
    return tuple(i for i, pages in enumerate(block_table) if page in pages)


def _generator(seed: int) -> torch.Generator:
    check_range("seed", seed, 0, MAX_SEED)
    return torch.Generator().manual_seed(seed)


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers with one decimal."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(10).round().div(10)


def _matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"
