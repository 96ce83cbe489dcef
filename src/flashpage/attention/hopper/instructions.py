"""Single instructions that Gluon has no word for: named barriers, quiet arrivals, a rescale that a
warp can jump over, a mask by immediates, halves of the rows, sums in global memory. The kernels are
written in these and in Gluon; nothing here knows attention.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy


@gluon.constexpr_function
def _barrier(instruction, index, threads):
    return f"{instruction} {index}, {threads}; mov.u32 $0, 0;"


@gluon.jit
def barrier_sync(index: gl.constexpr, threads: gl.constexpr):
    """Wait at a named barrier. Triton takes the first eight for itself."""
    gl.inline_asm_elementwise(
        _barrier("bar.sync", index, threads), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier_arrive(index: gl.constexpr, threads: gl.constexpr):
    """Arrive at a named barrier without waiting."""
    gl.inline_asm_elementwise(
        _barrier("bar.arrive", index, threads), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def release(barrier):
    """Every thread arrives at an mbarrier. (`mbarrier.arrive` would first synchronise the warps of
    the warpgroup.) No asynchronous copy of these threads is under way, so it counts at once.
    """
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def tell(barrier):
    """`release` after what every thread itself read and stored in shared memory, for those who wait
    to read or overwrite it. (By `mbarrier.arrive` one lane speaks for its warps, after a barrier of
    theirs. That is as right, but compute-sanitizer's racecheck takes an arrival to order only what
    the same thread did.)
    """
    gl.inline_asm_elementwise(
        "fence.acq_rel.cta; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    release(barrier)


@gluon.jit
def hold_here(x):
    """x, two rows by two columns a thread, non-negative: what comes later in the program, such as
    the wait for a matrix product, is not moved above the instructions that make x.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; .reg .f32 a, b; add.f32 a, $4, $5; add.f32 b, $6, $7; add.f32 a, a, b; "
        "setp.lt.f32 q, a, 0f00000000; vote.sync.any.pred q, q, 0xffffffff; @!q bra.uni over; "
        "nanosleep.u32 1; over: mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }",
        "=f,=f,=f,=f,f,f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def hold_rows_here(x):
    """`hold_here` for one number of a row a thread, such as its maximum; x is below infinity."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.eq.f32 q, $1, 0f7F800000; vote.sync.any.pred q, q, 0xffffffff; "
        "@!q bra.uni over; nanosleep.u32 1; over: mov.b32 $0, $1; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _rescale(n):
    """$0... are the results, tied to x; from $2n on the factors, of one row in elements 0 and 1 of
    every four and of another in 2 and 3."""
    multiply = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; "
        f"setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; or.pred p, p, q; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni over; {multiply} over: }}"
    )


@gluon.constexpr_function
def _rescale_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale_rows(x, factor):
    """`x * factor[:, None]` of an accumulator; a warp whose factors are all 1 jumps over it."""
    N: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise(
        _rescale(N),
        _rescale_operands(N),
        [x, factor[:, None].broadcast_to(x.shape)],
        dtype=gl.float32,
        is_pure=False,
        pack=N,
    )


@gluon.jit
def partial_sums(x):
    """Row sums of a tile of scores as 8 columns of partial sums: no thread needs another's."""
    return gl.sum(x.reshape([x.shape[0], x.shape[1] // 8, 8]), 1)


@gluon.jit
def scale_partial_sums(x, factor):
    """`x * factor[:, None]` for x as from `partial_sums`."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.constexpr_function
def _pack(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def pack_pairs(x, DTYPE: gl.constexpr):
    """A tile of float32 rounded to 16 bits, two columns in an int32: what a loop carries so costs
    neither the registers nor the instructions of single 16-bit numbers. No data moves."""
    low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        _pack(DTYPE), "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack_pairs(x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """What `pack_pairs` packed, as the left operand of a matrix product."""
    twice = gl.join(x, x).reshape([x.shape[0], x.shape[1] * 2])
    if gl.bfloat16 == DTYPE:
        pairs = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [twice], dtype=gl.float16, is_pure=True, pack=2
        )
    return gl.convert_layout(pairs, LAYOUT, assert_trivial=True)


@gluon.jit
def split_rows(x):
    """x `[rows, columns]` of an accumulator as its rows 0-7 and 8-15 of every 16, of which each
    thread has one each: no data moves."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    first, second = gl.split(x.reshape([R // 16, 2, 8, C]).permute((0, 2, 3, 1)))
    return first.reshape([R // 2, C]), second.reshape([R // 2, C])


@gluon.jit
def join_rows(first, second, like):
    """What `split_rows` split, in the layout of `like`."""
    R: gl.constexpr = first.shape[0]
    C: gl.constexpr = first.shape[1]
    LAYOUT: gl.constexpr = like.type.layout
    x = gl.join(first, second).reshape([R // 8, 8, C, 2]).permute((0, 3, 1, 2))
    return gl.convert_layout(x.reshape([R * 2, C]), LAYOUT, assert_trivial=True)


@gluon.jit
def split_vector(x, like):
    """One number a row, split as `split_rows` split the rows; `like` is one half of them."""
    R: gl.constexpr = x.shape[0]
    LAYOUT: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    first, second = gl.split(x.reshape([R // 16, 2, 8]).permute((0, 2, 1)))
    first = gl.convert_layout(first.reshape([R // 2]), LAYOUT, assert_trivial=True)
    return first, gl.convert_layout(second.reshape([R // 2]), LAYOUT, assert_trivial=True)


@gluon.jit
def join_vector(first, second, like):
    """What `split_vector` split, in the layout of `like`."""
    R: gl.constexpr = first.shape[0]
    LAYOUT: gl.constexpr = like.type.layout
    x = gl.join(first, second).reshape([R // 8, 8, 2]).permute((0, 2, 1))
    return gl.convert_layout(x.reshape([R * 2]), LAYOUT, assert_trivial=True)


@builtin
def tma_add(desc, coord, source, _semantic=None):
    """Add a tile in shared memory to one in global memory, asynchronously, as a store by `tma`."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, source.handle)


@gluon.constexpr_function
def _keep(n, step, other, jump):
    """$0... are the results, tied to x; from $2n on the distances. A thread's elements are two of a
    row, two of the row 8 further down, then those 8 columns on."""
    bits = "00000000" if other == 0.0 else "FF800000"
    select = []
    for i in range(n):
        column, distance = 8 * (i >> 2) + (i & 1), 2 * n + (i & 2)
        select.append(f"setp.ge.s32 q, ${distance}, {-step * column};")
        select.append(f"selp.f32 ${i}, ${i}, 0f{bits}, q;")
    if not jump:
        return f"{{ .reg .pred q; {' '.join(select)} }}"
    nearest = max(0, -step * (8 * ((n - 1) >> 2) + 1))
    return (
        f"{{ .reg .pred q; .reg .s32 d; min.s32 d, ${2 * n}, ${2 * n + 2}; "
        f"setp.lt.s32 q, d, {nearest}; vote.sync.any.pred q, q, 0xffffffff; @!q bra.uni over; "
        f"{' '.join(select)} over: }}"
    )


@gluon.constexpr_function
def _keep_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * n)


@gluon.jit
def keep_where(
    x, distance, STEP: gl.constexpr, OTHER: gl.constexpr, JUMP: gl.constexpr = False
):  # fmt: skip
    """x where distance >= 0, else OTHER, which is 0 or -inf.

    From one column to the next distance grows by STEP: of a row only its first element of each
    thread is looked at, the others are never computed. (An ordinary `where` takes more
    instructions, and registers for its indices.) JUMP: a warp of which nothing is hidden jumps
    over it. For an accumulator whose warps lie along rows.
    """
    N: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise(
        _keep(N, STEP, OTHER, JUMP),
        _keep_operands(N),
        [x, distance],
        dtype=gl.float32,
        is_pure=True,
        pack=N,
    )


@gluon.jit
def copies_done():
    """Wait until what this warp wrote by the accelerator has reached global memory (`store_wait`
    waits until it was read from shared memory), before any of its lanes tells others of it. The
    lane that started the copies waits, the others for that lane."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff; "
        "mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_turn(ptr, turn):
    """Until the counter at ptr, never negative, reaches turn; what this warp has the accelerator
    read and write in global memory comes after. Read by all lanes, whichever starts the copies: an
    atomic addition of 0 would have one lane tell the others, and queue with all that ask."""
    seen = turn * 0
    while seen < turn:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];",
            "=r,l",
            [ptr],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def next_turn(ptr):
    """Let the next one come, after all that this warp did: one lane adds 1 and waits for nothing.
    The other lanes' part comes before it by the warp's barrier in `copies_done`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
        "@first red.release.gpu.global.add.s32 [$1], 1; mov.u32 $0, 0; }",
        "=r,l",
        [ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
