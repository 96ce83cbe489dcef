"""The kernels for Hopper where there is no GPU: emulated."""

from __future__ import annotations

import pytest

from flashpage.attention import dispatch
from flashpage.attention.hopper.backend import HopperBackend, why_not_problem
from kernels import ON_GPU


@pytest.fixture(scope="session")
def emulated_kernels():
    from gluon_emulator import Emulated

    parts = ["forward_work", "forward_softmax", "forward_producer"]
    backward_parts = ["backward_work", "backward_producer", "backward_writers"]
    kernels = {
        "forward": [*parts, "forward_kernel"],
        "backward": [*parts, *backward_parts, "backward_kernel"],
        "decode": [*parts, "forward_kernel", "decode_kernel"],
    }
    return {
        function: Emulated([f"flashpage.attention.hopper.{part}" for part in used], used[-1])
        for function, used in kernels.items()
    }


@pytest.fixture
def hopper_backend(monkeypatch, emulated_kernels):
    """Within the test `hopper` serves, and without a GPU it is emulated."""
    if not ON_GPU:
        from flashpage.attention.hopper import backward, decode, forward

        for module in (forward, backward, decode):
            name = module.__name__.rpartition(".")[2]
            monkeypatch.setattr(module, f"{name}_kernel", emulated_kernels[name])
        monkeypatch.setattr(HopperBackend, "why_not", lambda self, *args: why_not_problem(*args))
    dispatch._choose.cache_clear()
    with dispatch.only("hopper"):
        yield
    dispatch._choose.cache_clear()
