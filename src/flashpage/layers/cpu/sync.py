"""Threads that meet inside a kernel; imported only where numba is installed.

A step has several hundred points at which all threads must have finished what came before. Leaving
one parallel section and entering the next costs microseconds each time; meeting costs a fraction of
one. Who waits long gives the processor away, so that a busy machine makes steps slower, not stuck.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from flashpage.attention.cpu.numba_math import jit
from flashpage.layers.cpu.vectors import I32, I64, declare, i, i64

COUNTERS = 16
"""int64 of an array to meet at: a cache line for the counter, one to keep others away."""

_SPINS = 4000
_MACHINE = platform.machine().lower()


def _relax(b: Any) -> None:
    if _MACHINE in ("x86_64", "amd64"):
        b.call(declare(b, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
    elif _MACHINE in ("aarch64", "arm64"):
        b.call(declare(b, "llvm.aarch64.hint", ir.VoidType(), [I32]), [ir.Constant(I32, 1)])


@intrinsic
def meet(typing_context, counter, threads, patience):  # type: ignore[no-untyped-def]
    """Wait until all threads have called this as often as the caller.

    counter: address of an int64, 0 before the first meeting. Who has given the processor away
    `patience` times, because some thread does not come, sends everybody on: see `all_came`.
    """

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        counter, threads, patience = arguments
        place = b.inttoptr(counter, ir.PointerType(I64))
        number = b.add(b.atomic_rmw("add", place, i(1), "seq_cst"), i(1))
        goal = b.mul(b.sdiv(b.add(number, b.sub(threads, i(1))), threads), threads)
        before = b.block
        wait, again, spin, give, late, after = (
            b.append_basic_block(name)
            for name in ("wait", "again", "spin", "give", "late", "after")
        )
        b.branch(wait)
        b.position_at_end(wait)
        turns = b.phi(I64)
        turns.add_incoming(i(0), before)
        now = b.load_atomic(place, "acquire", 8, typ=I64)
        b.cbranch(b.icmp_signed(">=", now, goal), after, again)
        b.position_at_end(again)
        following = b.add(turns, i(1))
        b.cbranch(b.icmp_signed("<", turns, i(_SPINS)), spin, give)
        b.position_at_end(spin)
        _relax(b)
        turns.add_incoming(following, b.block)
        b.branch(wait)
        b.position_at_end(give)
        if os.name == "posix":
            b.call(declare(b, "sched_yield", I32, []), [])
        turns.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", turns, patience), wait, late)
        b.position_at_end(late)
        b.atomic_rmw("add", place, i(1 << 62), "seq_cst")
        b.branch(after)
        b.position_at_end(after)
        return context.get_dummy_value()

    return types.void(i64, i64, i64), generate


@intrinsic
def take(typing_context, counter):  # type: ignore[no-untyped-def]
    """The next number of a counter, an int64 at an address: no other thread gets it."""

    def generate(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        place = b.inttoptr(arguments[0], ir.PointerType(I64))
        return b.atomic_rmw("add", place, i(1), "seq_cst")

    return i64(i64), generate


@jit()
def all_came(counters):  # type: ignore[no-untyped-def]
    """Whether every meeting was one."""
    return 0 <= counters[0] < 1 << 61


@jit()
def _meet_once(counters, threads, patience):  # type: ignore[no-untyped-def]
    meet(counters.ctypes.data, threads, patience)


@jit(parallel=True)
def try_to_meet(threads, patience):  # type: ignore[no-untyped-def]
    """Whether so many threads run at the same time."""
    counters = np.zeros(COUNTERS, np.int64)
    for _ in numba.prange(threads):
        _meet_once(counters, threads, patience)
    return all_came(counters)
