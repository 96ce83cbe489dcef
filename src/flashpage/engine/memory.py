"""How many pages the KV cache gets: from an option, a budget of bytes, or the machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from flashpage.errors import ArgumentError

CPU_MEMORY_SHARE = 0.25  # of what is available now: weights, activations and others need theirs


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

    The default holds `max_num_seqs` sequences of `max_model_len` tokens, or what fits into a
    quarter of the memory that is available.
    """
    if num_blocks is not None:
        return num_blocks
    wanted = -(-max_model_len // block_size) * max_num_seqs
    if kv_cache_memory is not None:
        return max(kv_cache_memory // bytes_per_block, 0)
    if device.type != "cpu":
        raise ArgumentError(f"give num_blocks or kv_cache_memory for a KV cache on {device}")
    budget = int(CPU_MEMORY_SHARE * available_memory())
    return max(min(wanted, budget // bytes_per_block), 1)


def available_memory() -> int:
    """Bytes of main memory this process may still take, container limits included."""
    limits = [_system_available()]
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
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
