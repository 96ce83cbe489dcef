"""The offline workloads, shrunk: what they ask for, and that the numbers say what happened."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from flashpage import cli, workloads
from flashpage.engine.engine import Engine
from flashpage.engine.llm import LLM
from flashpage.engine.runner import Runner
from flashpage.errors import ArgumentError
from flashpage.layers import fused
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


def test_pressure_gives_the_same_tokens(options, monkeypatch):
    launched: list[int] = []
    make_llm = Options.make_llm
    launch = Runner.launch

    def counting(self, chunks):
        launched[-1] += sum(chunk.num_tokens for chunk in chunks)
        return launch(self, chunks)

    monkeypatch.setattr(
        Options, "make_llm", lambda self, **a: launched.append(0) or make_llm(self, **a)
    )
    monkeypatch.setattr(Runner, "launch", counting)
    (row,) = workloads.pressure(options)
    assert row["requests"] == row["finished"] == 13
    assert row["preemptions"] > 0
    assert row["equal_tokens"] == row["equal_requests"] == 1.0
    # Every token but each request's last is computed once; all else was computed again.
    asks = workloads.mixed_asks(options)
    once = sum(len(ask.prompt) + ask.new_tokens - 1 for ask in asks)
    warm_up = 4 * (8 + 4 - 1)
    roomy, tight = launched
    assert roomy == warm_up + once
    assert row["recomputed_tokens"] == tight - roomy > row["preemptions"]


def test_a_shared_prefix_is_hit(options):
    # Small steps, so that the first prompt is computed before most others come.
    on, off = workloads.prefix(
        Options(**(vars(options) | {"engine": {"block_size": 4, "max_num_batched_tokens": 60}}))
    )
    assert on["hit_rate"] > 0.7
    assert off["hit_rate"] == 0
    assert on["time_share"] == pytest.approx(on["seconds"] / off["seconds"])


def test_the_floor_counts_packed_weights(options):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    changed = {"model": CONFIG | sizes, "engine": {"quantize": "q8_0"}, "dtype": "auto"}
    llm = Options(**(vars(options) | changed)).make_llm(num_blocks=20)
    config = llm.model_config
    kv_token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    weights = llm.engine.model.num_bytes
    assert weights > 0
    assert workloads._bytes_per_step(llm, 3, 50.0) == weights + 3 * 50 * kv_token


def test_decodes_go_on_beside_a_long_prompt(options):
    (row,) = workloads.interference(options)
    assert row["case"] == "2 decodes, a prompt of 819"
    assert row["largest_over_median"] == pytest.approx(row["largest_gap_ms"] / row["median_gap_ms"])


def test_sweep_and_single(options):
    rows = workloads.sweep(options)
    assert [row["case"] for row in rows] == ["batch 1", "batch 2", "batch 6", "batch 13"]
    weights = 10100 * 32 + 32 + 32 * 128 + 64 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16
    for row, size in zip(rows, (1, 2, 6, 13), strict=True):
        assert row["tokens_per_s"] == pytest.approx(1e3 * size / row["step_ms"])
        assert 102 + 5 <= row["context"] <= 102 + 13 + 8
        keys_and_values = size * row["context"] * 2 * 2 * 16
        floor = 4 * (weights + keys_and_values) / (1e9 * row["read_gb_per_s"])
        assert row["share_of_floor"] == pytest.approx(floor / (row["step_ms"] / 1e3))
        assert row["share_of_floor"] < 1.5
    decode, first = workloads.single(options)
    assert decode["tokens_per_s"] > 0
    assert first["ms"] > 0


def test_a_batch_that_does_not_fit_is_told_and_not_measured(options):
    rows = workloads.sweep(
        dataclasses.replace(options, engine={"block_size": 4, "num_blocks": 200})
    )
    assert [row["case"] for row in rows if "step_ms" in row] == ["batch 1", "batch 2", "batch 6"]
    assert rows[-1] == {"case": "batch 13", "not_measured": "needs 416 pages, the cache has 200"}


def test_a_workload_too_long_for_the_model_says_what_to_do(options):
    short = dataclasses.replace(options, model=CONFIG | {"max_position_embeddings": 64}, scale=0.5)
    with pytest.raises(ArgumentError, match="64 positions.*a smaller scale shrinks the workload"):
        workloads.mixed(short)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_ablation_switches_one_thing_off_at_a_time(on_gpu, options, monkeypatch):
    monkeypatch.setattr(Options, "on_gpu", on_gpu)
    # As the command line has it: what it says of an option that a row is about must not count.
    on = {"enforce_eager": False, "overlap": True, "enable_prefix_caching": True}
    options = dataclasses.replace(options, engine=options.engine | on)
    seen: list[tuple[dict[str, bool], bool]] = []
    launch = Runner.launch

    def launching(self, chunks):
        config = {name: getattr(self._config, name) for name in on}
        if not seen or seen[-1] != (config, fused.kernels_enabled()):
            seen.append((config, fused.kernels_enabled()))
        return launch(self, chunks)

    monkeypatch.setattr(Runner, "launch", launching)
    rows = workloads.ablation(options)
    off = [{"enforce_eager": True}, {"overlap": False}] if on_gpu else []
    off = [{}, *off, {"enable_prefix_caching": False}]
    assert seen == [*((on | changed, True) for changed in off), (on, False)]
    assert fused.kernels_enabled()
    assert [row["of_all_on"] for row in rows] == pytest.approx(
        [row["tokens_per_s"] / rows[0]["tokens_per_s"] for row in rows]
    )


def test_start_times_processes_that_generate_a_token(options, monkeypatch, capsys):
    """The processes' programs, run here: each makes its engine and says when the token is there."""
    warmed = []
    engines = []
    times = iter(range(1, 13))
    warm_up, generate = Engine.warm_up, LLM.generate

    def run_here(source: str) -> float:
        exec(source, {})
        assert capsys.readouterr().out.splitlines() == [workloads._FIRST_TOKEN]
        return float(next(times))

    def generating(self, *arguments, **named):
        engines.append(self.engine.config)
        return generate(self, *arguments, **named)

    monkeypatch.setattr(workloads, "_seconds_to_first_token", run_here)
    monkeypatch.setattr(Options, "on_gpu", True)
    monkeypatch.setattr(Engine, "warm_up", lambda self: warmed.append(self) or warm_up(self))
    monkeypatch.setattr(LLM, "generate", generating)
    rows = workloads.start(Options(**(vars(options) | {"rounds": 3})))
    assert rows == [
        {"case": "graphs when needed", "first_s": 1.0, "later_s": 2.5},
        {"case": "graphs before", "first_s": 4.0, "later_s": 5.5},
        {"case": "enforce_eager", "first_s": 7.0, "later_s": 8.5},
    ]
    assert [config.enforce_eager for config in engines] == [False] * 6 + [True] * 3
    assert {config.block_size for config in engines} == {4}
    assert len(warmed) == 3
    monkeypatch.setattr(Options, "on_gpu", False)
    assert workloads.start(options) == [{"case": "first token", "first_s": 10.0, "later_s": None}]


def test_a_process_is_timed_until_its_first_token_and_not_until_its_end():
    source = f"import time; print({workloads._FIRST_TOKEN!r}, flush=True); time.sleep(2)"
    began = time.perf_counter()
    seconds = workloads._seconds_to_first_token(source)
    assert time.perf_counter() - began - seconds > 1
    assert seconds > 0
    for source, word in (
        ("print('else')", "exit status 0"),
        ("import sys; print('much\\n' * 99, file=sys.stderr); sys.exit('no model')", "no model$"),
    ):
        with pytest.raises(ArgumentError, match=f"a process with this model fails: {word}"):
            workloads._seconds_to_first_token(source)


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
    assert [row["case"] for row in report["results"]] == ["2 in, 10 out", "first token of 20"]
    for line, message in (
        (
            "bench single --prompt-len 20",
            "--prompt-len = 20 is for the workload batch, not for single",
        ),
        ("bench --rounds 2", "--rounds = 2 is for workloads other than batch, not for batch"),
    ):
        result = CliRunner().invoke(cli.app, line.split())
        assert result.exit_code == 2
        assert message in result.output
    result = CliRunner().invoke(cli.app, ["bench", "fast"])
    assert result.exit_code == 2
    assert "must be one of batch, mixed, single" in result.output
