"""Offline workloads of the engine, each a question about its speed; plays them and measures.

Every workload builds its engine, warms it up (`Engine.warm_up`), and returns rows of numbers. Times
are in seconds unless a name says otherwise; token rates count generated tokens.
"""

from __future__ import annotations

import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flashpage.errors import ArgumentError

if TYPE_CHECKING:
    from flashpage.engine.engine import Engine
    from flashpage.engine.llm import LLM

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What all workloads share; `scale` below 1 shrinks numbers of requests and tokens alike."""

    model: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    rounds: int = 3
    scale: float = 1.0
    seed: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    """more arguments of `LLM`"""
    progress: Callable[[str], None] = lambda line: None

    def sized(self, number: int) -> int:
        return max(1, round(number * self.scale))

    def make_llm(self, **arguments: Any) -> LLM:
        import torch

        from flashpage.engine.llm import LLM

        # What an engine before this one held must be free before its successor measures it.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.progress("loading the model")
        return LLM(
            self.model,
            load_format=self.load_format,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
            **(arguments | self.engine),
        )


@dataclass(frozen=True)
class Ask:
    """A request of random tokens, that no end token stops."""

    prompt: list[int]
    new_tokens: int
    temperature: float = 0.6


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
    from flashpage.engine.sampling_params import SamplingParams

    outputs = {}
    before = engine.stats()
    began = time.perf_counter()
    for i, ask in enumerate(asks):
        params = SamplingParams(
            max_tokens=ask.new_tokens, temperature=ask.temperature, ignore_eos=True
        )
        engine.add_request(f"ask-{i}", ask.prompt, params, reports_once=True)
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
                "preemptions", "preempted_tokens", "prefix_hit_tokens", "steps",
                "host_seconds", "wait_seconds",
            )
        },
    )  # fmt: skip


def mixed_asks(options: Options, temperature: float = 0.6) -> list[Ask]:
    """256 prompts of 100 to 1024 random tokens, outputs of 100 to 1024 (with seed 0, 142,827 and
    133,966 tokens)."""
    numbers = random.Random(options.seed)
    count, low, high = options.sized(256), options.sized(100), options.sized(1024)
    prompts = [
        [numbers.randint(0, 10000) for _ in range(numbers.randint(low, high))] for _ in range(count)
    ]
    return [Ask(p, numbers.randint(low, high), temperature) for p in prompts]


def random_asks(
    options: Options, count: int, prompt_tokens: int, new_tokens: int, first: Sequence[int] = ()
) -> list[Ask]:
    """Prompts of `first` and random tokens."""
    numbers = random.Random(options.seed + 1)
    return [
        Ask([*first, *(numbers.randint(0, 10000) for _ in range(prompt_tokens))], new_tokens)
        for _ in range(count)
    ]


def _ready(options: Options, **arguments: Any) -> tuple[LLM, float]:
    """An LLM that has been warmed up, and the seconds that took."""
    llm = options.make_llm(**arguments)
    # Token ids go up to 10000.
    if llm.engine.vocab_size <= 10000:
        raise ArgumentError(
            f"workloads need a vocabulary of more than 10000 tokens, {llm.name} has "
            f"{llm.engine.vocab_size}"
        )
    options.progress("warming up")
    began = time.perf_counter()
    llm.engine.warm_up()
    play(llm.engine, random_asks(options, 4, 8, 4))
    return llm, time.perf_counter() - began


def _rounds(options: Options, llm: LLM, asks: list[Ask]) -> list[Played]:
    played = []
    for i in range(options.rounds):
        _forget(llm)
        played.append(play(llm.engine, asks))
        options.progress(f"round {i + 1} of {options.rounds}: {played[-1].rate:.0f} tokens/s")
    return played


def _forget(llm: LLM) -> None:
    """Empty the prefix cache, so that no round gains from the one before."""
    llm.engine.clear_prefix_cache()


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def mixed(options: Options) -> list[Row]:
    """W1: 256 requests of all lengths at once; output tokens per second."""
    asks = mixed_asks(options)
    longest = max(len(a.prompt) + a.new_tokens for a in asks)
    llm, warm_up = _ready(options, max_model_len=longest)
    played = _rounds(options, llm, asks)
    return [_mixed_row("mixed", played, warm_up)]


def _mixed_row(name: str, played: list[Played], warm_up: float) -> Row:
    middle = sorted(played, key=lambda p: p.rate)[len(played) // 2]
    steps = middle.stats["steps"]
    return {
        "case": name,
        "tokens_per_s": middle.rate,
        "seconds": middle.seconds,
        "steps": steps,
        "host_ms_per_step": 1e3 * middle.stats["host_seconds"] / steps,
        "wait_ms_per_step": 1e3 * middle.stats["wait_seconds"] / steps,
        "preemptions": middle.stats["preemptions"],
        "warm_up_s": warm_up,
    }


def single(options: Options) -> list[Row]:
    """W2: one request, 100 tokens in and 512 out; and the first token of 1024 tokens."""
    new = options.sized(512)
    llm, _ = _ready(options, max_model_len=options.sized(1024) + new)
    decode = _rounds(options, llm, random_asks(options, 1, options.sized(100), new))
    first = _rounds(options, llm, random_asks(options, 1, options.sized(1024), 1))
    return [
        {"case": "100 in, 512 out", "tokens_per_s": _median([p.rate for p in decode])},
        {
            "case": "first token of 1024",
            "ms": 1e3 * _median([p.first_token[0] for p in first]),
        },
    ]


_START = """
from flashpage import LLM, SamplingParams

llm = LLM({model!r}, **{arguments!r})
params = SamplingParams(max_tokens=1, ignore_eos=True)
llm.generate([[1, 2, 3]], params, progress=False)
"""


def start(options: Options) -> list[Row]:
    """W3: from the start of a process to its first token, with graphs and without."""
    rows = []
    for case, engine in (("graphs", {}), ("enforce_eager", {"enforce_eager": True})):
        seconds = []
        for _ in range(options.rounds):
            options.progress(f"starting a process, {case}")
            arguments = {
                "load_format": options.load_format,
                "dtype": options.dtype,
                "device": options.device,
                **options.engine,
                **engine,
            }
            source = _START.format(model=options.model, arguments=arguments)
            began = time.perf_counter()
            run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
            if run.returncode != 0:
                raise ArgumentError(f"a process with this model fails: {run.stderr[-500:]}")
            seconds.append(time.perf_counter() - began)
        # The first one may also compile kernels, the others find them on the disk.
        rows.append({"case": case, "first_s": seconds[0], "later_s": min(seconds)})
    return rows


def sweep(options: Options) -> list[Row]:
    """W4: steps of decodes after prompts of 2048 tokens, at several batch sizes."""
    prompt, new = options.sized(2048), options.sized(256)
    sizes = [options.sized(b) for b in (1, 8, 32, 128, 256)]
    llm, _ = _ready(options, max_model_len=prompt + new, max_num_seqs=max(sizes))
    bandwidth = _bandwidth(llm)
    rows = []
    for size in dict.fromkeys(sizes):
        _forget(llm)
        played = play(llm.engine, random_asks(options, size, prompt, new))
        # After the last prompt: the steps in which all decode.
        decoding = played.step_seconds[-(new - 1) :][1:-1]
        step = _median(decoding)
        floor = _bytes_per_step(llm, size, prompt + new // 2) / bandwidth
        rows.append(
            {
                "case": f"batch {size}",
                "step_ms": 1e3 * step,
                "tokens_per_s": size / step,
                "share_of_floor": floor / step,
            }
        )
        options.progress(f"batch {size}: {size / step:.0f} tokens/s")
    return rows


def _bytes_per_step(llm: LLM, batch: int, context: int) -> int:
    """Weights (the embedding's rows aside) and the keys and values of all sequences, read once."""
    from flashpage.cache.kv_cache import KVCache

    config = llm.model_config
    model = llm.engine.model
    weights = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    if not config.tie_word_embeddings:
        weights.pop(id(model.embed_tokens.weight), None)
    kv = KVCache.bytes_per_block(
        config.num_layers, 1, config.num_kv_heads, config.head_dim, llm.engine.config.dtype
    )
    return sum(weights.values()) + batch * context * kv


def _bandwidth(llm: LLM) -> float:
    """Bytes per second that this device reads and writes in a copy."""
    import torch

    from flashpage.explain.hardware import copy_bandwidth

    return copy_bandwidth(torch.device(llm.engine.config.device), 0.5)


def prefix(options: Options) -> list[Row]:
    """W5: 256 requests that begin with the same 1024 tokens, with the prefix cache and without."""
    numbers = random.Random(options.seed)
    common = [numbers.randint(0, 10000) for _ in range(options.sized(1024))]
    own, new = options.sized(64), options.sized(64)
    asks = random_asks(options, options.sized(256), own, new, common)
    rows = []
    for case, enabled in (("on", True), ("off", False)):
        engine = {k: v for k, v in options.engine.items() if k != "enable_prefix_caching"}
        llm, _ = _ready(
            replace(options, engine=engine),
            max_model_len=len(common) + own + new,
            enable_prefix_caching=enabled,
        )
        played = _rounds(options, llm, asks)
        total = sum(len(a.prompt) for a in asks)
        rows.append(
            {
                "case": f"prefix cache {case}",
                "seconds": _median([p.seconds for p in played]),
                "hit_rate": played[-1].stats["prefix_hit_tokens"] / total,
            }
        )
        del llm
    rows[0]["time_share"] = rows[0]["seconds"] / rows[1]["seconds"]
    return rows


def interference(options: Options) -> list[Row]:
    """W6: the gaps between the tokens of 32 decodes when a prompt of 16,384 tokens arrives."""
    from flashpage.engine.sampling_params import SamplingParams

    long, prompt, new = options.sized(16384), options.sized(256), options.sized(512)
    count = options.sized(32)
    llm, _ = _ready(options, max_model_len=long + new)
    engine = llm.engine
    rows = []
    for _ in range(options.rounds):
        _forget(llm)
        times: list[float] = []
        decodes = random_asks(options, count, prompt, new)
        for i, ask in enumerate(decodes):
            params = SamplingParams(max_tokens=new, temperature=0.6, ignore_eos=True)
            engine.add_request(f"decode-{i}", ask.prompt, params)
        arrived = None
        while engine.has_unfinished():
            names = {output.request_id for output in engine.step()}
            if "decode-0" in names:
                times.append(time.perf_counter())
            if len(times) == new // 4 and arrived is None:
                arrived = len(times)
                late = random_asks(options, 1, long, 1)[0]
                params = SamplingParams(max_tokens=1, ignore_eos=True)
                engine.add_request("late", late.prompt, params)
        gaps = [b - a for a, b in pairwise(times)]
        assert arrived is not None
        calm = _median(gaps[2 : arrived - 1])
        rows.append(
            {
                "median_gap_ms": 1e3 * calm,
                "largest_gap_ms": 1e3 * max(gaps[arrived - 1 :]),
                "largest_over_median": max(gaps[arrived - 1 :]) / calm,
            }
        )
    middle = sorted(rows, key=lambda r: r["largest_over_median"])[len(rows) // 2]
    return [{"case": f"{count} decodes, a prompt of {long}"} | middle]


def pressure(options: Options) -> list[Row]:
    """W7: the mixed workload, greedy, in a quarter of the pages that it would take."""
    asks = mixed_asks(options, temperature=0.0)
    longest = max(len(a.prompt) + a.new_tokens for a in asks)
    llm, _ = _ready(options, max_model_len=longest)
    config = llm.engine.config
    wanted = sum(config.num_pages(len(a.prompt) + a.new_tokens - 1) for a in asks)
    roomy = play(llm.engine, asks)
    del llm
    pages = max(wanted // 4, config.num_pages(longest))
    llm, _ = _ready(options, max_model_len=longest, num_blocks=pages)
    tight = play(llm.engine, asks)
    llm.engine.check()
    equal = sum(
        a == b
        for x, y in zip(roomy.tokens, tight.tokens, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    return [
        {
            "case": f"{pages} of {wanted} pages",
            "finished": len(tight.tokens),
            "tokens_per_s": tight.rate,
            "with_all_pages_tokens_per_s": roomy.rate,
            "preemptions": tight.stats["preemptions"],
            "recomputed_tokens": tight.stats["preempted_tokens"],
            "equal_tokens": equal / sum(map(len, roomy.tokens)),
        }
    ]


def ablation(options: Options) -> list[Row]:
    """The mixed workload with one thing switched off at a time."""
    asks = mixed_asks(options)
    longest = max(len(a.prompt) + a.new_tokens for a in asks)
    rows = []
    for name, off in (
        ("all on", {}),
        ("no graphs", {"enforce_eager": True}),
        ("no overlap", {"overlap": False}),
        ("no prefix cache", {"enable_prefix_caching": False}),
    ):
        llm, warm_up = _ready(options, max_model_len=longest, **off)
        rows.append(_mixed_row(name, _rounds(options, llm, asks), warm_up))
        del llm
    return rows


WORKLOADS: dict[str, Callable[[Options], list[Row]]] = {
    function.__name__: function
    for function in (mixed, single, start, sweep, prefix, interference, pressure, ablation)
}


def print_rows(rows: list[Row]) -> None:
    """A table whose columns are the names of the numbers."""
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(name.replace("_", " ") for name in names))
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in names))
    Console(width=160).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else f"{value}"
