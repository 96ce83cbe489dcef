"""Where the tests of the Triton kernels run: on the GPU, or without one in the interpreter.

With `FLASHPAGE_TEST_BACKENDS=hopper,triton` they judge, on a GPU, those backends in that order.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager

import pytest
import torch

from flashpage.attention import dispatch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
BACKENDS = ("triton_interpreter",)
if ON_GPU:
    BACKENDS = tuple(os.environ.get("FLASHPAGE_TEST_BACKENDS", "triton").split(","))
elif importlib.util.find_spec("triton"):
    import quick_interpreter

    quick_interpreter.install()
# The interpreter's bfloat16 products are wrong.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)[: 3 if ON_GPU else 2]


def kernels() -> AbstractContextManager[None]:
    """Within this context these kernels serve, or the call fails."""
    return dispatch.only(*BACKENDS)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned_empty)
