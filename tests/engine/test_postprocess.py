"""What a new token does: stop tokens, stop strings, minimum, maximum, and the text they leave."""

from __future__ import annotations

import pytest

from flashpage.engine.outputs import Logprob
from flashpage.engine.postprocess import append_token, logprob_dict
from flashpage.engine.request import Request, Sequence
from flashpage.engine.sampling_params import SamplingParams
from flashpage.layers.sampler import TokenLogprobs

EOS = 257


@pytest.fixture
def generate(tokenizer):
    """Feed the bytes of a text (and special ids) to a sequence until it ends."""

    def run(tokens: list[int], with_tokenizer: bool = True, **params) -> Sequence:
        params = SamplingParams(**{"max_tokens": 100, **params})
        request = Request(
            "id",
            None,
            [1],
            params,
            max_tokens=params.max_tokens,
            seed=0,
            tokenizer=tokenizer if with_tokenizer else None,
            eos_token_ids=frozenset({EOS}),
        )
        (sequence,) = request.sequences
        for token_id in tokens:
            append_token(sequence, token_id)
            if sequence.is_finished:
                break
        return sequence

    return run


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("tokens", "params", "text", "reason", "stop_reason"),
    [
        ([*ids("hé"), EOS], {}, "hé", "stop", None),
        ([*ids("hé"), EOS, *ids("llo")], {"ignore_eos": True}, "héllo", None, None),
        ([*ids("ab"), 99], {"stop_token_ids": [99]}, "ab", "stop", 99),
        (
            [*ids("ab"), 99],
            {"stop_token_ids": [99], "include_stop_str_in_output": True},
            "abc",
            "stop",
            99,
        ),
        (
            [*ids("ab"), EOS],
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            "ab<257>",
            "stop",
            None,
        ),
        (ids("one END two"), {"stop": "END"}, "one ", "stop", "END"),
        (
            ids("one END two"),
            {"stop": ["x", "END"], "include_stop_str_in_output": True},
            "one END",
            "stop",
            "END",
        ),
        (ids("one EN"), {"stop": "END", "max_tokens": 6}, "one EN", "length", None),
        ([*ids("one EN"), EOS], {"stop": "END"}, "one EN", "stop", None),
        (ids("日本")[:5], {"max_tokens": 5}, "日\ufffd", "length", None),
        (ids("abXab"), {"stop": "ab", "min_tokens": 2}, "abX", "stop", "ab"),
        (ids("abXab"), {"stop": "ab", "min_tokens": 1}, "abX", "stop", "ab"),
        ([EOS, *ids("a"), EOS], {"min_tokens": 1}, "a", "stop", None),
        (ids("ab"), {"max_tokens": 2, "stop": "b"}, "a", "stop", "b"),
        # What completes a stop string may come only when the bytes held back are given up.
        (ids("日本")[:5], {"max_tokens": 5, "stop": "\ufffd"}, "日", "stop", "\ufffd"),
        (ids("日本")[:5], {"max_tokens": 5, "stop": ["x", "日\ufffd"]}, "", "stop", "日\ufffd"),
        (
            ids("日本")[:5],
            {"max_tokens": 5, "stop": "\ufffd", "include_stop_str_in_output": True},
            "日\ufffd",
            "stop",
            "\ufffd",
        ),
        ([*ids("日本")[:5], EOS], {"stop": "\ufffd"}, "日", "stop", "\ufffd"),
        (
            [*ids("日本")[:5], 99],
            {"stop": "\ufffd", "stop_token_ids": [99]},
            "日",
            "stop",
            "\ufffd",
        ),
        ([*ids("日本")[:5], EOS], {}, "日\ufffd", "stop", None),
        (
            ids("日本")[:5],
            {"max_tokens": 5, "min_tokens": 5, "stop": "\ufffd"},
            "日\ufffd",
            "length",
            None,
        ),
        (
            [*ids("ab"), 99],
            {"stop_token_ids": [99], "stop": "bc", "include_stop_str_in_output": True},
            "abc",
            "stop",
            "bc",
        ),
    ],
)
def test_ends(generate, tokens, params, text, reason, stop_reason):
    sequence = generate(tokens, **params)
    assert sequence.text == text
    assert (sequence.finish_reason, sequence.stop_reason) == (reason, stop_reason)


def test_text_without_a_tokenizer_is_empty(generate):
    sequence = generate([*ids("ab"), EOS], with_tokenizer=False)
    assert (sequence.text, sequence.finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 2}]
)
def test_counts_follow_the_tokens_where_a_penalty_needs_them(penalty, generate):
    assert generate(ids("abca"), **penalty).output_counts == {97: 2, 98: 1, 99: 1}
    assert generate(ids("abca")).output_counts == {}


def test_logprob_dict(tokenizer):
    row = TokenLogprobs(
        token_id=99, logprob=-3.0, rank=7, top_token_ids=[97, 98], top_logprobs=[-0.5, -1.0]
    )
    assert list(logprob_dict(row, tokenizer).items()) == [
        (97, Logprob(-0.5, 1, "a")),
        (98, Logprob(-1.0, 2, "b")),
        (99, Logprob(-3.0, 7, "c")),
    ]
    assert logprob_dict(row, None)[97].decoded_token is None
