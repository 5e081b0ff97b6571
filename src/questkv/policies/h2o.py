"""H2O: half the budget for heavy hitters, half for recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from questkv.policies.eviction import EvictionPolicy, Moment
from questkv.policies.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class H2O(EvictionPolicy):
    """Holds the tokens that gathered the most attention mass so far, and as many recent ones.

    Zhang et al., *H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models*, NeurIPS 2023,
    https://arxiv.org/abs/2306.14048. The mass is summed over all queries of the prompt and of the decode steps since,
    the mean over each KV head's query heads. Half of the budget, rounded down, goes to the most recent tokens, the
    token itself included. The prompt itself is prefilled with the full cache, as in Quest's evaluation.
    """

    name: ClassVar[str] = "h2o"
    observes: ClassVar[bool] = True

    @property
    def smallest_budget(self) -> int:
        """One heavy hitter and the token itself."""
        return 2

    def first_scores(self, statistics: Statistics | None, shape: tuple[int, int]) -> torch.Tensor:
        """The mass over all queries of the prompt."""
        assert statistics is not None
        return statistics.accumulated

    def next_scores(self, scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """Mass goes on accumulating."""
        return scores + mass

    def priorities(self, scores: torch.Tensor, positions: torch.Tensor, moment: Moment) -> torch.Tensor:
        """The less mass, the lower; recent tokens stay."""
        recent = self.budget_tokens // 2
        # The token that is about to come, at position `seen`, is one of the recent ones.
        return scores.masked_fill(positions > moment.seen - recent, torch.inf)
