"""Run a random sample of flash-attn's own tests through our shim, on a GPU.

    python tests/flash_attn_suite.py                        fetches the file of flash-attn 2.8.3
    python tests/flash_attn_suite.py --file test_flash_attn.py --cases 4000 --seed 7

The file is not part of this project. Every test function of it is sampled; a function with few
cases gives all of them. Processes share the GPUs, each running its own part of the sample. Prints
what failed, and one JSON line with the counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

URL = "https://raw.githubusercontent.com/Dao-AILab/flash-attention/v2.8.3/tests/test_flash_attn.py"


# ---------------------------------------------------------------------------------------------
# In the processes: a pytest plugin that samples before anything is collected
# ---------------------------------------------------------------------------------------------


def sampled_marks(function: Any, cases: int, seed: int, part: int, parts: int) -> list[Any]:
    """The function's marks with all its parametrizations replaced by one of sampled cases."""
    import pytest

    axes: list[tuple[list[str], list[Any]]] = []
    others = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name != "parametrize":
            others.append(mark)
            continue
        names = [name.strip() for name in mark.args[0].split(",")]
        values = [v if len(names) > 1 else (v,) for v in mark.args[1]]
        axes.append((names, values))
    total = 1
    for _, values in axes:
        total *= len(values)
    rng = random.Random(f"{seed} {function.__name__}")
    picked = range(total) if total <= cases else sorted(rng.sample(range(total), cases))
    names = list(itertools.chain.from_iterable(axis for axis, _ in axes))
    chosen = []
    for index in itertools.islice(picked, part, None, parts):
        case: list[Any] = []
        for _, values in axes:
            index, i = divmod(index, len(values))
            case.extend(values[i])
        chosen.append(tuple(case) if len(names) > 1 else case[0])
    return [*others, pytest.mark.parametrize(",".join(names), chosen).mark] if names else others


def again(log: str) -> set[str]:
    """Names of the cases that failed in the run that printed `log`."""
    return set(re.findall(r"^FAILED \S*?::(\S+)", Path(log).read_text(), re.MULTILINE))


class Sampler:
    """Sampling as a plugin of pytest; `part` of `parts` is run here."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options.cases, options.seed, options.part, options.processes
        self.only = options.only
        # The names of one part's cases mean others in other parts: these run there too.
        self.again = again(options.again) if options.again else None
        self.deadline = time.monotonic() + options.seconds
        self.counts: Counter[tuple[str, str]] = Counter()

    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: Any) -> None:
        if name.startswith("test_") and callable(obj):
            obj.pytestmark = sampled_marks(obj, *self.options)

    def pytest_collection_modifyitems(self, session: Any, items: list[Any]) -> None:
        # Mixed, so that a time limit cuts every function alike.
        items[:] = [
            item
            for item in items
            if self.only in item.name and (self.again is None or item.name in self.again)
        ]
        random.Random(0).shuffle(items)

    def pytest_runtest_setup(self, item: Any) -> None:
        if time.monotonic() > self.deadline:
            item.session.shouldstop = "the time is up"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.skipped or (report.failed and report.when == "setup"):
            name = re.sub(r"\[.*", "", report.nodeid.split("::")[-1])
            self.counts[name, report.outcome] += 1


def run_part(options: argparse.Namespace) -> None:
    import flash_attn
    import pytest

    import flashpage

    assert flash_attn.flash_attn_func is flashpage.flash_attn_func, flash_attn.__file__
    sampler = Sampler(options)
    arguments = ["-q", "-q", "--tb=line", "-p", "no:cacheprovider", options.file]
    pytest.main(arguments, plugins=[sampler])
    counts = [[name, outcome, n] for (name, outcome), n in sampler.counts.items()]
    print("\nCOUNTS " + json.dumps(counts), flush=True)


# ---------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--file", help=f"flash-attn's test file; fetched from {URL} if not given")
    parser.add_argument("--cases", type=int, default=320, help="cases of each test function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after that time")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--again",
        help="the output of an earlier run of as many --cases and --processes and the same "
        "--seed: only what failed there",
    )
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        run_part(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        # Away from every other file, so that only the shim is called flash_attn.
        file = Path(folder) / "test_flash_attn.py"
        if options.file:
            file.write_text(Path(options.file).read_text())
        else:
            with urllib.request.urlopen(URL) as response:
                file.write_bytes(response.read())
        import torch

        from flashpage.compat.flash_attn import search_path

        environment = dict(os.environ)
        paths = [search_path(), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else range(max(torch.cuda.device_count(), 1))
        processes = [
            subprocess.Popen(
                [
                    sys.executable, str(Path(__file__).resolve()), "--file", str(file),
                    "--cases", str(options.cases), "--seed", str(options.seed),
                    "--processes", str(options.processes), "--part", str(part),
                    "--seconds", str(options.seconds), "--only", options.only,
                    *(["--again", str(Path(options.again).resolve())] if options.again else []),
                ],
                cwd=folder, env=environment | {"CUDA_VISIBLE_DEVICES": str(gpus[part % len(gpus)])},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True,
            )
            for part in range(options.processes)
        ]  # fmt: skip
        outputs = [process.communicate()[0] for process in processes]
    counts: Counter[tuple[str, str]] = Counter()
    for output in outputs:
        for line in output.splitlines():
            if line.startswith("COUNTS "):
                for name, outcome, n in json.loads(line[7:]):
                    counts[name, outcome] += n
        if "COUNTS" not in output:
            counts["a process that broke off", "failed"] += 1
        print("\n".join(re.findall(r"^(?:FAILED|ERROR|/|E ).*$", output, re.MULTILINE)))
    names = sorted({name for name, _ in counts})
    for name in names:
        print(name, {o: counts[name, o] for o in ("passed", "failed", "skipped")})
    totals = {o: sum(counts[n, o] for n in names) for o in ("passed", "failed", "skipped")}
    print(json.dumps({"suite": "flash-attn 2.8.3", "seed": options.seed, **totals}))
    sys.exit(1 if totals["failed"] or not totals["passed"] else 0)


if __name__ == "__main__":
    main()
