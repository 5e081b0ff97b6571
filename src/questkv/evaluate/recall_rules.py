"""Ways of choosing pages for a decode step: Quest's rules, and the oracles that know the true attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from questkv import kernels
from questkv.config import QuestConfig
from questkv.evaluate.recall_steps import LayerSteps
from questkv.evaluate.recall_truth import DenseTruth, Kept, PageContents
from questkv.kernels import Rows, Scoring

QUEST, ORACLE, ORACLE_TOKENS = "quest", "oracle", "oracle_tokens"


@dataclass(frozen=True)
class Rule:
    """How pages are ranked.

    Attributes:
        method: ``quest``; ``oracle``, pages by their true attention mass, the mean over the group's heads;
            ``oracle_tokens``, the same with pages of one token.
        config: Page size, sink, recent and boxes; for ``quest`` optimism, group rule and the pages' type. Its budget
            isn't used.
    """

    method: str
    config: QuestConfig

    @property
    def page_size(self) -> int:
        """S of the pages that are ranked."""
        return self.config.page_size

    @property
    def per_head(self) -> bool:
        """Whether each query head has a list of its own."""
        return self.method == QUEST and self.config.group == "per_head"

    @property
    def coded(self) -> bool:
        """Whether sealed pages are read in eight bits; oracles read what the model wrote."""
        return self.method == QUEST and self.config.kv_dtype == "int8"

    @property
    def label(self) -> str:
        """The rule in a few words, for tables and legends."""
        if self.method == ORACLE_TOKENS:
            return "oracle, tokens"
        if self.method == ORACLE:
            return f"oracle, pages of {self.page_size}"
        coded = ", int8" if self.coded else ""
        spans = f", spans of {self.config.span_pages}" if self.config.span_pages else ""
        return f"quest a={self.config.optimism:g} {self.config.group}, pages of {self.page_size}{coded}{spans}"

    def as_json(self) -> dict[str, Any]:
        """What tells it from other rules, as JSON values."""
        quest = self.method == QUEST
        return {
            "method": self.method,
            "page_size": self.page_size,
            "optimism": self.config.optimism if quest else None,
            "group": self.config.group if quest else None,
            "kv_dtype": self.config.kv_dtype if quest else None,
            "span_pages": self.config.span_pages if quest else None,
        }


class Ranking:
    """A rule applied to one layer's decode steps: every page's score, and the selections that follow from it.

    Args:
        rule: The rule.
        steps: The decode steps.
        pages: The tokens in pages of the rule's size (`LayerSteps.paged`), which Quest ranks by.
        truth: Their true attention, which the oracles rank by.
    """

    def __init__(
        self, rule: Rule, steps: LayerSteps, *, pages: kernels.Pages | None = None, truth: DenseTruth | None = None
    ) -> None:
        self.rule = rule
        self.steps = steps
        size = rule.page_size
        self._sealed = torch.div(steps.lengths - 1, size, rounding_mode="floor")
        places = torch.arange(-(-steps.keys.shape[1] // size), device=steps.lengths.device)
        # [R, P] tokens of a page that the row sees: S in sealed ones, 1 to S in the open one, 0 behind it.
        self.page_tokens = (steps.lengths[:, None] - places * size).clamp(0, size)
        self._open = places == self._sealed[:, None]
        self._pages = pages
        if rule.method == QUEST:
            self.scores = self._estimate(None)
        else:
            assert truth is not None
            self.scores = truth.mass(size).unflatten(1, (-1, steps.group)).mean(dim=2)

    def chosen(self, budget: int) -> torch.Tensor:
        """[R, Hq, P] bool: pages that each query head reads with a budget of so many tokens, the open page included."""
        config = replace(self.rule.config, token_budget=budget)
        lengths = self.steps.lengths.tolist()
        counts = torch.tensor(
            [(n - 1) // config.page_size if config.is_dense_at(n) else config.pages_at(n) for n in lengths],
            device=self._sealed.device,
        )
        selection = kernels.select(
            # In two levels, which pages have a score depends on how many are wanted.
            self._estimate(counts) if config.span_pages else self.scores,
            self._sealed,
            counts,
            Scoring.of(config),
            backend=config.backend,
        )
        # One more place, for the -1 behind a shorter row's list.
        pages = torch.zeros(
            (*self.scores.shape[:2], self.scores.shape[2] + 1), dtype=torch.bool, device=selection.device
        )
        pages.scatter_(2, selection % pages.shape[2], True)
        lists = pages[..., :-1] | self._open[:, None]
        return lists if self.rule.per_head else lists.repeat_interleave(self.steps.group, dim=1)

    def _estimate(self, num_selected: torch.Tensor | None) -> torch.Tensor:
        """[R, H, P] Quest's scores, of all pages or for selecting so many [R] in two levels."""
        assert self._pages is not None
        config, steps = self.rule.config, self.steps
        table = torch.arange(-(-steps.keys.shape[1] // config.page_size)).to(steps.lengths)
        rows = Rows(table.expand(len(steps.lengths), -1), steps.lengths, num_selected)
        scoring = Scoring.of(config)
        return kernels.estimate(steps.queries, self._pages, rows, steps.softmax.scale, scoring, backend=config.backend)

    def kept(self, contents: PageContents, budgets: list[int]) -> Kept:
        """What selections with these budgets keep, one after another."""
        return contents.kept(torch.stack([self.chosen(budget) for budget in budgets]), self.page_tokens)

    def order(self) -> torch.Tensor:
        """[R, H, P] int64 logical pages in the order in which a growing budget takes them.

        The open page comes first, then sink and recent pages, then sealed pages by falling score (the lower page of
        equal ones), then what isn't a page of the row.
        """
        places = torch.arange(self.scores.shape[2], device=self.scores.device)
        recent = (places >= self._sealed[:, None] - self.rule.config.recent_pages) & (places < self._sealed[:, None])
        forced = recent | ((places < self.rule.config.sink_pages) & (places < self._sealed[:, None]))
        behind = places > self._sealed[:, None]
        turn = (2 - forced.int() - 2 * self._open.int() + behind.int())[:, None].expand_as(self.scores)
        by_score = self.scores.sort(dim=-1, descending=True, stable=True).indices
        by_turn = turn.gather(2, by_score).sort(dim=-1, stable=True).indices
        return by_score.gather(2, by_turn)

    def tokens_by_count(self) -> torch.Tensor:
        """[R, P] tokens read per KV head (the mean over them) when every list holds the first 1, 2, ... of `order`.

        A page that several heads of a group take counts once.
        """
        order = self.order()
        turn = torch.empty_like(order).scatter_(2, order, torch.arange(order.shape[2]).expand_as(order))
        first = turn.unflatten(1, (self.steps.keys.shape[0], -1)).amin(dim=2)  # [R, Hkv, P]
        tokens = self.page_tokens[:, None].expand_as(first)
        joined = torch.zeros_like(first).scatter_add_(2, first, tokens)
        return joined.cumsum(dim=2).double().mean(dim=1)
