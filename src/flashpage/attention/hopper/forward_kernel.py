"""The forward kernel for Hopper: one warp that fetches, two or three warpgroups that compute.

A thread block takes tiles of 64 query rows a warpgroup, one head at a time. Its producer warp finds
the tiles, and copies Q, K and V into shared memory by the tensor memory accelerator; each consumer
warpgroup holds the accumulator of its own 64 rows. Keys are walked from the last visible one down,
so that masks come first. S = Q K^T of the next block is on the tensor cores while the exponentials
of this one are computed (Shah et al. 2024, FlashAttention-3), and named barriers hand the tensor
cores from one warpgroup to the next (`PING_PONG`).

RAGGED descriptors address rows of one sequence, or of one page, in flat memory: two leading
dimensions whose strides add up to 2^64 move the rows so that they end with the last row of the
dimension. What lies beyond them is read as zeros and never written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashpage.attention.hopper.instructions import (
    barrier_arrive,
    barrier_sync,
    hold_here,
    partial_sums,
    release,
    rescale_rows,
    scale_partial_sums,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
RAGGED_ROWS = gl.constexpr(2**30)
"""Length of the row dimension of a ragged descriptor."""
FIRST_BARRIER = gl.constexpr(8)
"""Named barriers below belong to Triton."""


# ---------------------------------------------------------------------------------------------
# Which tile, which keys
# ---------------------------------------------------------------------------------------------


@gluon.jit
def _key_range(
    row_lo, row_hi, len_q, len_k, window_left, window_right,
    BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Blocks of keys that rows `row_lo ... row_hi - 1` see: `(lo, full_lo, full_hi, hi)`.

    Blocks lo ... hi - 1 hold a key that a row sees; full_lo ... full_hi - 1 need no mask. Always
    `0 <= lo <= full_lo <= full_hi`.
    """
    diff = len_k - len_q
    lo = 0
    full_lo = 0
    hi_key = len_k
    full_hi = len_k // BLOCK_N
    if HAS_RIGHT:
        hi_key = gl.minimum(hi_key, gl.maximum(row_hi + diff + window_right, 0))
        full_hi = gl.minimum(full_hi, gl.maximum(row_lo + diff + window_right + 1, 0) // BLOCK_N)
    hi = (hi_key + BLOCK_N - 1) // BLOCK_N
    if HAS_LEFT:
        lo = gl.maximum(row_lo + diff - window_left, 0) // BLOCK_N
        full_lo = (gl.maximum(row_hi - 1 + diff - window_left, 0) + BLOCK_N - 1) // BLOCK_N
        full_lo = gl.maximum(lo, gl.minimum(full_lo, hi))
    full_hi = gl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@gluon.jit
def _tile_blocks(
    row_lo, len_q, len_k, window_left, window_right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Blocks of keys that the tile walks, `(lo, hi)`: at least one, which may be masked wholly."""
    row_hi = gl.minimum(row_lo + BLOCK_M, len_q)
    lo, _, _, hi = _key_range(
        row_lo, row_hi, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    hi = gl.maximum(hi, 1)
    return gl.minimum(lo, hi - 1), hi


@gluon.jit
def _find_tile(
    tile, num_tiles_m, num_heads, group_heads, num_q_heads, batch, seqlen_q, seqlen_k,
    cu_q_ptr, cu_k_ptr, BLOCK_M: gl.constexpr, VARLEN: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """`(row_lo, sequence, head, first_q, len_q, first_k, len_k)` of the tile of this number.

    `group_heads` heads run side by side, the tiles with the most keys first. VARLEN: num_heads
    are the heads of one sequence, and the tiles of all sequences lie end to end, those of sequence
    i from `cu_q[i] // BLOCK_M + i` on, so that nothing depends on the longest length. After the
    last sequence there is one more without keys: the rows that belong to none.
    """
    per_group = num_tiles_m * group_heads
    group = tile // per_group
    num_here = gl.minimum(group_heads, num_heads - group * group_heads)
    within = tile % per_group
    tile_m = num_tiles_m - 1 - within // num_here
    head = group * group_heads + within % num_here
    if VARLEN:
        sequence = tile * 0
        last = batch
        while sequence < last:
            middle = (sequence + last + 1) // 2
            if gl.load(cu_q_ptr + middle) // BLOCK_M + middle <= tile_m:
                sequence = middle
            else:
                last = middle - 1
        first_q = gl.load(cu_q_ptr + sequence)
        is_tail = sequence == batch
        after = gl.minimum(sequence + 1, batch)
        len_q = gl.where(is_tail, seqlen_q, gl.load(cu_q_ptr + after)) - first_q
        first_k = gl.load(cu_k_ptr + sequence)
        len_k = gl.where(is_tail, 0, gl.load(cu_k_ptr + after) - first_k)
        if PAGED:
            first_k = first_k * 0
        row_lo = (tile_m - (first_q // BLOCK_M + sequence)) * BLOCK_M
    else:
        sequence = head // num_q_heads
        head = head % num_q_heads
        first_q = tile * 0
        first_k = tile * 0
        len_q = seqlen_q
        len_k = seqlen_k
        row_lo = tile_m * BLOCK_M
    return row_lo, sequence, head, first_q, len_q, first_k, len_k


# ---------------------------------------------------------------------------------------------
# The producer
# ---------------------------------------------------------------------------------------------


@gluon.jit
def _fetch(desc, entry, first, length, row, head, barrier, target, RAGGED: gl.constexpr):
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
def _page_ids(
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
            _fetch(
                desc, sequence, page * PAGE, length, row, kv_head, barrier,
                smem.slice(c * CHUNK, CHUNK, 2), RAGGED,
            )  # fmt: skip
    else:
        _fetch(desc, sequence, first_k, len_k, n, kv_head, barrier, smem, RAGGED)


@gluon.jit
def _publish(tile_s, index: gl.constexpr, value):
    tile_s.index(index).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
    window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, group_size,
    num_tiles_m, num_heads, group_heads, num_pages, stride_table,
    q_s, k_s, v_s, tile_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr, VARLEN: gl.constexpr, PAGE: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Find tiles, tell the consumers, and keep Q, K and V coming. One warp.

    PERSISTENT: tiles beyond the first are taken from a counter until none is left.
    """
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    KV_RAGGED: gl.constexpr = VARLEN or PAGE > 0
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_tiles = num_tiles_m * num_heads
    tile = gl.program_id(0)
    blocks_done = 0
    tiles_done = 0
    while tile < num_tiles:
        row_lo, sequence, head, first_q, len_q, first_k, len_k = _find_tile(
            tile, num_tiles_m, num_heads, group_heads, num_q_heads, batch, seqlen_q, seqlen_k,
            cu_q_ptr, cu_k_ptr, BLOCK_M, VARLEN, PAGE > 0,
        )  # fmt: skip
        if row_lo < len_q:
            mbarrier.wait(tile_empty, (tiles_done & 1) ^ 1)
            _publish(tile_s, 0, row_lo)
            _publish(tile_s, 1, sequence)
            _publish(tile_s, 2, head)
            _publish(tile_s, 3, first_q)
            _publish(tile_s, 4, len_q)
            _publish(tile_s, 5, len_k)
            mbarrier.arrive(tile_full, count=1)
            kv_head = head // group_size
            lo, hi = _tile_blocks(
                row_lo, len_q, len_k, window_left, window_right,
                BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            table_row = table_ptr
            pages = 0
            if PAGE > 0:
                table_row += sequence.to(gl.int64) * stride_table
                pages = _page_ids(
                    table_row, (hi - 1) * BLOCK_N, len_k, num_pages, BLOCK_N, CHUNK, PAGE, LAYOUT
                )
            for w in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(w), (tiles_done & 1) ^ 1)
                mbarrier.expect(q_full.index(w), 64 * BLOCK_D * 2)
                _fetch(
                    q_desc, sequence, first_q, len_q, row_lo + w * 64, head, q_full.index(w),
                    q_s.index(w), VARLEN,
                )  # fmt: skip
            for block in range(hi - 1, lo - 1, -1):
                n = block * BLOCK_N
                stage = blocks_done % STAGES
                phase = (blocks_done // STAGES) & 1
                here = pages
                if PAGE > 0:  # the next block's, while this one is waited for
                    pages = _page_ids(
                        table_row, n - BLOCK_N, len_k, num_pages, BLOCK_N, CHUNK, PAGE, LAYOUT
                    )
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * BLOCK_D * 2)
                _fetch_keys(
                    k_desc, k_s.index(stage), k_full.index(stage), here, sequence, first_k, len_k,
                    n, kv_head, BLOCK_N, CHUNK, PAGE, KV_RAGGED, LAYOUT,
                )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), BLOCK_N * BLOCK_D * 2)
                _fetch_keys(
                    v_desc, v_s.index(stage), v_full.index(stage), here, sequence, first_k, len_k,
                    n, kv_head, BLOCK_N, CHUNK, PAGE, KV_RAGGED, LAYOUT,
                )  # fmt: skip
                blocks_done += 1
            tiles_done += 1
        if PERSISTENT:
            tile = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        else:
            tile = num_tiles
    mbarrier.wait(tile_empty, (tiles_done & 1) ^ 1)
    _publish(tile_s, 0, -1)
    mbarrier.arrive(tile_full, count=1)


# ---------------------------------------------------------------------------------------------
# The consumers
# ---------------------------------------------------------------------------------------------


@gluon.jit
def _told(tile_s, index: gl.constexpr):
    """A number that the producer published."""
    return gl.max(tile_s.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _tanh(x):
    """Accurate relative to the result also near 0, where 1 - exp(-2|x|) cancels."""
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    e = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    return gl.where(gl.abs(x) < 0.25, near, gl.where(x < 0, -far, far))


@gluon.jit
def _softmax(
    s, m, row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
    BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr, MASK: gl.constexpr, RAW: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """`(p, m, alpha)`: P of a tile of raw scores, in base 2, the new maxima, and the factor that
    older sums and accumulators take.

    RAW: m are maxima of raw scores, which a positive scale keeps in order; otherwise of logits in
    base 2. LAZY: a maximum that grew by less than 8 in base 2 is not moved: P is then at most 2^8.
    """
    scale = 1.0
    if RAW:
        scale = softmax_scale * LOG2E
    else:
        s = s * softmax_scale
        if HAS_SOFTCAP:
            s = softcap * _tanh(s / softcap)
        s = s * LOG2E
    if MASK:
        diff = len_k - len_q
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
        cols = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        if HAS_RIGHT:
            last = gl.minimum(rows + (diff + window_right), len_k - 1)
            seen = cols[None, :] <= last[:, None]
        else:
            seen = (cols < len_k)[None, :]
        if HAS_LEFT:
            first = rows + (diff - window_left)
            seen = seen & (cols[None, :] >= first[:, None])
        s = gl.where(seen, s, float("-inf"))
    new_m = gl.maximum(m, gl.max(s, 1))
    if LAZY:
        new_m = gl.where((new_m - m) * scale > 8.0, new_m, m)
    shift = new_m
    if MASK:  # rows that have seen no key yet
        shift = gl.where(new_m == float("-inf"), 0.0, new_m)
    p = gl.exp2(s * scale - (shift * scale)[:, None])
    alpha = gl.exp2((m - shift) * scale)
    return p, new_m, alpha


@gluon.jit
def _step(
    q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
    row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
    WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
    MASK: gl.constexpr, RAW: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, PING_PONG: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """O += P V of the last block, S = Q K^T of `block` and its softmax."""
    v_stage = blocks_done % STAGES
    v_phase = (blocks_done // STAGES) & 1
    blocks_done += 1
    k_stage = blocks_done % STAGES
    mbarrier.wait(k_full.index(k_stage), (blocks_done // STAGES) & 1)
    if PING_PONG:
        barrier_sync(FIRST_BARRIER + WARPGROUP, 256)
    s = warpgroup_mma(
        q, k_s.index(k_stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)),
        gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT), use_acc=False, is_async=True,
    )  # fmt: skip
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = warpgroup_mma(p, v_s.index(v_stage).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
    if PING_PONG:
        barrier_arrive(FIRST_BARRIER + (WARPGROUP + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(1, deps=[s])
    release(k_empty.index(k_stage))
    new_p, m, alpha = _softmax(
        s, m, row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
        BLOCK_N, S_LAYOUT, MASK, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, LAZY,
    )  # fmt: skip
    total = scale_partial_sums(total, alpha) + partial_sums(new_p)
    if LAZY:
        total = hold_here(total)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    release(v_empty.index(v_stage))
    p = gl.convert_layout(new_p.to(v_s.dtype), P_LAYOUT)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))
    if LAZY:
        acc = rescale_rows(acc, alpha)
    else:
        acc = acc * alpha[:, None]
    return blocks_done, p, acc, m, total


@gluon.jit
def _store(
    o_desc, lse_ptr, out_s, acc, lse, row, sequence, head, first_q, len_q, num_q_heads, seqlen_q,
    O_LAYOUT: gl.constexpr, BLOCK_D: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """64 rows of O, through shared memory, and of the LSE; rows from len_q on are not written."""
    tma.store_wait(0)
    out_s.reshape([64, BLOCK_D]).store(acc.to(o_desc.dtype))
    fence_async_shared()
    if VARLEN:
        tma.async_copy_shared_to_global(
            o_desc, [RAGGED_ROWS, first_q + len_q, RAGGED_ROWS - len_q + row, head, 0], out_s
        )
        lse_row = head.to(gl.int64) * seqlen_q + first_q
    else:
        tma.async_copy_shared_to_global(o_desc, [sequence, row, head, 0], out_s)
        lse_row = (sequence.to(gl.int64) * num_q_heads + head) * seqlen_q
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
    gl.store(lse_ptr + lse_row + rows, lse, mask=rows < len_q)


@gluon.jit
def _consumer(
    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q, num_q_heads,
    q_s, k_s, v_s, o_s, tile_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty,
    WARPGROUP: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, VARLEN: gl.constexpr, RAW: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, PING_PONG: gl.constexpr,
    LAZY: gl.constexpr, OUT_IN_Q: gl.constexpr,
):  # fmt: skip
    """The 64 rows of number WARPGROUP of every tile. One warpgroup.

    OUT_IN_Q: O leaves through the shared memory of Q, which is then given back later.
    """
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    q = q_s.index(WARPGROUP).reshape([64, BLOCK_D])
    if PING_PONG and WARPGROUP == CONSUMERS - 1:  # the first turn
        barrier_arrive(FIRST_BARRIER, 256)
    blocks_done = 0
    tiles_done = 0
    mbarrier.wait(tile_full, 0)
    row_lo = _told(tile_s, 0)
    while row_lo >= 0:
        sequence = _told(tile_s, 1)
        head = _told(tile_s, 2)
        first_q = _told(tile_s, 3)
        len_q = _told(tile_s, 4)
        len_k = _told(tile_s, 5)
        mbarrier.arrive(tile_empty, count=1)
        lo, hi = _tile_blocks(
            row_lo, len_q, len_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        row = row_lo + WARPGROUP * 64
        # Of these 64 rows alone, within what all rows of the tile walk.
        _, full_lo, full_hi, _ = _key_range(
            row, gl.minimum(row + 64, len_q), len_q, len_k, window_left, window_right, BLOCK_N,
            HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip

        mbarrier.wait(q_full.index(WARPGROUP), tiles_done & 1)
        stage = blocks_done % STAGES
        mbarrier.wait(k_full.index(stage), (blocks_done // STAGES) & 1)
        if PING_PONG:
            barrier_sync(FIRST_BARRIER + WARPGROUP, 256)
        s = warpgroup_mma(
            q, k_s.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)),
            gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT), use_acc=False, is_async=True,
        )  # fmt: skip
        if PING_PONG:
            barrier_arrive(FIRST_BARRIER + (WARPGROUP + 1) % CONSUMERS, 256)
        s = warpgroup_mma_wait(0, deps=[s])
        release(k_empty.index(stage))
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        new_p, m, _ = _softmax(
            s, m, row, hi - 1, len_q, len_k, softmax_scale, softcap, window_left, window_right,
            BLOCK_N, S_LAYOUT, True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, False,
        )  # fmt: skip
        total = partial_sums(new_p)
        p = gl.convert_layout(new_p.to(v_s.dtype), P_LAYOUT)
        acc = gl.zeros([64, BLOCK_D], gl.float32, O_LAYOUT)

        # The right edge, what every row sees, the left edge.
        full_hi = gl.minimum(gl.maximum(full_hi, lo), hi - 1)
        full_lo = gl.minimum(gl.maximum(full_lo, lo), full_hi)
        if HAS_RIGHT:
            for block in range(hi - 2, full_hi - 1, -1):
                blocks_done, p, acc, m, total = _step(
                    q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
                    row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                    WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                    True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY,
                )  # fmt: skip
        else:
            full_hi = hi - 1
        for block in range(full_hi - 1, full_lo - 1, -1):
            blocks_done, p, acc, m, total = _step(
                q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
                row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                False, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY,
            )  # fmt: skip
        if HAS_LEFT:
            for block in range(full_lo - 1, lo - 1, -1):
                blocks_done, p, acc, m, total = _step(
                    q, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, p, acc, m, total,
                    row, block, len_q, len_k, softmax_scale, softcap, window_left, window_right,
                    WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                    True, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY,
                )  # fmt: skip

        if not OUT_IN_Q:
            release(q_empty.index(WARPGROUP))
        stage = blocks_done % STAGES
        mbarrier.wait(v_full.index(stage), (blocks_done // STAGES) & 1)
        acc = warpgroup_mma(p, v_s.index(stage).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
        blocks_done += 1
        row_sum = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, O_LAYOUT))
        nothing_seen = row_sum == 0.0
        row_sum = gl.where(nothing_seen, 1.0, row_sum)
        top = gl.convert_layout(m, gl.SliceLayout(1, O_LAYOUT))
        if RAW:
            top = top * (softmax_scale * LOG2E)
        lse = gl.where(nothing_seen, float("inf"), (top + gl.log2(row_sum)) * LN2)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        release(v_empty.index(stage))
        out_s = o_s.index(WARPGROUP)
        if OUT_IN_Q:
            out_s = q_s.index(WARPGROUP)
        _store(
            o_desc, lse_ptr, out_s, acc * (1.0 / row_sum)[:, None], lse, row, sequence, head,
            first_q, len_q, num_q_heads, seqlen_q, O_LAYOUT, BLOCK_D, VARLEN,
        )  # fmt: skip
        if OUT_IN_Q:
            tma.store_wait(0)
            release(q_empty.index(WARPGROUP))
        tiles_done += 1
        mbarrier.wait(tile_full, tiles_done & 1)
        row_lo = _told(tile_s, 0)
    if PING_PONG and WARPGROUP == 0:  # the turn that is left over
        barrier_sync(FIRST_BARRIER, 256)
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _shape(count, rows, head_dim, ragged):
    """Of `count` boxes of a descriptor in shared memory."""
    return [count, *([1, 1] if ragged else [1]), rows, 1, head_dim]


_NEVER_SPECIALISED = (
    "window_left",
    "window_right",
    "seqlen_q",
    "seqlen_k",
    "batch",
    "num_q_heads",
    "group_size",
    "num_tiles_m",
    "num_heads",
    "group_heads",
    "num_pages",
    "stride_table",
)


@gluon.jit(do_not_specialize=_NEVER_SPECIALISED)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
    softmax_scale, softcap, window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads,
    group_size, num_tiles_m, num_heads, group_heads, num_pages, stride_table,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr, VARLEN: gl.constexpr, PAGE: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr, RAW: gl.constexpr,
    PING_PONG: gl.constexpr, LAZY: gl.constexpr, PERSISTENT: gl.constexpr, OUT_IN_Q: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: one program a tile, or with PERSISTENT as many as run at a time.

    counter_ptr: int32, 0 (PERSISTENT). CHUNK: rows of K or V that one copy brings, BLOCK_N without
    pages. VARLEN: q and out are flat, seqlen_q is the number of all rows.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = _shape(CONSUMERS, 64, BLOCK_D, VARLEN)
    KV: gl.constexpr = _shape(STAGES, BLOCK_N, BLOCK_D, VARLEN or PAGE > 0)
    q_s = gl.allocate_shared_memory(DTYPE, TILE, q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, KV, k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, KV, v_desc.layout)
    o_s = q_s
    if not OUT_IN_Q:
        o_s = gl.allocate_shared_memory(DTYPE, TILE, o_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    tile_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    tile_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    tile_s = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=128)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=128 * CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=128 * CONSUMERS)
    mbarrier.init(tile_full, count=1)
    mbarrier.init(tile_empty, count=CONSUMERS)
    fence_async_shared()
    # Arguments are spelled out: in a variable, compile-time values would cease to be such.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 0, CONSUMERS, BLOCK_N, BLOCK_D, STAGES,
                    VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY, OUT_IN_Q,
                )),
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 1, CONSUMERS, BLOCK_N, BLOCK_D, STAGES,
                    VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY, OUT_IN_Q,
                )),
                (_producer, (
                    q_desc, k_desc, v_desc, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
                    window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, group_size,
                    num_tiles_m, num_heads, group_heads, num_pages, stride_table, q_s, k_s, v_s,
                    tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full,
                    tile_empty, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, CHUNK, VARLEN, PAGE, HAS_LEFT,
                    HAS_RIGHT, PERSISTENT,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 0, CONSUMERS, BLOCK_N, BLOCK_D, STAGES,
                    VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY, OUT_IN_Q,
                )),
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 1, CONSUMERS, BLOCK_N, BLOCK_D, STAGES,
                    VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY, OUT_IN_Q,
                )),
                (_consumer, (
                    o_desc, lse_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
                    num_q_heads, q_s, k_s, v_s, o_s, tile_s, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, tile_full, tile_empty, 2, CONSUMERS, BLOCK_N, BLOCK_D, STAGES,
                    VARLEN, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY, OUT_IN_Q,
                )),
                (_producer, (
                    q_desc, k_desc, v_desc, counter_ptr, cu_q_ptr, cu_k_ptr, table_ptr,
                    window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, group_size,
                    num_tiles_m, num_heads, group_heads, num_pages, stride_table, q_s, k_s, v_s,
                    tile_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full,
                    tile_empty, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, CHUNK, VARLEN, PAGE, HAS_LEFT,
                    HAS_RIGHT, PERSISTENT,
                )),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
