"""What the benchmarks of whole models share on the command line: options, and what is done with results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from questkv.cli import output
from questkv.models import WEIGHTS

if TYPE_CHECKING:
    from questkv.benchmark.model_run import Results

WHAT = "What is timed"


def parse_weights_list(text: str | None) -> str | None:
    """Accept a list of types that weights can be brought to."""
    if text is not None and not set(text.split(",")) <= set(WEIGHTS):
        raise typer.BadParameter(f"expected some of {', '.join(WEIGHTS)}")
    return text


Text = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="What the model reads.",
        show_default="Python's own documentation",
        rich_help_panel=WHAT,
    ),
]
Memory = Annotated[
    bool,
    typer.Option("--memory/--no-memory", help="Measure each one's peak memory in a process of its own (Linux)."),
]
Json = Annotated[str | None, typer.Option(metavar="FILE|-", help="Write the rows as JSON.")]
Plot = Annotated[str | None, typer.Option(metavar="FILE", help="Draw times and speedups (needs matplotlib).")]


def publish(
    results: Results[Any],
    title: str,
    table: Callable[..., Any],
    draw: Callable[..., None],
    json: str | None,
    plot: str | None,
) -> None:
    """Print a table and the notes, write JSON, draw a figure; with ``--json -`` JSON is all that is printed.

    Args:
        results: What a run found.
        title: Of table and figure.
        table: Makes the table of rows and title.
        draw: Draws the figure of rows to a path, with a title.
        json: ``--json``.
        plot: ``--plot``.
    """
    if json != output.STDOUT:
        output.print_out(table(results.rows, title), *results.notes)
    if json is not None:
        output.write_json(json, results.as_json())
    if plot is not None:
        draw(results.rows, str(Path(plot)), title)
