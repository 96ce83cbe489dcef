"""The Hopper backend: what it serves, and its kernels behind the protocol of `dispatch`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashpage.attention import dispatch
from flashpage.attention.dispatch import AttentionInputs, DecodeInputs
from flashpage.attention.hopper import rule
from flashpage.attention.problem import Function, Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.backend import TritonBackend


class HopperBackend:
    """Attention in 16 bits on a GPU of compute capability 9.0, where it is the faster one.

    The accelerator that fetches tiles has rules for addresses that a `Problem` does not show
    (16-byte alignment, no expanded dimensions, pages of a multiple of 8 tokens); tensors that
    break them are served by the kernels of `triton/`, and so are lengths at which those are faster
    (`rule`), unless these were asked for by name.
    """

    name = "hopper"

    def why_not(self, problem: Problem, function: Function) -> str | None:
        if problem.device.type != "cuda":
            return f"serves tensors on a GPU, not on {problem.device}"
        if reason := TritonBackend().why_not(problem, function):
            return reason
        capability = runtime.capability(problem.device)
        if capability != 90:
            return "serves compute capability 9.0 (Hopper)"
        if reason := why_not_problem(problem, function):
            return reason
        return None if dispatch.named() else rule.why_slower(problem, function)

    def but_for(self, problem: Problem, function: Function) -> str | None:
        odd = "tensors or pages that are not aligned"
        if function == "decode":
            odd += ", cache_batch_idx, cache_leftpad"
        if dispatch.named():
            return odd
        if function == "decode":
            return (
                f"fewer than {rule.FEWEST_DECODE_ROWS} rows (queries times the query heads of a kv "
                f"head), {odd}"
            )
        return (
            f"fewer than {rule.fewest_keys(problem, function)} keys, fewer than "
            f"{rule.FEWEST[function]} rows a sequence in the mean, too little work to occupy the "
            f"GPU, {odd}"
        )

    def forward(
        self, problem: Problem, inputs: AttentionInputs, return_s_dmask: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flashpage.attention.hopper.forward import addressable, forward

        if _slower(problem, "forward", inputs) or not addressable(inputs):
            return TritonBackend().forward(problem, inputs, return_s_dmask)
        return (*forward(problem, inputs), inputs.q.new_empty(0))

    def backward(
        self,
        problem: Problem,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        softmax_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flashpage.attention.hopper.backward import backward
        from flashpage.attention.hopper.forward import addressable

        if _slower(problem, "backward", inputs) or not addressable(inputs):
            return TritonBackend().backward(problem, inputs, dout, dlse, out, softmax_lse)
        return backward(problem, inputs, dout, dlse, out, softmax_lse)

    def decode(self, problem: Problem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        from flashpage.attention.hopper.decode import addressable, decode

        slower = not dispatch.named() and rule.slower_to_decode(problem, inputs)
        if slower or not addressable(inputs):
            return TritonBackend().decode(problem, inputs)
        return decode(problem, inputs)


def _slower(problem: Problem, function: Function, inputs: AttentionInputs) -> bool:
    return not dispatch.named() and rule.slower_here(
        problem, function, inputs, runtime.num_multiprocessors(inputs.q.device)
    )


def why_not_problem(problem: Problem, function: Function) -> str | None:
    """What the kernels do not serve on any GPU."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"serves float16 and bfloat16, not {problem.dtype}"
    if problem.head_dim % 8:
        return f"serves head_dim of a multiple of 8, not {problem.head_dim}"
    if function == "backward" and problem.head_dim > 128:
        return f"serves head_dim up to 128 in the backward, not {problem.head_dim}"
    if function == "backward" and problem.layout == "paged":
        return "attention over pages has no backward"
    if problem.has_alibi:
        return "has no ALiBi"
    if problem.dropout_p > 0.0:
        return "has no dropout"
    return None
