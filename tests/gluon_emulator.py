"""Run the source of a Gluon kernel on a CPU: Gluon itself has no interpreter.

The file of the kernel is executed with stand-ins for Gluon's modules. Tensors are torch's, layouts
mean nothing, and each partition of a thread block is a thread, so that its barriers have to be
right: one that is never completed raises `Deadlock`. Shared memory begins as NaN. A matrix product
is computed when it is waited for, from what its operands in shared memory hold by then. The thread
blocks of a grid run one after the other.

What it can not show: anything about layouts, registers, the memory model, or speed.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

TIMEOUT = 60.0
"""seconds that a thread waits at a barrier before it gives up"""


class Deadlock(Exception):
    """A barrier that nobody completes."""


class _Block:
    """What the threads of the thread block that runs share."""

    def __init__(self, program: int, num_programs: int, num_warps: int) -> None:
        self.program, self.num_programs, self.num_warps = program, num_programs, num_warps
        self.changed = threading.Condition()
        self.named: dict[int, list[int]] = {}
        """by index of a named barrier: arrivals, and how often it was completed"""
        self.fault: BaseException | None = None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: condition() or self.fault is not None, TIMEOUT)
        if self.fault is not None:
            raise self.fault
        if not done:
            raise Deadlock(what)


_block = _Block(0, 0, 0)
_partition = threading.local()
"""threads: of the partition that this thread stands for"""


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


class _Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.memory, self.offset + offset)


def _load(pointer: _Pointer, mask: Tensor | None = None, other: Any = None) -> Tensor:
    offset = torch.as_tensor(pointer.offset).long()
    if mask is None:
        return pointer.memory[offset]
    return torch.where(mask, pointer.memory[torch.where(mask, offset, 0)], other)


def _store(pointer: _Pointer, value: Tensor, mask: Tensor) -> None:
    pointer.memory[pointer.offset.long()[mask]] = value[mask]


def _atomic_add(pointer: _Pointer, value: int, sem: str = "acq_rel") -> Tensor:
    with _block.changed:
        old = pointer.memory[pointer.offset].clone()
        pointer.memory[pointer.offset] += value
        _block.changed.notify_all()
    return old


def _wait_for_turn(pointer: _Pointer, turn: int) -> None:
    """Thread blocks run one after the other: who waits for a later one waits forever."""
    place = int(pointer.offset)
    _block.wait_until(lambda: pointer.memory[place] >= turn, f"turn {int(turn)} at {place}")
    assert pointer.memory[place] == turn, "somebody came before their turn"


class _Shared:
    """A shared memory descriptor: a view of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype = list(tensor.shape), tensor.dtype

    def index(self, i: int) -> _Shared:
        assert 0 <= i < self.shape[0]
        return _Shared(self.tensor[i])

    def slice(self, start: int, length: int, dim: int) -> _Shared:
        return _Shared(self.tensor.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> _Shared:
        return _Shared(self.tensor.view(list(shape)))

    def permute(self, order: Sequence[int]) -> _Shared:
        return _Shared(self.tensor.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> _Shared:
        return _Shared(self.tensor.view(-1).view(dtype).view(list(shape)))

    def load(self, layout: Any) -> Tensor:
        return self.tensor.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype
        assert list(value.shape) == self.shape
        self.tensor.copy_(value)


class _Descriptor:
    """A tensor map: addresses wrap at 2^64 bytes, reads beyond the shape are zeros."""

    def __init__(self, descriptor: Any) -> None:
        self.x = descriptor
        self.layout, self.dtype = descriptor.layout, descriptor.base.dtype
        self.block_shape = descriptor.block_shape
        size = descriptor.base.untyped_storage().nbytes() // descriptor.base.element_size()
        self.memory = descriptor.base.as_strided((size,), (1,), 0)

    def _box(self, coord: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Element offsets of the box at `coord`, and which of them exist."""
        x, item = self.x, self.x.base.element_size()
        assert len(coord) == len(x.shape) == len(x.block_shape)
        first = sum(int(c) * stride for c, stride in zip(coord, x.strides, strict=True)) * item
        first = (first + 2**63) % 2**64 - 2**63
        offsets, inside = torch.tensor(x.base.storage_offset() + first // item), torch.tensor(True)
        for c, n, size, stride in zip(coord, x.block_shape, x.shape, x.strides, strict=True):
            step = torch.arange(n)
            here = step + int(c)
            offsets = offsets[..., None] + (step * stride if n > 1 else step)
            inside = inside[..., None] & (here >= 0) & (here < size)
        return offsets, inside

    def fetch(self, coord: Sequence[Any], barrier: _Barrier, target: _Shared) -> None:
        offsets, inside = self._box(coord)
        values = torch.where(inside, self.memory[torch.where(inside, offsets, 0)], 0)
        target.store(values.to(self.dtype))
        barrier.add_bytes(-values.numel() * self.x.base.element_size())

    def write(self, coord: Sequence[Any], source: _Shared) -> None:
        offsets, inside = self._box(coord)
        self.memory[offsets[inside]] = source.tensor[inside]

    def add(self, coord: Sequence[Any], source: _Shared) -> None:
        offsets, inside = self._box(coord)
        self.memory[offsets[inside]] += source.tensor[inside]


# ---------------------------------------------------------------------------------------------
# Barriers
# ---------------------------------------------------------------------------------------------


class _Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were expected too."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        with _block.changed:
            self.pending -= count
            assert self.pending >= 0, "more arrivals than the barrier counts"
            self._turn()

    def add_bytes(self, count: int) -> None:
        with _block.changed:
            self.bytes += count
            self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            _block.changed.notify_all()


class _Barriers:
    def __init__(self, count: int) -> None:
        self.items = [_Barrier() for _ in range(count)]

    def index(self, i: int) -> _Barrier:
        return self.items[int(i)]


class _BarrierLayout:
    pass


def _init(barrier: _Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _expect(barrier: _Barrier, count: int) -> None:
    barrier.add_bytes(count)
    barrier.arrive(1)


def _wait(barrier: _Barrier, parity: int) -> None:
    parity = int(parity)
    _block.wait_until(lambda: barrier.phase % 2 != parity, f"mbarrier, parity {parity}")


def _release(barrier: _Barrier) -> None:
    """Every thread of the partition arrives."""
    barrier.arrive(_partition.threads)


def _named_arrive(index: int, threads: int) -> int:
    with _block.changed:
        state = _block.named.setdefault(index, [0, 0])
        turn = state[1]
        state[0] += 128
        assert state[0] <= threads
        if state[0] == threads:
            state[:] = 0, turn + 1
            _block.changed.notify_all()
    return turn


def _named_sync(index: int, threads: int) -> None:
    turn = _named_arrive(index, threads)
    _block.wait_until(lambda: _block.named[index][1] > turn, f"named barrier {index}")


# ---------------------------------------------------------------------------------------------
# Instructions
# ---------------------------------------------------------------------------------------------


class _Product:
    """A matrix product under way."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute


def _value(x: Any) -> Tensor:
    return x.tensor if isinstance(x, _Shared) else x


def _mma(a: Any, b: _Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> _Product:
    assert is_async
    return _Product(
        lambda: (acc if use_acc else 0) + _value(a).float() @ b.tensor.float(),
    )


def _mma_wait(num_outstanding: int, deps: Sequence[Any]) -> Any:
    done = [x.compute() if isinstance(x, _Product) else x for x in deps]
    return done[0] if len(done) == 1 else tuple(done)


def _warp_specialize(
    partitions: Sequence[tuple[Callable[..., None], tuple]], warps: list[int], registers: list[int]
) -> None:
    assert len(warps) == len(registers) == len(partitions) - 1
    block = _block

    @torch.no_grad()
    def run(function: Callable[..., None], args: tuple, num_threads: int) -> None:
        _partition.threads = num_threads
        try:
            function(*args)
        except BaseException as fault:
            with block.changed:
                block.fault = block.fault or fault
                block.changed.notify_all()

    threads = [
        threading.Thread(target=run, args=(*p, 32 * n), daemon=True)
        for p, n in zip(partitions, (block.num_warps, *warps), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if block.fault is not None:
        raise block.fault


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if isinstance(layout, _BarrierLayout):
        return _Barriers(shape[0]) if len(shape) == 2 else _Barrier()
    x = torch.empty(list(shape), dtype=dtype)
    return _Shared(x.fill_(torch.nan) if dtype.is_floating_point else x.fill_(-(2**31)))


def _split_rows(x: Tensor, like: object = None) -> tuple[Tensor, Tensor]:
    pairs = x.reshape(-1, 2, 8, *x.shape[1:])
    return pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)


def _join_rows(first: Tensor, second: Tensor, like: object) -> Tensor:
    pairs = (x.reshape(-1, 8, *x.shape[1:]) for x in (first, second))
    return torch.stack(tuple(pairs), 1).flatten(0, 2)


def _keep_where(x: Tensor, distance: Tensor, step: int, other: float, jump: bool = False) -> Tensor:
    assert (distance.diff(dim=1) == step).all()
    return torch.where(distance >= 0, x, other)


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    def apply(a: Any, b: Any) -> Tensor:
        like = a if isinstance(a, Tensor) else b
        a, b = (x if isinstance(x, Tensor) else like.new_tensor(x) for x in (a, b))
        return function(a, b)

    return apply


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def _jit(function: Any = None, **_: Any) -> Any:
    return function or (lambda f: f)


def _stand_ins() -> dict[str, types.ModuleType]:
    """Modules by the names under which a kernel's file imports them."""
    anything = lambda *args, **kwargs: None  # noqa: E731
    language = _module(
        "language",
        constexpr=lambda x: x,
        bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32,
        int32=torch.int32, int64=torch.int64,
        SliceLayout=anything, BlockedLayout=anything, SwizzledSharedLayout=anything,
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=anything),
        NVMMADistributedLayout=anything, DotOperandLayout=anything,
        static_range=range,
        program_id=lambda axis: torch.tensor(_block.program, dtype=torch.int32),
        num_programs=lambda axis: _block.num_programs,
        arange=lambda a, b, layout: torch.arange(a, b, dtype=torch.int32),
        full=lambda shape, x, dtype, layout: torch.full(shape, x, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        minimum=_binary(torch.minimum), maximum=_binary(torch.maximum),
        where=lambda c, a, b: torch.where(torch.as_tensor(c), a, b),
        exp2=torch.exp2, log2=torch.log2, abs=torch.abs,
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype), max=torch.amax,
        convert_layout=lambda x, layout: x,
        load=_load, store=_store, atomic_add=_atomic_add,
        allocate_shared_memory=_allocate, warp_specialize=_warp_specialize,
    )  # fmt: skip
    hopper = _module(
        "hopper",
        fence_async_shared=anything,
        mbarrier=_module(
            "mbarrier", MBarrierLayout=_BarrierLayout, init=_init, expect=_expect, wait=_wait,
            arrive=lambda barrier, count: barrier.arrive(count),
        ),
        tma=_module(
            "tma",
            async_copy_global_to_shared=lambda desc, coord, barrier, target: desc.fetch(
                coord, barrier, target
            ),
            async_copy_shared_to_global=lambda desc, coord, source: desc.write(coord, source),
            store_wait=anything,
        ),
        warpgroup_mma=_mma,
        warpgroup_mma_wait=_mma_wait,
    )  # fmt: skip
    instructions = _module(
        "instructions",
        barrier_sync=_named_sync,
        barrier_arrive=_named_arrive,
        release=_release,
        tell=_release,
        hold_here=lambda x: x,
        hold_rows_here=lambda x: x,
        split_rows=_split_rows,
        split_vector=_split_rows,
        join_rows=_join_rows,
        join_vector=_join_rows,
        rescale_rows=lambda x, factor: x * factor[:, None],
        partial_sums=lambda x: x.reshape(x.shape[0], -1, 8).sum(1),
        scale_partial_sums=lambda x, factor: x * factor[:, None],
        pack_pairs=lambda x, dtype: x.to(dtype),
        unpack_pairs=lambda x, dtype, layout: x,
        copies_done=anything,
        wait_for_turn=_wait_for_turn,
        next_turn=lambda pointer: _atomic_add(pointer, 1),
        tma_add=lambda desc, coord, source: desc.add(coord, source),
        keep_where=_keep_where,
    )
    gluon = _module("gluon", jit=_jit, constexpr_function=_jit, language=language)
    return {
        "triton.experimental": _module("experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": _module("nvidia", hopper=hopper),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "flashpage.attention.hopper.instructions": instructions,
    }


class Emulated:
    """A kernel, launched as Triton's are: `Emulated(modules, name)[grid](*args, **constants)`.

    modules: the last holds the kernel, and imports those before it, in this order.
    """

    def __init__(self, modules: Sequence[str], name: str) -> None:
        specs = [importlib.util.find_spec(module) for module in modules]
        with mock.patch.dict(sys.modules, _stand_ins()):
            for spec in specs:
                source = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = source
                spec.loader.exec_module(source)
        self.function = getattr(source, name)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int, maxnreg: int | None = None, **constants: Any
        ) -> None:
            global _block
            for program in range(grid[0]):
                _block = _Block(program, grid[0], num_warps)
                self.function(*map(_argument, args), **constants)

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _Pointer(x.view(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,)))
    if hasattr(x, "block_shape"):
        return _Descriptor(x)
    return torch.tensor(x, dtype=torch.int32) if isinstance(x, int) else x
