"""The engine on a CPU against llama.cpp, OpenVINO GenAI and transformers: one file, one machine.

    python benchmarks/cpu.py               # SmolLM2-135M-Instruct Q4_1, all cores
    python benchmarks/cpu.py --peer-python .peers/bin/python    # peers installed elsewhere

Engines run one after another, each in a process of its own, greedily, on the same random prompts.
Peers that are not installed (llama-cpp-python, openvino-genai, transformers) are left out. Rates
are tokens per second: of the prompt until the first token, or of decoding after it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cpu_peers import PEERS

# Name, sequences, prompt tokens of each, new tokens, whether the prompt's rate counts.
CASES = (
    ("prompt 512", 1, 512, 2, True),
    ("decode from 0", 1, 1, 128, False),
    ("B1", 1, 256, 128, False),
    ("B8", 8, 256, 128, False),
    ("B32", 32, 256, 128, False),
    ("B1 at 2048", 1, 1984, 64, False),
)
_VOCAB = 49152


def measure(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    """Every case of one engine, in this process."""
    began = time.perf_counter()
    load = PEERS[engine]
    result: dict[str, Any] = {}
    cases = [case for case in CASES if case[1] <= options.max_batch]
    for max_seqs, max_len in sorted({(c[1], c[2] + c[3]) for c in cases}):
        run = load(options.model, options.threads, max_seqs, max_len)
        result.setdefault("load", time.perf_counter() - began)
        for name, batch, length, new, is_prompt in cases:
            if (batch, length + new) != (max_seqs, max_len):
                continue
            rates = []
            for round_ in range(-1, options.rounds):  # the first warms up
                numbers = random.Random(round_)
                prompts = [
                    [numbers.randrange(3, _VOCAB) for _ in range(length)] for _ in range(batch)
                ]
                first, rest = run(prompts, new)
                rate = batch * length / first if is_prompt else batch * (new - 1) / rest
                if round_ >= 0:
                    rates.append(rate)
            result[name] = statistics.median(rates)
            print(f"  {engine}, {name}: {result[name]:.1f}", file=sys.stderr, flush=True)
        del run
    return result


def read_floor(options: argparse.Namespace) -> dict[str, float]:
    """What a token of B1 must read at least, bytes, and how fast this machine reads, bytes/s.

    Every packed weight once, and K and V of half of the new tokens' contexts on average.
    """
    import torch

    from flashpage.weights.load import load_model

    torch.set_num_threads(options.threads)
    loaded = load_model(options.model)
    config, weights = loaded.config, loaded.model.num_bytes
    prompt, new = next((c[2], c[3]) for c in CASES if c[0] == "B1")
    kv_token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    big = torch.ones(2**28)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        big.sum()
        seconds.append(time.perf_counter() - began)
    return {"bytes": weights + kv_token * (prompt + new / 2), "rate": big.nbytes / min(seconds)}


def in_process(engine: str, options: argparse.Namespace) -> dict[str, Any] | None:
    python = options.peer_python if engine in ("llama.cpp", "openvino") else sys.executable
    command = [python, __file__, "--engine", engine, "--model", options.model]
    command += ["--threads", str(options.threads), "--rounds", str(options.rounds)]
    command += ["--max-batch", str(options.max_batch)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{engine} could not be measured")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a .gguf file; the default model's")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5, help="medians of so many")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        result = measure(options.engine, options)
        if options.engine == "flashpage":
            result["floor"] = read_floor(options)
        print(json.dumps(result))
        return
    from flashpage.weights.default_model import default_model_path
    from harness import finish, print_table, setup

    options.model = options.model or str(default_model_path())
    info = setup()
    print(f"{Path(options.model).name}, {options.threads} threads, {options.rounds} rounds")
    results = {e: r for e in options.engines if (r := in_process(e, options)) is not None}
    names = [case[0] for case in CASES if case[1] <= options.max_batch]
    print()
    rows = [(e, *(f"{r[n]:.0f}" for n in names), f"{r['load']:.1f} s") for e, r in results.items()]
    print_table(("tokens/s", *names, "load"), rows)
    ours = results.get("flashpage")
    if ours is not None:
        floor = ours["floor"]
        share = ours["B1"] * floor["bytes"] / floor["rate"]
        print(
            f"\nB1 reads {floor['bytes'] / 1e6:.0f} MB a token; at {floor['rate'] / 1e9:.1f} GB/s, "
            f"measured with the sum of 1 GiB of float32, that is {share:.0%} of what is possible"
        )
        ratios = {
            engine: {name: ours[name] / rates[name] for name in names}
            for engine, rates in results.items()
            if engine != "flashpage"
        }
        print()
        ratio_rows = [(e, *(f"{r[n]:.2f}x" for n in names)) for e, r in ratios.items()]
        print_table(("flashpage against", *names), ratio_rows)
    finish("cpu", {**info, **vars(options)}, [{"engine": e, **r} for e, r in results.items()])


if __name__ == "__main__":
    main()
