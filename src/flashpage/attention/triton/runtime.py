"""What the kernels need to know of the machine: Triton, the device, tensor descriptors.

The only file of this room that `backend` imports before a kernel is needed; Triton itself is
imported by the kernels' files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

MINIMUM_TRITON = (3, 6)


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


# ---------------------------------------------------------------------------------------------
# Counters: zeros that outlive a launch, so that none has to clear them
# ---------------------------------------------------------------------------------------------

_COUNTERS_OF_A_STREAM, _COUNTERS_OF_GRAPHS = 2**14, 2**20


def counters(device: torch.device, count: int) -> Tensor | None:
    """`count` int32 zeros, of which a kernel leaves zeros again when it ends; None: there are none.

    Launches of one stream follow each other and share theirs. A captured launch gets its own, for
    ever: graphs that were captured one after the other may be replayed side by side. They were
    made before, as nothing can be cleared once and for all during a capture; so the first call
    within a capture, and calls when those of graphs are used up, get none.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        return _counters_of_graphs(device, count)
    if count > _COUNTERS_OF_A_STREAM:
        return None
    return _counters_of_stream(device, torch.cuda.current_stream(device).cuda_stream)


_graph_counters: dict[torch.device, Tensor] = {}
"""Those that no captured launch has yet."""
_graph_counters_lock = threading.Lock()


@cache
def _counters_of_stream(device: torch.device, stream: int) -> Tensor:
    with _graph_counters_lock:
        if device not in _graph_counters:
            zeros = torch.zeros(_COUNTERS_OF_GRAPHS, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # graphs may run on any stream
            _graph_counters[device] = zeros
    return torch.zeros(_COUNTERS_OF_A_STREAM, dtype=torch.int32, device=device)


def _counters_of_graphs(device: torch.device, count: int) -> Tensor | None:
    count = -(-count // 4) * 4  # so that all are aligned alike, and one compiled kernel serves
    with _graph_counters_lock:
        left = _graph_counters.get(device)
        if left is None or len(left) < count:
            return None
        _graph_counters[device] = left[count:]
        return left[:count]


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
