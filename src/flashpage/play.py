"""Plays requests of random tokens on an engine, with a clock; asks no question about them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from flashpage.errors import ArgumentError

if TYPE_CHECKING:
    from flashpage.engine.engine import Engine
    from flashpage.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Ask:
    """A request of random tokens, that no end token stops."""

    prompt: list[int]
    new_tokens: int
    temperature: float = 0.6

    def params(self) -> SamplingParams:
        from flashpage.engine.sampling_params import SamplingParams

        return SamplingParams(
            max_tokens=self.new_tokens, temperature=self.temperature, ignore_eos=True
        )


@dataclass(frozen=True)
class Played:
    """What happened to a list of requests that came at the same time.

    Attributes:
        seconds: from before the first was added to the last token.
        first_token: seconds until each one's first token.
        tokens: what each one generated.
        step_seconds: between the returns of consecutive steps.
        stats: what the engine's counters gained.
    """

    seconds: float
    first_token: list[float]
    tokens: list[list[int]]
    step_seconds: list[float]
    stats: dict[str, float]

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def play(engine: Engine, asks: Sequence[Ask]) -> Played:
    """Add all, and step until all have ended."""
    from flashpage.engine.collector import old_objects_spared

    outputs = {}
    before = engine.stats()
    with old_objects_spared():  # as in LLM.generate
        began = time.perf_counter()
        for i, ask in enumerate(asks):
            engine.add_request(f"ask-{i}", ask.prompt, ask.params(), reports_once=True)
        steps = [time.perf_counter()]
        while engine.has_unfinished():
            for output in engine.step():
                outputs[output.request_id] = output
            steps.append(time.perf_counter())
    after = engine.stats()
    ordered = [outputs[f"ask-{i}"] for i in range(len(asks))]
    for output in ordered:
        if output.outputs[0].error is not None:
            raise ArgumentError(f"the model can not be measured: {output.outputs[0].error}")
    return Played(
        seconds=steps[-1] - began,
        first_token=[o.metrics.first_token_time - began for o in ordered],
        tokens=[o.outputs[0].token_ids for o in ordered],
        step_seconds=[b - a for a, b in pairwise(steps)],
        stats={
            name: getattr(after, name) - getattr(before, name)
            for name in (
                "preemptions", "prefix_hit_tokens", "tokens_computed", "steps",
                "host_seconds", "wait_seconds",
            )
        },
    )  # fmt: skip


@dataclass(frozen=True)
class Decodes:
    """Consecutive steps in which every request of a batch decoded.

    Attributes:
        step_seconds: between the returns of consecutive steps.
        host_seconds: the host's own work in each, without its waiting for the device.
        context: keys that a request attended to in such a step; the mean over requests and steps.
    """

    step_seconds: list[float]
    host_seconds: list[float]
    context: float


def play_decodes(engine: Engine, asks: Sequence[Ask], new_tokens: int) -> Decodes:
    """Step until the request that started last has `new_tokens`, and end all.

    The others must go on for as long: their `Ask.new_tokens` say how long they may.
    """
    from flashpage.engine.collector import old_objects_spared

    for i, ask in enumerate(asks):
        engine.add_request(f"ask-{i}", ask.prompt, ask.params(), reports_once=True)
    seconds: list[float] = []
    host: list[float] = []
    after, returned = engine.stats(), time.perf_counter()
    with old_objects_spared():  # as in LLM.generate
        while len(seconds) < new_tokens:
            if not engine.has_unfinished():
                raise ArgumentError("the model can not be measured: requests end before all decode")
            engine.step()
            before, after = after, engine.stats()
            before_step, returned = returned, time.perf_counter()
            if after.tokens_generated - before.tokens_generated == len(asks):
                seconds.append(returned - before_step)
                host.append(after.host_seconds - before.host_seconds)
            else:
                seconds.clear()
                host.clear()
    lengths = []
    for i, ask in enumerate(asks):
        output = engine.abort(f"ask-{i}")
        assert output is not None, "each has just got a token, and may have more"
        lengths.append(len(ask.prompt) + len(output.token_ids))
    # The last token's step read all keys before it, the step before that one less. The first of
    # these steps also held the end of the last prompt: it is not counted.
    measured = seconds[1:]
    context = sum(lengths) / len(lengths) - 1 - (len(measured) - 1) / 2
    return Decodes(measured, host[1:], context)
