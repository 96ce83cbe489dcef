"""The engine against transformers' `generate`: the same weights, the same prompts, one run.

    python benchmarks/engine.py    # SmolLM2-135M-Instruct, batch 8, 256 + 64 tokens

Each contender runs in bfloat16 and in float32; the ratio is of the best of each. Tokens/s are new
tokens over the whole time, prompts included. Needs transformers.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cpu_peers import transformers_model
from flashpage import LLM, SamplingParams
from flashpage.weights.default_model import default_model_path
from harness import finish, print_table, setup

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def random_prompts(batch: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]


def flashpage_runner(dtype: str, options: argparse.Namespace) -> Callable[[int], None]:
    llm = LLM(
        dtype=dtype,
        max_num_seqs=options.batch,
        max_num_batched_tokens=options.batch * options.prompt_len,  # as transformers: all at once
        enable_prefix_caching=False,
    )
    params = SamplingParams(max_tokens=options.new_tokens, temperature=0.0, ignore_eos=True)

    def run(seed: int) -> None:
        prompts = random_prompts(
            options.batch, options.prompt_len, llm.model_config.vocab_size, seed
        )
        outputs = llm.generate(prompts, params, progress=False)
        assert all(len(output.token_ids) == options.new_tokens for output in outputs)

    return run


def transformers_runner(dtype: str, options: argparse.Namespace) -> Callable[[int], None]:
    model = transformers_model(default_model_path(), DTYPES[dtype])
    vocab_size = model.config.vocab_size

    def run(seed: int) -> None:
        ids = torch.tensor(random_prompts(options.batch, options.prompt_len, vocab_size, seed))
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new_tokens,
            min_new_tokens=options.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == options.prompt_len + options.new_tokens

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    info = setup()
    print(f"SmolLM2-135M-Instruct, {vars(options)}", flush=True)

    runners = {
        (name, dtype): make(dtype, options)
        for name, make in (("flashpage", flashpage_runner), ("transformers", transformers_runner))
        for dtype in DTYPES
    }
    gc.collect()
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runners}
    for round_ in range(-1, options.rounds):  # the first round warms up
        for key, run in runners.items():
            start = time.perf_counter()
            run(round_)
            if round_ >= 0:
                times[key].append(time.perf_counter() - start)
                print(f"  {key[0]} {key[1]}: {times[key][-1]:.2f} s", flush=True)

    new_tokens = options.batch * options.new_tokens
    rates = {key: new_tokens / statistics.median(t) for key, t in times.items()}
    best = {
        name: max(rate for (n, _), rate in rates.items() if n == name)
        for name in ("flashpage", "transformers")
    }
    ratio = best["flashpage"] / best["transformers"]
    print()
    print_table(
        ("engine", "dtype", "tokens/s"),
        [(name, dtype, f"{rate:.1f}") for (name, dtype), rate in rates.items()],
    )
    print(f"best against best: {ratio:.2f}x")
    results: list[dict[str, Any]] = [
        {"engine": name, "dtype": dtype, "tokens_per_s": rate}
        for (name, dtype), rate in rates.items()
    ]
    finish("engine", {**info, **vars(options)}, [*results, {"ratio": ratio}])


if __name__ == "__main__":
    main()
