"""The decode kernel for Hopper: many rows a kv head, one part of the keys of a sequence.

The rows of a tile are (token, query head) pairs that share a kv head, so keys are read once for
all of them; a token takes PACK rows, the number of its heads rounded up to a power of two. Two
warpgroups of 64 rows take turns on the tensor cores over the same stream of K and V, as in the
forward, whose loop this is (`forward_kernel.walk`); a producer warp finds parts and fetches.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashpage.attention.hopper.forward_kernel import FIRST_BARRIER, walk
from flashpage.attention.hopper.forward_producer import bring_first_keys, bring_keys
from flashpage.attention.hopper.forward_work import key_range, publish, told
from flashpage.attention.hopper.instructions import barrier_arrive, barrier_sync, tell

CONSUMERS = gl.constexpr(2)
BLOCK_M = gl.constexpr(128)


@gluon.jit
def _num_keys(seqlens_ptr, sequence, num_new_tokens, capacity):
    """Of a sequence, within the cache whatever was given."""
    length = gl.load(seqlens_ptr + sequence)
    stored = gl.minimum(length, capacity) + num_new_tokens
    return gl.where(length < 0, 0, gl.minimum(stored, capacity))


@gluon.jit
def _blocks_of_part(
    row_lo, split, num_splits, seqlen_q, len_k, window_left, window_right,
    BLOCK_N: gl.constexpr, PACK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Blocks of keys that a part walks, `(lo, hi)`: at least one, which may be masked wholly."""
    after = gl.minimum((row_lo + BLOCK_M - 1) // PACK + 1, seqlen_q)
    lo, _, _, hi = key_range(
        row_lo // PACK, after, seqlen_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT,
        HAS_RIGHT,
    )  # fmt: skip
    per_split = (gl.maximum(hi - lo, 0) + num_splits - 1) // num_splits
    lo = lo + split * per_split
    return lo, gl.maximum(gl.minimum(hi, lo + per_split), lo + 1)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, counter_ptr, seqlens_ptr, table_ptr, window_left, window_right,
    seqlen_q, num_new_tokens, capacity, num_kv_heads, num_tiles_m, num_splits, num_parts,
    num_pages, stride_table, q_s, k_s, v_s, tile_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    PACK: gl.constexpr, CHUNK: gl.constexpr, PAGE: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Find parts, tell the consumers, and keep Q, K and V coming. One warp.

    PERSISTENT: parts beyond the first are taken from a counter until none is left.
    """
    part = gl.program_id(0)
    blocks_done = 0
    parts_done = 0
    while part < num_parts:
        # Heads vary fastest: parts that run together read neighbouring memory.
        kv_head = part % num_kv_heads
        rest = part // num_kv_heads
        row_lo = rest % num_tiles_m * BLOCK_M
        rest = rest // num_tiles_m
        split = rest % num_splits
        sequence = rest // num_splits
        len_k = _num_keys(seqlens_ptr, sequence, num_new_tokens, capacity)
        lo, hi = _blocks_of_part(
            row_lo, split, num_splits, seqlen_q, len_k, window_left, window_right, BLOCK_N, PACK,
            HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        table_row = table_ptr
        if PAGE > 0:
            table_row += sequence.to(gl.int64) * stride_table
        mbarrier.wait(tile_empty, (parts_done & 1) ^ 1)
        publish(tile_s, 0, row_lo)
        publish(tile_s, 1, sequence)
        publish(tile_s, 2, kv_head)
        publish(tile_s, 3, split)
        publish(tile_s, 4, len_k)
        publish(tile_s, 5, lo)
        publish(tile_s, 6, hi)
        tell(tile_full)
        pages = bring_first_keys(
            k_desc, table_row, sequence, sequence * capacity, len_k, hi, kv_head, num_pages, k_s,
            k_full, k_empty, blocks_done, BLOCK_N, BLOCK_D, K_STAGES, CHUNK, PAGE, True,
        )  # fmt: skip
        for w in gl.static_range(CONSUMERS):
            row = row_lo + w * 64
            mbarrier.wait(q_empty.index(w), (parts_done & 1) ^ 1)
            mbarrier.expect(q_full.index(w), 64 * BLOCK_D * 2)
            tma.async_copy_global_to_shared(
                q_desc, [sequence, row // PACK, kv_head, row % PACK, 0], q_full.index(w),
                q_s.index(w),
            )  # fmt: skip
        blocks_done = bring_keys(
            k_desc, v_desc, table_row, pages, sequence, sequence * capacity, len_k, lo, hi,
            kv_head, num_pages, k_s, v_s, k_full, k_empty, v_full, v_empty, blocks_done, BLOCK_N,
            BLOCK_D, K_STAGES, V_STAGES, CHUNK, PAGE, True,
        )  # fmt: skip
        parts_done += 1
        if PERSISTENT:
            part = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
        else:
            part = num_parts
    mbarrier.wait(tile_empty, (parts_done & 1) ^ 1)
    publish(tile_s, 0, -1)
    tell(tile_full)


@gluon.jit
def _store(
    out_ptr, lse_ptr, sum_ptr, acc, row_sum, top, lse, row, sequence, kv_head, split, seqlen_q,
    num_kv_heads, group_size, num_splits,
    O_LAYOUT: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """64 rows of what one part gave, or where the keys are one part of O and of the LSE."""
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, O_LAYOUT))
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, O_LAYOUT))
    token = rows // PACK
    real = (token < seqlen_q) & (rows % PACK < group_size)
    head = kv_head * group_size + rows % PACK
    num_q_heads = num_kv_heads * group_size
    sequence = sequence.to(gl.int64)
    place = (sequence * seqlen_q + token) * num_q_heads + head
    if sum_ptr is not None:
        place = place * num_splits + split
        gl.store(lse_ptr + place, top, mask=real)
        gl.store(sum_ptr + place, row_sum, mask=real)
        real = real & (top > float("-inf"))
    else:
        gl.store(lse_ptr + (sequence * num_q_heads + head) * seqlen_q + token, lse, mask=real)
        acc = acc * (1.0 / row_sum)[:, None]
    gl.store(
        out_ptr + (place * HEAD_DIM)[:, None] + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
    )


@gluon.jit
def _consumer(
    out_ptr, lse_ptr, sum_ptr, softmax_scale, softcap, window_left, window_right, seqlen_q,
    num_kv_heads, group_size, num_splits, q_s, k_s, v_s, tile_s,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty,
    WARPGROUP: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PACK: gl.constexpr,
    RAW: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    PING_PONG: gl.constexpr, LAZY: gl.constexpr, IMMEDIATES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """The 64 rows of number WARPGROUP of every part. One warpgroup."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q = q_s.index(WARPGROUP).reshape([64, BLOCK_D])
    if PING_PONG and WARPGROUP == CONSUMERS - 1:  # the first turn
        barrier_arrive(FIRST_BARRIER, 256)
    blocks_done = 0
    parts_done = 0
    mbarrier.wait(tile_full, 0)
    row_lo = told(tile_s, 0)
    while row_lo >= 0:
        sequence = told(tile_s, 1)
        kv_head = told(tile_s, 2)
        split = told(tile_s, 3)
        len_k = told(tile_s, 4)
        lo = told(tile_s, 5)
        hi = told(tile_s, 6)
        tell(tile_empty)
        row = row_lo + WARPGROUP * 64
        # Of these 64 rows alone, within what all rows of the tile walk.
        _, full_lo, full_hi, _ = key_range(
            row // PACK, gl.minimum((row + 63) // PACK + 1, seqlen_q), seqlen_q, len_k,
            window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        blocks_done, acc, row_sum, top, lse = walk(
            q, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, blocks_done,
            parts_done, row, lo, full_lo, full_hi, hi, seqlen_q, len_k, softmax_scale, softcap,
            window_left, window_right, WARPGROUP, CONSUMERS, BLOCK_N, BLOCK_D, K_STAGES, V_STAGES,
            PACK, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, PING_PONG, LAZY, False, IMMEDIATES,
            HALVES,
        )  # fmt: skip
        _store(
            out_ptr, lse_ptr, sum_ptr, acc, row_sum, top, lse, row, sequence, kv_head, split,
            seqlen_q, num_kv_heads, group_size, num_splits, O_LAYOUT, HEAD_DIM, BLOCK_D, PACK,
        )  # fmt: skip
        parts_done += 1
        mbarrier.wait(tile_full, parts_done & 1)
        row_lo = told(tile_s, 0)
    if PING_PONG and WARPGROUP == 0:  # the turn that is left over
        barrier_sync(FIRST_BARRIER, 256)


@gluon.constexpr_function
def _of(count, shape):
    """The shape of `count` tiles of a shape."""
    return [count, *shape]


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


_NEVER_SPECIALISED = (
    "window_left",
    "window_right",
    "seqlen_q",
    "num_new_tokens",
    "capacity",
    "num_kv_heads",
    "group_size",
    "num_tiles_m",
    "num_splits",
    "num_parts",
    "num_pages",
    "stride_table",
)


@gluon.jit(do_not_specialize=_NEVER_SPECIALISED)
def decode_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, sum_ptr, counter_ptr, seqlens_ptr, table_ptr,
    softmax_scale, softcap, window_left, window_right, seqlen_q, num_new_tokens, capacity,
    num_kv_heads, group_size, num_tiles_m, num_splits, num_parts, num_pages, stride_table,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PACK: gl.constexpr, CHUNK: gl.constexpr,
    PAGE: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, RAW: gl.constexpr, PING_PONG: gl.constexpr, LAZY: gl.constexpr,
    PERSISTENT: gl.constexpr, IMMEDIATES: gl.constexpr, HALVES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: one program a part, or with PERSISTENT as many as run at a time.

    With sum_ptr, out, lse and sum are `combine.Parts`; without, out and lse the results.
    counter_ptr: int32, 0 (PERSISTENT). CHUNK: rows of K or V that one copy brings, BLOCK_N without
    pages.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    KV: gl.constexpr = [1, 1, BLOCK_N, 1, BLOCK_D]
    q_s = gl.allocate_shared_memory(DTYPE, _of(CONSUMERS, q_desc.block_shape), q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, _of(K_STAGES, KV), k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, _of(V_STAGES, KV), v_desc.layout)
    q_full = _barriers(CONSUMERS, 1)
    q_empty = _barriers(CONSUMERS, 128)
    k_full = _barriers(K_STAGES, 1)
    k_empty = _barriers(K_STAGES, 128 * CONSUMERS)
    v_full = _barriers(V_STAGES, 1)
    v_empty = _barriers(V_STAGES, 128 * CONSUMERS)
    tile_full = _barriers(1, 32).index(0)
    tile_empty = _barriers(1, 128 * CONSUMERS).index(0)
    tile_s = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    # Arguments are spelled out: in a variable, compile-time values would cease to be such.
    gl.warp_specialize(
        [
            (_consumer, (
                out_ptr, lse_ptr, sum_ptr, softmax_scale, softcap, window_left, window_right,
                seqlen_q, num_kv_heads, group_size, num_splits, q_s, k_s, v_s, tile_s, q_full,
                q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, 0, BLOCK_N,
                HEAD_DIM, BLOCK_D, K_STAGES, V_STAGES, PACK, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
                PING_PONG, LAZY, IMMEDIATES, HALVES,
            )),
            (_consumer, (
                out_ptr, lse_ptr, sum_ptr, softmax_scale, softcap, window_left, window_right,
                seqlen_q, num_kv_heads, group_size, num_splits, q_s, k_s, v_s, tile_s, q_full,
                q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, 1, BLOCK_N,
                HEAD_DIM, BLOCK_D, K_STAGES, V_STAGES, PACK, RAW, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
                PING_PONG, LAZY, IMMEDIATES, HALVES,
            )),
            (_producer, (
                q_desc, k_desc, v_desc, counter_ptr, seqlens_ptr, table_ptr, window_left,
                window_right, seqlen_q, num_new_tokens, capacity, num_kv_heads, num_tiles_m,
                num_splits, num_parts, num_pages, stride_table, q_s, k_s, v_s, tile_s, q_full,
                q_empty, k_full, k_empty, v_full, v_empty, tile_full, tile_empty, BLOCK_N, BLOCK_D,
                K_STAGES, V_STAGES, PACK, CHUNK, PAGE, HAS_LEFT, HAS_RIGHT, PERSISTENT,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
