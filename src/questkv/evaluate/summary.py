"""Rows to figures of merit: one number for each table, method and budget, and the budget that is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from questkv.evaluate.task import Row, Task
from questkv.policies import policy_class


@dataclass(frozen=True)
class Cell:
    """All samples of one table under one method and budget.

    Attributes:
        table: Value of the rows' field `Task.table_by`.
        method: The method's name.
        budget: Tokens; None for a method without a budget.
        score: `Task.mean` of the rows.
        samples: How many rows.
        lowered: Forced tokens of a budget too small for the configured ones (see `Planned`), else empty.
    """

    table: Any
    method: str
    budget: int | None
    score: float
    samples: int
    lowered: tuple[tuple[str, int], ...] = ()


def summarise(task: Task, rows: Sequence[Row]) -> list[Cell]:
    """One cell for each table, method and budget, in the order of their first rows."""
    grouped: dict[tuple[Any, str, int | None], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row[task.table_by], row["method"], row["budget"]), []).append(row)
    return [
        Cell(table, method, budget, task.mean(group), len(group), tuple(group[0].get("lowered", {}).items()))
        for (table, method, budget), group in grouped.items()
    ]


@dataclass(frozen=True)
class Needed:
    """The smallest budget from which on a method keeps the full cache's score (the paper's figure 11 (a)).

    Attributes:
        table: As in `Cell`.
        method: A method with a budget.
        budget: Tokens; None if the largest budget tried isn't enough.
        largest: The largest budget tried.
    """

    table: Any
    method: str
    budget: int | None
    largest: int


def budgets_needed(task: Task, cells: Sequence[Cell]) -> list[Needed]:
    """For each table and method; none where the full cache wasn't run, or got nothing right.

    A budget is enough if it and every larger one that was tried come within `Task.tolerance` of the full cache.
    """
    needed = []
    full = {cell.table: cell.score for cell in cells if not policy_class(cell.method).uses_budget}
    for table, score in full.items():
        if task.higher_is_better and score <= 0:
            continue
        for method in dict.fromkeys(cell.method for cell in cells if cell.budget is not None):
            tried = {c.budget: c.score for c in cells if c.table == table and c.method == method and c.budget}
            enough = None
            for budget in sorted(tried, reverse=True):
                if not _keeps(task, tried[budget], score):
                    break
                enough = budget
            if tried:
                needed.append(Needed(table, method, enough, max(tried)))
    return needed


def _keeps(task: Task, score: float, full: float) -> bool:
    slack = task.tolerance * abs(full)
    return score >= full - slack if task.higher_is_better else score <= full + slack
