"""Where the tests of the Triton kernels run: on a GPU, or in Triton's interpreter on the CPU.

To be imported before any module of `flashpage.attention.triton`.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

# The interpreter's dot of bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE.type == "cuda")

on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
