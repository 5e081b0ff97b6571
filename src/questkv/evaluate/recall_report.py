"""Tables of `recall`: what each rule keeps with each budget, and what each layer needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from questkv.evaluate.recall import Recall, overall
from questkv.evaluate.recall_suggestion import Suggestion, suggest
from questkv.evaluate.report import Table
from questkv.evaluate.task import Row

_MEASURES = {
    "score": ("share of attention mass kept", "{:.4f}"),
    "top10": ("share of the 10 most attended tokens kept", "{:.4f}"),
    "error": ("relative error of a layer's output, lower is better", "{:.4f}"),
    "worst_head": ("share of attention mass kept in the head that keeps least", "{:.3f}"),
    "share_read": ("bytes read, boxes included, as a share of dense attention's", "{:.3f}"),
}


def recall_tables(recall: Recall, rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each length and measure: rules down, budgets across.

    Args:
        recall: What was measured.
        rows: Of `run_recall`.
    """
    budgets = sorted(recall.budgets)
    for length in recall.lengths:
        here = [row for row in overall(rows) if row["length"] == length and row["budget"] is not None]
        for measure, (title, form) in _MEASURES.items():
            lines = []
            for rule in dict.fromkeys(row["method"] for row in here):
                by_budget = {row["budget"]: row for row in here if row["method"] == rule}
                lines.append([rule, *(form.format(by_budget[budget][measure]) for budget in budgets)])
            header = ["rule", *(f"{budget}" for budget in budgets)]
            notes = _per_head_note(here) if measure == "share_read" else []
            yield Table(f"{length:,} tokens: {title}", header, lines, notes)


def needed_tables(recall: Recall, rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each length: the budget that keeps `Recall.share` of the mass, by layer, and the suggested line."""
    for suggestion in suggest(rows, recall.base):
        needed = [row for row in rows if row["length"] == suggestion.length and row["budget"] is None]
        rules = list(dict.fromkeys(row["method"] for row in needed))
        lines = []
        for layer in suggestion.layers:
            worst = [max(row["layers"][str(layer)] for row in needed if row["method"] == rule) for rule in rules]
            dense = "" if layer in suggestion.sparse else " (dense)"
            lines.append([f"layer {layer}{dense}", *map(str, worst)])
        means = [max(row["needed"] for row in needed if row["method"] == rule) for rule in rules]
        lines.append(["mean over layers", *map(str, means)])
        title = f"{suggestion.length:,} tokens: budget that keeps {suggestion.share:.4g} of the attention mass"
        yield Table(title, ["", *rules], lines, suggestion_lines(suggestion))


def suggestion_lines(suggestion: Suggestion) -> list[str]:
    """The configuration, and what it promises on the measured text."""
    return [
        suggestion.line,
        f"keeps {suggestion.share:.4g} of the attention mass in the mean over the layers that aren't dense; every one "
        f"of them does with {suggestion.every:,} of {suggestion.length:,} tokens.",
    ]


def recall_json(recall: Recall, rows: Sequence[Row], run: Mapping[str, Any]) -> dict[str, Any]:
    """The run, its rows, the means over samples and the suggestions."""
    short = [{key: value for key, value in row.items() if key not in ("layers", "sample")} for row in overall(rows)]
    suggestions = [suggestion.as_json() for suggestion in suggest(rows, recall.base)]
    return {"run": dict(run), "rows": list(rows), "summary": short, "suggestions": suggestions}


def _per_head_note(rows: Sequence[Row]) -> list[str]:
    lowered = [f"{row['own_budget']} at {row['budget']} ({row['method']})" for row in rows if _is_lowered(row)]
    if not lowered:
        return []
    return [f"Budget of each head where heads select for themselves, lowered to read as much: {', '.join(lowered)}."]


def _is_lowered(row: Row) -> bool:
    return bool(row["own_budget"] != row["budget"])
