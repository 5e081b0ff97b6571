"""Budgets read off a ranking: what reads as much as another rule, and what keeps a share of the attention mass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from questkv.config import QuestConfig
from questkv.errors import ConfigError
from questkv.evaluate.recall_rules import Ranking
from questkv.evaluate.recall_truth import DenseTruth


def pages_with(config: QuestConfig, budgets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[b, R] int64 sealed pages selected with each budget, as `QuestConfig.pages_at` counts them."""
    sealed = torch.div(lengths - 1, config.page_size, rounding_mode="floor")
    in_open_page = lengths - sealed * config.page_size
    fitting = torch.div(budgets[:, None] - in_open_page, config.page_size, rounding_mode="floor")
    return torch.minimum(fitting, sealed)


class EqualReading:
    """Finds the budget at which heads that select for themselves read as much as one list per KV head does.

    One budget serves the whole model, so the tokens read are summed over its sparse layers.
    """

    def __init__(self) -> None:
        self._layers = 0
        self._tokens: torch.Tensor | None = None

    def add(self, ranking: Ranking) -> None:
        """Count a layer in; every layer of the same rule and decode steps is added once."""
        tokens = ranking.tokens_by_count()
        self._config, self._lengths = ranking.rule.config, ranking.steps.lengths
        self._tokens = tokens if self._tokens is None else self._tokens + tokens
        self._layers += 1

    def budget(self, budget: int) -> int:
        """The largest budget per head with which no more is read than one list per KV head reads with `budget`."""
        assert self._tokens is not None
        smallest = min(self._config.smallest_budget, budget)
        budgets = torch.arange(smallest, budget + 1, device=self._lengths.device)
        counts = pages_with(self._config, budgets, self._lengths)
        # The list of count 0 is the open page alone, so counts are indices.
        read = self._tokens.T.gather(0, counts).sum(dim=1)
        in_open_page = (self._lengths - 1) % self._config.page_size + 1
        allowed = self._layers * (counts[-1] * self._config.page_size + in_open_page).sum()
        # Adding up whole numbers in float64 is exact but for the mean over KV heads.
        return int(budgets[read <= allowed * (1 + 1e-9)][-1])


@dataclass(frozen=True, eq=False)
class Keeping:
    """How much of the attention mass one rule keeps in one layer with every budget.

    Attributes:
        budgets: [b] int64 tokens, in steps of a page, from the smallest selection to the whole context.
        mass: [b] float64 share kept, the mean over decode steps and query heads.
    """

    budgets: torch.Tensor
    mass: torch.Tensor

    @classmethod
    def of(cls, ranking: Ranking, truth: DenseTruth) -> Keeping:
        """Add up the pages' mass in the order in which a growing budget takes them."""
        config, lengths = ranking.rule.config, ranking.steps.lengths
        order = ranking.order()
        if not ranking.rule.per_head:
            order = order.repeat_interleave(ranking.steps.group, dim=1)
        by_count = truth.mass(config.page_size).gather(2, order).double().cumsum(dim=2).mean(dim=1)  # [R, P]
        longest = int(lengths.max()) + config.page_size
        budgets = torch.arange(config.smallest_budget, max(longest, config.smallest_budget + 1), config.page_size)
        counts = pages_with(config, budgets.to(lengths.device), lengths)
        return cls(budgets, by_count.T.gather(0, counts).mean(dim=1).cpu())

    def needed(self, share: float) -> int:
        """The smallest budget that keeps `share` of the mass."""
        # A sum of float32 weights may miss 1 by its rounding.
        enough = (self.mass >= min(share, float(self.mass[-1]))).nonzero()
        return int(self.budgets[int(enough[0])])


def mean_keeping(layers: Sequence[Keeping]) -> Keeping:
    """The mean over layers (or samples) of equally many budgets."""
    return Keeping(layers[0].budgets, torch.stack([layer.mass for layer in layers]).mean(dim=0))


def check_share(share: float) -> None:
    """Refuse a share of the attention mass that no budget keeps, or every one does."""
    if not 0.0 < share < 1.0:
        raise ConfigError(f"[recall] suggest: expected a share of the attention mass in (0, 1), got {share!r}")
