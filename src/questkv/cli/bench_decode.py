"""``questkv bench decode``: whole tokens of a real model, beside others'."""

from __future__ import annotations

from typing import Annotated

import typer

from questkv.cli import bench_model, options, output
from questkv.cli.compiled import keep_compiled
from questkv.cli.document import read_document
from questkv.cli.failures import one_line_failures
from questkv.cli.targets import check_targets
from questkv.config import QuestConfig
from questkv.models import find_model


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
            callback=bench_model.parse_weights_list,
            help="Light weights (int8,int4) that our steps are timed with too, beside the model's own; model for none.",
            show_default="int4 where torchao is installed",
            rich_help_panel=bench_model.WHAT,
        ),
    ] = None,
    kv_dtype: options.KvDtype = options.KV_DTYPE,
    span_pages: options.SpanPages = options.SPAN_PAGES,
    page_size: options.PageSize = options.PAGE_SIZE,
    dtype: options.Dtype = "auto",
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Timed tokens of each.", rich_help_panel=bench_model.WHAT)
    ] = 16,
    text: bench_model.Text = None,
    block: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            min=64,
            help="Longest prefill; a longer context is made of such blocks.",
            rich_help_panel=bench_model.WHAT,
        ),
    ] = 2048,
    memory: bench_model.Memory = True,
    compile: options.Compile = False,
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: bench_model.Json = None,
    plot: bench_model.Plot = None,
) -> None:
    """Time whole tokens behind long contexts: ours sparse and dense, transformers', llama.cpp's and vLLM's.

    The last two where they are installed. All take a step in turn, each time with another token, after a check that
    they agree. A context longer than --block is made of blocks that were prefilled each on its own, at its own
    positions: the keys and values are the model's, but no token has seen the blocks before its own. So this measures
    time and not quality.
    """
    wanted = sorted(set(options.parse_contexts(contexts)))
    check_targets({"--json": json, "--plot": plot}, model=model, inputs={"--text": text})
    with options.named_by_options(token_budget="--budget"):
        config = QuestConfig(token_budget=budget, page_size=page_size, kv_dtype=kv_dtype, span_pages=span_pages)
    find_model(model)  # before the slow imports, so that a wrong name fails at once
    read = None if text is None else read_document(text)
    output.quiet_libraries()
    if compile:
        keep_compiled()
    import torch

    from questkv.benchmark import decode_report, decode_run, report

    if plot is not None:
        report.require_figure(plot)
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
        trust_remote_code=trust_remote_code,
        compiled=compile,
    )
    results = decode_run.run(plan, output.token_progress)
    bench_model.publish(results, plan.title, decode_report.decode_table, decode_report.plot_decode, json, plot)
