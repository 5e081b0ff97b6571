"""From a task and its options to finished rows, a table and files: what every ``questkv eval`` command does."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn
from rich.text import Text

from questkv.cli import options, output
from questkv.cli.eval_options import RunOptions
from questkv.cli.shown import shown, shown_line
from questkv.models import find_model

if TYPE_CHECKING:
    from questkv.evaluate.figures import Draw
    from questkv.evaluate.report import Table
    from questkv.evaluate.results import Results
    from questkv.evaluate.task import Row, Task
    from questkv.models import LoadedModel

RESULTS = Path("questkv-eval")
# Time left is told from the whole run's pace: prefill and decoding take turns.
_PACE_S = 24 * 3600


def evaluate(task: Task, run: RunOptions, draw: Draw) -> None:
    """Run a task as its options ask, print its tables and write its files.

    Importing `questkv.evaluate` imports torch: a command calls `output.quiet_libraries` before it makes its task.

    Args:
        task: The task with its settings.
        run: The shared options.
        draw: The figure of ``--plot``.
    """
    from questkv.evaluate import runner
    from questkv.evaluate.plan import Plan

    plan = Plan(methods=run.method_names(), budgets=run.budget_counts(), quest=run.quest())
    check_targets(run)
    loaded = load(run)
    samples = runner.list_samples(task, loaded)
    described = runner.describe(task, plan, loaded, run.described_model())
    names, runs = [sample.id for sample in samples], [(entry.method, entry.budget) for entry in plan.entries()]
    with open_results(run, described, names, runs, task.row_fields) as results:
        with share_progress(task.name) as on_progress:
            runner.run(task, loaded, plan, samples, results, on_progress)
        rows = in_order(results.rows, names, runs)
    publish(task, run, rows, described, results.folder, draw)


def check_targets(run: RunOptions) -> None:
    """Refuse what can't be written or drawn, before a model is loaded.

    Raises:
        QuestKVError: The first of them.
    """
    from questkv.evaluate.figures import require_figure
    from questkv.evaluate.results import check_folder

    if run.plot is not None:
        require_figure(run.plot)
    if run.output is not None:
        check_folder(run.output)


@contextlib.contextmanager
def open_results(
    run: RunOptions,
    described: Mapping[str, Any],
    samples: Sequence[str],
    runs: Sequence[tuple[str, int | None]],
    fields: Callable[[int | None], tuple[str, ...]],
) -> Iterator[Results]:
    """The run's results folder, whose rows are this run's; a Ctrl-C inside says how to go on.

    Args:
        run: The shared options.
        described: ``run.json``.
        samples: Names of the samples.
        runs: (method, budget) of each row of a sample.
        fields: What a row of a budget holds: `Task.row_fields`.
    """
    from questkv.evaluate.results import Results, check_rows, folder_name

    folder = run.output if run.output is not None else RESULTS / folder_name(described)
    with Results.open(folder, described, resume=run.resume) as results:
        check_rows(results.rows, folder, samples, runs, fields)
        try:
            yield results
        except KeyboardInterrupt:
            output.note(f"{len(results.rows)} finished rows are in {folder}; continue with --resume")
            raise


def publish(
    task: Task, run: RunOptions, rows: Sequence[Row], described: Mapping[str, Any], folder: Path, draw: Draw
) -> None:
    """Print the tables of finished rows and write the files that were asked for."""
    from questkv.evaluate import report

    if run.json != output.STDOUT:
        print_tables(report.tables(task, rows))
        output.note(f"{len(rows)} rows in {folder}")
    if run.json is not None:
        output.write_json(run.json, report.as_json(task, rows, described))
    if run.markdown is not None:
        output.write_text(run.markdown, report.markdown(task, rows, described, command_line()), "--markdown")
    if run.plot is not None:
        draw(task, rows, run.plot)


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables with their titles and notes."""
    from questkv.evaluate.report import screen

    for table in tables:
        output.print_out(Text(shown(table.title), style="italic"), screen(table), *table.notes)


def load(run: RunOptions) -> LoadedModel:
    """The model with the paged attention, on the threads that were asked for."""
    options.check_offload(run.quest())
    found = find_model(run.model)  # before the slow imports, so that a wrong name fails at once
    with output.busy(f"Loading {run.model}") if isinstance(found, Path) else contextlib.nullcontext():
        import torch

        from questkv import hf
        from questkv.models import load_model

        output.quiet_progress_bars()
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        loaded = load_model(
            run.model,
            dtype=run.dtype,
            rope_factor=run.rope_factor,
            attention="questkv",
            weights=run.weights,
            trust_remote_code=run.trust_remote_code,
        )
        hf.make_linear_fast(loaded.model)
        return loaded


def in_order(rows: list[Row], samples: list[str], runs: list[tuple[str, int | None]]) -> list[Row]:
    """Rows in the order of an undisturbed run, whatever order they were finished in."""
    place = {name: index for index, name in enumerate(samples)}
    return sorted(rows, key=lambda row: (place[row["sample"]], runs.index((row["method"], row["budget"]))))


@contextlib.contextmanager
def share_progress(what: str) -> Iterator[Callable[[float, str], None]]:
    """Draw a bar with the time left on a terminal; gives the function that moves it to a share in [0, 1]."""
    console = output.screen()
    if not console.is_terminal:
        yield lambda share, now: None
        return
    columns = (output.description_column(), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, speed_estimate_period=_PACE_S) as progress:
        bar = progress.add_task(shown_line(what), total=1.0)
        yield lambda share, now: progress.update(bar, completed=share, description=shown_line(now))


def command_line() -> str:
    """What the user typed, without what doesn't change the result."""
    return shlex.join(["questkv", *(word for word in sys.argv[1:] if word != "--resume")])
