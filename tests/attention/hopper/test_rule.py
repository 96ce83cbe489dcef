"""Where the forward for Hopper serves by itself: as it was measured."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import flashpage
from flashpage import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flashpage.attention import dispatch
from flashpage.attention.dispatch import AttentionInputs
from flashpage.attention.hopper import decode as hopper_decode
from flashpage.attention.hopper import forward as hopper
from flashpage.attention.hopper import rule
from flashpage.attention.hopper.backend import HopperBackend
from flashpage.attention.problem import Problem
from flashpage.attention.triton import runtime
from flashpage.attention.triton.backend import TritonBackend

BF16 = torch.bfloat16
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
# TFLOP/s of hopper and triton at these lengths; 16384 tokens, heads x head_dim = 2048.
MEASURED = {
    (64, False): ((356, 425, 448, 492, 497, 520), (352, 393, 412, 424, 426, 430)),
    (64, True): ((253, 333, 402, 447, 481, 501), (217, 306, 362, 398, 418, 429)),
    (128, False): ((458, 543, 596, 630, 647, 649), (345, 397, 427, 445, 455, 457)),
    (128, True): ((312, 432, 519, 575, 605, 626), (236, 302, 374, 428, 460, 480)),
    (256, False): ((512, 613, 679, 729, 770, 776), (364, 409, 436, 406, 424, 428)),
    (256, True): ((329, 461, 563, 629, 718, 754), (247, 329, 376, 367, 389, 404)),
}


def serves(
    head_dim, batch, seqlen_q, seqlen_k, heads, cu=None, multiprocessors=132, function="forward",
    **options,
):  # fmt: skip
    """By the rule, on a GPU with as many multiprocessors as an H200."""
    problem = Problem(
        "dense" if cu is None else "varlen", torch.device("cuda"), BF16, heads, heads, head_dim,
        head_dim**-0.5, **options,
    )  # fmt: skip
    shape = (batch, seqlen_q) if cu is None else (batch * seqlen_q,)
    q = torch.empty(*shape, heads, head_dim, device="meta")
    lengths = None if cu is None else torch.empty(batch + 1, device="meta")
    x = AttentionInputs(q, q, q, lengths, lengths, None, None, None, seqlen_q, seqlen_k)
    return rule.why_slower(problem, function) is None and not rule.slower_here(
        problem, function, x, multiprocessors
    )


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize(("head_dim", "causal"), MEASURED)
def test_serves_the_measured_cells_that_it_won(head_dim, causal, layout):
    options = {"window_right": 0} if causal else {}
    for seqlen, ours, other in zip(SEQLENS, *MEASURED[head_dim, causal], strict=True):
        chosen = serves(
            head_dim, 16384 // seqlen, seqlen, seqlen, 2048 // head_dim,
            cu=None if layout == "dense" else True, **options,
        )  # fmt: skip
        assert chosen == (ours > other), seqlen


@pytest.mark.parametrize(
    ("case", "options", "won"),
    [
        ((32, 4, 4096, 4096, 64), {"window_right": 0}, False),
        ((80, 4, 4096, 4096, 25), {"window_right": 0}, True),
        ((96, 4, 4096, 4096, 21), {"window_right": 0}, True),
        ((192, 4, 4096, 4096, 10), {"window_right": 0}, True),
        ((128, 4, 4096, 4096, 16), {"window_right": 0, "softcap": 30.0}, False),
        ((256, 4, 4096, 4096, 8), {"window_right": 0, "softcap": 30.0}, True),
        ((128, 2, 8192, 8192, 16), {"window_left": 1023, "window_right": 0}, True),
        ((128, 1, 128, 128, 32), {"window_right": 0}, False),
        ((128, 1, 256, 256, 32), {"window_right": 0}, False),
        ((128, 1, 1024, 1024, 32), {"window_right": 0}, True),
        ((128, 8, 512, 4096, 16), {"cu": True, "window_right": 0}, True),
        # not measured, so left alone
        ((128, 64, 256, 4096, 16), {"cu": True, "window_right": 0}, False),
        ((128, 64, 1024, 300, 16), {}, False),
        ((128, 2, 8192, 8192, 16), {"window_left": 100, "window_right": 0}, False),
        ((128, 1, 1024, 1024, 16), {"multiprocessors": 129}, False),
        ((128, 1, 1024, 1024, 16), {"multiprocessors": 128}, True),
        ((64, 16, 1024, 1024, 32), {"function": "backward"}, True),
        ((128, 1, 16384, 16384, 16), {"function": "backward", "window_right": 0}, True),
        ((128, 32, 512, 512, 16), {"function": "backward"}, False),
        ((128, 16, 1024, 1024, 8), {"function": "backward", "softcap": 9.0}, False),
        ((128, 2, 8192, 8192, 16), {"function": "backward", "window_left": 4000}, False),
        ((32, 16, 1024, 1024, 64), {"function": "backward"}, False),
        ((128, 1, 1024, 1024, 16), {"function": "backward"}, False),
    ],
    ids=str,
)
def test_serves_what_else_it_won(case, options, won):
    assert serves(*case, **options) == won


@pytest.fixture
def on_hopper(monkeypatch):
    """As on a Hopper GPU; kernels only say their name."""
    served = []
    monkeypatch.setattr(TritonBackend, "why_not", lambda *args: None)
    monkeypatch.setattr(runtime, "capability", lambda device: 90)
    launch = lambda problem, x, out, lse: served.append("hopper")  # noqa: E731
    monkeypatch.setattr(hopper, "launch", launch)
    monkeypatch.setattr(
        TritonBackend,
        "forward",
        lambda self, problem, x, _: (
            served.append("triton"), x.q, x.q.new_empty(0, dtype=torch.float32), x.q.new_empty(0),
        )[1:],
    )  # fmt: skip
    for module, name in ((TritonBackend, "triton"), (hopper_decode, "hopper")):

        def decode(*args, name=name):
            served.append(name)
            q = args[-1].q
            return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1])

        monkeypatch.setattr(module, "decode", decode)
    dispatch._choose.cache_clear()
    yield served
    dispatch._choose.cache_clear()


def test_reported(on_hopper):
    report = flashpage.backends("cuda", BF16, head_dim=128, causal=True)
    assert report.serving("forward") == "hopper"
    assert report.serving("backward") == "hopper"
    assert report.serving("decode") == "triton"
    text = str(report)
    assert "hopper     serves, but for fewer than 512 keys" in text
    assert "forward   triton     no: hopper is faster" in text
    assert "serves, but for fewer than 1024 keys" in text
    paged = flashpage.backends("cuda", BF16, head_dim=64, causal=True, layout="paged")
    assert "fewer than 8192 keys" in str(paged)
    assert paged.serving("decode") == "triton"
    paged = flashpage.backends("cuda", BF16, head_dim=128, causal=True, layout="paged")
    assert paged.serving("decode") == "hopper"
    assert "serves, but for fewer than 65 rows" in str(paged)
    for options in ({"softcap": 9.0}, {"window_size": (100, 0)}):
        paged = flashpage.backends("cuda", BF16, head_dim=128, layout="paged", **options)
        assert paged.serving("decode") == "triton"
    for options in ({"head_dim": 32}, {"head_dim": 128, "softcap": 30.0}):
        report = flashpage.backends("cuda", BF16, **options)
        assert report.serving("forward") == "triton"
        assert "slower than triton" in str(report)
        with dispatch.only("hopper", "triton"):
            named = flashpage.backends("cuda", BF16, **options)
        assert named.serving("forward") == "hopper"
        assert "fewer" not in str(named)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors on a CPU stand for a GPU's")
def test_calls_go_where_the_rule_says(on_hopper, monkeypatch):
    why_not = HopperBackend.why_not
    as_if = lambda self, p, f: why_not(self, _on_gpu(p), f)  # noqa: E731
    monkeypatch.setattr(HopperBackend, "why_not", as_if)
    monkeypatch.setattr(runtime, "num_multiprocessors", lambda device: 4)

    def served(call, *names):
        on_hopper.clear()
        if names:
            with dispatch.only(*names):
                call()
        else:
            call()
        return on_hopper

    def dense(seqlen, head_dim):
        q = torch.zeros(1, seqlen, 1, head_dim, dtype=BF16)
        return lambda: flash_attn_func(q, q, q)

    assert served(dense(512, 128)) == ["hopper"]
    assert served(dense(384, 128)) == ["triton"]
    assert served(dense(384, 128), "hopper") == ["hopper"]
    assert served(dense(512, 32)) == ["triton"]
    assert served(dense(512, 32), "hopper", "triton") == ["hopper"]
    assert served(dense(512, 128), "triton", "hopper") == ["triton"]
    q = torch.zeros(1024, 1, 128, dtype=BF16)
    for batch, expected in ((2, "hopper"), (3, "triton")):
        cu = torch.linspace(0, 1024, batch + 1).int()
        call = lambda cu=cu: flash_attn_varlen_func(q, q, q, cu, cu, 1024, 1024)  # noqa: E731
        assert served(call) == [expected]

    pages, table = torch.zeros(4, 16, 1, 128, dtype=BF16), torch.zeros(1, 4, dtype=torch.int32)

    def decode(queries, heads, page=16):
        q = torch.zeros(1, queries, heads, 128, dtype=BF16)
        return lambda: flash_attn_with_kvcache(
            q, pages[:, :page], pages[:, :page], cache_seqlens=30, block_table=table
        )

    assert served(decode(16, 4)) == ["triton"]
    assert served(decode(16, 5)) == ["hopper"]
    assert served(decode(1, 72)) == ["hopper"]
    assert served(decode(16, 5, page=12)) == ["triton"]
    assert served(decode(1, 1), "hopper") == ["hopper"]


def _on_gpu(problem: Problem) -> Problem:
    return Problem(**{**vars(problem), "device": torch.device("cuda")})
