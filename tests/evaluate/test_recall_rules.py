"""Selections and budgets of a rule, against the operators that a model decodes with and plain counting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from questkv import kernels
from questkv.config import QuestConfig
from questkv.evaluate.recall_budget import EqualReading, Keeping, mean_keeping, pages_with
from questkv.evaluate.recall_rules import ORACLE, ORACLE_TOKENS, QUEST, Ranking, Rule
from questkv.evaluate.recall_steps import LayerSteps
from questkv.evaluate.recall_truth import DenseTruth
from questkv.kernels import Rows, Scoring, Softmax
from recall_cases import layer_steps

CONFIG = QuestConfig(token_budget=1.0, page_size=5, sink_tokens=5, recent_tokens=8)
ROWS = 7
GROUPS = ("mean", "softmax_mean", "per_head")


def ranking(steps: LayerSteps, method: str = QUEST, **fields: object) -> tuple[Ranking, DenseTruth]:
    rule = Rule(method, replace(CONFIG, **fields))
    truth = DenseTruth(steps)
    pages = steps.paged(rule.page_size, rule.config.box_dtype, "reference")
    return Ranking(rule, steps, pages=pages, truth=truth), truth


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("budget", [25, 40, 61, 99])
def test_quest_keeps_what_decode_reads(group: str, budget: int) -> None:
    steps = layer_steps(83, ROWS)
    made, truth = ranking(steps, group=group, optimism=0.5)
    kept = made.kept(truth.contents(5), [budget])
    config = replace(CONFIG, token_budget=budget, group=group)
    pages = steps.paged(5, config.box_dtype, "reference")
    read = torch.empty(ROWS, dtype=torch.int64)
    out = kernels.decode(
        steps.queries,
        pages,
        Rows(
            torch.arange(17).expand(ROWS, 17).contiguous(),
            steps.lengths,
            torch.tensor([16 if config.is_dense_at(n) else config.pages_at(n) for n in steps.lengths.tolist()]),
        ),
        Softmax(steps.softmax.scale),
        Scoring(0.5, group, config.sink_pages, config.recent_pages),
        pages_read=read,
        backend="reference",
    )
    error = (out - truth.out).flatten(1).norm(dim=1) / truth.out.flatten(1).norm(dim=1)
    torch.testing.assert_close(kept.error[0], error, rtol=1e-4, atol=2e-6)
    # Every page is whole but the open ones, of which each KV head reads one.
    in_open_page = (steps.lengths - 1) % 5 + 1
    assert kept.tokens[0].tolist() == ((read - 2) * 5 + 2 * in_open_page).tolist()


@pytest.mark.parametrize(("method", "size", "forced"), [(ORACLE, 5, 5), (ORACLE_TOKENS, 1, 0)])
def test_oracles_take_the_most_mass_that_a_budget_holds(method: str, size: int, forced: int) -> None:
    steps = layer_steps(83, ROWS)
    made, truth = ranking(steps, method, page_size=size, sink_tokens=forced, recent_tokens=forced)
    chosen = made.chosen(30)
    for row, length in enumerate(steps.lengths.tolist()):
        sealed, in_open_page = (length - 1) // size, (length - 1) % size + 1
        for head in range(2):
            mass = truth.weights[row, 3 * head : 3 * head + 3].double().mean(dim=0)
            pages = [float(mass[p * size : (p + 1) * size].sum()) for p in range(sealed)]
            must = {0, sealed - 1} if forced else set()
            free = sorted(set(range(sealed)) - must, key=lambda p: -pages[p])
            expected = must | set(free[: (30 - in_open_page) // size - len(must)]) | {sealed}
            assert chosen[row, 3 * head].nonzero().flatten().tolist() == sorted(expected)


@pytest.mark.parametrize("group", GROUPS)
def test_the_order_is_that_in_which_growing_budgets_take_pages(group: str) -> None:
    steps = layer_steps(83, ROWS)
    made, _ = ranking(steps, group=group)
    tokens = made.tokens_by_count()
    for budget in range(CONFIG.smallest_budget, 90, 3):
        chosen = made.chosen(budget)
        counts = pages_with(CONFIG, torch.tensor([budget]), steps.lengths)[0]
        order = made.order()
        for row, count in enumerate(counts.tolist()):
            for head in range(order.shape[1]):
                listed = chosen[row, head if made.rule.per_head else 3 * head].nonzero().flatten().tolist()
                assert sorted(order[row, head, : count + 1].tolist()) == listed
            union = chosen[row].view(2, 3, -1).any(dim=1).long() @ made.page_tokens[row]
            assert float(tokens[row, count]) == pytest.approx(float(union.double().mean()))


def test_equal_reading_is_the_largest_budget_that_reads_no_more() -> None:
    layers = [ranking(layer_steps(83, ROWS, group=group), group="per_head")[0] for group in (3, 4)]
    equal = EqualReading()
    for layer in layers:
        equal.add(layer)

    def read(budget: int) -> int:
        chosen = [layer.chosen(budget).unflatten(1, (2, -1)).any(dim=2) for layer in layers]
        return sum(int((lists * layer.page_tokens[:, None]).sum()) for lists, layer in zip(chosen, layers, strict=True))

    for budget in (20, 33, 48, 70, 90):
        config = replace(CONFIG, token_budget=budget)
        one_list = sum(
            (n - 1) % 5 + 1 + 5 * ((n - 1) // 5 if config.is_dense_at(n) else config.pages_at(n))
            for n in layers[0].steps.lengths.tolist()
        )
        allowed = 2 * len(layers) * one_list  # two KV heads
        tried = [b for b in range(CONFIG.smallest_budget, budget + 1) if read(b) <= allowed]
        assert equal.budget(budget) == max(tried)


@pytest.mark.parametrize("method", [QUEST, ORACLE, ORACLE_TOKENS])
@pytest.mark.parametrize("group", ["mean", "per_head"])
def test_the_needed_budget_keeps_the_share_and_a_page_less_does_not(method: str, group: str) -> None:
    steps = layer_steps(83, ROWS)
    sizes = {"page_size": 1, "sink_tokens": 0, "recent_tokens": 0} if method == ORACLE_TOKENS else {}
    made, truth = ranking(steps, method, group=group, **sizes)
    keeping = Keeping.of(made, truth)
    size = made.rule.page_size
    contents = truth.contents(size)
    for share in (0.5, 0.8, 0.95, 0.999):
        needed = keeping.needed(share)
        assert float(made.kept(contents, [needed]).mass.mean()) >= share - 1e-6
        if needed - size >= made.rule.config.smallest_budget:
            assert float(made.kept(contents, [needed - size]).mass.mean()) < share + 1e-6


def test_the_mean_of_layers_lies_between_them() -> None:
    first, second = (Keeping.of(*ranking(layer_steps(83, ROWS, group=group))) for group in (2, 3))
    needed = sorted(kept.needed(0.9) for kept in (first, second))
    assert needed[0] <= mean_keeping([first, second]).needed(0.9) <= needed[1]
