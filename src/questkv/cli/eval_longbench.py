"""``questkv eval longbench``: questions about long texts and summaries of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from questkv.cli.eval_options import RunOptions, shared_options
from questkv.cli.eval_run import evaluate
from questkv.cli.output import quiet_libraries

_PAPER = "qasper,hotpotqa,multifieldqa_en,triviaqa,narrativeqa,gov_report"


@shared_options(
    leave_out=("lengths", "seed"),
    methods="full,quest,streaming_llm,h2o,tova,snapkv",
    budgets="512,1024,2048,4096",
    samples=20,
)
def longbench(
    run: RunOptions,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder with NAME.jsonl for each data set, in LongBench's format. Default: the hub's archive, which "
            "is downloaded once.",
            show_default=False,
        ),
    ] = None,
    datasets: Annotated[str, typer.Option(metavar="NAME,...", help="Which data sets; trec is there too.")] = _PAPER,
    max_length: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, help="Longest prompt; longer contexts lose their middle.")
    ] = 7500,
) -> None:
    """Answer LongBench's questions (the paper's figure 7); --samples is the records of each data set.

    A record's context is prefilled, what follows it decoded token by token. F1, ROUGE-L or classification, in per cent.
    """
    names = tuple(name.strip() for name in datasets.split(","))
    quiet_libraries()
    from questkv.evaluate.figures import draw_scores
    from questkv.evaluate.longbench import LongBench, check_names
    from questkv.evaluate.longbench_data import read_folder, read_hub

    check_names(names)
    records = read_hub(names) if data is None else read_folder(data, names)
    evaluate(LongBench(data=records, length=max_length, count=run.samples), run, draw_scores)
