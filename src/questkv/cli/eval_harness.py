"""``questkv eval harness``: tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from questkv.cli import output
from questkv.cli.eval_options import RunOptions, shared_options
from questkv.cli.eval_run import check_targets, in_order, load, open_results, publish, share_progress


@shared_options(leave_out=("lengths", "samples", "seed"), methods="full,quest", budgets="128,256,512,1024")
def harness(
    run: RunOptions,
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help="Tasks of lm-evaluation-harness.")],
    include_path: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where task files (.yaml) of your own lie.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples of each task.", show_default="all")
    ] = None,
    decoded: Annotated[
        int, typer.Option(metavar="TOKENS", min=1, help="Last tokens of a prompt that are decoded and not prefilled.")
    ] = 32,
) -> None:
    """Run tasks of lm-evaluation-harness, which questkv's extra `eval` installs.

    It makes the prompts and scores the answers; questkv prefills a prompt but for its last tokens, and decodes these
    and the answer under each method and budget.
    """
    output.quiet_libraries()
    from questkv.evaluate.figures import draw_scores
    from questkv.evaluate.harness import HarnessTasks, as_scored, require_lm_eval, run_harness
    from questkv.evaluate.plan import Plan
    from questkv.evaluate.runner import describe

    require_lm_eval()
    plan = Plan(methods=run.method_names(), budgets=run.budget_counts(), quest=run.quest())
    names = tuple(name.strip() for name in tasks.split(","))
    task = HarnessTasks(names, None if include_path is None else str(include_path), limit, decoded)
    check_targets(run)
    task.check_known()
    loaded = load(run)
    described = describe(task, plan, loaded, run.described_model())
    runs = [(entry.method, entry.budget) for entry in plan.entries()]
    with open_results(run, described, names, runs, task.row_fields) as results:
        with share_progress("harness") as on_progress:
            run_harness(task, loaded, plan, results, on_progress)
        rows = in_order(results.rows, list(names), runs)
    publish(as_scored(task, rows), run, rows, described, results.folder, draw_scores)
