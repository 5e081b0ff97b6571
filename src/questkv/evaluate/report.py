"""Tables of an evaluation, as Markdown and for the terminal: methods down, budgets across (the paper's table 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table as ScreenTable

from questkv.evaluate.summary import Cell, Needed, budgets_needed, summarise
from questkv.evaluate.task import Row, Task

ALL = "all"
_MARK = "\u2020"


@dataclass(frozen=True)
class Table:
    """One table, ready to be printed.

    Attributes:
        title: What it shows, with the number of samples.
        header: ``method`` and the budgets; ``all`` for the full cache.
        lines: A method's name and its scores, "" where there is none.
        notes: Sentences that belong under it.
    """

    title: str
    header: list[str]
    lines: list[list[str]]
    notes: list[str]


def tables(task: Task, rows: Sequence[Row]) -> list[Table]:
    """One table for each value of the rows' field `Task.table_by`."""
    cells = summarise(task, rows)
    needed = budgets_needed(task, cells)
    made = []
    for value in dict.fromkeys(cell.table for cell in cells):
        here = [cell for cell in cells if cell.table == value]
        budgets = sorted({cell.budget for cell in here if cell.budget is not None})
        columns: list[int | None] = [*budgets, *([None] if any(cell.budget is None for cell in here) else [])]
        lines = []
        for method in dict.fromkeys(cell.method for cell in here):
            scores = {cell.budget: _shown(task, cell) for cell in here if cell.method == method}
            lines.append([method, *(scores.get(budget, "") for budget in columns)])
        header = ["method", *(ALL if budget is None else f"{budget}" for budget in columns)]
        notes = [*_lowered(here), *_enough(task, [n for n in needed if n.table == value])]
        made.append(Table(_title(task, value, here), header, lines, notes))
    return made


def markdown(task: Task, rows: Sequence[Row], run: Mapping[str, Any], command: str | None = None) -> str:
    """A page with every table, what it was measured with, and the command that measured it."""
    return page(task.name, tables(task, rows), run, command)


def page(name: str, made: Iterable[Table], run: Mapping[str, Any], command: str | None = None) -> str:
    """Tables as a page of Markdown."""
    parts = [f"# {name}", *([f"`{command}`"] if command else [])]
    for table in made:
        head = "| " + " | ".join(table.header) + " |"
        rule = "|---|" + "--:|" * (len(table.header) - 1)
        body = ["| " + " | ".join(line) + " |" for line in table.lines]
        parts += [f"## {table.title}", "\n".join([head, rule, *body]), *table.notes]
    return "\n\n".join([*parts, _measured_with(run)]) + "\n"


def screen(table: Table) -> ScreenTable:
    """A table for the terminal, without its title and notes."""
    drawn = ScreenTable()
    for index, heading in enumerate(table.header):
        drawn.add_column(heading, justify="right" if index else "left")
    for line in table.lines:
        drawn.add_row(*line)
    return drawn


def as_json(task: Task, rows: Sequence[Row], run: Mapping[str, Any]) -> dict[str, Any]:
    """The run, its rows, and what the tables show of them."""
    cells = summarise(task, rows)
    return {
        "run": dict(run),
        "rows": list(rows),
        "summary": [{**asdict(cell), "lowered": dict(cell.lowered)} for cell in cells],
        "budgets_needed": [asdict(needed) for needed in budgets_needed(task, cells)],
    }


def _shown(task: Task, cell: Cell) -> str:
    return task.show(cell.score) + (_MARK if cell.lowered else "")


def _title(task: Task, value: Any, cells: Sequence[Cell]) -> str:
    samples = {cell.samples for cell in cells}
    many = f"{min(samples)}" if len(samples) == 1 else f"{min(samples)} to {max(samples)}"
    what = f"{value:,} tokens" if task.table_by == "length" else f"{value}"
    better = "" if task.higher_is_better else ", lower is better"
    return f"{what}: {task.metric}{better} ({many} sample{'' if many == '1' else 's'})"


def _lowered(cells: Sequence[Cell]) -> list[str]:
    """What the mark means, once for each budget."""
    by_budget: dict[int, tuple[dict[str, int], list[str]]] = {}
    for cell in cells:
        if cell.lowered and cell.budget is not None:
            by_budget.setdefault(cell.budget, (dict(cell.lowered), []))[1].append(cell.method)
    return [
        f"{_MARK} At {budget}, {' and '.join(methods)} ran with sink_tokens={forced['sink_tokens']} and "
        f"recent_tokens={forced['recent_tokens']}: the budget has no room for more."
        for budget, (forced, methods) in by_budget.items()
    ]


def _enough(task: Task, needed: Sequence[Needed]) -> list[str]:
    if not needed:
        return []
    found = ", ".join(
        f"{need.method} {need.budget}" if need.budget else f"{need.method} more than {need.largest}" for need in needed
    )
    within = (
        f"within {task.tolerance:.0%} of the full cache's score" if task.tolerance else "with the full cache's score"
    )
    return [f"Smallest budget {within}: {found}."]


def _measured_with(run: Mapping[str, Any]) -> str:
    """One paragraph: model, method, versions."""
    model, quest, machine = run["model"], run["quest"], run["environment"]
    stretched = f", rope factor {model['rope_factor']:g}" if model["rope_factor"] != 1 else ""
    light = f" with {model['weights']} weights" if "weights" in model else ""
    settings = ", ".join(f"{name}={_plain(value)}" for name, value in run["settings"].items())
    method = ", ".join(f"{name}={_plain(value)}" for name, value in quest.items())
    return (
        f"{model['name']} in {model['dtype']}{light}{stretched}; {settings}. Quest: {method}. "
        f"questkv {machine['questkv']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"backend {machine['backend']}, {machine['cpu']}, {machine['threads']} threads."
    )


def _plain(value: Any) -> str:
    """A setting's value in a sentence; of a text, its name."""
    if isinstance(value, Mapping):
        return str(value.get("name", ""))
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"
