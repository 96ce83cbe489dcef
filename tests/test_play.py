"""The clock of the workloads: which steps it counts, and the contexts that they had."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from flashpage import play as playing
from flashpage.engine.llm import LLM
from flashpage.errors import ArgumentError
from flashpage.play import Ask, play_decodes

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 400,
    "eos_token_id": 2,
}


def make_engine(**options):
    return LLM(
        CONFIG, load_format="dummy", dtype="float32", device="cpu", block_size=4, **options
    ).engine


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("batch", "budget"), [(1, 512), (7, 512), (7, 11)])
def test_only_steps_in_which_all_decode_are_counted(monkeypatch, overlap, batch, budget):
    engine = make_engine(overlap=overlap, max_num_seqs=7, max_num_batched_tokens=budget)
    launches = []
    launch = engine._runner.launch
    monkeypatch.setattr(
        engine._runner, "launch", lambda chunks: launches.append(list(chunks)) or launch(chunks)
    )
    clock = []

    def tick() -> float:
        clock.append(2.0 ** len(clock))
        return clock[-1]

    monkeypatch.setattr(playing.time, "perf_counter", tick)
    asks = [Ask([3 + i] * (20 + i), new_tokens=200) for i in range(batch)]
    decodes = play_decodes(engine, asks, new_tokens=9)
    monkeypatch.undo()
    if overlap:
        launches.pop()  # still in flight when all are ended
    counted = launches[-8:]
    for chunks in counted:
        assert len(chunks) == batch
        assert all(chunk.num_tokens == 1 for chunk in chunks)
    # The step before them held the end of the last prompt.
    assert any(chunk.num_tokens > 1 or chunk.start == 0 for chunk in launches[-9])
    assert decodes.context == pytest.approx(
        statistics.mean(chunk.end for chunks in counted for chunk in chunks)
    )
    assert len(decodes.step_seconds) == len(decodes.host_seconds) == 8
    assert all(0 < a < b for a, b in zip(decodes.host_seconds, decodes.step_seconds, strict=True))
    assert all(2 * a <= b for a, b in pairwise(decodes.step_seconds))
    assert not engine.has_unfinished()
    assert engine.stats().pages_used == 0
    engine.check()


def test_requests_that_end_too_early_are_told():
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=4)
    with pytest.raises(ArgumentError, match="end before all decode"):
        play_decodes(engine, [Ask([5] * 20, 3), Ask([6] * 20, 3)], new_tokens=3)
    assert not engine.has_unfinished()
