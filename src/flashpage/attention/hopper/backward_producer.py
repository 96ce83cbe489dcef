"""The producer warp of the backward for Hopper: finds blocks of keys, copies what they need."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashpage.attention.hopper.backward_work import (
    BLOCK_N,
    COL_LO,
    FIRST_K,
    FULL,
    HI,
    KV_HEAD,
    LANE,
    LEN_K,
    LEN_Q,
    LO,
    NUMBERS,
    SEQUENCE,
    STAGES,
    buffer_of,
    find_keys,
    find_lane,
    row_tile,
    row_tiles,
)
from flashpage.attention.hopper.forward_producer import fetch
from flashpage.attention.hopper.forward_work import publish
from flashpage.attention.hopper.instructions import tell


@gluon.jit
def producer(
    q_desc, k_desc, v_desc, dout_desc, stats_desc, counter_ptr, cu_q_ptr, cu_k_ptr,
    window_left, window_right, seqlen_q, seqlen_k, batch, num_q_heads, num_kv_heads, group_size,
    num_tiles_m, num_tiles_n, num_heads, group_heads, num_tiles,
    q_s, k_s, v_s, do_s, lse_s, delta_s, block_s,
    q_full, do_full, rows_empty, k_empty, v_empty, block_full, block_empty,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr, K_BUFFERS: gl.constexpr,
    V_BUFFERS: gl.constexpr,
):  # fmt: skip
    """Take blocks of keys from a counter until none is left, tell the others, and keep K, V, Q, dO,
    LSE and delta coming. One warp.

    It is at most one block ahead: the next one's first Q needs a stage that this one's last steps
    free. What a block has to wait for longest is asked for last: Q before V, and K last of all if
    it has but one buffer.

    ORDERED: numbers are taken as programs come to them, and a program works on its own in the order
    in which it took them. So the lowest number that is not done never waits: those that it needs,
    of the same rows and earlier keys, are lower. Nor does its program work on a later one first.
    """
    TILE_BYTES: gl.constexpr = BLOCK_M * BLOCK_D * 2 + BLOCK_M * 4
    KEY_BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    num_blocks = num_tiles_n * num_heads
    if ORDERED:  # programs need not start in the order of their numbers
        number = gl.atomic_add(counter_ptr, 1)
    else:
        number = gl.program_id(0)
    block = 0
    done = 0
    while number < num_blocks:
        col_lo, sequence, kv_head, first_q, len_q, first_k, len_k, first_tile = find_keys(
            number, num_tiles_n, num_heads, group_heads, num_kv_heads, batch, seqlen_q, seqlen_k,
            cu_q_ptr, cu_k_ptr, BLOCK_M, VARLEN,
        )  # fmt: skip
        if col_lo < len_k:
            lo, full, hi = row_tiles(
                col_lo, len_q, len_k, window_left, window_right, BLOCK_M, HAS_LEFT, HAS_RIGHT
            )
            lane = find_lane(
                sequence, kv_head * group_size, first_tile, num_q_heads, num_tiles_m, VARLEN
            )
            k_buffer, k_phase = buffer_of(block, K_BUFFERS)
            v_buffer, v_phase = buffer_of(block, V_BUFFERS)
            if lo == hi:  # nothing is fetched, but zeros may leave through this memory
                mbarrier.wait(k_empty.index(k_buffer), k_phase ^ 1)
                mbarrier.wait(v_empty.index(v_buffer), v_phase ^ 1)
            slot, block_phase = buffer_of(block, 2)
            mbarrier.wait(block_empty.index(slot), block_phase ^ 1)
            publish(block_s, slot * NUMBERS + COL_LO, col_lo)
            publish(block_s, slot * NUMBERS + LO, lo)
            publish(block_s, slot * NUMBERS + FULL, full)
            publish(block_s, slot * NUMBERS + HI, hi)
            publish(block_s, slot * NUMBERS + LEN_Q, len_q)
            publish(block_s, slot * NUMBERS + LEN_K, len_k)
            publish(block_s, slot * NUMBERS + LANE, lane)
            publish(block_s, slot * NUMBERS + SEQUENCE, sequence)
            publish(block_s, slot * NUMBERS + KV_HEAD, kv_head)
            publish(block_s, slot * NUMBERS + FIRST_K, first_k)
            tell(block_full.index(slot))
            for member in range(group_size):
                head = kv_head * group_size + member
                tile = lane + member * num_tiles_m
                for i in range(lo, hi):
                    m = row_tile(i, lo, hi, ORDERED)
                    stage, phase = buffer_of(done, STAGES)
                    q_here = q_full.index(stage)
                    do_here = do_full.index(stage)
                    is_first = (member == 0) & (i == lo)
                    mbarrier.wait(rows_empty.index(stage), phase ^ 1)
                    if is_first:  # K counts as part of the first Q, V of the first dO
                        mbarrier.expect(q_here, TILE_BYTES + KEY_BYTES)
                        if K_BUFFERS == 2:
                            mbarrier.wait(k_empty.index(k_buffer), k_phase ^ 1)
                            fetch(
                                k_desc, sequence, first_k, len_k, col_lo, kv_head, q_here,
                                k_s.index(k_buffer), VARLEN,
                            )  # fmt: skip
                    else:
                        mbarrier.expect(q_here, TILE_BYTES)
                    fetch(
                        q_desc, sequence, first_q, len_q, m * BLOCK_M, head, q_here,
                        q_s.index(stage), VARLEN,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        stats_desc, [tile + m, 0], q_here, lse_s.index(stage)
                    )
                    if is_first:
                        mbarrier.expect(do_here, TILE_BYTES + KEY_BYTES)
                    else:
                        mbarrier.expect(do_here, TILE_BYTES)
                    fetch(
                        dout_desc, sequence, first_q, len_q, m * BLOCK_M, head, do_here,
                        do_s.index(stage), VARLEN,
                    )  # fmt: skip
                    tma.async_copy_global_to_shared(
                        stats_desc, [num_tiles + tile + m, 0], do_here, delta_s.index(stage)
                    )
                    if is_first:
                        mbarrier.wait(v_empty.index(v_buffer), v_phase ^ 1)
                        fetch(
                            v_desc, sequence, first_k, len_k, col_lo, kv_head, do_here,
                            v_s.index(v_buffer), VARLEN,
                        )  # fmt: skip
                        if K_BUFFERS == 1:
                            mbarrier.wait(k_empty.index(k_buffer), k_phase ^ 1)
                            fetch(
                                k_desc, sequence, first_k, len_k, col_lo, kv_head, q_here,
                                k_s.index(k_buffer), VARLEN,
                            )  # fmt: skip
                    done += 1
            block += 1
        number = gl.atomic_add(counter_ptr, 1)
        if not ORDERED:
            number += gl.num_programs(0)
    slot, block_phase = buffer_of(block, 2)
    mbarrier.wait(block_empty.index(slot), block_phase ^ 1)
    publish(block_s, slot * NUMBERS + COL_LO, -1)
    tell(block_full.index(slot))
