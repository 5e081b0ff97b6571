"""``questkv bench prefill``: how fast a prompt is read, beside others."""

from __future__ import annotations

from typing import Annotated

import typer

from questkv.cli import bench_model, options, output
from questkv.cli.document import read_document
from questkv.cli.failures import one_line_failures
from questkv.cli.targets import check_targets
from questkv.config import QuestConfig
from questkv.models import find_model


@one_line_failures()
def prefill(
    model: options.Model = options.MODEL,
    contexts: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Tokens of the prompt: 2048,8192 or 2k,8k.")
    ] = "512,2048,8192",
    rope_factor: options.RopeFactor = 1.0,
    weights: Annotated[
        str,
        typer.Option(
            metavar="TYPE,...",
            callback=bench_model.parse_weights_list,
            help="Light weights (int8,int4) that we read with too, beside the model's own; model for none.",
            rich_help_panel=bench_model.WHAT,
        ),
    ] = "model",
    kv_dtype: options.KvDtype = options.KV_DTYPE,
    page_size: options.PageSize = options.PAGE_SIZE,
    dtype: options.Dtype = "auto",
    chunk: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=128,
            help="Tokens that we take in at once.",
            show_default="as in questkv ask",
            rich_help_panel=bench_model.WHAT,
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Timed readings of each.", rich_help_panel=bench_model.WHAT)
    ] = 3,
    text: bench_model.Text = None,
    memory: bench_model.Memory = True,
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: bench_model.Json = None,
    plot: bench_model.Plot = None,
) -> None:
    """Time the reading of a prompt: ours as `ask` does it, transformers' default, llama.cpp's and vLLM's.

    The last two where they are installed. All read the same text in turn, after a check that they agree on the next
    token. Ours reads in chunks, into pages; transformers in one forward with its own cache (sdpa). Reading a prompt is
    dense, whatever the budget.
    """
    wanted = sorted(set(options.parse_contexts(contexts)))
    check_targets({"--json": json, "--plot": plot}, model=model, inputs={"--text": text})
    with options.named_by_options():
        config = QuestConfig(token_budget=1.0, page_size=page_size, kv_dtype=kv_dtype)
    find_model(model)  # before the slow imports, so that a wrong name fails at once
    read = None if text is None else read_document(text)
    output.quiet_libraries()
    import torch

    from questkv.benchmark import prefill_report, prefill_run, report
    from questkv.hf.prefill import CHUNK_TOKENS

    if plot is not None:
        report.require_figure(plot)
    if threads is not None:
        torch.set_num_threads(threads)
    output.quiet_progress_bars()
    plan = prefill_run.Plan(
        model=model,
        contexts=tuple(wanted),
        config=config,
        weights=tuple(weights.split(",")),
        dtype=dtype,
        rope_factor=rope_factor,
        chunk=chunk or CHUNK_TOKENS,
        rounds=rounds,
        text=read,
        memory=memory,
        trust_remote_code=trust_remote_code,
    )
    results = prefill_run.run(plan, output.token_progress)
    bench_model.publish(results, plan.title, prefill_report.prefill_table, prefill_report.plot_prefill, json, plot)
