"""LLM: prompts of all shapes, streams, interrupts; the engine's promises on a real structure."""

from __future__ import annotations

import random
import signal
import threading
from dataclasses import replace

import pytest
import torch

from flashpage.cache.kv_cache import KVCache
from flashpage.engine import llm as llm_module
from flashpage.engine.engine import Engine
from flashpage.engine.llm import LLM
from flashpage.engine.sampling_params import SamplingParams
from flashpage.errors import ArgumentError, RequestError
from flashpage.layers.attention import SequenceSlice, build_attention_metadata
from flashpage.weights.load import LoadedModel

GREEDY = SamplingParams(temperature=0, max_tokens=12)
HUGE = 10**5000  # too long for Python to print
CHAT = [{"role": "user", "content": "hi"}]
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture
def make_llm(monkeypatch, tokenizer, make_engine):
    """An LLM over the fake model."""

    def make(*, with_tokenizer: bool = True, **options) -> LLM:
        model = make_engine().model

        def load_model(name, **_):
            return LoadedModel("fake", model.config, model, tokenizer if with_tokenizer else None)

        monkeypatch.setattr(llm_module, "load_model", load_model)
        llm = LLM("fake", **{"block_size": 4, "num_blocks": 64, **options})
        llm.engine.kv_cache.fill_(torch.nan)
        llm.fake = model
        return llm

    return make


def test_every_shape_of_prompt(make_llm, tokenizer, reference):
    llm = make_llm()
    chat_text = "user: hi\nassistant: "
    prompts = ["one", [5, 6, 7], CHAT]
    encoded = [tokenizer.encode("one"), [5, 6, 7], list(chat_text.encode())]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == ["one", None, chat_text]
    assert [o.prompt_token_ids for o in outputs] == encoded
    for output, ids in zip(outputs, encoded, strict=True):
        assert output.finished
        assert output.token_ids == reference.greedy(ids, 12)
    for prompt, output in zip(prompts, outputs, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert (alone.token_ids, alone.text) == (output.token_ids, output.text)
    assert llm.generate([], GREEDY) == []
    assert llm.chat(CHAT, GREEDY)[0].token_ids == outputs[2].token_ids
    assert [o.prompt for o in llm.chat([CHAT, CHAT], GREEDY)] == [chat_text] * 2
    assert llm.generate("one")[0].outputs[0].finish_reason in ("length", "stop")


def test_params_one_for_all_or_one_each(make_llm):
    llm = make_llm()
    params = [SamplingParams(max_tokens=i, ignore_eos=True) for i in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(o.token_ids) for o in outputs] == [1, 5, 3]
    with pytest.raises(RequestError, match="3 prompts but 2 sampling_params"):
        llm.generate(["a", "b", "c"], params[:2])
    with pytest.raises(RequestError, match="prompt 0: sampling_params must be"):
        llm.generate(["a"], [{"max_tokens": 1}])
    for bad in (5, "x", {"max_tokens": 1}, SamplingParams):
        with pytest.raises(RequestError, match="must be SamplingParams or a list of them"):
            llm.generate([[1]], bad)
        with pytest.raises(RequestError, match="must be SamplingParams or a list of them"):
            llm.stream([1], bad)
        with pytest.raises(RequestError, match="must be SamplingParams or a list of them"):
            llm.chat(CHAT, bad)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["good", []], "prompt 1: the prompt is empty"),
        ([[1], [2], [999]], r"prompt 2: prompt_token_ids\[0\] = 999"),
        (["good", [1] * 300], "prompt 1: 300 prompt tokens"),
        ([CHAT, [{"role": "user"}]], "prompt 1: message 0"),
        (["good", 7], "prompt 1: a prompt is a string"),
        ([1, "a"], "prompt 0: a prompt is a string"),
    ],
)
def test_a_bad_request_stops_all_before_anything_runs(make_llm, prompts, message):
    llm = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)
    assert llm.fake.batches == []
    assert not llm.engine.has_unfinished()


def test_chat_takes_only_chats(make_llm):
    for messages in ([], "hi", ["hi"], [[1, 2]], [None], [CHAT, []], CHAT[0], 5, None, {}):
        with pytest.raises(RequestError, match=r"message 0|a chat is"):
            make_llm().chat(messages, GREEDY)


def test_threads_take_turns(make_llm):
    llm = make_llm(num_blocks=200)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [[[40 + i, 50 + j, 60] for j in range(3)] for i in range(6)]
    expected = [[o.token_ids for o in llm.generate(p, params)] for p in prompts]
    llm.engine.clear_prefix_cache()
    got: list = [None] * len(prompts)
    ready = threading.Barrier(len(prompts))

    def work(i: int) -> None:
        ready.wait()
        if i % 2:
            got[i] = [o.token_ids for o in llm.generate(prompts[i], params)]
        else:
            pieces = [list(llm.stream(p, params)) for p in prompts[i]]
            got[i] = [[t for piece in x for t in piece.token_ids] for x in pieces]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected
    llm.engine.check()
    assert llm.engine.stats().pages_used == 0


@pytest.mark.parametrize("threads", [0, 10**5])
def test_a_number_of_threads_that_no_machine_has(threads, make_llm):
    with pytest.raises(ArgumentError, match=f"threads = {threads} "):
        make_llm(threads=threads)


def test_it_says_what_it_is(make_llm):
    shown = repr(make_llm(num_blocks=37))
    assert shown.startswith("LLM('fake', dtype='float32', device='cpu', max_model_len=")
    assert "num_blocks=37, block_size=4" in shown


def test_a_model_without_tokenizer_takes_ids(make_llm):
    llm = make_llm(with_tokenizer=False)
    assert llm.generate([1, 2], GREEDY)[0].text == ""
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate("text", GREEDY)


def test_a_failing_request_does_not_raise(make_llm, reference):
    bad, good = make_llm().generate([[1, 259], [1, 2]], GREEDY)
    assert bad.finish_reason == "error"
    assert "not finite" in bad.outputs[0].error
    assert good.token_ids == reference.greedy([1, 2], 12)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [(), ("e", "\ufffd\ufffd")])
def test_a_stream_adds_up_to_the_output(make_llm, n, stop):
    llm = make_llm()
    params = SamplingParams(max_tokens=60, seed=5, n=n, stop=stop)
    pieces = list(llm.stream("prompt", params))
    final = pieces[-1].output
    assert final.finished
    for part in final.outputs:
        mine = [piece for piece in pieces if piece.index == part.index]
        assert "".join(piece.text for piece in mine) == part.text
        assert [t for piece in mine for t in piece.token_ids] == part.token_ids
        reasons = [piece.finish_reason for piece in mine]
        assert reasons == [None] * (len(mine) - 1) + [part.finish_reason]
    (output,) = llm.generate("prompt", params)
    assert output.outputs == final.outputs


def test_streams_and_calls_may_be_interleaved(make_llm, reference):
    llm = make_llm()
    one = llm.stream([1, 1], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    two = llm.stream([2, 2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    tokens = {1: next(one).token_ids, 2: next(two).token_ids}
    assert llm.generate([3, 3], GREEDY)[0].token_ids == reference.greedy([3, 3], 12)
    for key, stream in ((1, one), (2, two)):
        for piece in stream:
            tokens[key] = tokens[key] + piece.token_ids
    assert tokens[1] == reference.greedy([1, 1], 10, stop=())
    assert tokens[2] == reference.greedy([2, 2], 30, stop=())


def test_a_closed_stream_is_aborted(make_llm):
    llm = make_llm()
    stream = llm.stream([1], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.engine.has_unfinished()
    stream.close()
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().pages_used == 0
    llm.engine.check()


def test_a_bad_stream_raises_at_once_and_an_unread_one_costs_nothing(make_llm):
    llm = make_llm()
    with pytest.raises(RequestError, match="prompt 0: the prompt is empty"):
        llm.stream([[]])
    with pytest.raises(RequestError, match="one prompt, got 2"):
        llm.stream(["a", "b"])
    llm.stream("never read")
    assert not llm.engine.has_unfinished()


def test_a_stream_whose_request_is_aborted_elsewhere_ends(make_llm, reference):
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    stream = llm.stream([1, 2], params)
    first = next(stream)
    llm.engine.step()
    aborted = llm.engine.abort("llm-0")
    llm.engine.add_request("llm-0", [3], params)  # the name is free: someone else's now
    (last,) = list(stream)
    assert last.finish_reason == "abort"
    assert last.output == aborted
    assert first.token_ids + last.token_ids == reference.greedy([1, 2], 2, stop=())
    assert llm.engine.has_unfinished(), "the other one was not taken for the stream's"


@pytest.mark.parametrize("stop", [(), "\ufffd"])
def test_a_stream_that_others_step_ends_with_their_outputs(make_llm, reference, stop):
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    stream = llm.stream([1, 2], params)
    pieces = [next(stream)]
    while llm.engine.has_unfinished():
        llm.engine.step()
    pieces += stream
    final = pieces[-1].output
    assert len(pieces) <= 2, "one with all that was missed"
    assert "".join(piece.text for piece in pieces) == final.text
    assert [token for piece in pieces for token in piece.token_ids] == final.token_ids
    assert final.outputs == llm.generate([1, 2], params)[0].outputs
    assert final.finished


def test_a_stream_closed_after_its_end_elsewhere_harms_nobody(make_llm):
    llm = make_llm()
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    llm.engine.abort("llm-0")
    llm.engine.add_request("llm-0", [3], GREEDY)
    stream.close()
    assert llm.engine.has_unfinished()


@pytest.mark.parametrize("how", ["abort", "step"])
def test_a_call_whose_requests_end_elsewhere_returns(make_llm, reference, how):
    """The model calls back, as another part of the program would between two steps."""
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def other():
        if len(llm.fake.batches) == 4:
            if how == "abort":
                llm.engine.abort("llm-0")
            while how == "step" and llm.engine.has_unfinished():
                llm.engine.step()

    step = llm.engine.step
    llm.engine.step = lambda: (step(), other())[0]
    one, two = llm.generate([[1, 2], [3, 4]], params)
    assert two.token_ids == reference.greedy([3, 4], 12, stop=())
    if how == "abort":
        assert one.finish_reason == "abort"
        assert one.token_ids == reference.greedy([1, 2], 4, stop=())
    else:
        assert one.token_ids == reference.greedy([1, 2], 12, stop=())
    assert not llm.engine.has_unfinished()


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_while_requests_are_queued_leaves_none(make_llm):
    llm = make_llm()
    add = llm.engine.add_request

    def press(request_id, *args, **options):
        add(request_id, *args, **options)
        if request_id == "llm-2":
            signal.raise_signal(signal.SIGINT)

    llm.engine.add_request = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(5)], GREEDY)
    assert not llm.engine.has_unfinished()
    llm.engine.check()


@pytest.mark.parametrize("call", ["generate", "chat", "stream"])
def test_without_params_a_text_ends_after_16_tokens_as_the_docstrings_say(make_llm, call):
    llm = make_llm()
    llm.engine.eos_token_ids = frozenset()
    prompt = CHAT if call == "chat" else [1, 2]
    result = list(getattr(llm, call)(prompt))
    output = result[-1].output if call == "stream" else result[0]
    assert (len(output.token_ids), output.finish_reason) == (16, "length")
    assert "16 tokens" in getattr(LLM, call).__doc__


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("interrupt", ["signal", "exception"])
def test_ctrl_c_aborts_the_call_and_leaves_the_engine_usable(make_llm, reference, interrupt):
    llm = make_llm()

    def press():
        if len(llm.fake.batches) == 4:
            if interrupt == "exception":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

    llm.fake.before_forward = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] * 20 for i in range(8)], GREEDY)
    assert len(llm.fake.batches) == 4
    assert not llm.engine.has_unfinished()
    llm.engine.check()
    assert llm.engine.stats().pages_used == 0
    assert llm.generate([1, 2], GREEDY)[0].token_ids == reference.greedy([1, 2], 12)


def test_sizes_follow_the_model_and_the_memory(make_llm):
    def sizes(**options) -> tuple[int, int]:
        config = make_llm(**{"num_blocks": None, **options}).engine.config
        return config.num_blocks, config.max_model_len

    page = KVCache.bytes_per_block(1, 4, 1, 2, torch.float32)
    assert sizes() == (64 * 32, 256)
    assert sizes(max_num_seqs=2, max_model_len=101) == (26 * 2, 101)
    assert sizes(kv_cache_memory=10 * page + 1) == (10, 40)
    assert sizes(num_blocks=100) == (100, 256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 9, "max_model_len": 37}, "9 pages of 4 .* max_model_len = 37 .* needs 10"),
        ({"kv_cache_memory": 1, "num_blocks": None}, "has 0 pages"),
        ({"max_model_len": 257}, "max_model_len = 257 is more than the 256 positions of fake"),
        ({"max_model_len": 0}, "max_model_len = 0 must be an integer from 1"),
        ({"num_blocks": 1.5}, "num_blocks = 1.5"),
        ({"block_size": 0}, "block_size = 0"),
        ({"max_num_batched_tokens": 8}, "less than max_num_seqs = 32"),
        ({"num_blocks": -HUGE}, "num_blocks = <int that can not be printed> must be an integer"),
        ({"max_model_len": HUGE}, "max_model_len = <int that can not be printed> is more than"),
        ({"max_num_seqs": HUGE}, "max_num_batched_tokens = 512 is less than max_num_seqs = <int"),
        ({"num_blocks": 10**12}, r"1000000000000 pages of 4 tokens takes 64\d{12} bytes on cpu"),
        ({"num_blocks": 10**12}, r"\d+ bytes are available"),
        ({"num_blocks": HUGE}, "num_blocks = <int that can not be printed> pages"),
        ({"kv_cache_memory": 10**17, "num_blocks": None}, "bytes are available"),
        ({"block_size": HUGE, "num_blocks": None, "kv_cache_memory": 1}, "has 0 pages of <int"),
        ({"block_size": 10**14}, "tokens takes .* bytes are available"),
        ({"log_stats": 0}, "log_stats = 0 must be seconds above 0, or None"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching = None must be True or False"),
        ({"seed": None}, "seed = None must be an integer"),
        ({"seed": True}, "seed = True"),
        ({"seed": 1.0}, "seed = 1.0"),
        ({"seed": 1 << 64}, "seed = 18446744073709551616"),
        ({"device": "foo"}, "device = 'foo' can not be used here: torch knows no such device"),
        ({"device": 1.5}, "device = 1.5 can not be used here"),
        ({"device": "meta"}, "device = 'meta' can not be used here: it computes nothing"),
        ({"device": "cuda:99"}, "device = 'cuda:99' can not be used here"),
        ({"device": "xpu"}, "device = 'xpu' can not be used here"),
    ],
)
def test_sizes_that_can_not_work(make_llm, options, message):
    with pytest.raises(ArgumentError, match=message):
        make_llm(**options)


def test_an_unknown_option_is_not_dropped(make_llm):
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        make_llm(gpu_memory_utilization=0.9)


# --- on a real structure: a tiny Llama with random weights, in float32 ---


def tiny_llama(**options) -> LLM:
    llm = LLM(TINY_LLAMA, load_format="dummy", dtype="float32", seed=1, **options)
    llm.engine.kv_cache.fill_(torch.nan)
    return llm


@torch.inference_mode()
def slow_greedy(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens from whole prefixes, each computed anew in one chunk on fresh pages."""
    model, config = llm.engine._runner._model, llm.model_config
    tokens = list(prompt)
    for _ in range(num_tokens):
        num_blocks = -(-len(tokens) // 16)
        cache = KVCache(
            config.num_layers, num_blocks, 16, config.num_kv_heads, config.head_dim, torch.float32
        )
        metadata = build_attention_metadata(
            [SequenceSlice(0, len(tokens), range(num_blocks))], block_size=16
        )
        positions = torch.arange(len(tokens))
        hidden = model(torch.tensor(tokens), positions, cache, metadata)
        tokens.append(int(model.compute_logits(hidden[-1:]).argmax()))
        if tokens[-1] in config.eos_token_ids:
            break
    return tokens[len(prompt) :]


def llama_prompts() -> list[list[int]]:
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 5, 16, 17, 33, 60)]
    return [*prompts, [*prompts[-1][:40], 7, 8], prompts[-1]]


@pytest.fixture(scope="module")
def expected_tokens() -> list[list[int]]:
    llm = tiny_llama()
    return [slow_greedy(llm, prompt, 24) for prompt in llama_prompts()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"max_num_batched_tokens": 33, "max_num_seqs": 3, "block_size": 8},
        {"block_size": 1, "enable_prefix_caching": False},
        {"num_blocks": 9},
        {"num_blocks": 9, "enable_prefix_caching": False, "max_num_batched_tokens": 40},
    ],
    ids=str,
)
def test_greedy_tokens_of_a_llama_do_not_depend_on_the_company(options, expected_tokens):
    """The pool of 9 pages is a quarter of what these requests need together."""
    llm = tiny_llama(**options)
    prompts = llama_prompts()
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == expected_tokens
    assert (llm.engine.stats().preemptions > 0) == (options.get("num_blocks") == 9)
    # Once more, on a used pool, alone, in another order, with others aborted on the way.
    outputs = llm.generate(prompts[::-1], params)
    assert [o.token_ids for o in outputs] == expected_tokens[::-1]
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, params)
    finished = {}
    for step in range(1000):
        finished |= {o.request_id: o.token_ids for o in llm.engine.step() if o.finished}
        llm.engine.check()
        if step in (2, 5, 9):
            llm.engine.abort(str(step % 8))
        if not llm.engine.has_unfinished():
            break
    assert len(finished) >= 5
    for request_id, tokens in finished.items():
        assert tokens == expected_tokens[int(request_id)]


def test_a_llama_scores_a_prompt_in_chunks_as_in_one(expected_tokens):
    prompt = llama_prompts()[5]
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    scores = []
    for budget in (8, 500):
        llm = tiny_llama(max_num_batched_tokens=budget, max_num_seqs=8)
        scores.append(llm.generate([prompt], params)[0].prompt_logprobs)
    assert len(scores[0]) == len(prompt)
    for token, one, two in zip(prompt[1:], scores[0][1:], scores[1][1:], strict=True):
        assert one[token].logprob == pytest.approx(two[token].logprob, abs=1e-5)


@pytest.mark.parametrize("eos", [(1000,), (-1,), (2, 300, -1)])
def test_end_tokens_outside_the_vocabulary_are_ignored(eos):
    """Loading refuses such a config; an engine that is given one must not stumble over it."""
    llm = tiny_llama()
    model = llm.engine._runner._model
    model.config = replace(model.config, eos_token_ids=eos)
    llm.engine = Engine(model, None, llm.engine.config)
    params = SamplingParams(max_tokens=20, min_tokens=20)
    bad, good = llm.generate([[5, 6], [7, 8]], [params, GREEDY])
    assert (len(bad.token_ids), bad.finish_reason) == (20, "length")
    assert good.finish_reason in ("length", "stop")
    assert llm.engine.eos_token_ids == {i for i in eos if i == 2}


def test_logits_of_bad_weights_fail_the_request_not_the_engine():
    llm = tiny_llama()
    with torch.no_grad():
        llm.engine._runner._model.embed_tokens.weight[7] = torch.nan
    bad, good = llm.generate([[5, 7, 9], [5, 6]], GREEDY)
    assert bad.finish_reason == "error"
    assert len(good.token_ids) == 12
