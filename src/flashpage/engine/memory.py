"""The KV cache's memory: how many pages it gets, where they lie, and that they fit there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashpage.cache.kv_cache import KVCache
from flashpage.engine.config import EngineConfig
from flashpage.engine.values import show
from flashpage.errors import ArgumentError

if TYPE_CHECKING:
    from flashpage.models.config import ModelConfig

# Of what is available now (on a GPU: with the weights loaded); activations and others need theirs.
CPU_MEMORY_SHARE = 0.25
GPU_MEMORY_SHARE = 0.85
_CGROUPS = (  # files with the limit and the usage of a container, of both kinds of cgroups
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def choose_num_blocks(
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int | None,
    kv_cache_memory: int | None,
    device: torch.device,
) -> int:
    """`num_blocks` if given, else what fits into `kv_cache_memory` bytes, else a default.

    The default holds `max_num_seqs` sequences of `max_model_len` tokens, or what fits into a share
    of the memory that is available.
    """
    if num_blocks is not None:
        return num_blocks
    wanted = -(-max_model_len // block_size) * max_num_seqs
    if kv_cache_memory is not None:
        return max(kv_cache_memory // bytes_per_block, 0)
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"give num_blocks or kv_cache_memory for a KV cache on {device}")
    share = GPU_MEMORY_SHARE if device.type == "cuda" else CPU_MEMORY_SHARE
    budget = int(share * free_memory(device))
    return max(min(wanted, budget // bytes_per_block), 1)


def check_device(device: Any) -> torch.device:
    """The device, with its number, if this machine has it and can compute on it; else
    `ArgumentError`."""
    try:
        checked = torch.device(device)
        if checked.type == "meta":
            raise ValueError("it computes nothing")
        return torch.empty(1, device=checked).device
    except Exception as error:  # each backend that is not there raises its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if reason.startswith("Expected one of"):  # torch's list of all that it was ever built for
            reason = "torch knows no such device"
        raise ArgumentError(f"device = {show(device)} can not be used here: {reason}") from error


def allocate_kv_cache(model: ModelConfig, config: EngineConfig) -> KVCache:
    """The cache of `config.num_blocks` pages; `ArgumentError` with the bytes if it does not fit.

    On a CPU pages take memory only when they are written, so that a cache can be larger than what
    is available now, but not than all of the machine's memory.
    """
    bytes_per_block = KVCache.bytes_per_block(
        model.num_layers, config.block_size, model.num_kv_heads, model.head_dim, config.dtype
    )
    num_bytes = config.num_blocks * bytes_per_block
    device = torch.device(config.device)
    is_cpu = device.type == "cpu"
    available = free_memory(device)
    try:
        if is_cpu and num_bytes > total_memory():
            raise MemoryError(f"all memory is {total_memory()} bytes")
        if num_bytes >= 1 << 63:
            raise MemoryError("no device has as much")
        return KVCache(
            num_layers=model.num_layers,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=config.dtype,
            device=config.device,
        )
    except (RuntimeError, MemoryError) as error:
        raise ArgumentError(
            f"a KV cache of num_blocks = {show(config.num_blocks)} pages of "
            f"{show(config.block_size)} tokens takes {show(num_bytes)} bytes on {config.device}: "
            f"{available} bytes are available, "
            f"{str(error).splitlines()[0] if str(error) else 'out of memory'}"
        ) from error


def free_memory(device: torch.device) -> int:
    """Bytes that the device can still give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def total_memory() -> int:
    """Bytes of main memory of this machine or container, used or not."""
    limits = [limit for limit_file, _ in _CGROUPS if (limit := _read_int(limit_file)) is not None]
    try:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        limits.append(1 << 62)  # not known here: the allocator will tell
    return min(limits)


def available_memory() -> int:
    """Bytes of main memory this process may still take, container limits included."""
    limits = [_system_available()]
    for limit_file, usage_file in _CGROUPS:
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            limits.append(max(limit - usage, 0))
    return min(limits)


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:  # not Linux: all of the memory is the best guess that needs no further package
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 4 << 30


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
