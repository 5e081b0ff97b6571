"""``questkv bench decode``: whole tokens of a real model, beside others'."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from questkv.cli import options, output
from questkv.cli.document import read_document
from questkv.cli.failures import one_line_failures
from questkv.cli.opening import keep_compiled
from questkv.config import QuestConfig
from questkv.models import WEIGHTS, find_model

if TYPE_CHECKING:
    from questkv.benchmark.decode_run import Results

_WHAT = "What is timed"


def _parse_weights(text: str | None) -> str | None:
    """Accept a list of types that weights can be brought to."""
    if text is not None and not set(text.split(",")) <= set(WEIGHTS):
        raise typer.BadParameter(f"expected some of {', '.join(WEIGHTS)}")
    return text


@one_line_failures()
def decode(
    model: options.Model = options.MODEL,
    contexts: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Tokens before the step: 2048,32768 or 2k,32k.")
    ] = "2048,8192",
    budget: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens that a sparse step may read.")] = 1024,
    rope_factor: options.RopeFactor = 1.0,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE,...",
            callback=_parse_weights,
            help="Light weights (int8,int4) that our steps are timed with too, beside the model's own; model for none.",
            show_default="int4 where torchao is installed",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    kv_dtype: options.KvDtype = options.KV_DTYPE,
    span_pages: options.SpanPages = options.SPAN_PAGES,
    page_size: options.PageSize = options.PAGE_SIZE,
    dtype: options.Dtype = "auto",
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Timed tokens of each.", rich_help_panel=_WHAT)] = 16,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What the model reads.",
            show_default="Python's own documentation",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    block: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            min=64,
            help="Longest prefill; a longer context is made of such blocks.",
            rich_help_panel=_WHAT,
        ),
    ] = 2048,
    memory: Annotated[
        bool,
        typer.Option("--memory/--no-memory", help="Measure each one's peak memory in a process of its own (Linux)."),
    ] = True,
    compile: options.Compile = False,
    threads: options.Threads = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write the rows as JSON.")] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw times and speedups (needs matplotlib).")
    ] = None,
) -> None:
    """Time whole tokens behind long contexts: ours sparse and dense, transformers', and llama.cpp's where installed.

    All take a step in turn, each time with another token, after a check that they agree. A context longer than --block
    is made of blocks that were prefilled each on its own, at its own positions: the keys and values are the model's,
    but no token has seen the blocks before its own. So this measures time and not quality.
    """
    wanted = sorted(set(options.parse_contexts(contexts)))
    output.check_writable(json)
    output.check_writable(plot, "--plot")
    config = QuestConfig(token_budget=budget, page_size=page_size, kv_dtype=kv_dtype, span_pages=span_pages)
    find_model(model)  # before the slow imports, so that a wrong name fails at once
    read = None if text is None else read_document(text)
    output.quiet_libraries()
    if compile:
        keep_compiled()
    import torch

    from questkv.benchmark import decode_run, report

    if plot is not None:
        report.require_matplotlib()
    if threads is not None:
        torch.set_num_threads(threads)
    output.quiet_progress_bars()
    plan = decode_run.Plan(
        model=model,
        contexts=tuple(wanted),
        config=config,
        weights=None if weights is None else tuple(weights.split(",")),
        dtype=dtype,
        rope_factor=rope_factor,
        steps=steps,
        block=block,
        text=read,
        memory=memory,
        compiled=compile,
    )
    results = decode_run.run(plan, output.token_progress)
    _publish(results, plan.title, json, plot)


def _publish(results: Results, title: str, json: str | None, plot: str | None) -> None:
    from rich.console import Console

    from questkv.benchmark import decode_report

    if json != output.STDOUT:
        console = Console()
        console.print(decode_report.decode_table(results.rows, title))
        for line in results.notes:
            console.print(line, highlight=False)
    if json is not None:
        output.write_json(json, results.as_json())
    if plot is not None:
        decode_report.plot_decode(results.rows, str(Path(plot)), title)
