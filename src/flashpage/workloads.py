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
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from flashpage.errors import ArgumentError
from flashpage.play import Ask, Played, play, play_decodes

if TYPE_CHECKING:
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
    """more arguments of `LLM`, of which those that a workload is about are its own"""
    progress: Callable[[str], None] = lambda line: None

    def sized(self, number: int) -> int:
        return max(1, round(number * self.scale))

    @property
    def on_gpu(self) -> bool:
        """Whether the model will run on a GPU."""
        import torch

        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(device).type == "cuda"

    def make_llm(self, **arguments: Any) -> LLM:
        import torch

        from flashpage.engine.llm import LLM

        # What an engine before this one held must be free before its successor measures it.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.progress("loading the model")
        try:
            return LLM(
                self.model,
                load_format=self.load_format,
                dtype=self.dtype,
                device=self.device,
                seed=self.seed,
                **(self.engine | arguments),
            )
        except ArgumentError as error:
            if str(error).startswith("max_model_len"):
                raise ArgumentError(f"{error}; a smaller scale shrinks the workload") from error
            raise


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
    # Room for the warm-up's own requests, however small the workload is.
    arguments["max_model_len"] = max(arguments["max_model_len"], 12)
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
        {
            "case": f"{options.sized(100)} in, {new} out",
            "tokens_per_s": _median([p.rate for p in decode]),
        },
        {
            "case": f"first token of {options.sized(1024)}",
            "ms": 1e3 * _median([p.first_token[0] for p in first]),
        },
    ]


_FIRST_TOKEN = "the first token is here"

_START = """
from flashpage import LLM, SamplingParams

llm = LLM({model!r}, **{arguments!r})
if {warm_up}:
    llm.engine.warm_up()
params = SamplingParams(max_tokens=1, ignore_eos=True)
assert llm.generate([[1, 2, 3]], params, progress=False)[0].token_ids
print({first_token!r}, flush=True)
"""


def start(options: Options) -> list[Row]:
    """W3: from the start of a process to its first token; on a GPU with graphs captured when
    needed, with those of `Engine.warm_up` captured before, and without graphs.

    A process finds compiled kernels on the disk if one before it, of an earlier row too, left
    them there: only the first figure of all can hold compiling.
    """
    rows = []
    cases: list[tuple[str, dict[str, Any], bool]] = [("first token", {}, False)]
    if options.on_gpu:
        cases = [
            ("graphs when needed", {}, False),
            ("graphs before", {}, True),
            ("enforce_eager", {"enforce_eager": True}, False),
        ]
    for case, engine, warm_up in cases:
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
            source = _START.format(
                model=options.model, arguments=arguments, warm_up=warm_up, first_token=_FIRST_TOKEN
            )
            seconds.append(_seconds_to_first_token(source))
        later = _median(seconds[1:]) if seconds[1:] else None
        rows.append({"case": case, "first_s": seconds[0], "later_s": later})
    return rows


def _seconds_to_first_token(source: str) -> float:
    """From before a Python process with this source is started to its word about the token."""
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        command = [sys.executable, "-c", source]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            seconds = None
            for line in process.stdout:
                if line.strip() == _FIRST_TOKEN:
                    seconds = time.perf_counter() - began
        if process.returncode != 0 or seconds is None:
            errors.seek(0)
            told = errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
            raise ArgumentError(f"a process with this model fails: {told[-1]}")
    return seconds


def sweep(options: Options) -> list[Row]:
    """W4: steps in which all requests of a batch decode, after prompts of 2048 tokens.

    The floor of a step is the time in which this device reads the weights once, and the keys and
    values of the contexts that the step had, at the rate of a plain sum (reads, no writes).
    """
    prompt, new = options.sized(2048), max(4, options.sized(256))
    sizes = list(dict.fromkeys(options.sized(b) for b in (1, 8, 32, 128, 256)))
    # While the last prompts are computed, the first requests go on.
    room = [new + _prefill_steps(options, size, max(sizes), prompt) for size in sizes]
    llm, _ = _ready(options, max_model_len=prompt + max(room), max_num_seqs=max(sizes))
    config = llm.engine.config
    bandwidth = _read_bandwidth(llm)
    rows: list[Row] = []
    for size, more in zip(sizes, room, strict=True):
        needed = size * config.num_pages(prompt + more)
        if needed > config.num_blocks:
            why = f"needs {needed} pages, the cache has {config.num_blocks}"
            rows.append({"case": f"batch {size}", "not_measured": why})
            continue
        _forget(llm)
        played = play_decodes(llm.engine, random_asks(options, size, prompt, more), new)
        step = _median(played.step_seconds)
        floor = _bytes_per_step(llm, size, played.context) / bandwidth
        rows.append(
            {
                "case": f"batch {size}",
                "step_ms": 1e3 * step,
                "host_ms": 1e3 * _median(played.host_seconds),
                "tokens_per_s": size / step,
                "context": played.context,
                "share_of_floor": floor / step,
                "read_gb_per_s": bandwidth / 1e9,
            }
        )
        options.progress(f"batch {size}: {size / step:.0f} tokens/s")
    return rows


def _prefill_steps(options: Options, batch: int, max_num_seqs: int, prompt: int) -> int:
    """Steps at most until all of a batch have their first token: decodes go first in each."""
    from flashpage.engine.llm import CPU_DEFAULTS, GPU_DEFAULTS

    defaults = GPU_DEFAULTS if options.on_gpu else CPU_DEFAULTS
    budget = options.engine.get("max_num_batched_tokens", defaults.max_num_batched_tokens)
    return -(-batch * prompt // max(1, budget - max_num_seqs)) + 8


def _bytes_per_step(llm: LLM, batch: int, context: float) -> float:
    """Weights (the embedding's rows aside) and the keys and values of all sequences, read once."""
    from flashpage.cache.kv_cache import KVCache
    from flashpage.layers.embedding import Embedding
    from flashpage.layers.linear import Linear
    from flashpage.models.quantized import QuantizedDecoder

    config = llm.model_config
    dtype = llm.engine.config.dtype
    kv = KVCache.bytes_per_block(config.num_layers, 1, config.num_kv_heads, config.head_dim, dtype)
    if isinstance(llm.engine.model, QuantizedDecoder):
        return llm.engine.model.num_bytes + batch * context * kv
    weights = 0
    for module in llm.engine.model.modules():
        if isinstance(module, Linear):  # whose weight may be packed, and no parameter
            weights += module.in_features * module.out_features
            weights += 0 if module.bias is None else module.bias.numel()
        elif not isinstance(module, Embedding):
            weights += sum(p.numel() for p in module.parameters(recurse=False))
    return weights * dtype.itemsize + batch * context * kv


def _read_bandwidth(llm: LLM) -> float:
    """Bytes per second that this device reads."""
    import torch

    from flashpage.explain.hardware import read_bandwidth

    return read_bandwidth(torch.device(llm.engine.config.device), 0.5)


def prefix(options: Options) -> list[Row]:
    """W5: 256 requests that begin with the same 1024 tokens, with the prefix cache and without."""
    numbers = random.Random(options.seed)
    common = [numbers.randint(0, 10000) for _ in range(options.sized(1024))]
    own, new = options.sized(64), options.sized(64)
    asks = random_asks(options, options.sized(256), own, new, common)
    rows = []
    for case, enabled in (("on", True), ("off", False)):
        llm, _ = _ready(
            options, max_model_len=len(common) + own + new, enable_prefix_caching=enabled
        )
        played = _rounds(options, llm, asks)
        stats = played[-1].stats
        rows.append(
            {
                "case": f"prefix cache {case}",
                "seconds": _median([p.seconds for p in played]),
                "hit_rate": stats["prefix_hit_tokens"] / max(stats["prefix_lookup_tokens"], 1),
            }
        )
        del llm
    rows[0]["time_share"] = rows[0]["seconds"] / rows[1]["seconds"]
    return rows


def interference(options: Options) -> list[Row]:
    """W6: the gaps between the tokens of 32 decodes when a prompt of 16,384 tokens arrives."""
    from flashpage.engine.collector import old_objects_spared

    long, prompt = options.sized(16384), options.sized(256)
    new = max(options.sized(512), 32)  # some gaps before the prompt arrives, and some after
    count = options.sized(32)
    llm, _ = _ready(options, max_model_len=long + new)
    engine = llm.engine
    rows = []
    for _ in range(options.rounds):
        _forget(llm)
        times: list[float] = []
        decodes = random_asks(options, count, prompt, new)
        late = random_asks(options, 1, long, 1)[0]
        began = ended = 0.0
        for i, ask in enumerate(decodes):
            engine.add_request(f"decode-{i}", ask.prompt, ask.params())
        arrived = None
        with old_objects_spared():
            while engine.has_unfinished():
                names = {output.request_id for output in engine.step()}
                if "decode-0" in names:
                    times.append(time.perf_counter())
                if "late" in names:
                    ended = time.perf_counter()
                if len(times) == new // 4 and arrived is None:
                    arrived = len(times)
                    began = time.perf_counter()
                    engine.add_request("late", late.prompt, late.params())
        gaps = [b - a for a, b in pairwise(times)]
        assert arrived is not None
        calm = _median(gaps[2 : arrived - 1])
        rows.append(
            {
                "median_gap_ms": 1e3 * calm,
                "largest_gap_ms": 1e3 * max(gaps[arrived - 1 :]),
                "largest_over_median": max(gaps[arrived - 1 :]) / calm,
                "late_first_token_ms": 1e3 * (ended - began),
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
    pairs = list(zip(roomy.tokens, tight.tokens, strict=True))
    equal = sum(a == b for x, y in pairs for a, b in zip(x, y, strict=True))
    return [
        {
            "case": f"{pages} of {wanted} pages",
            "requests": len(asks),
            "finished": sum(
                len(x) == ask.new_tokens for x, ask in zip(tight.tokens, asks, strict=True)
            ),
            "tokens_per_s": tight.rate,
            "with_all_pages_tokens_per_s": roomy.rate,
            "preemptions": tight.stats["preemptions"],
            "recomputed_tokens": tight.stats["tokens_computed"] - roomy.stats["tokens_computed"],
            "equal_tokens": equal / sum(map(len, roomy.tokens)),
            "equal_requests": sum(x == y for x, y in pairs) / len(asks),
        }
    ]


def ablation(options: Options) -> list[Row]:
    """The mixed workload with one thing switched off at a time, of those that this device has."""
    from flashpage.layers.fused import without_kernels

    asks = mixed_asks(options)
    longest = max(len(a.prompt) + a.new_tokens for a in asks)
    rows: list[Row] = []
    for name, off, kernels in (
        ("all on", {}, nullcontext()),
        ("no graphs", {"enforce_eager": True}, nullcontext()),
        ("no overlap", {"overlap": False}, nullcontext()),
        ("no prefix cache", {"enable_prefix_caching": False}, nullcontext()),
        ("no fused kernels", {}, without_kernels()),
    ):
        if name in ("no graphs", "no overlap") and not options.on_gpu:
            continue
        options.progress(name)
        with kernels:
            llm, warm_up = _ready(options, max_model_len=longest, **off)
            rows.append(_mixed_row(name, _rounds(options, llm, asks), warm_up))
        rows[-1]["of_all_on"] = rows[-1]["tokens_per_s"] / rows[0]["tokens_per_s"]
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
