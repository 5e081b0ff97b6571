"""Figures of `recall`: what each layer needs (the paper's figure 3), and what a budget finds (figure 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from questkv.evaluate.figures import figure
from questkv.evaluate.recall import Recall, overall
from questkv.evaluate.recall_rules import ORACLE, ORACLE_TOKENS, QUEST
from questkv.evaluate.task import Row

_MEASURES = {
    "score": "share of attention mass kept",
    "top10": "share of the 10 most attended tokens kept",
    "error": "relative error of a layer's output",
}
_KNOBS = {"optimism": "optimism", "group": "group rule", "page_size": "page size"}
_COLOURS = {ORACLE_TOKENS: "black", ORACLE: "grey"}


def draw_recall(recall: Recall, rows: Sequence[Row], path: str) -> None:
    """For each length, a line of panels over the layers and one over the budgets for every setting that was varied.

    Args:
        recall: What was measured.
        rows: Of `run_recall`.
        path: A PNG or SVG file.
    """
    varied = [knob for knob in _KNOBS if len(_values(recall, knob)) > 1] or ["optimism"]
    with figure(path, len(recall.lengths) * 3 * (1 + len(varied)), size=(5.0, 3.6)) as axes:
        panels = iter(axes)
        for length in recall.lengths:
            here = [row for row in overall(rows) if row["length"] == length]
            _over_layers(panels, recall, here, f"{length:,} tokens")
            for knob in varied:
                _over_budgets(panels, recall, here, knob, f"{length:,} tokens")


def _over_layers(panels: Iterator[Any], recall: Recall, rows: Sequence[Row], title: str) -> None:
    """Figure 3: the share of tokens that a layer can do without; then mass and error by layer at a middle budget."""
    panel = next(panels)
    for row in (row for row in rows if row["budget"] is None):
        layers = sorted(map(int, row["layers"]))
        spared = [1 - row["layers"][str(layer)] / row["tokens"] for layer in layers]
        panel.plot(layers, spared, **_line(row, 0))
    panel.set(ylabel=f"share of tokens to spare, {recall.share:.0%} of mass kept", ylim=(0, 1))
    panel.set_title(f"{title}: sparsity of each layer (figure 3)", fontsize=9)
    middle = sorted(recall.budgets)[len(recall.budgets) // 2]
    for name in ("mass", "error"):
        panel_of_name = next(panels)
        for row in (row for row in rows if row["budget"] == middle and _is_base(recall, row)):
            layers = sorted(map(int, row["layers"]))
            panel_of_name.plot(layers, [row["layers"][str(layer)][name] for layer in layers], **_line(row, 0))
        panel_of_name.set(ylabel=_MEASURES["score" if name == "mass" else name])
        panel_of_name.set_title(f"{title}: budget {middle}", fontsize=9)
        _finish(panel_of_name, "layer")
    _finish(panel, "layer")


def _over_budgets(panels: Iterator[Any], recall: Recall, rows: Sequence[Row], knob: str, title: str) -> None:
    """Figure 4 and its like: one line for each value of a setting, the others as in the base configuration."""
    values = _values(recall, knob)
    budgets = sorted(recall.budgets)
    for name, label in _MEASURES.items():
        panel = next(panels)
        for row in _first_of_each(rows):
            colour = values.index(row["rule"][knob]) if row["rule"][knob] in values else 0
            if row["budget"] is None or not _is_base(recall, row, besides=knob):
                continue
            own = {r["budget"]: r for r in rows if r["method"] == row["method"]}
            # Smaller pages have more boxes to read, so equal budgets are not equal bytes.
            places = [own[budget]["share_read"] if knob == "page_size" else budget for budget in budgets]
            panel.plot(places, [own[budget][name] for budget in budgets], **_line(row, colour, knob))
        panel.set_xscale("log", base=2)
        if knob != "page_size":
            panel.set_xticks(budgets, [f"{budget}" for budget in budgets])
            panel.minorticks_off()
        else:
            panel.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.2g}%")
        if name == "error":
            panel.set_yscale("log")
        panel.set(ylabel=label)
        panel.set_title(f"{title}: by {_KNOBS[knob]}", fontsize=9)
        _finish(panel, "bytes read of dense attention's" if knob == "page_size" else "token budget")


def _first_of_each(rows: Sequence[Row]) -> list[Row]:
    """One row of every rule that was measured at budgets."""
    return list({row["method"]: row for row in rows if row["budget"] is not None}.values())


def _is_base(recall: Recall, row: Row, besides: str = "") -> bool:
    """Whether a row's rule is the base configuration's, or an oracle of its pages, but for one setting."""
    rule = row["rule"]
    if rule["method"] == ORACLE_TOKENS:
        return True
    knobs = [knob for knob in _KNOBS if knob != besides and rule[knob] is not None]
    return all(rule[knob] == getattr(recall.base, knob) for knob in knobs)


def _values(recall: Recall, knob: str) -> tuple[Any, ...]:
    tried: tuple[Any, ...] = {
        "optimism": recall.optimisms,
        "group": recall.groups,
        "page_size": recall.page_sizes,
    }[knob]
    return tried


def _line(row: Row, colour: int, knob: str = "") -> dict[str, Any]:
    """Oracles are dashed and in greys, but for their page size where that is what varies."""
    rule = row["rule"]
    style = {"linestyle": "-" if rule["method"] == QUEST else "--", "marker": "o", "markersize": 3}
    varies = rule["method"] == QUEST or (rule["method"] == ORACLE and knob == "page_size")
    return {**style, "color": f"C{colour}" if varies else _COLOURS[rule["method"]], "label": row["method"]}


def _finish(panel: Any, xlabel: str) -> None:
    panel.set_xlabel(xlabel)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
