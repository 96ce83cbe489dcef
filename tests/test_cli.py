"""The commands, on a tiny random model whose tokenizer knows bytes."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

import flashpage
from flashpage import cli
from flashpage.engine.llm import LLM
from flashpage.layers.cpu import forms

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory for `--load-format dummy`."""
    directory = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 400,
    }
    (directory / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """A command freezes what it loads; this process is not its own."""
    yield
    gc.unfreeze()


@pytest.fixture
def invoke(model: str) -> Any:
    """Run a command on the tiny model; with `input`, that is what stdin holds."""

    def run(command: str, *arguments: str, input: str | None = None) -> Any:
        options = ["--model", model, "--load-format", "dummy", "--dtype", "float32"]
        return CliRunner().invoke(cli.app, [command, *options, *arguments], input=input)

    return run


def reference(model: str, prompt: Any, seed: int = 0, **params: Any) -> Any:
    """The seed is that of the dummy weights too, as it is on the command line."""
    llm = LLM(model, load_format="dummy", dtype="float32", max_num_seqs=1, seed=seed)
    params["seed"] = seed
    return llm.generate([prompt], flashpage.SamplingParams(**params))[0]


def assert_refused(result: Any, words: str) -> None:
    """One line on stderr that says why, nothing on stdout, exit status 2."""
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("flashpage: error: ")
    assert words in line
    assert not result.stdout


class TestGenerate:
    def test_text_on_stdout_numbers_on_stderr(self, invoke: Any, model: str) -> None:
        result = invoke("generate", "Hello", "--max-tokens", "12")
        assert result.exit_code == 0, result.output
        chat = [{"role": "user", "content": "Hello"}]
        expected = reference(model, chat, max_tokens=12, temperature=0.0)
        assert result.stdout == expected.text + "\n"
        (line,) = result.stderr.splitlines()
        count = len(expected.prompt_token_ids)
        assert f"{count} prompt tokens, 0 cached, 12 new tokens, first after" in line
        if sys.platform.startswith("linux"):
            assert re.search(r" ms \(\d+\.\d\d s from the start of the process\),", line)
        assert "tokens/s" in line
        assert "pages used" in line

    @pytest.mark.parametrize("default", [False, True])
    def test_in_a_process_of_its_own(self, default: bool, model: str, smollm2_path: Path) -> None:
        """There it imports torch itself, and checks the default model's file meanwhile."""
        command = [sys.executable, "-m", "flashpage", "generate", "Hello", "--max-tokens", "8"]
        if not default:
            command += ["--model", model, "--load-format", "dummy", "--dtype", "float32"]
        environment = {**os.environ, "PYTHONPATH": str(Path(flashpage.__file__).parents[1])}
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr
        chat = [{"role": "user", "content": "Hello"}]
        params = flashpage.SamplingParams(max_tokens=8, temperature=0.0)
        if default:
            expected = LLM(smollm2_path, max_num_seqs=1).chat(chat, params)[0]
        else:
            expected = reference(model, chat, max_tokens=8, temperature=0.0)
        assert result.stdout == expected.text + "\n"

    def test_raw(self, invoke: Any, model: str) -> None:
        result = invoke("generate", "Hello", "--raw", "--max-tokens", "12")
        assert (
            result.stdout == reference(model, "Hello", max_tokens=12, temperature=0.0).text + "\n"
        )
        assert "5 prompt tokens" in result.stderr

    def test_prompt_from_stdin(self, invoke: Any) -> None:
        options = ("--raw", "--max-tokens", "4")
        piped = invoke("generate", "-", *options, input="a prompt")
        assert piped.stdout == invoke("generate", "a prompt", *options).stdout

    def test_sampling_options(self, invoke: Any, model: str) -> None:
        options = ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01"]
        options += ["--repetition-penalty", "1.2", "--seed", "7", "--max-tokens", "20", "--raw"]
        first, again = (invoke("generate", "Hi", *options).stdout for _ in range(2))
        expected = reference(
            model,
            "Hi",
            temperature=0.9,
            top_k=50,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.2,
            seed=7,
            max_tokens=20,
        )
        assert first == again == expected.text + "\n"

    def test_stop(self, invoke: Any, model: str) -> None:
        whole = reference(model, "Hello", max_tokens=30, temperature=0.0).text
        stop = next(c for c in whole[5:] if c.isascii() and c.isprintable() and c not in whole[:5])
        arguments = ("--raw", "--max-tokens", "30", "--stop", stop, "--stop", "never seen")
        assert invoke("generate", "Hello", *arguments).stdout == whole.split(stop)[0] + "\n"

    def test_interrupt(self, invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*arguments: Any) -> Iterator[Any]:
            raise KeyboardInterrupt
            yield

        monkeypatch.setattr(LLM, "stream", interrupted)
        assert invoke("generate", "Hello").exit_code == 130


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("generate", "x", "--top-p", "3"), "top_p = 3.0"),
            (("generate", "x", "--dtype", "float8"), "float8"),
            (("generate", "x", "--max-tokens", "5000"), "max_model_len = 400"),
            (("generate", "", "--raw"), "the prompt is empty"),
            (("generate", "x", "--seed", "9" * 23), "must be an integer from -2**63"),
            (("bench", "--prompt-len", "300", "--new-tokens", "300"), "400 positions"),
        ],
    )
    def test_one_line_and_code_2(self, arguments: tuple[str, ...], words: str, invoke: Any) -> None:
        result = invoke(*arguments)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("flashpage: error: ")
        assert words in line

    @pytest.mark.parametrize("name", ["missing.gguf", "/no/such/directory"])
    def test_model_that_is_not_there(self, name: str) -> None:
        result = CliRunner().invoke(cli.app, ["generate", "x", "--model", name])
        assert result.exit_code == 2
        assert f"{name} is neither a file nor a directory" in result.stderr

    def test_cache_in_the_home_of_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLASHPAGE_CACHE", "~no-such-user/x")
        result = CliRunner().invoke(cli.app, ["generate", "x"])
        assert result.exit_code == 2
        assert "'~no-such-user/x'" in result.stderr

    @pytest.mark.parametrize("arguments", [("generate", "-"), ("chat",)])
    @pytest.mark.parametrize(
        ("redirected", "words"), [("", "not valid utf-8"), ("<&-", "stdin is closed")]
    )
    def test_stdin_that_is_no_text(
        self, arguments: tuple[str, ...], redirected: str, words: str, model: str
    ) -> None:
        options = ["--model", model, "--load-format", "dummy", "--dtype", "float32"]
        command = shlex.join([sys.executable, "-m", "flashpage", *arguments, *options])
        result = subprocess.run(
            f"{command} {redirected}",
            shell=True,
            input=b"\xff\n",
            cwd=Path(flashpage.__file__).parents[1],
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
            capture_output=True,
        )
        assert result.returncode == 2
        *notices, line = result.stderr.decode().splitlines()
        assert all("CPU kernel" in notice for notice in notices)  # where it compiles them first
        assert line.startswith("flashpage: error: ")
        assert words in line

    def test_unknown_option(self, invoke: Any) -> None:
        assert invoke("generate", "x", "--tempurature", "1").exit_code == 2


class TestChat:
    def test_turns_share_their_prefix(self, invoke: Any) -> None:
        opening = "A first turn that is longer than one page of the cache."
        result = invoke("chat", "--max-tokens", "8", input=f"{opening}\nAnd?\n\n/exit\nnot read\n")
        assert result.exit_code == 0, result.output
        first, second = result.stderr.splitlines()
        assert ", 0 cached," in first
        cached = int(second.split(" cached")[0].split(", ")[-1])
        assert cached >= 64

    def test_ends_with_the_input(self, invoke: Any) -> None:
        result = invoke("chat", "--max-tokens", "4", input="Hi")
        assert result.exit_code == 0
        assert len(result.stderr.splitlines()) == 1
        assert invoke("chat", input="").exit_code == 0

    def test_clear_and_system(self, invoke: Any) -> None:
        lines = "Hi\nMore\n/clear\nHi\n"
        result = invoke("chat", "--max-tokens", "4", "--system", "Be brief.", input=lines)
        prompts = [line.split(" prompt")[0] for line in result.stderr.splitlines()]
        assert prompts[0] == prompts[2]
        assert int(prompts[1].lstrip("[")) > int(prompts[0].lstrip("["))

    def test_a_turn_that_does_not_fit_does_not_end_the_talk(self, invoke: Any) -> None:
        result = invoke("chat", "--max-tokens", "8", input=f"{'x' * 500}\nHi\n")
        assert result.exit_code == 0
        error, numbers = result.stderr.splitlines()
        assert "max_model_len = 400" in error
        assert "/clear" in error
        assert "8 new tokens" in numbers

    def test_interrupt_stops_the_reply_only(
        self, invoke: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream, seen = LLM.stream, []

        def interrupted_once(self: LLM, messages: Any, params: Any) -> Iterator[Any]:
            seen.append([m["content"] for m in messages])
            for i, piece in enumerate(stream(self, messages, params)):
                yield piece
                if len(seen) == 1 and i == 2:
                    raise KeyboardInterrupt

        monkeypatch.setattr(LLM, "stream", interrupted_once)
        result = invoke("chat", "--max-tokens", "8", input="One\nTwo\n")
        assert result.exit_code == 0
        assert "[stopped]" in result.stderr
        assert seen[0] == ["One"]
        assert seen[1][0] == "One"
        assert seen[1][2] == "Two"


class TestBench:
    def test_ends_in_a_line_of_json(self, invoke: Any) -> None:
        sizes = ("--batch", "2", "--prompt-len", "20", "--new-tokens", "4")
        result = invoke("bench", *sizes)
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout.splitlines()[-1])
        assert report["setup"]["batch"] == 2
        assert report["result"]["dtype"] == report["result"]["weights"] == "float32"
        rates = [v for k, v in report["result"].items() if k.endswith("_rate")]
        assert len(rates) == 3
        assert min(rates) > 0
        assert "prompt_len: 20" in result.stdout

    def test_log_stats(self, invoke: Any) -> None:
        """Lines on stderr from every command that runs the engine; stdout stays as it is."""
        tokens = ("--max-tokens", "4")
        sizes = ("--batch", "2", "--prompt-len", "20", "--new-tokens", "4")
        for command in (("generate", "Hi", *tokens), ("chat", *tokens), ("bench", *sizes)):
            result = invoke(*command, "--log-stats", "1e-9", input="Hi\n")
            assert result.exit_code == 0, result.output
            pattern = r"flashpage: \d+ running, \d+ waiting, \d+ of \d+ pages, prefix hits "
            assert len(re.findall(pattern, result.stderr)) >= 4, command
            assert "waiting" not in result.stdout
            result = invoke(*command, "--log-stats", "0", input="Hi\n")
            assert result.exit_code == 2
            assert "log_stats = 0.0 must be seconds above 0" in result.stderr


class TestBackends:
    def test_prints_the_report(self) -> None:
        options = ["--dtype", "bfloat16", "--layout", "paged", "--causal"]
        result = CliRunner().invoke(cli.app, ["backends", *options])
        assert result.exit_code == 0
        assert "paged bfloat16 on cpu" in result.stdout
        assert "decode" in result.stdout

    @pytest.mark.parametrize(
        "options",
        [("--dtype", "int8"), ("--layout", "sparse"), ("--device", "foo"), ("--head-dim", "300")],
    )
    def test_unknown_values(self, options: tuple[str, ...]) -> None:
        result = CliRunner().invoke(cli.app, ["backends", *options])
        assert result.exit_code == 2
        assert options[1] in result.stderr


class TestRoofline:
    def run(self, *options: str) -> Any:
        return CliRunner().invoke(cli.app, ["roofline", *options])

    def test_the_numbers_of_the_rtx_4090(self) -> None:
        sizes = ("--seqlen", "8192", "--head-dim", "128", "--dtype", "fp32")
        result = self.run("--gpu", "rtx4090", *sizes)
        assert result.exit_code == 0, result.output
        for words in ("ridge 81.9 FLOP/B", "268.4 MB", "4.194 MB", "1.091 GB", "34.36 GFLOP"):
            assert words in result.stdout
        rows = [line for line in result.stdout.splitlines() if "GFLOP │" in line]
        standard, tiled, no_cache = (row.strip("│").split("│") for row in rows)
        assert [cell.strip() for cell in standard[4:]] == ["1.082 ms", "38.5%", "1.00x", "memory"]
        assert [cell.strip() for cell in tiled[3:]] == [
            *("2,048.0", "416 us", "100.0%", "2.60x", "compute")
        ]
        assert no_cache[-1].strip() == "memory"

    def test_list(self) -> None:
        result = self.run("--list")
        for words in ("rtx4090", "B200", "989.5", "T4 datasheet", "this"):
            assert words in result.stdout

    def test_forms(self) -> None:
        gpu = ("--gpu", "h100", "--dtype", "bf16")
        heads = ("--heads", "8", "--kv-heads", "2")
        for options, words in (
            (("--decode", "--batch", "4", *heads), "decode from pages of 16, 4 x context 8192"),
            (("--varlen", "100,200", "--causal"), "2 sequences, 300 keys, longest 200, bf16"),
            (("--backward", *heads), "backward: N = 8192, bf16"),
        ):
            result = self.run(*gpu, *options)
            assert result.exit_code == 0, result.output
            assert words in result.stdout

    def test_measured_points_are_in_the_picture(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        path = tmp_path / "a[1].svg"
        sizes = ("--seqlen", "128", "--head-dim", "16")
        result = self.run("--gpu", "t4", *sizes, "--measure", "--plot", str(path))
        assert result.exit_code == 0, result.output
        for name in ("standard", "tiled", "torch SDPA", "flashpage"):
            assert f"│ {name} " in result.stdout
        assert f"drawn: {path}" in result.stdout.replace("\n", "")
        assert path.stat().st_size > 10_000

    def test_memory(self) -> None:
        result = self.run("--memory", "--seqlen", "1", "--head-dim", "16")
        assert result.exit_code == 0, result.output
        assert "S alone" in result.stdout
        assert result.stderr.splitlines()[0] == "measuring: standard, N = 1"

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--gpu", "tpu9"), "gpu must be one of this, rtx4090, rtx3090"),
            (("--seqlen", "-5"), "seqlen must be from 1 to 2147483647, got -5"),
            (("--batch", "0"), "batch must be from 1 to 2147483647, got 0"),
            (("--heads", "6", "--kv-heads", "4"), "got 4 key/value heads and 6 query heads"),
            (("--head-dim", "300"), "at most 256 (and at least 1), got 300"),
            (("--dtype", "int8"), "dtype must be one of fp32, bf16, fp16, got 'int8'"),
            (("--gpu", "t4", "--dtype", "bf16"), "T4 has a peak for (fp32, fp16), got 'bf16'"),
            (("--varlen", "1,x"), "varlen must be lengths between commas"),
            (("--varlen", "1,2", "--batch", "2"), "batch must be left out when varlen"),
            (("--varlen", "1,2", "--seqlen", "2"), "seqlen must be left out when varlen"),
            (("--varlen", "0,2"), "varlen must be lengths from 1, got '0,2'"),
            (("--block-size", "4"), "block_size must be left out without decode, got 4"),
            (("--decode", "--backward"), "backward must be False over pages"),
            (("--decode", "--block-size", "0"), "block_size must be from 1"),
            (("--plot", "a.gif"), "plot must end in .png or .svg, got 'a.gif'"),
            (("--gpu", "t4", "--theme", "sepia"), "theme must be one of light, dark, got 'sepia'"),
            (("--memory", "--causal"), "memory must be of dense attention without mask"),
            (("--memory", "--measure"), "memory must be measured without backward and measure"),
        ],
    )
    def test_refused(self, options: tuple[str, ...], words: str) -> None:
        result = self.run(*options)
        assert_refused(result, words)


class TestTrace:
    def run(self, *options: str) -> Any:
        return CliRunner().invoke(cli.app, ["trace", *options])

    def test_worked_examples(self) -> None:
        result = self.run()
        assert result.exit_code == 0, result.output
        assert "Example 1" in result.stdout
        assert "Example 2" in result.stdout
        for words in ("0.0474 1.9051 1.0000", "1.5530  0.5930 0.6760", "1.2034  0.1843 0.8723"):
            assert words in result.stdout
        (reductions, second) = re.findall(r"cross-worker reductions +(\d) +(\d)", result.stdout)
        assert (reductions, second) == (("0", "0"), ("4", "0"))
        assert "\x1b" not in result.stdout

    def test_own_sizes(self) -> None:
        sizes = ("--seqlen-q", "3", "--seqlen-k", "7", "--head-dim", "5", "--block-size", "4")
        options = (*sizes, "--workers", "3", "--causal")
        result = self.run(*options, "--seed", "7")
        assert result.exit_code == 0, result.output
        words = (
            "3 query rows, 7 keys, head_dim 5, blocks of 4 keys, 3 workers, scale 0.4472, causal"
        )
        assert f"Random inputs, seed 7\n{words}\n" in result.stdout
        assert result.stdout == self.run(*options, "--seed", "7").stdout
        assert result.stdout != self.run(*options, "--seed", "8").stdout

    def test_varlen(self) -> None:
        result = self.run("--varlen", "--seqlens", "2,1", "--causal")
        assert result.exit_code == 0, result.output
        assert "cu_seqlens = [0, 2, 3]" in result.stdout
        assert "  0 A #..\n  1 A ##.\n  2 B ..#\n" in result.stdout
        assert "cu_seqlens = [0, 3, 4, 9]" in self.run("--varlen").stdout

    def test_paged(self) -> None:
        result = self.run("--paged")
        assert result.exit_code == 0, result.output
        shared = re.search(r"requests 0 and 1 share: (\d+), (\d+)\n", result.stdout)
        assert shared is not None
        for logical, page in enumerate(shared.groups()):
            assert result.stdout.count(f"\n{logical} -> {page}*") == 2
        own = self.run("--paged", "--seqlens", "5,3", "--block-size", "2")
        assert "requests 0 and 1 share: none" in own.stdout

    @pytest.mark.parametrize("mode", [(), ("--causal",), ("--varlen",), ("--paged",)])
    def test_html(self, mode: tuple[str, ...], tmp_path: Path) -> None:
        path = tmp_path / "page.html"
        result = self.run(*mode, "--html", str(path))
        assert result.exit_code == 0, result.output
        assert result.stdout.replace("\n", "") == f"written: {path}"
        assert path.read_text().startswith("<!doctype html>")

    def test_html_is_not_written_for_what_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "page.html"
        assert self.run("--seqlen-q", "0", "--html", str(path)).exit_code == 2
        assert not path.exists()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--seqlen-q", "0"), "seqlen_q must be from 1 to 64, got 0"),
            (("--seqlen-q", "2", "--workers", "3"), "workers must be from 1 to 2 (the query rows)"),
            (("--block-size", "-1"), "block_size must be from 1 to 64, got -1"),
            (("--seed", "-1"), "seed must be from 0"),
            (("--varlen", "--paged"), "varlen and paged must be asked for one at a time"),
            (("--varlen", "--workers", "2"), "workers must be left out with varlen, got 2"),
            (("--varlen", "--seqlens", "3,x"), "seqlens must be lengths between commas"),
            (("--varlen", "--seqlens", "3,-1"), "seqlens must be from 0 to 64, got -1"),
            (("--paged", "--causal"), "causal must be left out with paged, got True"),
            (("--paged", "--seqlens", "4,2", "--shared", "2"), "shared must be from 0 to 1"),
            (("--seqlens", "3"), "seqlens must be left out without varlen and paged, got (3,)"),
            (("--shared", "3"), "shared must be left out without varlen and paged, got 3"),
            (("--html", "a.txt"), "html must end in .html or .htm, got 'a.txt'"),
            (("--html", "no/such/a.html"), "html must be in a directory that exists"),
        ],
    )
    def test_refused(self, options: tuple[str, ...], words: str) -> None:
        result = self.run(*options)
        assert_refused(result, words)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from flashpage import cli; "
        "result = CliRunner().invoke(cli.app, ['--help']); assert result.exit_code == 0; "
        "assert not {'torch', 'numba', 'transformers', 'numpy'} & set(sys.modules)"
    )
    source = Path(flashpage.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source)


def test_output_that_the_terminal_can_not_show(model: str) -> None:
    """Random weights give many bytes that are no character; the text still ends."""
    options = ["--model", model, "--load-format", "dummy", "--dtype", "float32"]
    result = subprocess.run(
        [sys.executable, "-m", "flashpage", "generate", "Hi", "--max-tokens", "40", *options],
        cwd=Path(flashpage.__file__).parents[1],
        env={**os.environ, "PYTHONIOENCODING": "latin-1:strict"},
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr
    assert b"?" in result.stdout


def test_module_runs() -> None:
    source = Path(flashpage.__file__).parents[1]
    command = [sys.executable, "-m", "flashpage", "--help"]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0
    for name in ("generate", "chat", "bench", "backends", "roofline", "trace"):
        assert name in result.stdout


class TestSurroundings:
    def test_version(self) -> None:
        result = CliRunner().invoke(cli.app, ["--version"])
        assert result.output.strip() == f"flashpage {flashpage.__version__}"
        assert result.exit_code == 0

    def test_unknown_chat_commands_are_not_sent_to_the_model(self, invoke: Any) -> None:
        result = invoke("chat", "--max-tokens", "4", input="/help\n/exit\n")
        assert "no such command: /help" in result.stderr
        assert "/clear forgets" in result.stderr
        assert result.stdout == ""

    def test_chat_needs_a_template(self, tmp_path: Path) -> None:
        config = tmp_path / "config.json"
        sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16}
        heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
        config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **heads}))
        options = ["chat", "--model", str(config), "--load-format", "dummy"]
        result = CliRunner().invoke(cli.app, options, input="Hi\nHi\n")
        assert result.exit_code == 2
        assert result.stderr.count("has no chat template") == 1

    @pytest.mark.parametrize(
        ("missing", "code"),
        [
            ("typer", "import flashpage.cli"),
            (
                "gguf",  # which dequantises
                "from flashpage.weights.load import load_model; "
                "load_model('{gguf}', dtype='float32')",
            ),
        ],
    )
    def test_missing_packages_are_named(
        self, missing: str, code: str, smollm2_path: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{missing!r}] = None")
        paths = [str(tmp_path), *sys.path]
        result = subprocess.run(
            [sys.executable, "-c", code.format(gguf=smollm2_path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert result.returncode == 1
        assert f"{missing} is not installed: pip install {missing}, or" in result.stderr
        assert "extra 'engine'" in result.stderr


def test_options_of_a_cpu(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert invoke("generate", "Hi", "--max-tokens", "2", "--threads", "1").exit_code == 0
    assert chosen[0] == 1
    assert_refused(invoke("generate", "Hi", "--quantize", "q3"), "quantize must be one of")
    if not forms.why_no_form():
        words = "quantize = 'q8_0' can not be had here: head_dim = 16 is not a multiple of 32"
        assert_refused(invoke("chat", "--quantize", "q8_0"), words)
