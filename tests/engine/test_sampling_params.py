"""SamplingParams: every field, in and out of its range."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

from flashpage.engine.sampling_params import SamplingParams
from flashpage.errors import FlashpageError, RequestError

HUGE = 10**5000  # no float, and too long for Python to print


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, 1, 10**6, None]),
        ("min_tokens", [0, 16]),
        ("temperature", [0, 0.0, 1e-9, 2, 100.5, 1e9, 10**9]),
        ("top_k", [-1, 0, 1, 10**9]),
        ("top_p", [1, 1.0, 1e-9]),
        ("min_p", [0, 0.0, 1, 1.0]),
        ("presence_penalty", [-2, 2, 0.5]),
        ("frequency_penalty", [-2, 2, 0.5]),
        ("repetition_penalty", [1e-9, 1, 5.5, 1e9]),
        ("logit_bias", [{}, {0: -100, 7: 100.0}]),
        ("seed", [None, 0, -1, 2**70]),
        ("n", [1, 100]),
        ("stop", [(), "x", ("x", "yz"), ("\n",)]),
        ("stop_token_ids", [(), (0, 5)]),
        ("ignore_eos", [True, False]),
        ("logprobs", [None, 0, 20]),
        ("prompt_logprobs", [None, 0, 20]),
        ("include_stop_str_in_output", [True, False]),
        ("skip_special_tokens", [True, False]),
    ],
)
def test_in_range(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1, True, 1.0, "5", math.nan, -HUGE]),
        ("min_tokens", [-1, None, True, 17, HUGE]),
        ("temperature", [-0.1, math.nan, math.inf, None, True, "1", 1.1e9, 1e39, 10**400, HUGE]),
        ("top_k", [-2, 1.5, None, True, -HUGE]),
        ("top_p", [0, -0.1, 1.1, math.nan, True, HUGE]),
        ("min_p", [-0.1, 1.1, math.nan, False, HUGE]),
        ("presence_penalty", [-2.01, 2.01, math.nan, None, 10**400, -HUGE]),
        ("frequency_penalty", [-2.01, 2.01, math.nan, None, 10**400, -HUGE]),
        ("repetition_penalty", [0, -1, 1e-50, 1e39, math.nan, math.inf, 10**400, HUGE]),
        ("logit_bias", [None, [1], {-1: 0}, {True: 0}, {1.5: 0}, {1: 101}, {1: math.nan}]),
        ("logit_bias", [{1: 10**400}, {-HUGE: 0}]),
        ("seed", [1.5, True, "1", Unprintable()]),
        ("n", [0, -1, True, 1.0, None, 10_001, HUGE]),
        ("stop", [None, "", ["x", ""], [1], {"x"}]),
        ("stop_token_ids", [None, 5, [-1], [True], [1.0], [-HUGE]]),
        ("ignore_eos", [None, 1]),
        ("logprobs", [-1, True, 1.0]),
        ("prompt_logprobs", [-1, True, 1.0]),
        ("include_stop_str_in_output", [0, "yes"]),
        ("skip_special_tokens", [0, None]),
    ],
)
def test_out_of_range(field, values):
    for value in values:
        with pytest.raises(RequestError, match=field.split("_penalty")[0]):
            SamplingParams(**{field: value})


def test_messages_name_field_value_and_rule():
    with pytest.raises(ValueError, match=r"top_p = 1\.5 must be in \(0, 1\]"):
        SamplingParams(top_p=1.5)
    with pytest.raises(FlashpageError, match=r"temperature = -1 must be in \[0, 1e\+09\]"):
        SamplingParams(temperature=-1)
    with pytest.raises(FlashpageError, match="min_tokens = 5 is more than max_tokens = 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_frozen_and_no_keyword_is_dropped():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_what_it_was_made_from_can_change_without_effect():
    bias, stop, stop_ids = {1: 2.0}, ["a"], [3]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=stop_ids)
    bias[1] = math.nan
    bias[10**9] = 1
    stop.append(5)
    stop_ids.append(-1)
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("a",)
    assert params.stop_token_ids == (3,)
    assert params == SamplingParams(logit_bias={1: 2.0}, stop=("a",), stop_token_ids=(3,))


def test_its_mapping_can_not_be_changed():
    bias = SamplingParams(logit_bias={1: 2.0}).logit_bias
    for change in (
        lambda: bias.__setitem__(1, 3.0),
        lambda: bias.__delitem__(1),
        lambda: bias.__ior__({1: 3.0}),
        lambda: bias.update({1: 3.0}),
        lambda: bias.setdefault(2, 3.0),
        lambda: bias.pop(1),
        bias.popitem,
        bias.clear,
    ):
        with pytest.raises(TypeError, match="can not be changed"):
            change()
    assert bias == {1: 2.0}


def test_copies_of_all_kinds():
    params = SamplingParams(logit_bias={1: 2.0}, stop=["a"])
    for same in (
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params),
        SamplingParams(**dataclasses.asdict(params)),
    ):
        assert same == params


def test_stop_strings_and_greedy():
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy
