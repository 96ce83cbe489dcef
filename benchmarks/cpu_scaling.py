"""How the time of a decode step on a CPU grows with the batch and with the context; and memory.

    python benchmarks/cpu_scaling.py            # the default model, all cores
    python benchmarks/cpu_scaling.py --large    # also what a 7B model in 4 bits takes, loaded

Flat cost: with weights read once a step and each sequence's keys once, a step takes a + b n for a
batch of n, and the same in the context. "of linear" is the growth between two rows over what the
straight line through the first and the last row gives: 1.00 where it is linear.
`--large` makes random weights of Llama-2-7B's sizes, quantised to Q4_0 tensor by tensor, in a
process of its own, and reports the largest resident set over what the packed weights take.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from itertools import pairwise
from typing import Any

BATCHES = (8, 16, 32, 64, 128)
CONTEXTS = (128, 512, 2048, 8000)
BATCH_CONTEXT = 128
STEPS = 24

LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def step_ms(options: argparse.Namespace, batch: int, context: int) -> float:
    """Median time of a step in which all decode, after prompts of about `context` tokens."""
    from flashpage import LLM
    from flashpage.play import Ask, play_decodes

    length = context + 2 * STEPS + batch
    llm = LLM(
        options.model,
        threads=options.threads,
        max_num_seqs=batch,
        num_blocks=batch * (length // 16 + 2),
        block_size=16,
        max_model_len=length,
    )
    prompts = [[3 + (7 * i + j) % 1000 for j in range(context)] for i in range(batch)]
    asks = [Ask(prompt, STEPS + batch, 0.0) for prompt in prompts]
    return 1e3 * statistics.median(play_decodes(llm.engine, asks, STEPS).step_seconds)


def with_growth(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """`of_linear` for every row after the first."""
    slope = (rows[-1]["ms"] - rows[0]["ms"]) / (rows[-1][name] - rows[0][name])
    for before, row in pairwise(rows):
        row["of_linear"] = (row["ms"] - before["ms"]) / (slope * (row[name] - before[name]))
    return rows


def large() -> dict[str, float]:
    """A 7B model's packed bytes, and the resident set at its largest, in this process."""
    from flashpage.weights.load import load_model

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model = load_model(LLAMA_7B, load_format="dummy", quantize="q4_0").model
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"packed_gb": model.num_bytes / 1e9, "before_gb": base / 1e9, "peak_gb": most / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a .gguf file; the default model's")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only-large", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_large:
        print(json.dumps(large()))
        return
    from harness import finish, print_table, setup

    info = setup()
    batches = with_growth(
        [{"batch": b, "ms": step_ms(options, b, BATCH_CONTEXT)} for b in BATCHES], "batch"
    )
    contexts = with_growth(
        [{"context": c, "ms": step_ms(options, 1, c)} for c in CONTEXTS], "context"
    )
    results: list[dict[str, Any]] = [*batches, *contexts]
    for rows, name in ((batches, "batch"), (contexts, "context")):
        cells = [
            (str(r[name]), f"{r['ms']:.2f}", f"{r['of_linear']:.2f}" if "of_linear" in r else "")
            for r in rows
        ]
        print_table((name, "ms a step", "of linear"), cells)
    if options.large:
        command = [sys.executable, __file__, "--only-large"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        memory = json.loads(done.stdout.splitlines()[-1])
        results.append(memory)
        print(
            f"7B in Q4_0: packed {memory['packed_gb']:.2f} GB, resident at most "
            f"{memory['peak_gb']:.2f} GB, of these {memory['before_gb']:.2f} GB before"
        )
    finish("cpu_scaling", {**info, **vars(options)}, results)


if __name__ == "__main__":
    main()
