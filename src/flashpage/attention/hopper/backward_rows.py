"""What is done to query rows before and after the backward kernel for Hopper, in plain Triton.

Before: delta = rowsum(dO * O) - dLSE, the LSE in base 2, and zeros for the sums of dQ, in tiles of
BLOCK_M rows: see `backward_kernel`. After: dQ from its sums, which lie in the order of registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashpage.attention.triton.backward_kernels import find_sequence, rows_of
from flashpage.attention.triton.score import LOG2E

_COUNTS = ("num_tiles", "num_q_heads", "num_sequences", "seqlen_q")


@triton.jit
def _tile(
    cu_q_ptr, num_tiles, num_q_heads, num_sequences, seqlen_q,
    BLOCK_M: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """`(entry, head, first, row_lo, length)` of this program's tile of rows."""
    tile = tl.program_id(0) % num_tiles
    lane = tl.program_id(0) // num_tiles
    if VARLEN:
        sequence, tile = find_sequence(cu_q_ptr, tile, num_sequences, BLOCK_M)
        first, length = rows_of(cu_q_ptr, sequence, num_sequences, seqlen_q)
        entry = lane * 0
        head = lane
    else:
        entry = lane // num_q_heads
        head = lane % num_q_heads
        first = lane * 0
        length = seqlen_q
    return entry, head, first, tile * BLOCK_M, length


@triton.jit(do_not_specialize=_COUNTS)
def prepare_kernel(
    out, dout, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, sums_ptr, turns_ptr, counter_ptr, cu_q_ptr,
    dout_strides, num_tiles, num_q_heads, num_sequences, seqlen_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Grid: one program a tile. turns_ptr: None where dQ is summed in any order, else set to 0, and
    the sums are left to the first block of keys; counter_ptr: of blocks of keys, set to 0;
    num_sequences: with the rows after the last one if VARLEN. Rows that a tile has too many, and
    rows that see no key, get an LSE that makes their P zero.
    """
    tl.store(counter_ptr, 0)
    if turns_ptr is not None:
        tl.store(turns_ptr + tl.program_id(0), 0)
    entry, head, first, row_lo, length = _tile(
        cu_q_ptr, num_tiles, num_q_heads, num_sequences, seqlen_q, BLOCK_M, VARLEN
    )
    if row_lo >= length:
        return
    rows = row_lo + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (rows < length)[:, None] & (d < HEAD_DIM)[None, :]
    row = entry.to(tl.int64) * seqlen_q + first + rows
    place = ((row * num_q_heads + head) * HEAD_DIM)[:, None] + d[None, :]
    o = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    dout += entry.to(tl.int64) * dout_strides[0] + head.to(tl.int64) * dout_strides[2]
    place = ((first + rows).to(tl.int64) * dout_strides[1])[:, None] + d[None, :]
    do = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    place = (entry.to(tl.int64) * num_q_heads + head) * seqlen_q + first + rows
    lse = tl.load(lse_ptr + place, mask=rows < length, other=float("inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + place, mask=rows < length, other=0.0)
    tile = tl.program_id(0).to(tl.int64)
    stats = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(lse2_ptr + stats, tl.where(lse == float("inf"), 1e30, lse * LOG2E))
    tl.store(delta_ptr + stats, delta)
    if turns_ptr is None:
        elements = tile * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)
        tl.store(sums_ptr + elements, tl.zeros([BLOCK_M * BLOCK_D], tl.float32))


@triton.jit(do_not_specialize=_COUNTS)
def finish_kernel(
    sums_ptr, turns_ptr, dq, cu_q_ptr, softmax_scale,
    num_tiles, num_q_heads, num_sequences, seqlen_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Grid: as `prepare_kernel`. dq is contiguous."""
    entry, head, first, row_lo, length = _tile(
        cu_q_ptr, num_tiles, num_q_heads, num_sequences, seqlen_q, BLOCK_M, VARLEN
    )
    if row_lo >= length:
        return
    tile = tl.program_id(0).to(tl.int64)
    elements = tile * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)
    if turns_ptr is None:
        x = tl.load(sums_ptr + elements)
    else:  # rows that no block of keys came to have no sums
        seen = tl.load(turns_ptr + tile) > 0
        x = tl.load(sums_ptr + elements, mask=seen & (elements >= 0), other=0.0)
    # The order in which `backward_kernel` put registers, taken back.
    ROWS: tl.constexpr = BLOCK_M // 16
    COLUMNS: tl.constexpr = 8 // ROWS
    x = x.reshape(COLUMNS, ROWS, BLOCK_D // 8 // COLUMNS, 8, 4, 2, 2)
    x = tl.permute(x, (1, 5, 3, 0, 2, 4, 6)).reshape(BLOCK_M, BLOCK_D)
    rows = row_lo + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = entry.to(tl.int64) * seqlen_q + first + rows
    tl.store(
        dq + ((row * num_q_heads + head) * HEAD_DIM)[:, None] + d[None, :],
        (x * softmax_scale).to(dq.dtype.element_ty),
        mask=(rows < length)[:, None] & (d < HEAD_DIM)[None, :],
    )
