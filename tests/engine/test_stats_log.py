"""What the engine counts, recounted from outside; and the line that is made of it."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace

import pytest

from flashpage.engine.config import EngineConfig
from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.stats_log import StatsLog
from flashpage.errors import ArgumentError

LINE = re.compile(
    r"flashpage: (\d+) running, (\d+) waiting, (\d+) of (\d+) pages, prefix hits (-|[\d.]+ %), "
    r"(\d+) preemptions, generated ([\d.]+) tokens/s, prompt ([\d.]+) tokens/s"
)


def add_some(engine, seed: int, count: int = 9) -> tuple[int, int]:
    """Greedy requests that begin alike; prompt tokens and the tokens that they will generate."""
    rng = random.Random(seed)
    num_prompt = num_new = 0
    for i in range(count):
        prompt = [1] * 8 + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 30), ignore_eos=True)
        engine.add_request(f"{seed}-{i}", prompt, params)
        num_prompt += len(prompt)
        num_new += params.max_tokens
    return num_prompt, num_new


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [15, 200])
def test_counters(make_engine, run_all, overlap, caching, num_blocks):
    engine = make_engine(
        overlap=overlap, enable_prefix_caching=caching, num_blocks=num_blocks, max_model_len=60
    )
    first = engine.stats()
    assert first.prefix_hit_rate is None
    assert first.tokens_per_second is None
    num_prompt, num_new = add_some(engine, 1)
    outputs = run_all(engine)
    stats = engine.stats()
    assert stats.tokens_generated == num_new
    assert stats.tokens_computed == sum(engine.model.batches)
    assert stats.steps == len(engine.model.batches)
    assert stats.tokens_per_second == pytest.approx(num_new / stats.step_seconds)
    assert stats.step_seconds > 0
    assert (stats.preemptions > 0) == (num_blocks == 15)
    cached = sum(output.num_cached_tokens for output in outputs.values())
    if num_blocks == 200:
        # Every token but each request's last is computed or found, once.
        assert stats.prompt_tokens_computed == num_prompt - cached
        assert stats.tokens_computed == num_prompt + num_new - len(outputs) - cached
        assert stats.prefix_lookup_tokens == (num_prompt if caching else 0)
        assert stats.prefix_hit_tokens == cached
    else:
        found_again = stats.prefix_hit_tokens - cached
        again = stats.preempted_tokens - found_again
        assert stats.tokens_computed == num_prompt + num_new - len(outputs) - cached + again
        assert stats.prompt_tokens_computed > num_prompt - cached - found_again
        assert not caching or stats.prefix_lookup_tokens > num_prompt
    if caching:
        assert cached > 0
        assert stats.prefix_hit_rate == stats.prefix_hit_tokens / stats.prefix_lookup_tokens
    else:
        assert stats.prefix_hit_rate is None


def test_a_line_says_what_the_counters_say(make_engine, run_all, capsys):
    """A line per step: together they tell of every token."""
    engine = make_engine(log_stats=1e-9, num_blocks=30)
    add_some(engine, 2)
    stepped = 0.0
    generated = prompt = 0.0
    while engine.has_unfinished():
        engine.step()
        stats = engine.stats()
        (line,) = capsys.readouterr().err.splitlines()
        numbers = LINE.fullmatch(line).groups()
        assert [int(n) for n in numbers[:4]] == [
            stats.num_running, stats.num_waiting, stats.pages_used, stats.pages_total,
        ]  # fmt: skip
        assert numbers[4] == f"{100 * stats.prefix_hit_rate:.1f} %"
        assert int(numbers[5]) == stats.preemptions
        generated += float(numbers[6]) * (stats.step_seconds - stepped)
        prompt += float(numbers[7]) * (stats.step_seconds - stepped)
        stepped = stats.step_seconds
    assert generated == pytest.approx(stats.tokens_generated, rel=1e-3)
    assert prompt == pytest.approx(stats.prompt_tokens_computed, rel=1e-3)


def test_lines_come_by_the_seconds_of_stepping(make_engine):
    stats = replace(make_engine().stats(), wait_seconds=3.0)
    log = StatsLog(2.0)
    assert not log.is_due(1.9)
    assert log.is_due(3.0)
    # 9 tokens in 3 seconds, then 1 in 2 of which the host worked one.
    assert "generated 3.0 tokens/s" in log.line(replace(stats, tokens_generated=9))
    assert not log.is_due(4.9)
    assert log.is_due(5.0)
    later = replace(stats, wait_seconds=4.0, host_seconds=1.0, tokens_generated=10)
    line = log.line(later)
    assert "generated 0.5 tokens/s" in line
    assert "prefix hits -," in line


def test_silent_unless_asked(make_engine, run_all, capsys):
    for options in ({}, {"log_stats": 1000}):
        engine = make_engine(**options)
        add_some(engine, 3)
        run_all(engine)
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("gone", ["none", "closed", "broken"])
def test_a_stderr_that_is_gone_harms_no_request(make_engine, run_all, monkeypatch, gone, tmp_path):
    class Broken:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    closed = (tmp_path / "closed").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "broken": Broken()}[gone])
    engine = make_engine(log_stats=1e-9)
    add_some(engine, 4)
    assert len(run_all(engine)) == 9


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "5", [1]])
def test_seconds_that_can_not_be(value):
    with pytest.raises(ArgumentError, match=r"log_stats = .* must be seconds above 0, or None"):
        EngineConfig(num_blocks=1, max_model_len=1, log_stats=value)
