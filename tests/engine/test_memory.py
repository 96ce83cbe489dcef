"""Memory: where the number of pages comes from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashpage.engine import memory
from flashpage.engine.config import EngineConfig
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


def config_of(num_blocks: int) -> EngineConfig:
    return EngineConfig(num_blocks=num_blocks, max_model_len=8, block_size=4)


MODEL = SimpleNamespace(num_layers=2, num_kv_heads=1, head_dim=2)


def test_a_cache_larger_than_all_memory_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(memory, "total_memory", lambda: 12_800)
    monkeypatch.setattr(memory, "available_memory", lambda: 77)
    assert memory.allocate_kv_cache(MODEL, config_of(100)).num_blocks == 100
    with pytest.raises(
        ArgumentError,
        match="num_blocks = 101 pages of 4 tokens takes 12928 bytes on cpu: 77 bytes are available",
    ):
        memory.allocate_kv_cache(MODEL, config_of(101))


@pytest.mark.parametrize("num_blocks", [10**12, 10**17, 10**30])
def test_what_the_allocator_refuses_is_an_argument_error(monkeypatch, num_blocks):
    monkeypatch.setattr(memory, "total_memory", lambda: 1 << 200)
    with pytest.raises(ArgumentError, match=f"{num_blocks} pages .* {num_blocks * 128} bytes"):
        memory.allocate_kv_cache(MODEL, config_of(num_blocks))


def test_total_memory_holds_what_is_available_and_is_limited_by_the_container(monkeypatch):
    assert memory.available_memory() <= memory.total_memory() < 1 << 50
    monkeypatch.setattr(memory, "_read_int", {"/sys/fs/cgroup/memory.max": 9000}.get)
    assert memory.total_memory() == 9000


def test_devices():
    assert memory.check_device("cpu") == torch.device("cpu")
    assert memory.check_device(torch.device("cpu")) == torch.device("cpu")
    for device in ("foo", "", None, 1.5, "meta", "cuda:99", torch.device("cuda", 99)):
        with pytest.raises(ArgumentError, match="device = .* can not be used here: ."):
            memory.check_device(device)
