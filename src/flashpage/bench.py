"""Measures the engine's offline throughput on one batch of random prompts."""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flashpage.errors import ArgumentError

if TYPE_CHECKING:
    from flashpage.engine.llm import LLM
    from flashpage.engine.outputs import RequestOutput


@dataclass(frozen=True)
class BenchSetup:
    """What is measured: `batch` prompts of `prompt_len` tokens, `new_tokens` more for each."""

    model: str | None = None
    batch: int = 8
    prompt_len: int = 256
    new_tokens: int = 64
    seed: int = 0
    dtype: str = "auto"
    load_format: str = "auto"
    device: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    """more arguments of `LLM`"""


@dataclass(frozen=True)
class BenchResult:
    """What came out; rates are over the whole batch, in tokens per second.

    Attributes:
        weights: what they are kept as: "quantised" (the blocks of a file, or `quantize`), or dtype.
        dtype: of keys and values, and without quantised weights of everything.
        load_seconds: until the model was ready.
        total_seconds: from the first request's arrival to the last token.
        prefill_rate: prompt tokens, until every request had its first token.
        decode_rate: new tokens, from then on.
        output_rate: new tokens over the total time.
        mean_time_to_first_token: in seconds.
    """

    name: str
    weights: str
    dtype: str
    threads: int
    load_seconds: float
    total_seconds: float
    prefill_rate: float
    decode_rate: float
    output_rate: float
    mean_time_to_first_token: float


def run_bench(setup: BenchSetup) -> BenchResult:
    """Load the model, run a small batch to warm up (kernels compile then), and measure one.

    Raises:
        FlashpageError: the model can not be loaded or can not hold such a sequence.
    """
    from flashpage.engine.llm import LLM

    started = time.perf_counter()
    llm = LLM(
        setup.model,
        dtype=setup.dtype,
        load_format=setup.load_format,
        device=setup.device,
        max_num_seqs=setup.batch,
        max_model_len=setup.prompt_len + setup.new_tokens,
        enable_prefix_caching=False,
        seed=setup.seed,
        **setup.engine,
    )
    load_seconds = time.perf_counter() - started
    llm.engine.warm_up()
    _run(llm, setup, new_tokens=2)
    outputs = _run(llm, setup, new_tokens=setup.new_tokens)
    for output in outputs:
        if output.outputs[0].error is not None:
            raise ArgumentError(f"the model can not be measured: {output.outputs[0].error}")

    start = min(o.metrics.arrival_time for o in outputs)
    all_started = max(o.metrics.first_token_time for o in outputs)
    end = max(o.metrics.finish_time for o in outputs)
    new_tokens = sum(o.metrics.num_generated_tokens for o in outputs)
    first = [o.metrics.first_token_time - o.metrics.arrival_time for o in outputs]
    dtype = str(llm.engine.config.dtype).removeprefix("torch.")
    quantised = _is_quantised(llm)
    return BenchResult(
        name=llm.name,
        weights="quantised" if quantised else dtype,
        dtype=dtype,
        threads=_num_threads(quantised),
        load_seconds=load_seconds,
        total_seconds=end - start,
        prefill_rate=setup.batch * setup.prompt_len / (all_started - start),
        decode_rate=(new_tokens - setup.batch) / (end - all_started),
        output_rate=new_tokens / (end - start),
        mean_time_to_first_token=sum(first) / len(first),
    )


def _is_quantised(llm: LLM) -> bool:
    from flashpage.models.quantized import QuantizedDecoder

    return isinstance(llm.engine.model, QuantizedDecoder)


def _num_threads(quantised: bool) -> int:
    """How many compute."""
    import torch

    from flashpage.models.quantized import num_threads

    return num_threads() if quantised else torch.get_num_threads()


def print_report(setup: BenchSetup, result: BenchResult) -> None:
    """A table, then everything as one line of JSON."""
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", "value")
    kept = result.dtype
    if result.weights != result.dtype:
        kept = f"{result.weights} weights, keys and values {result.dtype}"
    table.add_row("model", f"{result.name}, {kept}, {result.threads} threads")
    table.add_row("load", f"{result.load_seconds:.1f} s")
    table.add_row("total", f"{result.total_seconds:.2f} s")
    table.add_row("prefill", f"{result.prefill_rate:.1f} tokens/s")
    table.add_row("decode", f"{result.decode_rate:.1f} tokens/s")
    table.add_row("output", f"{result.output_rate:.1f} tokens/s")
    table.add_row("first token, mean", f"{result.mean_time_to_first_token * 1000:.0f} ms")
    Console().print(table)
    print(json.dumps({"setup": asdict(setup), "result": asdict(result), "machine": machine()}))


def machine() -> dict[str, str]:
    """What a measurement was made on."""
    import torch

    from flashpage.explain.hardware import processor

    found = {
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _run(llm: LLM, setup: BenchSetup, new_tokens: int) -> Sequence[RequestOutput]:
    from flashpage.engine.sampling_params import SamplingParams

    numbers = random.Random(setup.seed)
    prompts = [
        [numbers.randrange(llm.model_config.vocab_size) for _ in range(setup.prompt_len)]
        for _ in range(setup.batch)
    ]
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return llm.generate(prompts, params, progress=False)
