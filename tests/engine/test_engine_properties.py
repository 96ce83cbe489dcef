"""Engine: random sequences of add, step and abort, with every promise checked after each."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashpage.engine.sampling_params import SamplingParams

POISON = 259
# Few different tokens and shared beginnings: prefixes are hit and blocks are computed twice.
beginnings = st.sampled_from([[], [1] * 8, [1] * 13, [1, 2] * 9])
tails = st.lists(st.integers(1, 3), min_size=1, max_size=12)
prompts = st.builds(lambda head, tail: head + tail, beginnings, tails)


@st.composite
def sampling_params(draw) -> SamplingParams:
    greedy = draw(st.booleans())
    max_tokens = draw(st.integers(0, 14))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=0.0 if greedy else 1.0,
        seed=draw(st.integers(0, 3)),
        n=draw(st.integers(1, 3)),
        ignore_eos=draw(st.booleans()),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        logprobs=draw(st.sampled_from([None, 1])),
    )


def _without_errors(outputs):
    return [replace(output, error=None) for output in outputs]


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_random_life(make_engine, data):
    """Whatever happened around it, a request gives what it gives alone."""
    options = {
        "block_size": data.draw(st.sampled_from([1, 2, 4])),
        "max_num_seqs": data.draw(st.integers(1, 5)),
        "max_num_batched_tokens": data.draw(st.sampled_from([5, 9, 40])),
        "enable_prefix_caching": data.draw(st.booleans()),
        "overlap": data.draw(st.booleans()),
        "max_model_len": 64,
    }
    # Just enough for the largest request, so that a second one often means preemption.
    num_blocks = math.ceil((25 + 5 + 14) / options["block_size"]) + data.draw(st.integers(0, 12))
    engine = make_engine(num_blocks=num_blocks, **options)
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    finished = {}
    aborted = set()
    for i in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "abort"]))
        if action == "add":
            prompt = data.draw(prompts)
            if data.draw(st.integers(0, 9)) == 0:
                prompt = [*prompt, POISON]
            asked[str(i)] = (prompt, data.draw(sampling_params()))
            engine.add_request(str(i), *asked[str(i)])
        elif action == "abort" and (alive := sorted(set(asked) - set(finished) - aborted)):
            request_id = data.draw(st.sampled_from(alive))
            assert engine.abort(request_id).finished
            aborted.add(request_id)
        else:
            finished |= {o.request_id: o for o in engine.step() if o.finished}
        engine.check()
    for _ in range(3000):
        if not engine.has_unfinished():
            break
        finished |= {o.request_id: o for o in engine.step() if o.finished}
        engine.check()
    assert set(finished) | aborted == set(asked)
    stats = engine.stats()
    assert stats.pages_used == stats.num_running == stats.num_waiting == 0

    for request_id, output in finished.items():
        alone = make_engine(num_blocks=100, max_model_len=64, max_num_batched_tokens=64)
        alone.add_request(request_id, *asked[request_id])
        (expected,) = [o for _ in range(99) for o in alone.step() if o.finished]
        # Why logits are bad is told in other words where the host does not see them.
        assert _without_errors(output.outputs) == _without_errors(expected.outputs)
        assert output.prompt_logprobs == expected.prompt_logprobs
        is_poisoned = POISON in asked[request_id][0]
        is_scored = asked[request_id][1].max_tokens == 0
        assert (output.finish_reason == "error") == is_poisoned or is_scored
