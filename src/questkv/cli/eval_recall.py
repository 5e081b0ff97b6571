"""``questkv eval recall``: how much of the true attention the selected pages hold, and which budget to choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from questkv.cli import options, output
from questkv.cli.document import read_document
from questkv.cli.eval_options import RunOptions, shared_options
from questkv.cli.eval_run import (
    check_targets,
    command_line,
    in_order,
    load,
    open_results,
    print_tables,
    share_progress,
)
from questkv.config import QuestConfig

if TYPE_CHECKING:
    from questkv.evaluate.recall import Recall

T = TypeVar("T")
_WHAT, _CACHE = "What is run", "The cache"
_DEFAULT = options.DEFAULTS


def parse_values(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Read ``0,0.5,1`` as values of one kind.

    Raises:
        typer.BadParameter: One isn't of that kind.
    """
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option}: expected values separated by commas, got {text!r}") from None


@shared_options(
    leave_out=("methods", "seed", "optimism", "group", "page_size", "kv_dtype", "span_pages", "offload"),
    budgets="128,256,512,1024,2048",
    lengths="7000",
    samples=1,
)
def recall(
    document: options.Document,
    run: RunOptions,
    suggest: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Say which budget keeps that share of the attention mass (0.99), by layer, and print it as a "
            "configuration.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    start: Annotated[int, typer.Option(metavar="TOKEN", min=0, help="First token of the text that is used.")] = 0,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Decode steps behind each prompt.")] = 24,
    optimism: Annotated[
        str,
        typer.Option(metavar="A,...", help="Weights of a box's width in the score: 0,0.5,1.", rich_help_panel=_CACHE),
    ] = f"{_DEFAULT.optimism:g}",
    group: Annotated[
        str,
        typer.Option(metavar="RULE,...", help="How heads agree: mean,softmax_mean,per_head.", rich_help_panel=_CACHE),
    ] = _DEFAULT.group,
    page_size: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Tokens a page: 8,16,32.", rich_help_panel=_CACHE)
    ] = f"{_DEFAULT.page_size}",
    kv_dtype: Annotated[
        str,
        typer.Option(metavar="TYPE,...", help="Types of sealed pages: model,int8.", rich_help_panel=_CACHE),
    ] = _DEFAULT.kv_dtype,
    span_pages: Annotated[
        str,
        typer.Option(metavar="C,...", help="Pages a span: 0,4,8; 0 scores every page.", rich_help_panel=_CACHE),
    ] = f"{_DEFAULT.span_pages}",
) -> None:
    """Measure how much of the true attention the selected pages hold (the paper's figures 3 and 4).

    A text is prefilled once and some of its tokens are decoded densely; every combination of budget, optimism, group
    rule, page size, type of pages and span is measured on these steps, beside oracles that know the true attention. The
    first of several values is the one that --suggest is for.
    """
    optimisms = parse_values("--optimism", optimism, float)
    groups = parse_values("--group", group, str)
    page_sizes = parse_values("--page-size", page_size, int)
    kv_dtypes = parse_values("--kv-dtype", kv_dtype, str)
    text = read_document(document)
    output.quiet_libraries()
    from questkv.evaluate.recall import Recall
    from questkv.evaluate.text import Text

    with options.named_by_options(token_budget="--budgets"):
        base = QuestConfig(
            token_budget=1.0, optimism=optimisms[0], group=groups[0], page_size=page_sizes[0], kv_dtype=kv_dtypes[0]
        )
        task = Recall(
            text=Text(document, text),
            lengths=run.length_counts(),
            budgets=run.budget_counts(),
            page_sizes=page_sizes,
            optimisms=optimisms,
            groups=groups,
            kv_dtypes=kv_dtypes,
            span_pages=parse_values("--span-pages", span_pages, int),
            base=base,
            windows=run.samples,
            start=start,
            steps=steps,
            share=0.99 if suggest is None else suggest,
        )
    _evaluate(task, run, suggest is not None)


def _evaluate(task: Recall, run: RunOptions, with_suggestion: bool) -> None:
    """Run it, print tables or the suggestion, and write the files."""
    from questkv.evaluate import recall_report, report
    from questkv.evaluate.recall import describe_recall, run_recall
    from questkv.evaluate.recall_figures import draw_recall
    from questkv.evaluate.runner import list_samples

    check_targets(run)
    loaded = load(run)
    samples = list_samples(task, loaded)
    described = describe_recall(task, loaded, run.described_model())
    names = [sample.id for sample in samples]
    with open_results(run, described, names, task.runs(), task.row_fields) as results:
        with share_progress("recall") as on_progress:
            run_recall(task, loaded, samples, results, on_progress)
        rows = in_order(results.rows, names, task.runs())
    tables = [*recall_report.recall_tables(task, rows), *recall_report.needed_tables(task, rows)]
    if run.json != output.STDOUT:
        print_tables(
            recall_report.needed_tables(task, rows) if with_suggestion else recall_report.recall_tables(task, rows)
        )
        output.note(f"{len(rows)} rows in {results.folder}")
    if run.json is not None:
        output.write_json(run.json, recall_report.recall_json(task, rows, described))
    if run.markdown is not None:
        output.write_text(run.markdown, report.page("recall", tables, described, command_line()), "--markdown")
    if run.plot is not None:
        draw_recall(task, rows, run.plot)
