"""Figures of an evaluation in the paper's form; matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from questkv.errors import ConfigError, MissingPackageError
from questkv.evaluate.summary import Cell, Needed, budgets_needed, summarise
from questkv.evaluate.task import Row, Task
from questkv.files import write_whole
from questkv.policies import METHODS, policy_class

Draw = Callable[[Task, Sequence[Row], str], None]
"""Draws the rows of a task into a file."""

FORMATS = (".png", ".svg")
# A perplexity so far is drawn from this part of the tokens on: one rare word at the start would flatten all the rest.
_SETTLED = 10


def require_figure(path: str) -> None:
    """Fail before the evaluation, not after it.

    Raises:
        ConfigError: The file's name ends in another format.
        MissingPackageError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"[eval] --plot: expected a file that ends in {' or '.join(FORMATS)}, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("[eval] --plot: expected matplotlib; install it: pip install matplotlib")


@contextmanager
def figure(path: str, panels: int, *, columns: int = 3, size: tuple[float, float] = (4.6, 3.6)) -> Iterator[list[Any]]:
    """Axes for a number of panels; what was drawn on them is saved at the end, as PNG or SVG by the file's name.

    Raises:
        OutputError: The file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    # the same rows give the same file
    matplotlib.rcParams["svg.hashsalt"] = "questkv"
    from matplotlib import pyplot

    columns = min(columns, panels)
    lines = math.ceil(panels / columns)
    drawn, grid = pyplot.subplots(
        lines, columns, figsize=(size[0] * columns, size[1] * lines), layout="constrained", squeeze=False
    )
    try:
        axes = list(grid.flat)
        for unused in axes[panels:]:
            unused.set_axis_off()
        yield axes[:panels]
        kind = Path(path).suffix[1:].lower()
        picture = io.BytesIO()
        drawn.savefig(picture, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        write_whole(path, picture.getvalue(), "--plot")
    finally:
        pyplot.close(drawn)


def draw_scores(task: Task, rows: Sequence[Row], path: str) -> None:
    """Score over budget, a panel a table (figure 7), and the budget needed for the full score (figure 11 (a))."""
    cells = summarise(task, rows)
    needed = budgets_needed(task, cells)
    by_table = list(dict.fromkeys(cell.table for cell in cells))
    with figure(path, len(by_table) + bool(needed)) as axes:
        for panel, table in zip(axes, by_table, strict=False):
            _scores(panel, task, [cell for cell in cells if cell.table == table])
            panel.set_title(_name(task, table), fontsize=10)
        lines, names = axes[0].get_legend_handles_labels()
        # outside: inside it would lie on points of a panel, and it belongs to all of them
        axes[0].figure.legend(lines, names, loc="outside lower center", ncols=len(names), fontsize=8)
        if needed:
            _needed(axes[-1], task, needed)


def draw_perplexity(task: Task, rows: Sequence[Row], path: str) -> None:
    """Perplexity over the position, each method at the middle one of the budgets (figure 6), and over the budget."""
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    cells = summarise(task, rows)
    with figure(path, 2 * len(lengths), columns=2, size=(5.4, 3.8)) as axes:
        for index, length in enumerate(lengths):
            left, right = axes[2 * index : 2 * index + 2]
            here = [row for row in rows if row["length"] == length]
            for method in _methods(row["method"] for row in here):
                budgets = sorted({row["budget"] or 0 for row in here if row["method"] == method})
                budget = budgets[len(budgets) // 2]
                own = [row["nll"] for row in here if row["method"] == method and (row["budget"] or 0) == budget]
                name = f"{method}, {budget}" if budget else method
                tokens, values = running_perplexity(own)
                settled = len(tokens) // _SETTLED
                left.plot(tokens[settled:], values[settled:], label=name, **_style(method, marker=False))
            left.set(xlabel=f"tokens decoded behind {length:,}", ylabel="perplexity so far")
            left.legend(fontsize=8)
            left.grid(alpha=0.3)
            _scores(right, task, [cell for cell in cells if cell.table == length])
            right.legend(fontsize=8)


def running_perplexity(nll: Sequence[Sequence[float]]) -> tuple[list[int], list[float]]:
    """Decoded tokens 1, 2, ..., and the perplexity of all tokens up to each, over several samples."""
    tokens, total, values = [], 0.0, []
    for step, column in enumerate(zip(*nll, strict=True), start=1):
        total += sum(column)
        tokens.append(step)
        values.append(math.exp(total / (step * len(nll))))
    return tokens, values


def draw_needle(task: Task, rows: Sequence[Row], path: str) -> None:
    """A heat map of depth over length for each method and budget."""
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    runs = list(dict.fromkeys((row["method"], row["budget"]) for row in rows))
    score = {(row["method"], row["budget"], row["length"], row["depth"]): row["score"] for row in rows}
    with figure(path, len(runs), size=(1.6 + 0.45 * len(lengths), 1.2 + 0.28 * len(depths))) as axes:
        for panel, run in zip(axes, runs, strict=True):
            grid = [[score.get((*run, length, depth), math.nan) for length in lengths] for depth in depths]
            panel.pcolormesh(grid, cmap="RdYlBu", vmin=0, vmax=1, edgecolors="white", linewidth=1)
            panel.set_xticks([i + 0.5 for i in range(len(lengths))], [f"{length:,}" for length in lengths], fontsize=7)
            panel.set_yticks([i + 0.5 for i in range(len(depths))], [f"{depth:.0%}" for depth in depths], fontsize=7)
            panel.invert_yaxis()
            found = task.mean([row for row in rows if (row["method"], row["budget"]) == run])
            panel.set_title(f"{run[0]}{f' {run[1]}' if run[1] else ''}: {task.show(found)}", fontsize=9)
            panel.set_xlabel("tokens", fontsize=8)
            panel.set_ylabel("depth", fontsize=8)


def _scores(panel: Any, task: Task, cells: Sequence[Cell]) -> None:
    """Lines over the budget; a method without one is a level line."""
    for method in _methods(cell.method for cell in cells):
        line = sorted((cell.budget or 0, cell.score) for cell in cells if cell.method == method)
        if not policy_class(method).uses_budget:
            panel.axhline(line[0][1], label=method, **_style(method, marker=False))
        else:
            panel.plot(*zip(*line, strict=True), label=method, **_style(method))
    budgets = sorted({cell.budget for cell in cells if cell.budget})
    if budgets:
        panel.set_xscale("log", base=2)
        panel.set_xticks(budgets, [f"{budget}" for budget in budgets])
        panel.minorticks_off()
    panel.set(xlabel="token budget", ylabel=task.metric)
    if task.show(0.5).endswith("%"):
        panel.set_ylim(-0.05, 1.05)
        panel.yaxis.set_major_formatter(lambda score, _: task.show(score))
    panel.grid(alpha=0.3)


def _needed(panel: Any, task: Task, needed: Sequence[Needed]) -> None:
    """Bars in groups of one table; a hatched one says that even the largest budget tried was too small."""
    by_table = list(dict.fromkeys(need.table for need in needed))
    methods = _methods(need.method for need in needed)
    width = 0.8 / len(methods)
    for offset, method in enumerate(methods):
        for group, table in enumerate(by_table):
            for need in (n for n in needed if n.table == table and n.method == method):
                place = group + (offset - (len(methods) - 1) / 2) * width
                height, hatch = (need.budget, None) if need.budget else (need.largest, "//")
                color = _style(method)["color"]
                panel.bar(place, height, width, color=color, alpha=1.0 if need.budget else 0.35, hatch=hatch)
                text = f"{height}" if need.budget else f">{height}"
                panel.text(place, height, text, ha="center", va="bottom", fontsize=7)
    panel.set_yscale("log", base=2)
    ticks = sorted({need.budget or need.largest for need in needed})
    panel.set_yticks(ticks, [f"{tick}" for tick in ticks])
    panel.set_ylim(min(ticks) / 2, max(ticks) * 1.5)
    panel.minorticks_off()
    panel.set_xticks(range(len(by_table)), [_name(task, table) for table in by_table], fontsize=8)
    panel.set_title("budget needed for the full score (hatched: not reached)", fontsize=9)
    panel.set_ylabel("token budget")


def _name(task: Task, table: Any) -> str:
    return f"{table:,} tokens" if task.table_by == "length" else f"{table}"


def _methods(names: Iterator[str]) -> list[str]:
    """Names in one order, so that a method has one colour in every figure."""
    present = set(names)
    return [method for method in METHODS if method in present]


def _style(method: str, *, marker: bool = True) -> dict[str, Any]:
    """A method's colour and marker, the same in every figure; lines that lie on one another show through."""
    if method == "full":
        return {"color": "black", "linestyle": "--"}
    place = METHODS.index(method)
    style = {"color": f"C{place - 1}", "alpha": 0.8}
    return {**style, "marker": "osD^vPX"[place % 7], "markersize": 5} if marker else style
