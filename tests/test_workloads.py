"""The offline workloads, shrunk: what they ask for, and that the numbers say what happened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from flashpage import cli, workloads
from flashpage.errors import ArgumentError
from flashpage.workloads import Options

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 10100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture
def options() -> Options:
    return Options(
        model=CONFIG,  # type: ignore[arg-type] - LLM takes a config too
        load_format="dummy",
        dtype="float32",
        device="cpu",
        rounds=1,
        scale=0.05,
        engine={"block_size": 4},
    )


def test_the_mixed_requests_are_those_of_the_baseline():
    asks = workloads.mixed_asks(Options())
    assert len(asks) == 256
    assert sum(len(a.prompt) for a in asks) == 142_827
    assert sum(a.new_tokens for a in asks) == 133_966
    assert {a.temperature for a in asks} == {0.6}


def test_mixed_with_and_without_overlap(options):
    asks = workloads.mixed_asks(options, temperature=0.0)
    played = []
    for overlap in (True, False):
        llm = options.make_llm(max_model_len=102, overlap=overlap)
        played.append(workloads.play(llm.engine, asks))
    first, second = played
    assert first.tokens == second.tokens
    assert [len(tokens) for tokens in first.tokens] == [ask.new_tokens for ask in asks]
    assert first.rate == pytest.approx(sum(map(len, first.tokens)) / first.seconds)
    assert all(0 < t <= first.seconds for t in first.first_token)
    assert sum(first.step_seconds) <= first.seconds
    assert len(second.step_seconds) == second.stats["steps"]
    (row,) = workloads.mixed(options)
    assert row["tokens_per_s"] > 0
    assert row["steps"] == first.stats["steps"]


def test_pressure_gives_the_same_tokens(options):
    (row,) = workloads.pressure(options)
    assert row["finished"] == 13
    assert row["preemptions"] > 0
    assert row["recomputed_tokens"] >= row["preemptions"]
    assert row["equal_tokens"] == 1.0


def test_a_shared_prefix_is_hit(options):
    # Small steps, so that the first prompt is computed before most others come.
    on, off = workloads.prefix(
        Options(**(vars(options) | {"engine": {"block_size": 4, "max_num_batched_tokens": 60}}))
    )
    assert on["hit_rate"] > 0.7
    assert off["hit_rate"] == 0
    assert on["time_share"] == pytest.approx(on["seconds"] / off["seconds"])


def test_decodes_go_on_beside_a_long_prompt(options):
    (row,) = workloads.interference(options)
    assert row["case"] == "2 decodes, a prompt of 819"
    assert row["largest_over_median"] == pytest.approx(row["largest_gap_ms"] / row["median_gap_ms"])


def test_sweep_and_single(options):
    rows = workloads.sweep(options)
    assert [row["case"] for row in rows] == ["batch 1", "batch 2", "batch 6", "batch 13"]
    assert all(0 < row["share_of_floor"] < 1.5 for row in rows)
    decode, first = workloads.single(options)
    assert decode["tokens_per_s"] > 0
    assert first["ms"] > 0


def test_ablation_switches_one_thing_off_at_a_time(options, monkeypatch):
    seen = []
    make_llm = Options.make_llm
    monkeypatch.setattr(
        Options, "make_llm", lambda self, **a: seen.append(a) or make_llm(self, **a)
    )
    rows = workloads.ablation(options)
    switches = [{k: v for k, v in a.items() if k != "max_model_len"} for a in seen]
    assert switches == [
        {},
        {"enforce_eager": True},
        {"overlap": False},
        {"enable_prefix_caching": False},
    ]
    assert len(rows) == 4


def test_a_small_vocabulary_is_refused(options):
    small = Options(**(vars(options) | {"model": CONFIG | {"vocab_size": 300}}))
    with pytest.raises(ArgumentError, match="more than 10000 tokens, dummy has 300"):
        workloads.mixed(small)


def test_a_process_that_fails_is_told(options):
    broken = Options(**(vars(options) | {"engine": {"num_blocks": -1}}))
    with pytest.raises(ArgumentError, match="num_blocks"):
        workloads.start(broken)


def test_from_the_command_line(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    arguments: list[Any] = ["bench", "single", "--model", str(path), "--load-format", "dummy"]
    arguments += ["--dtype", "float32", "--scale", "0.02", "--rounds", "1", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["setup"]["workload"] == "single"
    assert [row["case"] for row in report["results"]] == ["100 in, 512 out", "first token of 1024"]
    result = CliRunner().invoke(cli.app, ["bench", "fast"])
    assert result.exit_code == 2
    assert "must be one of batch, mixed, single" in result.output
