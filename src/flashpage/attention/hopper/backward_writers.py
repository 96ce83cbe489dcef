"""The warps of the backward for Hopper that have the tensor memory accelerator write.

Adders add dQ to its sums; dK and dV are sent by a sender, or by adders. These leave through memory
that the next block of keys does not need at once, while that one is at work:

- At head_dim 64 K and V have two buffers: dV leaves through this block's V and dK through its K,
  which the block after the next needs.
- At head_dim 128 V has one buffer, free as soon as the last dP^T is there, so that the next one
  comes while this block ends. dK leaves through a buffer of dQ, as one more tile of it. K has two,
  and dV leaves through K's; ORDERED needs that memory for a second buffer of dQ, and dV leaves
  through one of these as well.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashpage.attention.hopper.backward_work import (
    BLOCK_N,
    FIRST_K,
    HI,
    KV_HEAD,
    LANE,
    LEN_K,
    LEN_Q,
    LO,
    NUMBERS,
    SEQUENCE,
    buffer_of,
    keys_in_dq,
    next_block,
    row_tile,
)
from flashpage.attention.hopper.forward_producer import RAGGED_ROWS
from flashpage.attention.hopper.forward_work import told
from flashpage.attention.hopper.instructions import (
    copies_done,
    next_turn,
    tell,
    tma_add,
    wait_for_turn,
)


@gluon.jit
def _first_block(m, len_q, len_k, window_left, BLOCK_M: gl.constexpr, HAS_LEFT: gl.constexpr):
    """The first block of keys that sees a row of tile m."""
    first = m * 0
    if HAS_LEFT:
        first = gl.maximum(m * BLOCK_M + (len_k - len_q - window_left), 0) // BLOCK_N
    return first


@gluon.jit
def _send(desc, smem, entry, first, length, row, head, RAGGED: gl.constexpr):
    """Rows of dK or dV from shared memory; those from `length` on are not written."""
    if RAGGED:
        tma.async_copy_shared_to_global(
            desc, [RAGGED_ROWS, first + length, RAGGED_ROWS - length + row, head, 0], smem
        )
    else:
        tma.async_copy_shared_to_global(desc, [entry, row, head, 0], smem)


@gluon.jit
def _send_from_dq(
    desc, use, sequence, first_k, len_k, col_lo, kv_head, dq_s, dq_full, dq_empty,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, VARLEN: gl.constexpr, ADDERS: gl.constexpr,
    NUMBER: gl.constexpr,
):  # fmt: skip
    """dK or dV from the buffer of dQ that this use of them takes, if it is this adder's."""
    if (use & (ADDERS - 1)) == NUMBER:
        buffer, phase = buffer_of(use, ADDERS)
        mbarrier.wait(dq_full.index(buffer), phase)
        smem = keys_in_dq(dq_s, buffer, desc, BLOCK_M, BLOCK_D, VARLEN)
        _send(desc, smem, sequence, first_k, len_k, col_lo, kv_head, VARLEN)
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(buffer), count=1)


@gluon.jit
def adder(
    dq_desc, dk_desc, dv_desc, turns_ptr, window_left, group_size, num_tiles_m,
    dq_s, block_s, dq_full, dq_empty, k_empty, block_full, block_empty,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, VARLEN: gl.constexpr, HAS_LEFT: gl.constexpr,
    ORDERED: gl.constexpr, ADDERS: gl.constexpr, K_BUFFERS: gl.constexpr, V_BUFFERS: gl.constexpr,
    NUMBER: gl.constexpr,
):  # fmt: skip
    """Have finished tiles of dQ added to the sums in global memory: those that come in buffer
    NUMBER, every ADDERS-th. One warp; idle where there are fewer.

    ORDERED: in the order of the blocks of keys, told by a counter of each tile; the first one
    writes. From asking for a turn to passing it on takes, as calculated from times, about 4,950
    cycles, a step at head_dim 128 3,900. Two warps (and turns as in `instructions.py`) brought the
    time over that of any order from 1.27 to 1.02 there.

    The accelerator reads and writes sums asynchronously, and not in the proxy of the counter.
    `copies_done` waits until they are written (`store_wait`: until dQ was read from shared memory),
    so that `next_turn`, a release, comes after them; `wait_for_turn` is an acquire, and a fence of
    the proxies after it keeps this block's copies behind. The next one adds to what this one wrote.
    """
    if NUMBER < ADDERS:
        block = 0
        uses = 0  # of all buffers of dQ, before this block of keys
        col_lo = next_block(block_s, block_full, 0, 1)
        while col_lo >= 0:
            slot = block & 1
            lo = told(block_s, slot * NUMBERS + LO, 1)
            hi = told(block_s, slot * NUMBERS + HI, 1)
            lane = told(block_s, slot * NUMBERS + LANE, 1)
            len_q = 0
            len_k = 0
            if ORDERED and HAS_LEFT:
                len_q = told(block_s, slot * NUMBERS + LEN_Q, 1)
                len_k = told(block_s, slot * NUMBERS + LEN_K, 1)
            count = hi - lo
            steps = count * group_size
            for step in range((NUMBER - uses) & (ADDERS - 1), steps, ADDERS):
                member = step // count
                m = row_tile(lo + step - member * count, lo, hi, ORDERED)
                tile = lane + member * num_tiles_m + m
                turn = 0
                if ORDERED:  # asked before dQ is there, which mostly comes later
                    before = _first_block(m, len_q, len_k, window_left, BLOCK_M, HAS_LEFT)
                    turn = col_lo // BLOCK_N - before
                    wait_for_turn(turns_ptr + tile, turn)
                buffer, phase = buffer_of(uses + step, ADDERS)
                mbarrier.wait(dq_full.index(buffer), phase)
                if K_BUFFERS == 1 and step == steps - 1:  # K's last product is done
                    mbarrier.arrive(k_empty.index(0), count=1)
                if ORDERED:
                    if turn == 0:
                        tma.async_copy_shared_to_global(dq_desc, [tile, 0, 0], dq_s.index(buffer))
                    else:
                        tma_add(dq_desc, [tile, 0, 0], dq_s.index(buffer))
                else:
                    tma_add(dq_desc, [tile, 0, 0], dq_s.index(buffer))
                tma.store_wait(0)
                mbarrier.arrive(dq_empty.index(buffer), count=1)
                if ORDERED:
                    copies_done()
                    next_turn(turns_ptr + tile)
            uses += steps
            if K_BUFFERS == 1 and NUMBER == 0 and steps == 0:
                mbarrier.arrive(k_empty.index(0), count=1)
            if V_BUFFERS == 1:
                sequence = told(block_s, slot * NUMBERS + SEQUENCE, 1)
                kv_head = told(block_s, slot * NUMBERS + KV_HEAD, 1)
                first_k = told(block_s, slot * NUMBERS + FIRST_K, 1)
                len_k = told(block_s, slot * NUMBERS + LEN_K, 1)
                if K_BUFFERS == 1:
                    _send_from_dq(
                        dv_desc, uses, sequence, first_k, len_k, col_lo, kv_head, dq_s, dq_full,
                        dq_empty, BLOCK_M, BLOCK_D, VARLEN, ADDERS, NUMBER,
                    )  # fmt: skip
                    uses += 1
                _send_from_dq(
                    dk_desc, uses, sequence, first_k, len_k, col_lo, kv_head, dq_s, dq_full,
                    dq_empty, BLOCK_M, BLOCK_D, VARLEN, ADDERS, NUMBER,
                )  # fmt: skip
                uses += 1
            tell(block_empty.index(slot))
            block += 1
            col_lo = next_block(block_s, block_full, block, 1)


@gluon.jit
def sender(
    dk_desc, dv_desc, k_s, v_s, block_s, out_full, k_empty, v_empty, block_full, block_empty,
    VARLEN: gl.constexpr, K_BUFFERS: gl.constexpr, V_BUFFERS: gl.constexpr,
):  # fmt: skip
    """Send what leaves through K's and V's memory, and give that back. One warp; idle where all
    leaves through dQ's."""
    if K_BUFFERS == 2:
        block = 0
        col_lo = next_block(block_s, block_full, 0, 1)
        while col_lo >= 0:
            slot, phase = buffer_of(block, 2)
            sequence = told(block_s, slot * NUMBERS + SEQUENCE, 1)
            kv_head = told(block_s, slot * NUMBERS + KV_HEAD, 1)
            first_k = told(block_s, slot * NUMBERS + FIRST_K, 1)
            len_k = told(block_s, slot * NUMBERS + LEN_K, 1)
            tell(block_empty.index(slot))
            mbarrier.wait(out_full.index(slot), phase)
            if V_BUFFERS == 2:
                _send(dv_desc, v_s.index(slot), sequence, first_k, len_k, col_lo, kv_head, VARLEN)
                _send(dk_desc, k_s.index(slot), sequence, first_k, len_k, col_lo, kv_head, VARLEN)
            else:
                _send(dv_desc, k_s.index(slot), sequence, first_k, len_k, col_lo, kv_head, VARLEN)
            tma.store_wait(0)
            mbarrier.arrive(k_empty.index(slot), count=1)
            if V_BUFFERS == 2:
                mbarrier.arrive(v_empty.index(slot), count=1)
            block += 1
            col_lo = next_block(block_s, block_full, block, 1)
