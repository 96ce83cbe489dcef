"""Scheduler: order, budget, pages and preemption, without any model."""

from __future__ import annotations

import pytest

from flashpage.cache.prefix import PrefixNode
from flashpage.engine import scheduler as scheduler_module
from flashpage.engine.config import EngineConfig
from flashpage.engine.request import Request, Sequence
from flashpage.engine.sampling_params import SamplingParams
from flashpage.engine.scheduler import Scheduler
from flashpage.errors import ArgumentError


def make_scheduler(**options) -> Scheduler:
    sizes = {"num_blocks": 10, "block_size": 4, "max_model_len": 40, "max_num_seqs": 4}
    return Scheduler(EngineConfig(**(sizes | {"max_num_batched_tokens": 16} | options)))


def make_sequence(num_tokens: int, first: int = 0) -> Sequence:
    tokens = list(range(first, first + num_tokens))
    params = SamplingParams(max_tokens=9)
    request = Request("id", None, tokens, params, max_tokens=9, seed=0, tokenizer=None)
    return request.sequences[0]


def step(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """Schedule, commit, and give each sequence that reached its end one more token."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        scheduler.launched([chunk])
        scheduler.commit(chunk)
        if chunk.is_last:
            chunk.sequence.token_ids.append(1000 + chunk.end)
            chunk.sequence.length += 1
    scheduler.check()
    return [(chunk.sequence, chunk.num_tokens) for chunk in chunks]


def test_decodes_first_then_running_chunks_then_newcomers():
    scheduler = make_scheduler(num_blocks=40)
    long, short, late = make_sequence(30), make_sequence(4, 100), make_sequence(5, 200)
    scheduler.add([short])
    assert step(scheduler) == [(short, 4)]
    scheduler.add([long])
    assert step(scheduler) == [(short, 1), (long, 15)]
    scheduler.add([late])
    assert step(scheduler) == [(short, 1), (long, 15)]
    assert step(scheduler) == [(short, 1), (long, 1), (late, 5)]


@pytest.mark.parametrize("attention_context", [None, 10, 1000])
def test_no_prompt_takes_a_whole_step_while_another_decodes(attention_context, monkeypatch):
    work = 32
    monkeypatch.setattr(scheduler_module, "CHUNK_WORK", work)
    scheduler = make_scheduler(
        num_blocks=5000, max_model_len=900, max_num_batched_tokens=64,
        attention_context=attention_context,
    )  # fmt: skip
    first, long, other = (make_sequence(n, 1000 * n) for n in (2, 600, 500))
    alone = make_sequence(200, 9000)
    scheduler.add([alone])
    assert step(scheduler) == [(alone, 64)]
    scheduler.remove(alone)
    scheduler.add([first])
    assert step(scheduler) == [(first, 2)]
    scheduler.add([long, other])
    both = 0
    while (done := long.num_computed_tokens) < 600:
        chunks = dict(step(scheduler))
        assert chunks.pop(first) == 1
        both += len(chunks) == 2
        n = chunks[long]
        assert n <= work + 1e-9
        a = attention_context or 1e30
        assert n == 1 or n * (1 + (done + n / 2) / a) <= work + 1e-9
        if done + n < 600:
            assert (n + 1) * (1 + (done + (n + 1) / 2) / a) > work
    # Each prompt has its share: together they may fill a step.
    assert both > 1


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(num_blocks=40)
    sequences = [make_sequence(1, 10 * i) for i in range(6)]
    scheduler.add(sequences)
    assert step(scheduler) == [(s, 1) for s in sequences[:4]]
    scheduler.remove(sequences[1])
    assert [s for s, _ in step(scheduler)] == [sequences[0], *sequences[2:5]]


def test_a_newcomer_waits_for_pages_and_nobody_passes_it():
    scheduler = make_scheduler(num_blocks=5)
    running, large, small = make_sequence(8), make_sequence(10, 100), make_sequence(1, 200)
    scheduler.add([running, large, small])
    assert step(scheduler) == [(running, 8)]
    assert step(scheduler) == [(running, 1)], "3 pages would fit, but not one to spare"
    scheduler.remove(running)
    assert step(scheduler) == [(large, 10), (small, 1)]


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler = make_scheduler(num_blocks=5, enable_prefix_caching=False)
    old, young, new = make_sequence(7), make_sequence(4, 100), make_sequence(1, 200)
    scheduler.add([old])
    step(scheduler)
    scheduler.add([young, new])
    assert step(scheduler) == [(old, 1), (young, 4)]
    for _ in range(4):
        step(scheduler)
    assert scheduler.num_preemptions == 0
    # old has 12 computed tokens, young 8: both need a new page, and there is none.
    assert step(scheduler) == [(old, 1)]
    assert scheduler.num_preemptions == 1
    assert list(scheduler.waiting.values()) == [young, new]
    assert young.num_computed_tokens == 0
    assert young.num_output_tokens == 5, "what was generated stays"
    scheduler.remove(old)
    assert step(scheduler)[0] == (young, 9)


def test_a_preempted_sequence_hits_its_own_prefix():
    scheduler = make_scheduler(num_blocks=5)
    old, young = make_sequence(7), make_sequence(4, 100)
    scheduler.add([old])
    step(scheduler)
    scheduler.add([young])
    while not scheduler.num_preemptions:
        step(scheduler)
    scheduler.remove(old)
    assert step(scheduler) == [(young, 5)], "the first page is still there, the second was taken"


def test_remove_is_idempotent_and_knows_strangers():
    scheduler = make_scheduler()
    sequence = make_sequence(5)
    scheduler.remove(sequence)
    scheduler.add([sequence])
    scheduler.remove(sequence)
    assert step(scheduler) == []
    scheduler.add([sequence])
    step(scheduler)
    scheduler.remove(sequence)
    scheduler.remove(sequence)
    scheduler.check()
    assert scheduler.pool.num_used == 0


def test_equal_blocks_are_held_once():
    scheduler = make_scheduler(num_blocks=20)
    one, two = make_sequence(8), make_sequence(8)
    scheduler.add([one])
    assert step(scheduler) == [(one, 8)]
    scheduler.add([two])
    assert step(scheduler) == [(one, 1), (two, 4)], "the last token, with its block, is computed"
    assert one.block_ids[:2] == two.block_ids[:2]
    assert scheduler.pool.num_used == 3


def test_who_begins_like_one_under_way_waits_for_its_blocks():
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=8, overlap=True)
    one, two = make_sequence(15), make_sequence(15)
    other, late = make_sequence(5, 100), make_sequence(15)
    late.token_ids[0] = 77
    scheduler.add([one, two, other, late])
    # As with overlap: the second step is scheduled before the first one's blocks can be hit.
    # Others pass, as far as the budget goes.
    first = scheduler.schedule()
    assert [(c.sequence, c.num_tokens) for c in first] == [(one, 15), (other, 1)]
    for chunk in first:
        scheduler.launched([chunk])
    one.length += 1
    second = scheduler.schedule()
    assert [(c.sequence, c.num_tokens) for c in second] == [(one, 1), (other, 4), (late, 11)]
    for chunk in first:
        scheduler.commit(chunk)
    for chunk in second:
        scheduler.launched([chunk])
    one.token_ids.append(1)
    one.length += 1
    other.length += 1
    third = scheduler.schedule()
    chunks = [(c.sequence, c.num_tokens) for c in third]
    assert chunks == [(one, 1), (other, 1), (late, 4), (two, 3)]
    assert two.num_hit_blocks == 3
    scheduler.check()


def test_nobody_waits_for_what_will_not_come():
    """Not for one that left, for one whose blocks can not be cached, nor without a cache."""
    scheduler = make_scheduler(num_blocks=40)
    one, two = make_sequence(15), make_sequence(15)
    scheduler.add([one, two])
    scheduler.schedule()
    scheduler.remove(one)
    assert [c.sequence for c in scheduler.schedule()] == [two]
    scheduler.remove(two)

    one, two = make_sequence(15), make_sequence(15)
    scheduler.add([one])
    (chunk,) = scheduler.schedule()
    scheduler.launched([chunk])
    one.cache_chain = [PrefixNode(None, (), 39)]  # stands for a past that was forgotten
    scheduler.commit(chunk)
    assert len(one.cache_chain) == 1
    one.cache_chain = []
    scheduler.add([two])
    assert two in [c.sequence for c in scheduler.schedule()]

    scheduler = make_scheduler(num_blocks=40, enable_prefix_caching=False)
    one, two = make_sequence(7), make_sequence(7)
    scheduler.add([one, two])
    assert [c.sequence for c in scheduler.schedule()] == [one, two]


def test_removing_what_is_poisoned_spares_the_hit_part():
    scheduler = make_scheduler(num_blocks=20)
    first, second = make_sequence(4), make_sequence(12)
    scheduler.add([first])
    step(scheduler)
    scheduler.add([second])
    step(scheduler)
    assert second.num_hit_blocks == 1
    scheduler.remove(second, poisoned=True)
    scheduler.check()
    assert len(scheduler.prefix_cache) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks = 0 must be an integer from 1"),
        ({"block_size": 2.0}, "block_size = 2.0"),
        ({"max_num_seqs": True}, "max_num_seqs = True"),
        ({"max_num_batched_tokens": 3}, "= 3 is less than max_num_seqs = 4"),
    ],
)
def test_sizes_are_checked(options, message):
    with pytest.raises(ArgumentError, match=message):
        make_scheduler(**options)
