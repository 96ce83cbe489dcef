"""Which backend serves a problem, and why not the others.

A backend is tried in the order of `_BACKENDS`; the first that has no objection serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Protocol, get_args

import torch
from torch import Tensor

from flashpage.attention.problem import (
    Function,
    Layout,
    Problem,
    check_heads,
    resolve_softcap_and_dropout,
    resolve_window,
)
from flashpage.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class AttentionInputs:
    """The data of a forward or backward; shapes as in `ops`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    rng_state: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class DecodeInputs:
    """The data of a decode; shapes as in `functional.flash_attn_with_kvcache`, new keys stored."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    num_new_tokens: int
    """keys just stored after those of cache_seqlens, the same number for each sequence"""
    block_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    alibi_slopes: Tensor | None
    num_splits: int

    @property
    def seqlens_k(self) -> Tensor:
        """int32 `[batch]`: keys to attend over, as positions in the cache."""
        n = self.num_new_tokens
        return self.cache_seqlens + n if n else self.cache_seqlens


class Backend(Protocol):
    """What a backend implements."""

    name: str

    def why_not(self, problem: Problem, function: Function) -> str | None:
        """None if this backend can serve `function` of the problem, else the reason.

        A backend that can, but is slower than another there, gives that as a reason too, unless it
        was asked for by name (`named`).
        """

    def but_for(self, problem: Problem, function: Function) -> str | None:
        """Which calls of a problem that it serves it passes on to another backend, if any: what a
        `Problem` does not say, such as lengths.
        """

    def forward(
        self, problem: Problem, inputs: AttentionInputs, return_s_dmask: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(out, softmax_lse, s_dmask)`, fresh and contiguous."""

    def backward(
        self,
        problem: Problem,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        softmax_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)`, fresh and contiguous."""

    def decode(self, problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        """`(out, softmax_lse)`, fresh and contiguous."""


def _triton() -> Backend:
    from flashpage.attention.triton.backend import TritonBackend

    return TritonBackend()


def _hopper() -> Backend:
    from flashpage.attention.hopper.backend import HopperBackend

    return HopperBackend()


def _triton_interpreter() -> Backend:
    from flashpage.attention.triton.backend import InterpretedTritonBackend

    return InterpretedTritonBackend()


def _cpu_numba() -> Backend:
    from flashpage.attention.cpu.backend import NumbaBackend

    return NumbaBackend()


def _cpu_torch() -> Backend:
    from flashpage.attention.cpu.backend import TorchBackend

    return TorchBackend()


# Fastest first. Modules are imported when a backend is first asked for.
_BACKENDS: dict[str, Callable[[], Backend]] = {
    "hopper": _hopper,
    "triton": _triton,
    "cpu_numba": _cpu_numba,
    "cpu_torch": _cpu_torch,
    "triton_interpreter": _triton_interpreter,
}
# Serves nobody who did not ask for it by name.
_BY_NAME = ("triton_interpreter",)
_DEFAULT = tuple(name for name in _BACKENDS if name not in _BY_NAME)

_named: ContextVar[tuple[str, ...] | None] = ContextVar("named_backends", default=None)


@cache
def _backend(name: str) -> Backend:
    return _BACKENDS[name]()


@contextlib.contextmanager
def only(*names: str) -> Iterator[None]:
    """Within this context only the named backends may serve: of them the first that can, also where
    another is faster.

    For tests and measurements that compare a fast path with its slow twin.
    """
    unknown = [name for name in names if name not in _BACKENDS]
    if unknown or not names:
        raise ArgumentError(f"names must be among {sorted(_BACKENDS)}, got {list(names)}")
    with within(names):
        yield


def named() -> tuple[str, ...] | None:
    """The names that `only` gave, None outside of it."""
    return _named.get()


@contextlib.contextmanager
def within(names: tuple[str, ...] | None) -> Iterator[None]:
    """As it was where `named()` gave these: autograd runs the backward in threads of its own, which
    know nothing of the forward's context."""
    token = _named.set(names)
    try:
        yield
    finally:
        _named.reset(token)


@lru_cache(maxsize=4096)
def _choose(problem: Problem, function: Function, named: tuple[str, ...] | None) -> Backend:
    reasons = []
    for name in named or _DEFAULT:
        backend = _backend(name)
        reason = backend.why_not(problem, function)
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise UnsupportedError(
        f"no backend serves {function} of {problem}. " + "; ".join(reasons) + "."
    )


def choose(problem: Problem, function: Function) -> Backend:
    """The backend that serves this call.

    Raises:
        UnsupportedError: with every backend's reason.
    """
    return _choose(problem, function, _named.get())


# ---------------------------------------------------------------------------------------------
# The report that users see
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendStatus:
    """Whether one backend serves one function of the problem that was asked about."""

    function: Function
    backend: str
    serves: bool
    """this backend would serve the call"""
    reason: str
    """why not, if it does not; else which calls another backend serves, if any"""


@dataclass(frozen=True)
class BackendReport:
    """Result of `backends()`; printing it gives a table."""

    problem: Problem
    statuses: tuple[BackendStatus, ...]

    def serving(self, function: Function) -> str | None:
        """Name of the backend that serves `function`, None if none does."""
        for status in self.statuses:
            if status.function == function and status.serves:
                return status.backend
        return None

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"{p.layout} {str(p.dtype).removeprefix('torch.')} on {p.device}: "
            f"{p.num_q_heads} query heads, {p.num_kv_heads} kv heads, head_dim {p.head_dim}"
        ]
        for s in self.statuses:
            but_for = f", but for {s.reason}" if s.reason else ""
            verdict = f"serves{but_for}" if s.serves else f"no: {s.reason}"
            lines.append(f"  {s.function:<9} {s.backend:<10} {verdict}")
        return "\n".join(lines)


def backends(
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    *,
    layout: Layout = "dense",
    num_q_heads: int = 8,
    num_kv_heads: int = 8,
    head_dim: int = 64,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi: bool = False,
    dropout_p: float = 0.0,
) -> BackendReport:
    """Say which backend would serve a call with these properties, and why not the others.

    Args:
        device, dtype: of q, k and v.
        layout: "dense" and "varlen" are the functions of those names; "paged" is
            `flash_attn_varlen_func` (forward) or `flash_attn_with_kvcache` (decode) with a
            `block_table`.

    Returns:
        a `BackendReport`; `print` it, or ask `report.serving("forward")`.

    Raises:
        ArgumentError: an unknown layout, device or dtype, or heads, softcap or dropout that the
            call itself would refuse.
    """
    if layout not in get_args(Layout):
        raise ArgumentError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"device must be a torch device such as 'cpu' or 'cuda:0', got {device!r}"
        ) from error
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype must be a torch dtype or its name, got {dtype!r}")
    check_heads(num_q_heads, num_kv_heads, head_dim)
    resolve_softcap_and_dropout(softcap, dropout_p)
    left, right = resolve_window(window_size, causal)
    problem = Problem(
        layout=layout,
        device=device,
        dtype=dtype,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        has_alibi=alibi,
    )
    statuses = []
    for function in get_args(Function):
        taken = None
        for name in _named.get() or _DEFAULT:
            backend = _backend(name)
            reason = backend.why_not(problem, function)
            serves = reason is None and taken is None
            if serves:
                taken = name
                reason = backend.but_for(problem, function)
            elif reason is None:
                reason = f"{taken} is faster"
            statuses.append(BackendStatus(function, name, serves, reason or ""))
    return BackendReport(problem, tuple(statuses))
