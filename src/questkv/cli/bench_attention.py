"""``questkv bench attention``: one decode step of one layer, beside others'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer

from questkv.cli.failures import one_line_failures
from questkv.cli.options import DEFAULTS, SpanPages, Threads, named_by_options, parse_contexts, parse_finite
from questkv.cli.output import STDOUT, print_out, quiet_libraries, token_progress, write_json
from questkv.cli.targets import check_targets
from questkv.config import GROUP_RULES, KV_DTYPES, QuestConfig
from questkv.errors import ConfigError

_PRESETS = ("llama2-7b", "llama3-8b", "smollm2")
_SHAPE = "The layer"


@one_line_failures()
def attention(
    preset: Annotated[
        str, typer.Option(metavar="|".join(_PRESETS), help="A model's shape.", rich_help_panel=_SHAPE)
    ] = "llama2-7b",
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.", rich_help_panel=_SHAPE)] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads.", rich_help_panel=_SHAPE)] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Channels a head.", rich_help_panel=_SHAPE)] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.", rich_help_panel=_SHAPE)] = 1,
    dtype: Annotated[
        str, typer.Option(metavar="bfloat16|float16|float32", help="Of keys and values.", rich_help_panel=_SHAPE)
    ] = "bfloat16",
    context: Annotated[str, typer.Option(metavar="N,...", help="Tokens of every sequence: 4096,32768.")] = "32768",
    budget: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens that a sparse step may read.")] = 2048,
    page_size: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens a page.")] = DEFAULTS.page_size,
    optimism: Annotated[float, typer.Option(help="Weight of a box's width in the score.")] = DEFAULTS.optimism,
    group: Annotated[str, typer.Option(metavar="|".join(GROUP_RULES), help="How heads agree.")] = DEFAULTS.group,
    span_pages: SpanPages = DEFAULTS.span_pages,
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="|".join(KV_DTYPES),
            help="Pages in the model's type, or in eight bits; then those in the model's type are timed beside them.",
        ),
    ] = DEFAULTS.kv_dtype,
    backend: Annotated[str, typer.Option(help="auto, native, triton or reference.")] = "auto",
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, callback=parse_finite, help="Time to spend at each context.")
    ] = 20.0,
    flex: Annotated[bool, typer.Option("--flex", help="Time flex_attention too; compiling it takes long.")] = False,
    threads: Threads = None,
    json: Annotated[str | None, typer.Option(metavar="FILE|-", help="Write the rows as JSON.")] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw times and speedups (needs matplotlib).")
    ] = None,
) -> None:
    """Time one decode step of one layer: ours sparse and dense, and PyTorch's, in turn, after a check that they agree.

    Every step has a fresh query and another layer's cache than the one before. Contents are random, so this measures
    time and not quality. GB/s counts the bytes that a step must read.
    """
    if preset not in _PRESETS:
        raise typer.BadParameter(f"--preset: expected one of {', '.join(_PRESETS)}")
    contexts = parse_contexts(context)
    check_targets({"--json": json, "--plot": plot})
    with named_by_options(token_budget="--budget"):
        config = QuestConfig(
            token_budget=budget,
            page_size=page_size,
            optimism=optimism,
            group=group,
            span_pages=span_pages,
            kv_dtype=kv_dtype,
            backend=backend,
        )
    quiet_libraries()
    import torch

    from questkv.benchmark import report
    from questkv.benchmark.attention import Attention, as_json, summarise
    from questkv.benchmark.shapes import PRESETS
    from questkv.environment import environment

    if plot is not None:
        report.require_figure(plot)
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    try:
        shape = replace(PRESETS[preset], batch=batch, dtype=dtype, **{k: v for k, v in chosen.items() if v is not None})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rows = []
    unit = page_size * max(span_pages, 1)
    with torch.inference_mode():
        for tokens in contexts:
            if tokens % unit or tokens <= budget:
                raise ConfigError(
                    f"[bench] --context: expected a multiple of {unit} above the budget {budget}, got {tokens}"
                )
            with token_progress(f"{tokens:,} tokens", 100) as progress:
                measured = Attention(shape, config, tokens, with_flex=flex)
                rows += measured.measure(seconds, lambda share: progress(round(share * 100)))
                del measured
    summary = list(summarise(rows))
    kind = dtype if kv_dtype == "model" else f"{dtype} and pages in eight bits"
    title = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {kind}, batch {batch}, budget {budget}"
    if span_pages:
        title += f", spans of {span_pages} pages"
    if json != STDOUT:
        print_out(report.attention_table(rows, title), *_lines(summary, config.kv_dtype, dtype))
    if json is not None:
        last = {key: value for key, value in summary[-1].items() if key not in ("context", "best_peer")}
        values = {"rows": as_json(rows), **last, "by_context": summary, "config": config.to_dict()}
        write_json(json, {**values, "shape": vars(shape), "environment": environment(backend)})
    if plot is not None:
        report.plot_attention(rows, plot, title)


def _lines(summary: list[dict[str, Any]], kv_dtype: str, dtype: str) -> Iterator[str]:
    """What the table amounts to, context by context."""
    for line in summary:
        yield (
            f"{line['context']:,} tokens: sparse {line['speedup_over_dense']:.2f}x over our dense, "
            f"{line['speedup_over_best_peer']:.2f}x over {line['best_peer']}; dense reads at "
            f"{line['bandwidth_share']:.0%} of the memory's speed"
        )
        if kv_dtype == "int8":
            yield (
                f"  pages in eight bits: sparse {line['speedup_over_sparse_model']:.2f}x over sparse in {dtype}, "
                f"dense {line['dense_speedup_over_dense_model']:.2f}x over dense in {dtype}, sparse "
                f"{line['speedup_over_dense_model']:.2f}x over dense in {dtype}"
            )
