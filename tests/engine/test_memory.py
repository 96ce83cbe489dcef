"""Memory: where the number of pages comes from."""

from __future__ import annotations

import pytest
import torch

from flashpage.engine import memory
from flashpage.errors import ArgumentError


def choose(**options) -> int:
    sizes = {
        "bytes_per_block": 1000,
        "block_size": 16,
        "max_model_len": 100,
        "max_num_seqs": 4,
        "num_blocks": None,
        "kv_cache_memory": None,
        "device": torch.device("cpu"),
    }
    return memory.choose_num_blocks(**(sizes | options))


def test_the_option_then_the_budget_then_the_default(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 40)
    assert choose(num_blocks=3, kv_cache_memory=10**6) == 3
    assert choose(kv_cache_memory=5999) == 5
    assert choose() == 4 * 7


def test_the_default_leaves_memory_to_others(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 40_000)
    assert choose() == 10


def test_no_guess_for_other_devices():
    with pytest.raises(ArgumentError, match="give num_blocks or kv_cache_memory"):
        choose(device=torch.device("meta"))


def test_available_memory_is_plausible_and_limited_by_the_container(monkeypatch):
    available = memory.available_memory()
    assert 1 << 20 < available < 1 << 50
    files = {"/sys/fs/cgroup/memory.max": 9000, "/sys/fs/cgroup/memory.current": 2000}
    monkeypatch.setattr(memory, "_read_int", files.get)
    assert memory.available_memory() == 7000
