"""The command line: options and printing of every command; the work is below.

Texts go to stdout, everything about them to stderr, so that output can be piped.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from flashpage import __version__
from flashpage.errors import (
    ArgumentError,
    FlashpageError,
    MissingDependencyError,
    RequestError,
    require,
)
from flashpage.start import collector_paused, let_threads_sleep, seconds_since_start
from flashpage.weights import default_model

try:
    require("typer", "engine")
    require("rich", "engine")
    import typer
except MissingDependencyError as error:
    raise SystemExit(f"flashpage: error: {error}") from None

if TYPE_CHECKING:
    from flashpage.engine.llm import LLM
    from flashpage.engine.outputs import RequestOutput, StreamPiece
    from flashpage.engine.sampling_params import SamplingParams

T = TypeVar("T")

CHAT_HELP = "/clear forgets, /exit ends, Ctrl-C stops a reply"

app = typer.Typer(
    help="FlashAttention without the build, and the paged engine on top of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashpage {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """FlashAttention without the build, and the paged engine on top of it."""


DEFAULT_MODEL = "Default: SmolLM2-135M-Instruct, fetched once (93 MB)."
Model = Annotated[
    str | None,
    typer.Option(help=f"Directory, .gguf file or Hugging Face Hub id. {DEFAULT_MODEL}"),
]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
LoadFormat = Annotated[str, typer.Option(help="auto, safetensors or gguf.")]
Quantize = Annotated[
    str,
    typer.Option(
        help="On a CPU: auto keeps a GGUF file's blocks, none dequantises them; q8_0, q4_0 and "
        "q4_1 also quantise floats."
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads on a CPU; else the physical cores.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:<index>; a GPU if there is one.")
]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
TopK = Annotated[int, typer.Option(help="Draw among the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Draw among the likeliest tokens of this mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this times the best.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 avoids tokens already seen.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text to stop at; may be repeated.")]
LogStats = Annotated[
    float | None,
    typer.Option(help="A line about the engine on stderr, every so many seconds of work."),
]


def main() -> None:
    """Entry point of the `flashpage` command."""
    let_threads_sleep()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks must not end a text half-way.
        sys.stdout.reconfigure(errors="replace")
    app(prog_name="flashpage")


def _report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A mistake of the user is one line on stderr and exit code 2; Ctrl-C is code 130."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except FlashpageError as error:
            typer.echo(f"flashpage: error: {_one_line(error)}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            typer.echo("", err=True)
            raise typer.Exit(130) from None

    return run


@app.command()
@_report_errors
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: Model = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    dtype: DType = "auto",
    device: Device = None,
    load_format: LoadFormat = "auto",
    log_stats: LogStats = None,
    quantize: Quantize = "auto",
    threads: Threads = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
) -> None:
    """Write a text that answers (or, with --raw, continues) the prompt."""
    params = _sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or [],
    )
    text = _from_stdin(lambda: sys.stdin.read()) if prompt == "-" else prompt
    llm = _load(
        model,
        dtype=dtype,
        device=device,
        load_format=load_format,
        quantize=quantize,
        threads=threads,
        seed=seed,
        log_stats=log_stats,
    )
    is_chat = not raw and llm.tokenizer is not None and llm.tokenizer.has_chat_template
    question = [{"role": "user", "content": text}] if is_chat else text
    output = first_at = None
    for piece in llm.stream(question, params):
        if first_at is None:
            first_at = seconds_since_start()
        output = piece.output
        typer.echo(piece.text, nl=False)
    typer.echo("")
    _report(output, first_at)


@app.command()
@_report_errors
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="Instructions before the first turn.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    dtype: DType = "auto",
    device: Device = None,
    load_format: LoadFormat = "auto",
    log_stats: LogStats = None,
    quantize: Quantize = "auto",
    threads: Threads = None,
) -> None:
    """Talk with the model, turn by turn; /clear forgets, /exit ends, Ctrl-C stops a reply."""
    params = _sampling_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or [],
    )
    llm = _load(
        model,
        dtype=dtype,
        device=device,
        load_format=load_format,
        quantize=quantize,
        threads=threads,
        seed=seed,
        log_stats=log_stats,
    )
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise RequestError(
            f"{llm.name} has no chat template: flashpage generate --raw continues a text with it"
        )
    if sys.stderr.isatty():
        typer.echo(f"{llm.name}: {CHAT_HELP}", err=True)
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    for line in _lines():
        if line == "/exit":
            break
        if line == "/clear":
            messages = list(opening)
        elif line.startswith("/"):
            typer.echo(f"no such command: {line} ({CHAT_HELP})", err=True)
        elif line:
            turn = {"role": "user", "content": line}
            try:
                reply = _reply(llm, [*messages, turn], params)
            except FlashpageError as error:
                typer.echo(f"flashpage: error: {_one_line(error)} (/clear starts anew)", err=True)
            else:
                messages += [turn, {"role": "assistant", "content": reply}]


def _refuse_options_of_others(context: typer.Context, workload: str) -> None:
    """The sizes of `batch` are its own, and it is neither repeated nor scaled."""
    others, whose = ("batch", "prompt_len", "new_tokens"), "the workload batch"
    if workload == "batch":
        others, whose = ("rounds", "scale"), "workloads other than batch"
    for name in others:
        # By its name: the class is click's, which typer may carry within itself.
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            option = f"--{name.replace('_', '-')} = {context.params[name]}"
            raise ArgumentError(f"{option} is for {whose}, not for {workload}")


@app.command()
@_report_errors
def bench(
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Argument(
            help="batch (sizes by options), mixed, single, start, sweep, prefix, interference, "
            "pressure or ablation."
        ),
    ] = "batch",
    model: Annotated[
        str | None,
        typer.Option(
            help="Directory, .gguf file, Hugging Face Hub id, or with --load-format dummy a "
            f"config.json or qwen3-0.6b. {DEFAULT_MODEL}"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="batch: requests at the same time.")] = 8,
    prompt_len: Annotated[int, typer.Option(min=1, help="batch: prompt tokens of each.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="batch: tokens for each.")] = 64,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per step; the device's default.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per page; the device's default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Medians of so many.")] = 3,
    scale: Annotated[
        float, typer.Option(min=0.001, max=1, help="Shrink the workloads' sizes.")
    ] = 1.0,
    device: Device = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="Wait for each step before the next.")
    ] = False,
    seed: Seed = 0,
    dtype: DType = "auto",
    load_format: Annotated[
        str, typer.Option(help="auto, safetensors, gguf or dummy (random weights).")
    ] = "auto",
    log_stats: LogStats = None,
    quantize: Quantize = "auto",
    threads: Threads = None,
) -> None:
    """Measure the engine: prints the set-up, a table, and one JSON line last."""
    from flashpage import bench as measuring
    from flashpage import workloads

    known = ("batch", *workloads.WORKLOADS)
    if workload not in known:
        raise ArgumentError(f"WORKLOAD = {workload!r} must be one of {', '.join(known)}")
    _refuse_options_of_others(context, workload)
    engine: dict[str, Any] = {"enforce_eager": enforce_eager, "quantize": quantize}
    if threads is not None:
        engine["threads"] = threads
    if no_overlap:
        engine["overlap"] = False
    if max_num_batched_tokens is not None:
        engine["max_num_batched_tokens"] = max_num_batched_tokens
    if block_size is not None:
        engine["block_size"] = block_size
    if log_stats is not None:
        engine["log_stats"] = log_stats
    common = {"model": model, "seed": seed, "dtype": dtype, "load_format": load_format}
    if workload == "batch":
        setup = measuring.BenchSetup(
            **common,
            batch=batch,
            prompt_len=prompt_len,
            new_tokens=new_tokens,
            device=device,
            engine=engine,
        )
        for name, value in asdict(setup).items():
            typer.echo(f"{name}: {'default' if value is None else value}")
        measuring.print_report(setup, measuring.run_bench(setup))
        return
    progress = lambda line: typer.echo(f"  {line}", err=True)  # noqa: E731
    options = workloads.Options(
        **common, device=device, rounds=rounds, scale=scale, engine=engine, progress=progress
    )
    shown = {"workload": workload, **common, "device": device, "rounds": rounds, "scale": scale}
    for name, value in (shown | engine).items():
        typer.echo(f"{name}: {'default' if value is None else value}")
    rows = workloads.WORKLOADS[workload](options)
    workloads.print_rows(rows)
    machine = measuring.machine()
    typer.echo(json.dumps({"setup": shown | engine, "results": rows, "machine": machine}))


@app.command()
@_report_errors
def backends(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    layout: Annotated[str, typer.Option(help="dense, varlen or paged.")] = "dense",
    num_q_heads: Annotated[int, typer.Option(min=1)] = 8,
    num_kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    causal: Annotated[bool, typer.Option("--causal")] = False,
) -> None:
    """Say which backend would serve an attention call, and why not the others."""
    import torch

    import flashpage

    names = ("float32", "bfloat16", "float16", "float64")
    if dtype not in names:
        raise ArgumentError(f"dtype must be one of {names}, got {dtype!r}")
    report = flashpage.backends(
        device,
        getattr(torch, dtype),
        layout=layout,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        causal=causal,
    )
    typer.echo(str(report))


@app.command()
@_report_errors
def roofline(
    gpu: Annotated[str, typer.Option(help="A device of --list, or this: measured now.")] = "this",
    seqlen: Annotated[
        int | None, typer.Option(help="Tokens of each sequence; --decode: keys. Default: 8192.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    varlen: Annotated[
        str | None, typer.Option(help="Lengths between commas, instead of --seqlen and --batch.")
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="One new token a sequence, K and V in pages.")
    ] = False,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a page, with --decode. Default: 16.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 1,
    kv_heads: Annotated[int | None, typer.Option(help="Default: as many as --heads.")] = None,
    head_dim: Annotated[int, typer.Option(help="1 to 256.")] = 128,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    causal: Annotated[bool, typer.Option("--causal")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="The backward alone.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run it on this machine, shortened to fit.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Instead: measure peak memory as N doubles.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw into FILE.png or FILE.svg.")] = None,
    theme: Annotated[str, typer.Option(help="Of the picture: light or dark.")] = "light",
    list_devices: Annotated[bool, typer.Option("--list", help="Print the known devices.")] = False,
) -> None:
    """Show why tiling is fast: FLOPs, bytes and least time of attention on a device."""
    from flashpage.explain import report

    if list_devices:
        report.print_devices()
        return
    work = report.make_workload(
        seqlen=seqlen,
        varlen=varlen,
        decode=decode,
        batch=batch,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        block_size=block_size,
    )
    if memory and (backward or measure):
        raise ArgumentError(
            "memory must be measured without backward and measure, got "
            + " and ".join(["backward"] * backward + ["measure"] * measure)
        )
    if memory:
        report.report_memory(work, plot=plot, theme=theme)
    else:
        report.report_roofline(
            work, gpu, backward=backward, measured=measure, plot=plot, theme=theme
        )


@app.command()
@_report_errors
def trace(
    seqlen_q: Annotated[int | None, typer.Option(help="Query rows, at most 64.")] = None,
    seqlen_k: Annotated[int | None, typer.Option(help="Keys; default: --seqlen-q.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="At most 64.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Keys of a block; --paged: tokens of a page.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Who share the work.")] = None,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same inputs.")] = None,
    varlen: Annotated[
        bool, typer.Option("--varlen", help="Instead: how cu_seqlens maps tokens to sequences.")
    ] = False,
    paged: Annotated[
        bool, typer.Option("--paged", help="Instead: a decode through its block_table.")
    ] = False,
    seqlens: Annotated[
        str | None, typer.Option(help="--varlen, --paged: lengths between commas.")
    ] = None,
    shared: Annotated[
        int | None, typer.Option(help="--paged: first tokens that all requests share.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to step through instead: FILE.html.")
    ] = None,
) -> None:
    """Walk through small attention step by step; with no option, through two worked examples."""
    from flashpage.explain.trace import report_trace

    report_trace(
        html=html,
        varlen=varlen,
        paged=paged,
        seqlens=seqlens,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        block_size=block_size,
        workers=workers,
        causal=causal or None,
        seed=seed,
        shared=shared,
    )


def _sampling_params(**fields: Any) -> SamplingParams:
    """Checked before the model is loaded: a typing error should not cost seconds."""
    from flashpage.engine.sampling_params import SamplingParams

    return SamplingParams(**fields)


def _load(model: str | None, **options: Any) -> LLM:
    if model is None:
        default_model.check_ahead()
    with collector_paused():
        from flashpage.engine.llm import LLM

        # One conversation at a time: a cache for one sequence is enough.
        return LLM(model, max_num_seqs=1, **options)


def _lines() -> Iterator[str]:
    """What the user types, until the end of the input; with a prompt only on a terminal."""
    interactive = _from_stdin(lambda: sys.stdin.isatty())
    if interactive:
        _enable_line_editing()
    while True:
        try:
            line = _from_stdin(lambda: input("> ") if interactive else sys.stdin.readline())
        except EOFError:
            typer.echo("")
            return
        if not interactive and not line:
            return
        yield line.strip()


def _from_stdin(read: Callable[[], T]) -> T:
    """What `read` gets from stdin."""
    if sys.stdin is None:
        raise RequestError("there is no text to read: stdin is closed")
    try:
        return read()
    except UnicodeDecodeError as error:
        raise RequestError(f"the text on stdin is not valid {error.encoding}: {error}") from error
    except OSError as error:
        raise RequestError(f"stdin can not be read: {error}") from error


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):  # not on Windows
        import readline  # noqa: F401 - input() uses it once it is imported


def _reply(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the model's turn as it comes; Ctrl-C ends it, and what was said stays."""
    stream: Iterator[StreamPiece] = llm.stream(messages, params)
    parts: list[str] = []
    output = None
    try:
        for piece in stream:
            output = piece.output
            parts.append(piece.text)
            typer.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        typer.echo("")
        typer.echo("[stopped]", err=True)
        return "".join(parts)
    typer.echo("")
    _report(output)
    return "".join(parts)


def _report(output: RequestOutput | None, first_at: float | None = None) -> None:
    """One line of numbers on stderr; `first_at`: seconds from the process's start to a token."""
    if output is None:
        return
    metrics = output.metrics
    first, rate = metrics.time_to_first_token, metrics.tokens_per_second
    from_start = "" if first_at is None else f" ({first_at:.2f} s from the start of the process)"
    fields = [
        f"{len(output.prompt_token_ids)} prompt tokens",
        f"{output.num_cached_tokens} cached",
        f"{metrics.num_generated_tokens} new tokens",
        "no token" if first is None else f"first after {first * 1000:.0f} ms{from_start}",
        "- tokens/s" if rate is None else f"{rate:.1f} tokens/s",
        f"{metrics.pages_used} pages used",
    ]
    typer.echo(typer.style(f"[{', '.join(fields)}]", dim=True), err=True)
    if output.outputs[0].error is not None:
        raise FlashpageError(output.outputs[0].error)


def _one_line(error: FlashpageError) -> str:
    return " ".join(str(error).split())
