"""What the tests of several rooms share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Triton decides when a kernel is defined whether it is compiled or interpreted. Without a GPU the
# kernels are tested in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flashpage.errors import DownloadError
from flashpage.layers.linear import Linear
from flashpage.weights.default_model import default_model_path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; without a network the test is skipped, except in CI."""
    try:
        return default_model_path()
    except DownloadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a process that was started in the background."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay plain tensors, to be looked at."""
    monkeypatch.setattr(Linear, "prepare", lambda self: None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes for `pytest -n auto`. Tests on a GPU share neither its memory nor its time."""
    return 0 if torch.cuda.is_available() else min(os.cpu_count() or 1, 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
