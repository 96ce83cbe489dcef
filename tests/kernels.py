"""Where the tests of the Triton kernels run: on the GPU, or without one in the interpreter."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from flashpage.attention import dispatch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
BACKEND = "triton" if ON_GPU else "triton_interpreter"
# The interpreter's bfloat16 products are wrong.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)[: 3 if ON_GPU else 2]


def kernels() -> AbstractContextManager[None]:
    """Within this context the Triton kernels serve, or the call fails."""
    return dispatch.only(BACKEND)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned_empty)
