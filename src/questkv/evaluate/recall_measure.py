"""Every rule at every budget on observed decode steps, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from questkv.config import QuestConfig
from questkv.evaluate.recall_budget import EqualReading, Keeping, mean_keeping
from questkv.evaluate.recall_rules import QUEST, Ranking, Rule
from questkv.evaluate.recall_steps import LayerSteps, Observed
from questkv.evaluate.recall_truth import DenseTruth
from questkv.evaluate.runner import Progress

if TYPE_CHECKING:
    from questkv.evaluate.recall import Recall

# Most float32 numbers that the pages' contents of one layer may take at once (256 MiB).
_AT_ONCE = 2**26


def measure(observed: Observed, recall: Recall, on_progress: Progress) -> Iterator[dict[str, Any]]:
    """Every rule at every budget on observed decode steps, then what the base rules need.

    Yields:
        One mapping per rule and budget: ``method`` (the rule's label), ``budget``, ``score`` (share of the attention
        mass kept), ``top10``, ``error``, ``worst_head`` (the least share that a query head kept, mean over the steps),
        ``bytes_read`` (a step, all layers counted), ``share_read`` (of dense attention's bytes), ``own_budget`` (per
        head), ``rule``, and ``layers`` with the same numbers by layer. Means leave dense layers out unless all are.
        At last, with ``budget`` None, one for each base rule with ``needed`` tokens overall and by layer.
    """
    own = _own_budgets(observed, recall, on_progress)
    found: dict[tuple[Rule, int], dict[int, dict[str, float]]] = {}
    keeping: dict[Rule, dict[int, Keeping]] = {rule: {} for rule in recall.base_rules()}
    for done, layer in enumerate(observed.layers, start=1):
        steps = observed.steps(layer)
        for rule, budget, values in _measure_layer(steps, recall, own):
            found.setdefault((rule, budget), {})[layer] = values
        truth = DenseTruth(steps)
        for rule in recall.base_rules():
            pages = steps.paged(rule.page_size, rule.config.box_dtype, rule.config.backend)
            keeping[rule][layer] = Keeping.of(Ranking(rule, steps, pages=pages, truth=truth), truth)
        on_progress(0.2 + 0.8 * done / len(observed.layers), "measuring")
    counted = sparse_layers(observed.layers, recall.base)
    for (rule, budget), layers in found.items():
        yield _row(rule, budget, own.get((rule, budget), budget), layers, counted)
    for rule, kept in keeping.items():
        yield _needed_row(rule, recall.share, kept, counted, int(observed.lengths[-1]))


def sparse_layers(layers: Sequence[int], config: QuestConfig) -> list[int]:
    """The layers that Quest skips pages in; all of them where it would in none."""
    return [layer for layer in layers if not config.is_dense_layer(layer)] or list(layers)


def _own_budgets(observed: Observed, recall: Recall, on_progress: Progress) -> dict[tuple[Rule, int], int]:
    """The budget per head of every rule that selects per head, for each budget: as much is read with it."""
    readings = {rule: EqualReading() for rule in recall.rules() if rule.per_head}
    layers = sparse_layers(observed.layers, recall.base) if readings else []
    for done, layer in enumerate(layers, start=1):
        steps = observed.steps(layer)
        for size in recall.page_sizes:
            pages = steps.paged(size, recall.base.box_dtype, recall.base.backend)
            for rule, reading in readings.items():
                if rule.page_size == size:
                    reading.add(Ranking(rule, steps, pages=pages))
        on_progress(0.2 * done / len(layers), "counting pages per head")
    return {(rule, budget): reading.budget(budget) for rule, reading in readings.items() for budget in recall.budgets}


def _measure_layer(
    steps: LayerSteps, recall: Recall, own: dict[tuple[Rule, int], int]
) -> Iterator[tuple[Rule, int, dict[str, float]]]:
    """Every rule and budget in one layer."""
    heads, dim = steps.queries.shape[1:]
    for size in sorted({rule.page_size for rule in recall.rules()}):
        rules = [rule for rule in recall.rules() if rule.page_size == size]
        pages = {
            spans: steps.paged(size, recall.base.box_dtype, recall.base.backend, spans)
            for spans in {rule.config.span_pages for rule in rules}
        }
        coded = steps.coded(size, recall.base.backend) if any(rule.coded for rule in rules) else None
        at_once = max(_AT_ONCE // (heads * -(-steps.keys.shape[1] // size) * (dim + 3)), 1)
        parts: dict[Rule, list[Any]] = {}
        for first in range(0, len(steps.lengths), at_once):
            rows = steps.rows(slice(first, first + at_once))
            truth = DenseTruth(rows)
            contents = {False: truth.contents(size)}
            if coded is not None:
                contents[True] = truth.contents(size, coded)
            for rule in rules:
                budgets = [own.get((rule, budget), budget) for budget in recall.budgets]
                ranking = Ranking(rule, rows, pages=pages[rule.config.span_pages], truth=truth)
                parts.setdefault(rule, []).append(ranking.kept(contents[rule.coded], budgets))
        for rule, kept in parts.items():
            mass, top, error, tokens = (
                torch.cat([getattr(part, name) for part in kept], dim=1) for name in ("mass", "top", "error", "tokens")
            )
            for i, budget in enumerate(recall.budgets):
                yield (
                    rule,
                    budget,
                    {
                        "mass": float(mass[i].mean()),
                        "top10": float(top[i].mean()),
                        "error": float(error[i].mean()),
                        "worst_head": float(mass[i].mean(dim=0).min()),
                        "bytes_read": _bytes_read(rule, steps, own.get((rule, budget), budget), tokens[i]),
                        "bytes_dense": _dense_bytes(steps),
                    },
                )


def _bytes_read(rule: Rule, steps: LayerSteps, budget: int, tokens: torch.Tensor) -> float:
    """Bytes that a step reads in one layer, boxes included (an oracle has none), the mean over the steps."""
    per_token = 2 * steps.keys.shape[2] * steps.keys.element_size()
    read = float(tokens.double().mean()) * per_token
    if rule.method != QUEST:
        return read
    config = rule.config
    geometry = steps.geometry(rule.page_size, config.box_dtype, "int8" if rule.coded else "model")
    if rule.coded:
        # Boxes are the code book: attention reads them again, with the page.
        open_tokens = (steps.lengths - 1) % rule.page_size + 1
        in_open = float(open_tokens.double().mean()) * len(steps.keys)
        pages = (float(tokens.double().mean()) - in_open) / rule.page_size
        read = in_open * per_token + pages * geometry.closed_page_bytes / len(steps.keys)
    # A row that its budget covers is read densely, without a look at the boxes.
    sparse = [length for length in steps.lengths.tolist() if length > budget]
    scored = replace(config, token_budget=budget)
    boxes = sum(scored.boxes_at(length) for length in sparse) * geometry.box_bytes
    return float(read + boxes / len(steps.lengths))


def _dense_bytes(steps: LayerSteps) -> float:
    """Bytes that a dense step reads in one layer, the mean over the steps."""
    return (
        float(steps.lengths.double().mean()) * 2 * steps.keys.shape[0] * steps.keys.shape[2] * steps.keys.element_size()
    )


def _row(
    rule: Rule, budget: int, own: int, layers: Mapping[int, Mapping[str, float]], counted: Sequence[int]
) -> dict[str, Any]:
    """One rule and budget: means over the counted layers, and the numbers of each."""
    of = {name: [layers[layer][name] for layer in counted] for name in layers[counted[0]]}
    mean = {name: sum(values) / len(values) for name, values in of.items()}
    return {
        "method": rule.label,
        "budget": budget,
        "score": mean["mass"],
        "top10": mean["top10"],
        "error": mean["error"],
        "worst_head": min(of["worst_head"]),
        "bytes_read": sum(of["bytes_read"]),
        "share_read": sum(of["bytes_read"]) / sum(of["bytes_dense"]),
        "own_budget": own,
        "rule": rule.as_json(),
        "layers": {str(layer): dict(values) for layer, values in layers.items()},
    }


def _needed_row(
    rule: Rule, share: float, kept: Mapping[int, Keeping], counted: Sequence[int], length: int
) -> dict[str, Any]:
    """What one rule needs to keep a share of the mass, in the mean over the counted layers and in each layer."""
    mean = min(mean_keeping([kept[layer] for layer in counted]).needed(share), length)
    return {
        "method": rule.label,
        "budget": None,
        "score": mean / length,
        "share": share,
        "needed": mean,
        "tokens": length,
        "rule": rule.as_json(),
        "layers": {str(layer): min(of_layer.needed(share), length) for layer, of_layer in kept.items()},
    }
