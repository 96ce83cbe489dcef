"""The producer warp of the forward for Hopper: finds tiles, copies Q, K and V to shared memory.

RAGGED descriptors address rows of one sequence, or of one page, in flat memory: two leading
dimensions whose strides add up to 2^64 move the rows so that they end with the last row of the
dimension. What lies beyond them is read as zeros and never written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashpage.attention.hopper.forward_work import find_tile, publish, tile_blocks
from flashpage.attention.hopper.instructions import tell

RAGGED_ROWS = gl.constexpr(2**30)
"""Length of the row dimension of a ragged descriptor."""


@gluon.jit
def fetch(desc, entry, first, length, row, head, barrier, target, RAGGED: gl.constexpr):
    """Copy the rows from `row` on of a sequence that has `length` rows from `first` on."""
    if RAGGED:
        tma.async_copy_global_to_shared(
            desc,
            [RAGGED_ROWS, first + length, RAGGED_ROWS - length + row, head, 0],
            barrier,
            target,
        )
    else:
        tma.async_copy_global_to_shared(desc, [entry, row, head, 0], barrier, target)


@gluon.jit
def page_ids(
    table_ptr, n, len_k, num_pages,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, PAGE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The page of each CHUNK of the block of keys at n; wrong ids are moved into the pool."""
    key = n + gl.arange(0, BLOCK_N // CHUNK, LAYOUT) * CHUNK
    page = gl.load(table_ptr + key // PAGE, mask=(key >= 0) & (key < len_k), other=0)
    return gl.minimum(gl.maximum(page, 0), num_pages - 1)


@gluon.jit
def _fetch_keys(
    desc, smem, barrier, pages, sequence, first_k, len_k, n, kv_head,
    BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, PAGE: gl.constexpr, RAGGED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy the block of keys at n of K or V."""
    if PAGE > 0:
        index = gl.arange(0, BLOCK_N // CHUNK, LAYOUT)
        for c in gl.static_range(BLOCK_N // CHUNK):
            page = gl.sum(gl.where(index == c, pages, 0), 0)
            key = n + c * CHUNK
            row = key % PAGE
            length = gl.minimum(gl.maximum(len_k - (key - row), 0), PAGE)
            fetch(
                desc, sequence, page * PAGE, length, row, kv_head, barrier,
                smem.slice(c * CHUNK, CHUNK, 2), RAGGED,
            )  # fmt: skip
    else:
        fetch(desc, sequence, first_k, len_k, n, kv_head, barrier, smem, RAGGED)


@gluon.jit
def _fetch_block(
    desc, smem, full, empty, count, pages, sequence, first_k, len_k, n, kv_head,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
    PAGE: gl.constexpr, RAGGED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy the block of keys at n of K or V, number `count` of all, once its stage is free."""
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BLOCK_N * BLOCK_D * 2)
    _fetch_keys(
        desc, smem.index(stage), full.index(stage), pages, sequence, first_k, len_k, n, kv_head,
        BLOCK_N, CHUNK, PAGE, RAGGED, LAYOUT,
    )  # fmt: skip


@gluon.jit
def bring_first_keys(
    k_desc, table_row, sequence, first_k, len_k, hi, kv_head, num_pages, k_s, k_full, k_empty,
    blocks_done, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr,
    CHUNK: gl.constexpr, PAGE: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Copy block hi - 1 of K alone; its pages, for `bring_keys`. Its stage is free before that of Q
    is, so it is asked for before Q."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n = (hi - 1) * BLOCK_N
    pages = 0
    if PAGE > 0:
        pages = page_ids(table_row, n, len_k, num_pages, BLOCK_N, CHUNK, PAGE, LAYOUT)
    _fetch_block(
        k_desc, k_s, k_full, k_empty, blocks_done, pages, sequence, first_k, len_k, n, kv_head,
        BLOCK_N, BLOCK_D, K_STAGES, CHUNK, PAGE, RAGGED, LAYOUT,
    )  # fmt: skip
    return pages


@gluon.jit
def bring_keys(
    k_desc, v_desc, table_row, pages, sequence, first_k, len_k, lo, hi, kv_head, num_pages,
    k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CHUNK: gl.constexpr, PAGE: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Copy the blocks of keys hi - 1 ... lo, in this order, but for K of the first, whose `pages`
    these are (`bring_first_keys`). Returns `blocks_done`, which counts them.

    K of a block goes before V of the block before it: consumers give back a stage of K when its
    scores are there, one of V only after the softmax that runs beside its product. To wait for
    V's first would hold up a K that could have come, and the tensor cores with it.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ahead = pages
    if PAGE > 0:
        ahead = page_ids(
            table_row, (hi - 2) * BLOCK_N, len_k, num_pages, BLOCK_N, CHUNK, PAGE, LAYOUT
        )
    for block in range(hi - 2, lo - 1, -1):
        n = block * BLOCK_N
        last = pages
        pages = ahead
        if PAGE > 0:  # the next block's, while this one is waited for
            ahead = page_ids(table_row, n - BLOCK_N, len_k, num_pages, BLOCK_N, CHUNK, PAGE, LAYOUT)
        _fetch_block(
            k_desc, k_s, k_full, k_empty, blocks_done + 1, pages, sequence, first_k, len_k, n,
            kv_head, BLOCK_N, BLOCK_D, K_STAGES, CHUNK, PAGE, RAGGED, LAYOUT,
        )  # fmt: skip
        _fetch_block(
            v_desc, v_s, v_full, v_empty, blocks_done, last, sequence, first_k, len_k, n + BLOCK_N,
            kv_head, BLOCK_N, BLOCK_D, V_STAGES, CHUNK, PAGE, RAGGED, LAYOUT,
        )  # fmt: skip
        blocks_done += 1
    _fetch_block(
        v_desc, v_s, v_full, v_empty, blocks_done, pages, sequence, first_k, len_k, lo * BLOCK_N,
        kv_head, BLOCK_N, BLOCK_D, V_STAGES, CHUNK, PAGE, RAGGED, LAYOUT,
    )  # fmt: skip
    return blocks_done + 1


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
    window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, group_size,
    num_tiles_m, num_heads, group_heads, num_pages, stride_table,
    q_s, k_s, v_s, tile_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CHUNK: gl.constexpr, VARLEN: gl.constexpr,
    PAGE: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Find tiles, tell the consumers, and keep Q, K and V coming. One warp.

    PERSISTENT: tiles beyond the first are taken from a counter until none is left.
    """
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    KV_RAGGED: gl.constexpr = VARLEN or PAGE > 0
    num_tiles = num_tiles_m * num_heads
    tile = gl.program_id(0)
    blocks_done = 0
    tiles_done = 0
    while tile < num_tiles:
        row_lo, sequence, head, first_q, len_q, first_k, len_k = find_tile(
            tile, num_tiles_m, num_heads, group_heads, num_q_heads, batch, seqlen_q, seqlen_k,
            cu_q_ptr, cu_k_ptr, BLOCK_M, VARLEN, PAGE > 0,
        )  # fmt: skip
        if row_lo < len_q:
            mbarrier.wait(tile_empty, (tiles_done & 1) ^ 1)
            publish(tile_s, 0, row_lo)
            publish(tile_s, 1, sequence)
            publish(tile_s, 2, head)
            publish(tile_s, 3, first_q)
            publish(tile_s, 4, len_q)
            publish(tile_s, 5, len_k)
            tell(tile_full)
            kv_head = head // group_size
            lo, hi = tile_blocks(
                row_lo, len_q, len_k, window_left, window_right,
                BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            table_row = table_ptr
            if PAGE > 0:
                table_row += sequence.to(gl.int64) * stride_table
            pages = bring_first_keys(
                k_desc, table_row, sequence, first_k, len_k, hi, kv_head, num_pages, k_s, k_full,
                k_empty, blocks_done, BLOCK_N, BLOCK_D, K_STAGES, CHUNK, PAGE, KV_RAGGED,
            )  # fmt: skip
            for w in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(w), (tiles_done & 1) ^ 1)
                mbarrier.expect(q_full.index(w), 64 * BLOCK_D * 2)
                fetch(
                    q_desc, sequence, first_q, len_q, row_lo + w * 64, head, q_full.index(w),
                    q_s.index(w), VARLEN,
                )  # fmt: skip
            blocks_done = bring_keys(
                k_desc, v_desc, table_row, pages, sequence, first_k, len_k, lo, hi, kv_head,
                num_pages, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, BLOCK_N,
                BLOCK_D, K_STAGES, V_STAGES, CHUNK, PAGE, KV_RAGGED,
            )  # fmt: skip
            tiles_done += 1
        if PERSISTENT:
            tile = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        else:
            tile = num_tiles
    mbarrier.wait(tile_empty, (tiles_done & 1) ^ 1)
    publish(tile_s, 0, -1)
    tell(tile_full)
