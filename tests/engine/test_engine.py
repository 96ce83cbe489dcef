"""Engine: greedy tokens whatever else runs, limits, errors, aborts, logprobs, n, seeds."""

from __future__ import annotations

import math
import random

import pytest
import torch

from flashpage.engine.sampling_params import SamplingParams
from flashpage.errors import RequestError

EOS, SPARE, POISON = 257, 258, 259
VOCAB_SIZE = 260
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def prompts_of(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 40])
def test_a_lone_request(make_engine, run_all, reference, length):
    prompt = prompts_of(length, 1)[0][:1] * length
    engine = make_engine()
    engine.add_request("a", prompt, GREEDY)
    (output,) = run_all(engine).values()
    assert output.token_ids == reference.greedy(prompt, 20)
    assert output.finish_reason in ("length", "stop")
    assert output.prompt_token_ids == prompt
    assert not engine.has_unfinished()
    assert engine.step() == []


@pytest.mark.parametrize("budget", [8, 16, 300])
@pytest.mark.parametrize("num_blocks", [20, 26, 200])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_greedy_tokens_do_not_depend_on_the_company(
    make_engine, run_all, reference, budget, num_blocks, prefix, block_size
):
    """Batch mates, chunk sizes, shared prefixes and preemption change nothing."""
    engine = make_engine(
        max_num_batched_tokens=budget,
        num_blocks=num_blocks * 4 // block_size,
        enable_prefix_caching=prefix,
        block_size=block_size,
    )
    prompts = prompts_of(budget, 8)
    prompts += [prompts[0][:20] + tail for tail in prompts[5:]] + prompts[:2]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    outputs = run_all(engine)
    for i, prompt in enumerate(prompts):
        assert outputs[str(i)].token_ids == reference.greedy(prompt, 20)
    stats = engine.stats()
    assert max(engine.model.batches) <= budget
    assert (stats.preemptions > 0) == (num_blocks < 200)
    assert stats.pages_used == stats.num_running == stats.num_waiting == 0
    assert stats.tokens_generated == sum(len(o.token_ids) for o in outputs.values())
    if not prefix:
        assert stats.prefix_hit_tokens == 0


def test_a_prefix_is_hit_and_the_last_token_still_computed(make_engine, run_all, reference):
    engine = make_engine()
    prompt = prompts_of(1, 1, 5)[0][:1] * 16
    for expected_hits in (0, 12):
        engine.add_request("a", prompt, GREEDY)
        output = run_all(engine)["a"]
        assert output.num_cached_tokens == expected_hits
        assert output.token_ids == reference.greedy(prompt, 20)
    assert engine.stats().prefix_hit_tokens == 12


def test_a_conversation_hits_what_was_generated(make_engine, run_all):
    engine = make_engine()
    engine.add_request("a", [1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=12))
    first = run_all(engine)["a"]
    history = [*first.prompt_token_ids, *first.token_ids]
    engine.add_request("b", [*history, 9], GREEDY)
    assert run_all(engine)["b"].num_cached_tokens == (len(history) - 1) // 4 * 4


def test_requests_that_come_together_share_pages(make_engine, run_all):
    """Equal blocks that are computed at the same time are held once."""
    engine = make_engine(max_num_batched_tokens=64)
    for i in range(4):
        engine.add_request(str(i), [7] * 16, SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    engine.check()
    # Three full blocks and the fourth, complete too, are shared; each decode needs its own next.
    assert engine.stats().pages_used == 4


def test_a_long_prefill_never_starves_a_decode(make_engine):
    engine = make_engine(max_num_batched_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add_request("short", [1, 2], params)
    engine.step()
    engine.add_request("long", [3] * 100, GREEDY)
    for _ in range(10):
        outputs = engine.step()
        assert [o.request_id for o in outputs] == ["short"], "one token for the decode each step"
    assert engine.model.batches[1:] == [8] * 10, "and the rest of the budget for the prefill"


def test_preemption_keeps_what_was_generated(make_engine, run_all, reference):
    """Penalties, seeds and log-probabilities do not notice it."""
    prompts = prompts_of(5, 6, 20)
    params = [
        SamplingParams(
            max_tokens=30,
            seed=i,
            ignore_eos=True,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            repetition_penalty=1.2,
            logprobs=2,
            prompt_logprobs=1,
        )
        for i in range(6)
    ]
    results = []
    for num_blocks in (200, 16):
        engine = make_engine(num_blocks=num_blocks)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params[i])
        results.append((engine, run_all(engine)))
    (roomy, expected), (tight, outputs) = results
    assert roomy.stats().preemptions == 0
    assert tight.stats().preemptions > 3
    for request_id, output in outputs.items():
        assert output.outputs == expected[request_id].outputs
        assert output.prompt_logprobs == expected[request_id].prompt_logprobs
        assert len(output.logprobs) == len(output.token_ids) == 30


def test_penalties_biases_and_masks_follow_the_history(make_engine, run_all, reference):
    """Against the formulas, one token at a time: the prompt counts for repetition only."""
    prompt = prompts_of(11, 1)[0] + list(range(60, 90))
    params = SamplingParams(
        temperature=0,
        max_tokens=25,
        min_tokens=25,
        presence_penalty=1.5,
        frequency_penalty=1.0,
        repetition_penalty=1.8,
        logit_bias={7: 6.0, 8: -100},
        stop_token_ids=[9, 70],
    )
    tokens = list(prompt)
    for _ in range(25):
        logits = reference.logits_after(tokens)[-1]
        output = tokens[len(prompt) :]
        for token in set(tokens):
            logits[token] *= 1.8 if logits[token] < 0 else 1 / 1.8
        for token in set(output):
            logits[token] -= 1.5 + 1.0 * output.count(token)
        logits[7] += 6
        logits[8] -= 100
        logits[[EOS, 9, 70]] = -math.inf
        tokens.append(int(logits.argmax()))
    engine = make_engine()
    engine.add_request("a", prompt, params)
    assert run_all(engine)["a"].token_ids == tokens[len(prompt) :]


@pytest.mark.parametrize("budget", [8, 500])
def test_prompt_logprobs(make_engine, run_all, reference, budget):
    """Right in chunks, after a prefix that could be hit, and for a prompt that is only scored."""
    prompt = prompts_of(2, 1, 5)[0] * 15
    engine = make_engine(max_num_batched_tokens=budget)
    engine.add_request("warm", prompt, GREEDY)
    run_all(engine)
    engine.add_request(
        "score", prompt, SamplingParams(max_tokens=0, prompt_logprobs=3, temperature=0)
    )
    output = run_all(engine)["score"]
    assert output.token_ids == []
    assert output.finish_reason == "length"
    assert output.num_cached_tokens == 0
    expected = reference.logits_after(prompt).log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position in range(1, len(prompt)):
        entry = output.prompt_logprobs[position]
        row, token = expected[position - 1], prompt[position]
        assert entry[token].logprob == pytest.approx(row[token].item(), abs=1e-5)
        likeliest = row.topk(3).indices.tolist()
        assert list(entry)[:3] == likeliest
        assert [entry[t].rank for t in likeliest] == [1, 2, 3]


def test_scoring_a_single_token(make_engine, run_all):
    engine = make_engine()
    engine.add_request("a", [5], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert run_all(engine)["a"].prompt_logprobs == [None]


def test_logprobs_of_generated_tokens(make_engine, run_all, reference):
    engine = make_engine()
    engine.add_request(
        "a", [1, 2, 3], SamplingParams(max_tokens=5, logprobs=2, seed=1, ignore_eos=True)
    )
    output = run_all(engine)["a"]
    rows = reference.logits_after([1, 2, 3, *output.token_ids]).log_softmax(-1)[2:]
    for token, row, entry in zip(output.token_ids, rows, output.logprobs, strict=False):
        assert entry[token].logprob == pytest.approx(row[token].item(), abs=1e-5)
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        assert list(entry)[:2] == row.topk(2).indices.tolist()


def test_a_seed_gives_the_same_text_whatever_runs(make_engine, run_all):
    params = SamplingParams(max_tokens=15, seed=42, top_p=0.9)
    outputs = []
    for company in (0, 5):
        engine = make_engine(num_blocks=30)
        for i, prompt in enumerate(prompts_of(9, company)):
            engine.add_request(f"other {i}", prompt, SamplingParams(max_tokens=20))
        engine.add_request("mine", [4, 5, 6], params)
        outputs.append(run_all(engine)["mine"].token_ids)
    assert outputs[0] == outputs[1]


def test_requests_without_a_seed_differ_and_follow_the_engines(make_engine, run_all):
    def texts(seed):
        engine = make_engine(seed=seed)
        for i in range(3):
            engine.add_request(str(i), [1, 2], SamplingParams(max_tokens=10, ignore_eos=True))
        outputs = run_all(engine)
        return [outputs[str(i)].token_ids for i in range(3)]

    first = texts(0)
    assert len({tuple(ids) for ids in first}) == 3
    assert texts(0) == first
    assert texts(1) != first


@pytest.mark.parametrize("prefix", [True, False])
def test_n_continuations_share_one_prompt(make_engine, run_all, prefix):
    prompt = prompts_of(3, 1, 5)[0] * 8
    engine = make_engine(enable_prefix_caching=prefix)
    params = SamplingParams(max_tokens=6, n=4, seed=7, prompt_logprobs=0, ignore_eos=True)
    engine.add_request("a", prompt, params)
    output = run_all(engine)["a"]
    assert [part.index for part in output.outputs] == [0, 1, 2, 3]
    assert all(len(part.token_ids) == 6 for part in output.outputs)
    assert len({tuple(part.token_ids) for part in output.outputs}) == 4
    assert len(output.prompt_logprobs) == len(prompt)
    if prefix:
        hits = (len(prompt) - 1) // 4 * 4
        assert engine.stats().prefix_hit_tokens == 3 * hits
        assert sum(engine.model.batches) == len(prompt) + 3 * (len(prompt) - hits) + 4 * 5
    engine.add_request("one", prompt, SamplingParams(max_tokens=6, seed=7, ignore_eos=True))
    assert run_all(engine)["one"].token_ids == output.token_ids, "the first is the n = 1 text"


def test_n_greedy_continuations_are_equal(make_engine, run_all, reference):
    engine = make_engine(num_blocks=12)
    engine.add_request("a", [1] * 20, SamplingParams(temperature=0, max_tokens=9, n=3))
    expected = reference.greedy([1] * 20, 9)
    assert [part.token_ids for part in run_all(engine)["a"].outputs] == [expected] * 3


def test_abort_frees_everything_at_once(make_engine, run_all, reference):
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request("a", [1] * 30, GREEDY)
    engine.add_request("b", [2] * 30, SamplingParams(temperature=0, max_tokens=20, n=2))
    engine.add_request("c", [3, 4], GREEDY)
    engine.step()
    assert engine.stats().pages_used > 0
    output = engine.abort("a")
    assert output.finished
    assert output.finish_reason == "abort"
    engine.check()
    assert engine.abort("a") is None
    assert engine.abort("never was") is None
    engine.step()
    assert {part.finish_reason for part in engine.abort("b").outputs} == {"abort"}
    engine.check()
    assert run_all(engine)["c"].token_ids == reference.greedy([3, 4], 20)
    assert engine.stats().pages_used == 0
    engine.add_request("a", [1], GREEDY)


def test_abort_shows_the_text_that_was_held_back(make_engine, tokenizer):
    engine = make_engine(tokenizer=tokenizer)
    bias = SamplingParams(logit_bias={97: 100}, stop="aaaa", temperature=0)
    engine.add_request("a", [1], bias)
    for _ in range(3):
        (output,) = engine.step()
        assert output.text == ""
    assert engine.abort("a").text == "aaa"


def test_continuations_of_an_admitted_prompt_go_before_newcomers(make_engine):
    engine = make_engine(max_num_seqs=3)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.add_request("first", [1] * 9, SamplingParams(max_tokens=9, n=3, ignore_eos=True))
    engine.add_request("long", [2] * 40, params)
    engine.add_request("late", [3], params)
    for _ in range(4):
        engine.step()
    assert engine.stats().num_running == 3
    assert [len(part.token_ids) for part in engine.abort("first").outputs] == [4, 1, 0]
    assert len(engine.abort("late").token_ids) == 0


@pytest.mark.parametrize("siblings", [1, 3])
def test_a_poisoned_request_fails_alone(make_engine, run_all, reference, siblings):
    """Not even those that share its prefix, or get its pages, are harmed."""
    engine = make_engine(num_blocks=30)
    shared = prompts_of(4, 1, 5)[0] * 4
    engine.add_request("bad", [*shared, POISON, *shared], SamplingParams(max_tokens=5, n=siblings))
    for i in range(4):
        engine.add_request(str(i), [*shared, i], GREEDY)
    outputs = run_all(engine)
    for part in outputs["bad"].outputs:
        assert part.finish_reason == "error"
        assert "'bad' failed" in part.error
        assert "not finite" in part.error
    for i in range(4):
        assert outputs[str(i)].token_ids == reference.greedy([*shared, i], 20)


def test_poisoned_pages_are_never_hit(make_engine, run_all):
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request("bad", [POISON] * 20, GREEDY)
    assert run_all(engine)["bad"].finish_reason == "error"
    engine.add_request("again", [POISON] * 20, GREEDY)
    assert run_all(engine)["again"].num_cached_tokens == 0


def test_a_poisoned_prompt_can_not_be_scored(make_engine, run_all):
    engine = make_engine()
    engine.add_request("bad", [1, 2, POISON, 3], SamplingParams(max_tokens=0, prompt_logprobs=0))
    output = run_all(engine)["bad"]
    assert output.finish_reason == "error"
    assert "after prompt token 2" in output.outputs[0].error


class Tripping:
    """A tokenizer that raises when it decodes for the `at`-th time, or a given token."""

    def __init__(self, tokenizer, at: int = -1, token: int = -1) -> None:
        self.tokenizer, self.at, self.token, self.count = tokenizer, at, token, 0

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        self.count += 1
        if self.count == self.at or self.token in ids:
            raise KeyError("no such token")
        return self.tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("n", [1, 3])
def test_a_tokenizer_that_raises_once_fails_one_request_alone(
    make_engine, run_all, reference, tokenizer, n
):
    """At every call in turn: pushes, flushes, log-probabilities of prompt and tokens."""
    params = SamplingParams(
        max_tokens=3, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1, n=n
    )
    prompts = {"a": [1, 200, 3], "b": [4, 5], "c": [6]}
    expected = {name: reference.greedy(ids, 3, stop=()) for name, ids in prompts.items()}
    counting = Tripping(tokenizer)
    for at in range(0, 1000):
        tripping = Tripping(tokenizer, at) if at else counting
        engine = make_engine(tokenizer=tripping)
        refused = []
        for name, ids in prompts.items():
            try:
                engine.add_request(name, ids, params)
            except RequestError:
                refused.append(name)
        outputs = run_all(engine)
        assert engine.stats().pages_used == 0
        failed = []
        for name, output in outputs.items():
            reasons = {part.finish_reason for part in output.outputs}
            for part in output.outputs:
                length = len(part.token_ids)
                assert part.token_ids == expected[name][:length]
                assert len(part.logprobs) == length
                if part.finish_reason == "error":
                    assert "can not decode its tokens: KeyError('no such token')" in part.error
                    assert part.stop_reason is None
                else:
                    assert (part.finish_reason, length) == ("length", 3)
                    assert part.text == tokenizer.decode(expected[name])
            failed += [name] * ("error" in reasons)
        if at == 0:
            assert failed == refused == []
        elif tripping.count < at:
            break
        else:
            assert len(failed + refused) == 1
    assert at > counting.count > 10


def test_a_token_that_can_not_be_decoded_ends_its_request_and_no_other(
    make_engine, run_all, reference, tokenizer
):
    engine = make_engine(tokenizer=Tripping(tokenizer, token=SPARE))
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={SPARE: 100})
    engine.add_request("bad", [1], params)
    engine.add_request("good", [2], SamplingParams(temperature=0, max_tokens=5))
    outputs = run_all(engine)
    assert (outputs["bad"].finish_reason, outputs["bad"].token_ids) == ("error", [SPARE])
    assert outputs["good"].token_ids == reference.greedy([2], 5)
    with pytest.raises(RequestError, match="can not decode the prompt: KeyError"):
        engine.add_request("refused", [SPARE], GREEDY)
    assert not engine.has_unfinished()


def test_an_abort_frees_all_though_the_tokenizer_raises(make_engine, tokenizer):
    tripping = Tripping(tokenizer)
    engine = make_engine(tokenizer=tripping)
    engine.add_request("a", [1] * 9, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    tripping.at = tripping.count + 1
    assert engine.abort("a").finish_reason == "abort"
    assert engine.stats().pages_used == 0
    engine.check()


def test_an_abort_does_not_cut_at_a_stop_string(make_engine, tokenizer):
    """What reads like one was never completed: the next bytes could have made a character."""
    engine = make_engine(tokenizer=tokenizer)
    lead = "日".encode()[0]
    params = SamplingParams(temperature=0, logit_bias={lead: 100}, stop="\ufffd")
    engine.add_request("a", [1], params)
    engine.step()
    output = engine.abort("a").outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("\ufffd", "abort", None)


@pytest.mark.parametrize("eos", [(VOCAB_SIZE,), (1000, EOS), (-1,), ()])
def test_end_tokens_that_the_model_can_not_produce_are_ignored(make_engine, run_all, eos):
    engine = make_engine(eos_token_ids=eos)
    assert engine.eos_token_ids == {EOS} & set(eos)
    params = SamplingParams(temperature=0, max_tokens=6, min_tokens=5, logit_bias={EOS: 100})
    engine.add_request("a", [1], params)
    tokens = run_all(engine)["a"].token_ids
    if EOS in eos:
        assert EOS not in tokens[:5]
        assert tokens[5] == EOS
    else:
        assert tokens == [EOS] * 6


def test_an_exception_in_a_step_changes_nothing(make_engine, run_all, reference):
    engine = make_engine(num_blocks=12)
    for i in range(3):
        engine.add_request(str(i), [i] * 9, GREEDY)
    for step in range(200):
        if not engine.has_unfinished():
            break
        if step % 3 == 1:

            def trip():
                raise KeyboardInterrupt

            engine.model.before_forward = trip
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            engine.model.before_forward = lambda: None
            engine.check()
        for output in engine.step():
            prompt = output.prompt_token_ids
            assert output.token_ids == reference.greedy(prompt, 20)[: len(output.token_ids)]
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 260], {}, r"prompt_token_ids\[1\] = 260 is not a token .* from 0 to 259"),
        ([-1], {}, r"\[0\] = -1"),
        ([True], {}, r"\[0\] = True"),
        ([1.0], {}, r"\[0\] = 1.0"),
        (["a"], {}, r"\[0\] = 'a'"),
        ([1] * 120, {"max_tokens": 9}, "120 prompt tokens .* make 129: .* max_model_len = 128"),
        ([1] * 128, {"max_tokens": None}, "128 tokens leaves no room for 1 more"),
        ([1] * 60, {"max_tokens": 6}, "need 17 pages of 4 tokens: the cache has 16"),
        ([1] * 60, {"max_tokens": None, "min_tokens": 6}, "leaves no room for 6 more"),
        ([1], {"stop_token_ids": [260]}, r"stop_token_ids\[0\] = 260"),
        ([1], {"logit_bias": {260: 1.0}}, r"logit_bias\[260\]: not a token"),
        ([1], {"logprobs": 261}, "logprobs = 261 is more than the 260 tokens"),
        ([1], {"stop": "x"}, "needs an engine with a tokenizer"),
        ([10**5000], {}, r"\[0\] = <int that can not be printed>"),
        ([1], {"stop_token_ids": [10**5000]}, r"stop_token_ids\[0\] = <int that can not be"),
        ([1], {"logprobs": 10**5000}, "logprobs = <int that can not be printed> is more"),
        ([1], {"max_tokens": 10**5000}, "max_tokens = <int that can not be printed> make"),
        ([1], {"max_tokens": None, "min_tokens": 10**5000}, "no room for <int that can not be"),
        (None, {}, "prompt_token_ids = None must be a sequence of token ids"),
        (5, {}, "prompt_token_ids = 5 must be"),
        ("text", {}, "prompt_token_ids = 'text' must be"),
        (b"text", {}, "must be a sequence"),
        ({1: 2}, {}, "must be a sequence"),
        ({1, 2}, {}, "must be a sequence"),
        (torch.tensor(3), {}, "must be a sequence|is not a token"),
        ([[1, 2]], {}, r"\[0\] = \[1, 2\]"),
    ],
)
def test_refused_on_arrival(make_engine, run_all, reference, prompt, params, message):
    engine = make_engine(num_blocks=16)
    engine.add_request("good", [1, 2], GREEDY)
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert list(run_all(engine)) == ["good"]


def test_arguments_of_wrong_kinds_are_refused(make_engine):
    engine = make_engine()
    for params in ("x", 5, {"max_tokens": 1}, SamplingParams):
        with pytest.raises(RequestError, match="sampling_params must be SamplingParams, not"):
            engine.add_request("a", [1], params)
    for request_id in (None, 5, ["a"], b"a"):
        with pytest.raises(RequestError, match="request_id = .* must be a string"):
            engine.add_request(request_id, [1])
    assert not engine.has_unfinished()


def test_arrays_of_ids_are_welcome(make_engine, run_all, reference):
    engine = make_engine()
    engine.add_request("a", torch.tensor([1, 2]), GREEDY)
    engine.add_request("b", torch.tensor([1, 2]).numpy(), GREEDY)
    engine.add_request("c", range(1, 3), GREEDY)
    for output in run_all(engine).values():
        assert output.prompt_token_ids == [1, 2]
        assert output.token_ids == reference.greedy([1, 2], 20)


def test_what_a_request_was_made_from_can_change_without_effect(make_engine, run_all):
    """A bias for a token outside the vocabulary would take every request down."""
    engine = make_engine()
    bias, stop_ids, prompt = {7: 100.0}, [300 - 50], [1, 2]
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias=bias, stop_token_ids=stop_ids)
    engine.add_request("a", prompt, params)
    bias[10**6] = 1.0
    bias[7] = -100.0
    stop_ids.append(7)
    prompt.append(10**6)
    assert run_all(engine)["a"].token_ids == [7] * 5


def test_outputs_come_to_the_one_who_asked_whoever_steps(make_engine):
    engine = make_engine()
    mine, others = [], []
    engine.add_request("mine", [1], GREEDY, on_output=mine.append)
    engine.add_request("others", [2], GREEDY, on_output=others.append)
    stepped = [output for _ in range(3) for output in engine.step()]
    assert mine + others == sorted(stepped, key=lambda output: output.request_id)
    aborted = engine.abort("mine")
    assert mine[-1] is aborted
    assert len(others) == 3


def test_an_id_in_use_is_refused(make_engine, run_all):
    engine = make_engine()
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", [2], GREEDY)
    assert run_all(engine)["a"].prompt_token_ids == [1]
    engine.add_request("a", [2], GREEDY)


@pytest.mark.parametrize(("num_blocks", "length"), [(16, 59), (15, 60)])
def test_what_just_fits_is_served(make_engine, run_all, reference, num_blocks, length):
    """The last generated token needs no page."""
    max_tokens = num_blocks * 4 + 1 - length
    engine = make_engine(num_blocks=num_blocks)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request("a", [1] * length, params)
    engine.add_request("b", [1] * length, SamplingParams(temperature=0, max_tokens=None))
    outputs = run_all(engine)
    expected = reference.greedy([1] * length, max_tokens, stop=())
    assert outputs["a"].token_ids == expected
    assert outputs["b"].token_ids == reference.greedy([1] * length, max_tokens)


def test_the_model_ends_its_text(make_engine, run_all, reference):
    seed = next(s for s in range(1000) if EOS in reference.greedy([s % 256, s // 256], 60))
    prompt = [seed % 256, seed // 256]
    expected = reference.greedy(prompt, 60)
    engine = make_engine()
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=60))
    engine.add_request("b", prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    engine.add_request(
        "c", prompt, SamplingParams(temperature=0, max_tokens=61, min_tokens=len(expected))
    )
    outputs = run_all(engine)
    assert outputs["a"].token_ids == expected
    assert (outputs["a"].finish_reason, outputs["a"].outputs[0].stop_reason) == ("stop", None)
    assert outputs["b"].token_ids == reference.greedy(prompt, 60, stop=())
    assert EOS not in outputs["c"].token_ids[: len(expected)]


def test_metrics(make_engine, run_all):
    engine = make_engine()
    engine.add_request("a", [1] * 10, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    metrics = run_all(engine)["a"].metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finish_time
    assert metrics.num_generated_tokens == 5
    assert metrics.pages_used == math.ceil(14 / 4)
    assert metrics.time_to_first_token >= 0
    assert metrics.tokens_per_second > 0


def test_text_follows_the_tokens(make_engine, run_all, tokenizer):
    engine = make_engine(tokenizer=tokenizer)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=40, seed=3, ignore_eos=True))
    seen = ""
    while engine.has_unfinished():
        for output in engine.step():
            assert output.text.startswith(seen)
            seen = output.text
    assert seen == tokenizer.decode(output.token_ids)
    assert torch.isnan(engine.kv_cache.k[0]).any(), "the pool was poisoned"


@pytest.mark.parametrize("count", [1, 5])
def test_with_overlap_every_step_gives_every_request_a_token(make_engine, reference, count):
    engine = make_engine(overlap=True, max_num_batched_tokens=40)
    for i in range(count):
        engine.add_request(str(i), [1, 2, 3 + i], SamplingParams(max_tokens=9, ignore_eos=True))
    assert engine.step() == []  # its tokens come with the next step, which is launched before
    for n in range(1, 10):
        outputs = engine.step()
        assert [len(o.token_ids) for o in outputs] == [n] * count
        engine.check()
    assert not engine.has_unfinished()
    assert engine.stats().steps == 9
