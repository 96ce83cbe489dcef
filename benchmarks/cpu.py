"""The engine on a CPU against llama.cpp, OpenVINO GenAI and transformers: one file, one machine.

    python benchmarks/cpu.py               # SmolLM2-135M-Instruct Q4_1, all cores
    python benchmarks/cpu.py --peer-python .peers/bin/python    # peers installed elsewhere

Of each case the engines are loaded side by side, each in a process of its own, and run in turn,
round after round, one at a time: a machine whose speed moves slows all of them. They decode
greedily, after the same random prompts. Peers that are not installed (llama-cpp-python,
openvino-genai, transformers) are left out. Rates are tokens per second, medians over the rounds: of
the prompt until the first token, or of decoding after it.
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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cpu_peers import PEERS


class Case(NamedTuple):
    """`batch` prompts of `prompt` tokens, `new` more for each."""

    name: str
    batch: int
    prompt: int
    new: int
    times_prompt: bool = False
    """the prompt's rate counts, else the decode's"""


CASES = (
    Case("prompt 512", 1, 512, 2, times_prompt=True),
    Case("decode from 0", 1, 1, 128),
    Case("B1", 1, 256, 128),
    Case("B8", 8, 256, 128),
    Case("B32", 32, 256, 128),
    Case("B1 at 2048", 1, 1984, 64),
)
_VOCAB = 49152
_ENVIRONMENT = dict(os.environ)
"""of the engines, whose waiting threads are their own matter"""


def serve(engine: str, case: Case, options: argparse.Namespace) -> None:
    """Load an engine in this process; then for every line of stdin one round, told on stdout."""
    began = time.perf_counter()
    _, batch, length, new, times_prompt = case
    try:
        run = PEERS[engine](options.model, options.threads, batch, length + new)
    except ImportError as error:
        sys.exit(f"{engine} is not installed: {error}")
    print(json.dumps({"load": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        numbers = random.Random(int(line))
        prompts = [[numbers.randrange(3, _VOCAB) for _ in range(length)] for _ in range(batch)]
        first, rest = run(prompts, new)
        rate = batch * length / first if times_prompt else batch * (new - 1) / rest
        print(json.dumps({"rate": rate}), flush=True)


class Engine:
    """An engine in a process of its own, loaded for one case."""

    def __init__(self, engine: str, case: Case, options: argparse.Namespace) -> None:
        python = options.peer_python if engine in ("llama.cpp", "openvino") else sys.executable
        command = [python, __file__, "--engine", engine, "--case", case.name]
        command += ["--model", options.model, "--threads", str(options.threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_ENVIRONMENT
        )

    def answer(self) -> dict[str, float]:
        """What the process says next; `EOFError` if it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise EOFError

    def round(self, seed: int) -> float:
        """Tokens per second of one round."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        return self.answer()["rate"]

    def end(self) -> None:
        self._process.communicate()


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Of each engine that there is: `rates` of the rounds in turn, `load` seconds.

    And under "read" how fast this machine read beside them, bytes per second.
    """
    engines: dict[str, Engine] = {}
    result: dict[str, Any] = {}
    for name in options.engines:
        engine = Engine(name, case, options)
        try:
            result[name] = {"load": engine.answer()["load"], "rates": []}
            engine.round(-1)  # warms up
            engines[name] = engine
        except EOFError:
            engine.end()
            result.pop(name, None)
            print(f"{name} could not be measured: {case.name}")
    read = []
    for round_ in range(options.rounds):
        for name, engine in engines.items():
            result[name]["rates"].append(engine.round(round_))
        read.append(read_rate())
    for engine in engines.values():
        engine.end()
    told = "  ".join(f"{n} {statistics.median(result[n]['rates']):.1f}" for n in engines)
    print(f"  {case.name}: {told}", file=sys.stderr, flush=True)
    return result | {"read": read}


@cache
def _gibibyte() -> Any:
    import torch

    return torch.ones(2**28)


def read_rate() -> float:
    """Bytes per second of a sum of 1 GiB of float32, the best of three."""
    big, seconds = _gibibyte(), []
    for _ in range(3):
        began = time.perf_counter()
        big.sum()
        seconds.append(time.perf_counter() - began)
    return big.nbytes / min(seconds)


def bytes_per_token(path: str) -> float:
    """What a token of B1 must read at least: every packed weight once, and K and V of half of the
    new tokens' contexts on average."""
    from flashpage.weights.load import load_model

    loaded = load_model(path)
    config, weights = loaded.config, loaded.model.num_bytes
    case = next(c for c in CASES if c.name == "B1")
    kv_token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return weights + kv_token * (case.prompt + case.new / 2)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _existing(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=_existing, help="a .gguf file; the default model's")
    parser.add_argument("--threads", type=_positive, default=os.cpu_count(), help="all cores")
    parser.add_argument("--rounds", type=_positive, default=5, help="medians of so many")
    parser.add_argument("--engines", nargs="+", choices=PEERS, default=list(PEERS), help="all")
    parser.add_argument(
        "--peer-python",
        type=_existing,
        default=sys.executable,
        help="a Python that has llama-cpp-python and openvino-genai",
    )
    parser.add_argument("--cases", nargs="+", choices=[c.name for c in CASES], help="all")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options.engine, next(c for c in CASES if c.name == options.case), options)
        return
    options.cases = options.cases or [c.name for c in CASES]
    os.environ["OMP_WAIT_POLICY"] = "passive"  # not to spin beside the engines
    import torch

    from flashpage.weights.default_model import default_model_path
    from harness import finish, print_table, setup

    torch.set_num_threads(options.threads)
    options.model = options.model or str(default_model_path())
    info = setup()
    print(f"{Path(options.model).name}, {options.threads} threads, {options.rounds} rounds")
    results = {c.name: measure(c, options) for c in CASES if c.name in options.cases}
    if not any(engine in r for r in results.values() for engine in options.engines):
        sys.exit("nothing was measured")
    medians = {
        engine: {
            case: statistics.median(r[engine]["rates"])
            for case, r in results.items()
            if engine in r
        }
        for engine in options.engines
    }
    print()
    print_table(
        ("tokens/s", *results),
        [
            (engine, *(f"{m[case]:.0f}" if case in m else "-" for case in results))
            for engine, m in medians.items()
        ],
    )
    ours = medians.pop("flashpage", {})
    if "B1" in ours:
        size, b1 = bytes_per_token(options.model), results["B1"]
        shares = [
            rate * size / read
            for rate, read in zip(b1["flashpage"]["rates"], b1["read"], strict=True)
        ]
        rate = statistics.median(b1["read"])
        print(
            f"\nB1 reads {size / 1e6:.0f} MB a token: {statistics.median(shares):.0%} of what a "
            f"sum of 1 GiB of float32 read after each round, {rate / 1e9:.1f} GB/s "
            f"(rounds: {', '.join(f'{share:.0%}' for share in shares)})"
        )
    if ours and medians:
        print()
        print_table(
            ("flashpage against", *results),
            [
                (e, *(f"{ours[c] / m[c]:.2f}x" if c in m and c in ours else "-" for c in results))
                for e, m in medians.items()
            ],
        )
    finish("cpu", {**info, **vars(options)}, [{"case": c, **r} for c, r in results.items()])


if __name__ == "__main__":
    main()
