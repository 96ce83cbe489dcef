"""The Triton backend: what it serves, and its kernels behind the protocol of `dispatch`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.attention.dispatch import AttentionInputs, DecodeInputs
from flashpage.attention.problem import Function, Problem
from flashpage.attention.triton import runtime

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonBackend:
    """Every call on a GPU. Kernels are imported when the first one is launched."""

    name = "triton"

    def why_not(self, problem: Problem, function: Function) -> str | None:
        if problem.device.type != "cuda":
            return f"serves tensors on a GPU, not on {problem.device}"
        if problem.dtype not in DTYPES:
            return f"serves float16, bfloat16 and float32, not {problem.dtype}"
        if not torch.cuda.is_available():
            return "torch sees no GPU on this machine"
        if reason := runtime.why_no_triton():
            return reason
        return self._why_not_capability(runtime.capability(problem.device), problem, function)

    def _why_not_capability(
        self, capability: int, problem: Problem, function: Function
    ) -> str | None:
        if 0 < capability < 75:
            return "needs compute capability 7.5 or newer"
        if capability == 75 and problem.dtype == torch.bfloat16:
            return "bfloat16 needs compute capability 8.0 or newer: use float16"
        wide = problem.head_dim > 128 and problem.dtype == torch.float32
        if capability == 75 and wide and function == "backward":
            return "its tiles do not fit the shared memory of compute capability 7.5"
        return None

    def but_for(self, problem: Problem, function: Function) -> str | None:
        return None

    def forward(
        self, problem: Problem, inputs: AttentionInputs, return_s_dmask: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flashpage.attention.triton.forward import forward

        return forward(problem, inputs, return_s_dmask)

    def backward(
        self,
        problem: Problem,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        softmax_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flashpage.attention.triton.backward import backward

        return backward(problem, inputs, dout, dlse, out, softmax_lse)

    def decode(self, problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        from flashpage.attention.triton.decode import decode

        return decode(problem, inputs)


class InterpretedTritonBackend(TritonBackend):
    """The same kernels in Triton's interpreter, on CPU tensors; only when asked for by name.

    For tests without a GPU: thousands of times slower than a GPU.
    """

    name = "triton_interpreter"

    def why_not(self, problem: Problem, function: Function) -> str | None:
        if not runtime.INTERPRETING:
            return "runs with TRITON_INTERPRET=1"
        if problem.device.type != "cpu":
            return f"serves tensors on the CPU, not on {problem.device}"
        if problem.dtype not in (torch.float16, torch.float32):
            return f"the interpreter is right for float16 and float32, not for {problem.dtype}"
        return runtime.why_no_triton()
