"""Steps that fail or are interrupted, and are repeated: nothing lost or twice, equal tokens."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import torch

from flashpage.engine import runner
from flashpage.engine.company import Company
from flashpage.engine.cuda_graph import StepGraphs
from flashpage.engine.runner import Runner
from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.token_counts import TokenCounts
from flashpage.errors import RequestError
from graphs import LLAMA, Again, make_engine, run, steps


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_after_its_replay_can_be_repeated(error, overlap, monkeypatch):
    """The replay has chosen tokens over those that the repeated step reads."""
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    scored = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    penalized = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **PENALIZED)
    requests = [([5, 6, 7], plain), ([8, 9], scored), ([10], plain), ([11] * 3, penalized)]
    expected = run(make_engine(LLAMA), requests)
    for failing in (1, 2, 5, 9):
        engine = make_engine(LLAMA, Again(), overlap=overlap)
        model, calls = engine.model, [0]
        compute = model.compute_logits

        def compute_logits(hidden, calls=calls, compute=compute, failing=failing):
            calls[0] += 1
            if calls[0] == failing:
                raise error
            return compute(hidden)

        monkeypatch.setattr(model, "compute_logits", compute_logits)
        assert run(engine, requests, error, num_errors=1) == expected


PENALIZED = {"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.1}


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["sample", "plain_sampling", "count_tokens", "_Fetched"])
def test_a_step_with_overlap_that_fails_while_it_chooses_can_be_repeated(
    name, with_graphs, monkeypatch
):
    """Wherever it fails: the device may have been told of tokens already."""
    plain = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    scored = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1)
    penalized = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, **PENALIZED)
    requests = [([5, 6, 7], plain), ([8, 9], scored), ([10], plain), ([11] * 3, penalized)]
    expected = run(make_engine(LLAMA), requests)
    owner = Company if name == "plain_sampling" else runner
    whole = getattr(owner, name)
    for failing in (1, 2, 5):
        calls = [0]

        def fail(*args, calls=calls, failing=failing):
            calls[0] += 1
            if calls[0] == failing:
                raise KeyboardInterrupt
            return whole(*args)

        engine = make_engine(LLAMA, Again() if with_graphs else None, overlap=True)
        monkeypatch.setattr(owner, name, fail)
        # With graphs the tokens of a step are counted within it.
        num_errors = 0 if with_graphs and name == "count_tokens" else 1
        assert run(engine, requests, KeyboardInterrupt, num_errors) == expected
        monkeypatch.setattr(owner, name, whole)


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
def test_counts_that_fail_half_way_are_no_ones(with_graphs, monkeypatch):
    """A row that had another owner, and was not counted to its end, is counted again."""
    params = SamplingParams(max_tokens=15, temperature=0.0, ignore_eos=True, **PENALIZED)
    expected = run(make_engine(LLAMA), [([8, 9], params)])
    engine = make_engine(LLAMA, Again() if with_graphs else None, overlap=True)
    run(engine, [([5, 6, 7] * 5, params)])
    count, calls = TokenCounts._count, [0]

    def fail_once(self, counts, sequence):
        calls[0] += 1
        if calls[0] == 1:
            raise MemoryError
        count(self, counts, sequence)

    monkeypatch.setattr(TokenCounts, "_count", fail_once)
    assert run(engine, [([8, 9], params)], MemoryError, num_errors=1) == expected


@pytest.mark.parametrize("bad_calls", [{1}, {2}, {1, 3}, {2, 4}, {3, 5}], ids=str)
def test_outputs_outlive_interrupted_waits(bad_calls, monkeypatch):
    """Two waits that are interrupted leave two steps under way: both report."""
    interrupt_waits(monkeypatch, bad_calls)
    requests = [
        ([5 + i], SamplingParams(max_tokens=2 + i, temperature=0.0, ignore_eos=True))
        for i in range(3)
    ]
    engine = make_engine(LLAMA, Again(), overlap=True)
    tokens = run(engine, requests, KeyboardInterrupt, num_errors=len(bad_calls))
    assert {name: len(ids) for name, ids in tokens.items()} == {"0": 2, "1": 3, "2": 4}


class Interrupted(Again):
    """One replay is interrupted as it begins, or as it returns; each replay and call is counted."""

    def __init__(self, number: int, has_run: bool) -> None:
        super().__init__()
        self.number, self.has_run, self.asked = number, has_run, 0

    def __call__(self, body):
        inner, result = super().__call__(body)

        class Graph:
            def replay(graph) -> None:
                self.asked += 1
                if self.asked != self.number:
                    inner.replay()
                    return
                if self.has_run:
                    inner.replay()
                raise KeyboardInterrupt

        return Graph(), result


def plain_and_penalized():
    """Requests, and the tokens that they give without graphs and overlap."""
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    penalized = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, **PENALIZED)
    requests = [([5, 6, 7], plain), ([8, 9], penalized), ([10], plain)]
    expected = run(make_engine(LLAMA), requests)
    return requests, expected


@pytest.mark.parametrize("has_run", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 8))
def test_a_replay_that_is_interrupted_can_be_repeated(number, has_run):
    """The host can not tell whether it ran: an interrupt is raised when a call returns."""
    requests, expected = plain_and_penalized()
    engine = make_engine(LLAMA, Interrupted(number, has_run), overlap=True)
    assert run(engine, requests, KeyboardInterrupt, num_errors=1) == expected


@pytest.mark.parametrize("number", range(1, 8))
def test_a_replay_that_never_began_leaves_the_step_before_it(number, monkeypatch):
    requests, expected = plain_and_penalized()
    engine = make_engine(LLAMA, Again(), overlap=True)
    replay, calls = StepGraphs.replay, [0]

    def interrupted(self, *args):
        calls[0] += 1
        if calls[0] == number:
            raise KeyboardInterrupt
        return replay(self, *args)

    monkeypatch.setattr(StepGraphs, "replay", interrupted)
    assert run(engine, requests, KeyboardInterrupt, num_errors=1) == expected


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("place", ["launch", "_launch", "_fetch", "wait"])
def test_ctrl_c_anywhere_in_a_step_is_raised_at_its_end(place, with_graphs, monkeypatch):
    """As a signal, not as an exception of the call: the step is not repeated, its outputs come."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [([5, 6, 7], params), ([8, 9], params)]
    expected = run(make_engine(LLAMA), requests)
    engine = make_engine(LLAMA, Again() if with_graphs else None, overlap=True)
    whole, calls = getattr(Runner, place), [0]

    def signalled(self, *args):
        result = whole(self, *args)
        calls[0] += 1
        if calls[0] in (2, 5, 6):
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Runner, place, signalled)
    assert run(engine, requests, KeyboardInterrupt, num_errors=3) == expected


def test_tokens_that_nobody_has_read_are_not_overwritten(monkeypatch):
    """A GPU's tokens come through three buffers in turn; steps that fail must not use them up."""

    class Event:
        def synchronize(self) -> None:
            pass

    def fetch(self, sequences, rows):  # as on a GPU
        self._fetched.rotate()
        buffer, event = self._fetched[0]
        host = buffer[: rows[-1] + 1 if rows else 0]
        host.copy_(self._sampled[: len(host)])
        return runner._Fetched(host, event, sequences, rows)

    monkeypatch.setattr(Runner, "_fetch", fetch)
    whole, left = Runner._choose, [0]

    def fails(self, *args):
        sampled = whole(self, *args)
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return sampled

    monkeypatch.setattr(Runner, "_choose", fails)
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}

    def tokens_of(num_errors: int) -> dict[str, list[int]]:
        engine = make_engine(LLAMA, Again(), overlap=True)
        engine._runner._fetched.extend((torch.empty(99, dtype=torch.int64), Event()) for _ in "123")
        engine.add_request("plain", [5, 6, 7], SamplingParams(**params))
        for _ in range(4):
            engine.step()
        left[0] = num_errors
        engine.add_request("scored", [8, 9], SamplingParams(**params, logprobs=1))
        return {o.request_id: o.token_ids for o in steps(engine) if o.finished}

    expected = tokens_of(0)
    assert len(expected) == 2
    for num_errors in (1, 2, 3, 4):
        assert tokens_of(num_errors) == expected


def interrupt_waits(monkeypatch, bad_calls: set[int]) -> None:
    wait, calls = runner._Fetched.wait, [0]

    def interrupted(self):
        calls[0] += 1
        if calls[0] in bad_calls:
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(runner._Fetched, "wait", interrupted)


def test_what_an_interrupted_wait_leaves_is_delivered(monkeypatch):
    """Even where the request's end was found in the interrupted step."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    stop = run(make_engine(LLAMA), [([5, 6, 7], params)])["0"][3]
    stopping = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=[stop])
    num_left = 0
    for first in range(1, 6):
        engine = make_engine(LLAMA, Again(), overlap=True)
        with monkeypatch.context() as patch:
            interrupt_waits(patch, {first, first + 2})
            engine.add_request("a", [5, 6, 7], stopping)
            outputs = []
            while engine.has_unfinished():
                try:
                    outputs += engine.step()
                except KeyboardInterrupt:
                    if not engine._requests:
                        num_left += 1
                        with pytest.raises(RequestError, match="in use"):
                            engine.add_request("a", [8], stopping)
        assert [output.finish_reason for output in outputs if output.finished] == ["stop"]
    assert num_left > 0


def test_an_abort_leaves_nothing_behind(monkeypatch):
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for first in (1, 2, 3):
        engine = make_engine(LLAMA, Again(), overlap=True)
        engine.add_request("a", [5, 6, 7], params)
        with monkeypatch.context() as patch:
            interrupt_waits(patch, {first, first + 2})
            for _ in range(6):
                with contextlib.suppress(KeyboardInterrupt):
                    engine.step()
                if engine._undelivered:
                    break
        assert engine._undelivered
        assert engine.abort("a").finished
        engine.add_request("a", [50, 51], params)
        assert all(output.prompt_token_ids == [50, 51] for output in steps(engine))


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
def test_a_scored_prompt_whose_wait_is_interrupted_holds_its_promises(with_graphs, monkeypatch):
    engine = make_engine(LLAMA, Again() if with_graphs else None)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=0))
    with monkeypatch.context() as patch:
        patch.setattr(runner.Launch, "wait", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check()
    assert [output.finish_reason for output in engine.step()] == ["length"]


def test_waiting_is_told_from_work_in_interrupted_steps_too(monkeypatch):
    engine = make_engine(LLAMA, Again(), overlap=True)
    scored = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    engine.add_request("plain", [5], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.add_request("scored", [6], scored)
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    calls = [0]

    def wait(self):
        clock[0] += 1.0
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(runner._Fetched, "wait", wait)
    list(steps(engine))
    stats = engine.stats()
    assert stats.wait_seconds == stats.step_seconds == calls[0] > 3
    assert stats.host_seconds == 0.0
