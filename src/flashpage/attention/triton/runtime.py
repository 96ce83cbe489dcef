"""What the kernels need to know of the machine: Triton, the device, tensor descriptors.

The only file of this room that `backend` imports before a kernel is needed; Triton itself is
imported by the kernels' files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor

MINIMUM_TRITON = (3, 6)

COMPILERS = 8
"""threads that compile kernels ahead"""


INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors: for tests without a GPU. Triton decides it
when a kernel is defined, so it is read once."""


@cache
def why_no_triton() -> str | None:
    """None if Triton can be imported and is new enough, else the reason."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it comes with torch's builds for GPUs)"
    try:
        import triton
    except Exception as error:  # a broken installation can raise anything
        return f"triton can not be imported: {error}"
    found = str(getattr(triton, "__version__", "something without a version"))
    version = re.match(r"(\d+)\.(\d+)", found)
    if version is None or tuple(map(int, version.groups())) < MINIMUM_TRITON:
        wanted = ".".join(map(str, MINIMUM_TRITON))
        return f"triton {wanted} or newer is needed, {found} is installed"
    return None


@cache
def capability(device: torch.device) -> int:
    """Compute capability as `10 * major + minor`; 0 for the interpreter and for AMD."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def overlap(device: torch.device) -> dict[str, Any]:
    """The launch option of a kernel that may be set up while the one before it still runs.

    Programmatic dependent launch, compute capability 9.0 and up. Such a kernel says at its start
    that the next may come (`gdc_launch_dependents`), and waits (`gdc_wait`) before it reads what an
    earlier kernel wrote, and before it writes anything: in every program, so that its end means
    that all before it have ended.
    """
    return {"launch_pdl": True} if capability(device) >= 90 else {}


_compiling_ahead: ContextVar[bool] = ContextVar("launches only compile", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`: call it with the kernel's arguments. The one way in which kernels start."""
    if _compiling_ahead.get():
        return partial(kernel.run, grid=grid, warmup=True)
    return kernel[grid]


def hash_triton_ahead() -> None:
    """Let Triton hash itself (0.5 s) in a thread, while weights are loaded: it does so once a
    process, before the first kernel, for the names of what it keeps on the disk."""

    def read() -> None:
        # Not part of Triton's public interface: without it the first kernel does it.
        with contextlib.suppress(Exception):
            from triton.runtime.cache import triton_key

            triton_key()

    if why_no_triton() is None:
        Thread(target=read, name="flashpage hashes triton", daemon=True).start()


def can_compile_ahead(device: torch.device) -> bool:
    """Whether `compiling_ahead` can be entered for this device."""
    return device.type == "cuda" and why_no_triton() is None


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """In this thread, until it ends, launches start nothing: each kernel is compiled (or found in
    the cache on the disk) and loaded beside the others. What they would have written stays as it
    was.

    Most of a first call is compiling, much of it in programs of their own (ptxas, and the C
    compiler for what starts the kernel): side by side they take the time of a few.
    """
    from triton import AsyncCompileMode

    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(
        COMPILERS, initializer=torch.cuda.set_device, initargs=(index,)
    ) as pool:
        # An error shows again, and better, where the kernel is launched.
        mode = AsyncCompileMode(_Loading(pool), ignore_errors=True)
        token = _compiling_ahead.set(True)
        try:
            with mode:
                yield
        finally:
            _compiling_ahead.reset(token)


class _Loading(Executor):
    """Compiles in `pool`, and there also loads what came of it."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def submit(self, fn: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        return self._pool.submit(self._load, fn)

    @staticmethod
    def _load(compile_: Callable[[], Any]) -> Any:
        kernel = compile_()
        kernel.run  # noqa: B018 - the property makes what starts the kernel, and loads it
        return kernel


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the tensors' device, whichever is current; its current stream is used."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


# ---------------------------------------------------------------------------------------------
# Tensor descriptors: tiles are fetched by the tensor memory accelerator (compute capability 9.0+)
# ---------------------------------------------------------------------------------------------


def descriptors_fit(*tensors: Tensor) -> bool:
    """The accelerator can address these tensors: 16-byte alignment, no expanded dimension.

    Used on Hopper and Blackwell of the data centre, whose matrix units read what it fetched; not
    for float32, whose products are not theirs.
    """
    if tensors[0].element_size() != 2:
        return False
    if not INTERPRETING and not 90 <= capability(tensors[0].device) < 120:
        return False
    return all(_descriptor_fits(x) for x in tensors)


def _descriptor_fits(x: Tensor) -> bool:
    *strides, last = x.stride()
    if x.data_ptr() % 16 or last != 1 or x.numel() == 0:
        return False
    unit = 16 // x.element_size()
    return all(stride % unit == 0 and 0 < stride < 2**37 for stride in strides)


@cache
def _descriptor_type() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    class Descriptor(TensorDescriptor):
        """Without its checks, which take longer than the launch: `descriptors_fit` made them."""

        def __post_init__(self) -> None:
            pass

    return Descriptor


def descriptor(x: Tensor, block_shape: list[int]) -> Any:
    """A host tensor descriptor of all of x, read in tiles of `block_shape`."""
    return _descriptor_type()(x, x.shape, x.stride(), block_shape)
