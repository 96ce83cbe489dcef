"""A long random life of an engine: nothing leaks, nothing hangs, and nobody is harmed by others.

`FLASHPAGE_RANDOM_LIFE_SECONDS` says how long it lasts; else 5 seconds on a CPU, 20 on a GPU.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import time
from collections import Counter
from typing import NamedTuple

import psutil
import pytest
import torch
from torch import Tensor, nn

from flashpage.engine.config import EngineConfig
from flashpage.engine.engine import Engine
from flashpage.engine.outputs import RequestOutput
from flashpage.engine.runner import Runner
from flashpage.engine.sampling_params import SamplingParams
from flashpage.errors import RequestError
from flashpage.layers import attention, fused
from flashpage.layers.linear import Linear
from flashpage.weights.load import load_model
from graphs import Again

SECONDS = "FLASHPAGE_RANDOM_LIFE_SECONDS"
HANGS_AFTER = 120.0  # seconds in which a hundred steps must be possible
BUDGET = 64
POISON = 259  # its embedding is NaN
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1000,
    "eos_token_id": 257,
}
BEGINNINGS = ([], [], [65] * 40, [66, 67] * 70, list(range(256)))


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams


def make_engine(device: str, tokenizer) -> Engine:
    """With a pool that is small for its sequences and full of NaN."""
    model = load_model(CONFIG, load_format="dummy", dtype="float32", device=device, seed=1).model
    model.embed_tokens.weight.data[POISON] = torch.nan
    raw_logits = model.compute_raw_logits

    def without_poison(hidden: Tensor) -> Tensor:
        """Prompts alone hold it."""
        return raw_logits(hidden).index_fill(1, poison, -torch.inf)

    poison = torch.tensor([POISON], device=device)
    model.compute_raw_logits = without_poison
    config = EngineConfig(
        num_blocks=64,
        max_model_len=1000,
        block_size=16,
        max_num_seqs=24,
        max_num_batched_tokens=BUDGET,
        overlap=True,
        device=device,
    )
    engine = Engine(model, tokenizer, config)
    engine.kv_cache.fill_(torch.nan)
    engine.warm_up()
    if device == "cpu":
        fused.load_kernels()
        attention.load_kernels()
        make_every_product(model)
    return engine


@torch.inference_mode()
def make_every_product(model: nn.Module) -> None:
    """oneDNN keeps a kernel for each number of rows that it has seen, up to a limit: no leak."""
    for module in model.modules():
        if isinstance(module, Linear):
            for rows in range(1, BUDGET + 1):
                module(torch.zeros(rows, module.in_features))


def draw_request(rng: random.Random) -> Asked:
    length = rng.randint(1, 500) if rng.random() < 0.05 else rng.randint(1, 60)
    prompt = [rng.randrange(256) for _ in range(length)]
    if rng.random() < 0.06:
        # With a beginning of its own: in a masked tile 0 * NaN is NaN, so the keys and values of
        # tokens before POISON are poisoned too, and can be hit until the first logits tell of it.
        prompt.insert(rng.randrange(len(prompt) + 1), POISON)
    else:
        prompt = [*rng.choice(BEGINNINGS), *prompt]
    max_tokens = 0 if rng.random() < 0.03 else rng.randint(1, rng.choice([10, 60, 200]))
    options = {
        "max_tokens": max_tokens,
        "min_tokens": rng.randint(0, max_tokens) if rng.random() < 0.1 else 0,
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.5]),
        "seed": rng.randrange(2**32),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "ignore_eos": rng.random() < 0.5,
    }
    rare = {
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {97: 3.0, 98: -100.0},
        "stop": ["e", "no", "\n", "a", "i"],
        "stop_token_ids": [101, 32],
        "logprobs": 3,
        "prompt_logprobs": 1,
    }
    # Most ask for little more, as the plain path is the fast one.
    names = rng.sample(sorted(rare), rng.choice([0, 0, 0, 1, 3]))
    return Asked(prompt, SamplingParams(**options, **{name: rare[name] for name in names}))


def ask_badly(engine: Engine, rng: random.Random, used_id: str | None) -> None:
    """What must be refused, and leave no trace."""
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=5)
    bad = [
        lambda: engine.add_request("bad", [], params),
        lambda: engine.add_request("bad", [1, 260], params),
        lambda: engine.add_request("bad", [1, -1], params),
        lambda: engine.add_request("bad", "text", params),
        lambda: engine.add_request("bad", [1] * 1001, params),
        lambda: engine.add_request("bad", prompt, SamplingParams(max_tokens=998)),
        lambda: engine.add_request("bad", prompt, SamplingParams(logprobs=261)),
        lambda: engine.add_request("bad", prompt, SamplingParams(stop_token_ids=[260])),
        lambda: engine.add_request("bad", prompt, SamplingParams(temperature=-1.0)),
        lambda: engine.add_request("bad", prompt, {"max_tokens": 3}),
        lambda: engine.add_request(7, prompt, params),
    ]
    if used_id is not None:
        bad.append(lambda: engine.add_request(used_id, prompt, params))
    before = engine.stats()
    with pytest.raises(RequestError):
        rng.choice(bad)()
    assert engine.stats() == before


def check_output(asked: Asked, output: RequestOutput) -> Counter[str]:
    """A finished request gives what was asked for; its reasons."""
    params = asked.params
    assert output.prompt_token_ids == asked.prompt
    assert len(output.outputs) == params.n
    reasons = Counter(str(part.finish_reason) for part in output.outputs)
    if POISON in asked.prompt and params.max_tokens > 0:
        assert set(reasons) <= {"error", "abort"}
        return reasons
    if params.prompt_logprobs is not None and not reasons.keys() & {"abort", "error"}:
        assert len(output.prompt_logprobs) == len(asked.prompt)
    for part in output.outputs:
        count = len(part.token_ids)
        assert count <= params.max_tokens
        # Asked only for scores, a prompt with POISON has none that are numbers.
        assert part.finish_reason != "error" or POISON in asked.prompt, part.error
        if part.finish_reason == "length":
            assert count == params.max_tokens
        elif part.finish_reason == "stop":
            assert count >= max(params.min_tokens, 1)
            if isinstance(part.stop_reason, str):
                # Before min_tokens they do not count.
                assert params.min_tokens or not any(t in part.text for t in params.stop_strings)
            elif part.stop_reason is not None:
                assert part.stop_reason == part.token_ids[-1]
                assert part.stop_reason in params.stop_token_ids
            else:
                assert part.token_ids[-1] == CONFIG["eos_token_id"]
                assert not params.ignore_eos
        assert part.logprobs is None or len(part.logprobs) == count
    return reasons


class Life:
    """Adds, aborts and steps at random, and checks the engine after every step."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.alive: dict[str, Asked] = {}
        self.reasons: Counter[str] = Counter()
        self.finished: list[tuple[Asked, RequestOutput]] = []
        """the last few that nobody aborted"""
        self.num_steps = 0
        self.num_asked = 0
        self._idle_steps = 0
        self._work = engine.stats().tokens_computed

    def live(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._act()
            self.step()
            if self.rng.random() < 0.0005:
                self.drain()

    def _act(self) -> None:
        dice = self.rng.random()
        some = self.rng.choice(list(self.alive)) if self.alive else None
        if dice < 0.4 and len(self.alive) < 60:
            asked = draw_request(self.rng)
            self.num_asked += 1
            request_id = str(self.num_asked)
            once = self.rng.random() < 0.5
            self.engine.add_request(request_id, *asked, reports_once=once)
            self.alive[request_id] = asked
        elif dice < 0.43 and some is not None:
            output = self.engine.abort(some)
            assert output.finished
            self.reasons += check_output(self.alive.pop(some), output)
            assert self.engine.abort(some) is None
        elif dice < 0.45:
            ask_badly(self.engine, self.rng, some)
        elif dice < 0.451:
            self.engine.clear_prefix_cache()

    def step(self) -> None:
        if self.num_steps % 100 == 0:
            faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        self.num_steps += 1
        for output in self.engine.step():
            if output.finished:
                asked = self.alive.pop(output.request_id)
                self.reasons += check_output(asked, output)
                self.finished = [*self.finished[-11:], (asked, output)]
        self.engine.check()
        assert self.engine.has_unfinished() == bool(self.alive)
        before, self._work = self._work, self.engine.stats().tokens_computed
        # With overlap, a step may do no more than wait for the one before it.
        self._idle_steps = self._idle_steps + 1 if self._work == before and self.alive else 0
        assert self._idle_steps < 5, f"no progress: {self.engine.stats()}"

    def drain(self) -> None:
        """Until all have ended; then no page may be held."""
        while self.alive:
            self.step()
        self.step()  # one that was launched for nobody may still run
        stats = self.engine.stats()
        assert stats.pages_used == stats.num_running == stats.num_waiting == 0
        gc.collect()

    def has_seen_all(self) -> bool:
        """Whether everything that this is about has happened."""
        stats = self.engine.stats()
        ends = {"length", "stop", "abort", "error"}
        return stats.preemptions > 0 and stats.prefix_hit_tokens > 0 and ends <= set(self.reasons)

    def check_alone(self) -> int:
        """The last ones that finished give the same tokens when nothing else runs.

        Not those with top_k or top_p: random weights leave hundreds of tokens almost equally
        likely, and a last bit that rounds otherwise in other company swaps two of their ranks.
        """
        compared = 0
        for asked, output in list(self.finished):
            if POISON in asked.prompt or asked.params.top_k or asked.params.top_p < 1:
                continue
            self.engine.add_request("alone", *asked)
            final = None
            while self.engine.has_unfinished():
                final = [*self.engine.step(), final][0]
            tokens = [part.token_ids for part in output.outputs]
            assert [part.token_ids for part in final.outputs] == tokens, asked
            compared += 1
        return compared


@pytest.mark.parametrize(
    ("device", "graphs", "seconds"),
    [
        pytest.param("cpu", False, 5.0, id="cpu"),
        pytest.param("cpu", True, 3.0, id="cpu-graphs"),
        pytest.param("cuda", True, 20.0, id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_random_life(device, graphs, seconds, tokenizer, capfd):
    seconds = float(os.environ.get(SECONDS, seconds))
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # shown if the test fails
    process = psutil.Process()

    def memory() -> tuple[int, int]:
        on_gpu = torch.cuda.memory_allocated() if device == "cuda" else 0
        return on_gpu, process.memory_info().rss

    engine = make_engine(device, tokenizer)
    if graphs and device == "cpu":
        engine._runner = Runner(engine.model, engine.kv_cache, engine.config, capture=Again())
    life = Life(engine, random.Random(seed))
    try:
        with capfd.disabled():  # a traceback of a hang must reach the terminal
            life.live(seconds / 10)
            life.drain()
            on_gpu, resident = memory()
            life.live(seconds * 9 / 10)
            patience = time.monotonic() + 60  # with a slow machine
            while not life.has_seen_all() and time.monotonic() < patience:
                life.live(1.0)
            life.drain()
    finally:
        faulthandler.cancel_dump_traceback_later()
    on_gpu_at_end, resident_at_end = memory()
    assert on_gpu_at_end - on_gpu < 8 << 20
    assert resident_at_end - resident < 100 << 20

    assert life.has_seen_all(), (engine.stats(), life.reasons)
    assert life.check_alone() > 3
