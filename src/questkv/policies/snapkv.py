"""SnapKV: what the prompt's last queries heed, chosen once at the prompt's end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from questkv.errors import ConfigError
from questkv.policies.eviction import EvictionPolicy, Moment
from questkv.policies.statistics import OBSERVED_QUERIES, Statistics


@dataclass(frozen=True, kw_only=True)
class SnapKV(EvictionPolicy):
    """Holds the prompt's tokens that its last queries heeded most, with their neighbours, and the recent tokens.

    Li et al., *SnapKV: LLM Knows What You are Looking for Before Generation*, NeurIPS 2024,
    https://arxiv.org/abs/2404.14469. The mass of the prompt's last 32 queries (the window) on the tokens before them,
    the mean over each KV head's query heads, is max-pooled over 7 neighbouring tokens: the settings of the paper's
    LongBench runs (the code's defaults are a mean over 5). The tokens of the highest pooled mass stay, and the window.

    The paper's cache grows with each generated token. Here new tokens count in the budget: the chosen tokens stay to
    the end, and of the window and the tokens after it the oldest goes. The window holds at most (budget - 1) // 2
    tokens; 32 queries are observed all the same.

    Attributes:
        pool_tokens: Tokens whose largest mass is each one's score, an odd number.
    """

    name: ClassVar[str] = "snapkv"
    observes: ClassVar[bool] = True

    pool_tokens: int = 7

    def __post_init__(self) -> None:
        pool = self.pool_tokens
        if isinstance(pool, bool) or not isinstance(pool, int) or pool < 1 or pool % 2 == 0:
            raise ConfigError(f"[{self.name}] pool_tokens: expected an odd int >= 1, got {pool!r}")
        super().__post_init__()

    @property
    def smallest_budget(self) -> int:
        """One chosen token and the token itself."""
        return 2

    @property
    def window_tokens(self) -> int:
        """The prompt's last tokens that are held at its end without being chosen."""
        return min(OBSERVED_QUERIES, (self.budget_tokens - 1) // 2)

    def first_scores(self, statistics: Statistics | None, shape: tuple[int, int]) -> torch.Tensor:
        """The pooled mass of the window's queries; the window's own tokens need no score."""
        assert statistics is not None
        scores = torch.zeros(shape)
        before = max(shape[1] - self.window_tokens, 0)
        if before:
            mass = statistics.window[:, :before]
            scores[:, :before] = F.max_pool1d(mass, self.pool_tokens, stride=1, padding=self.pool_tokens // 2)
        return scores

    def next_scores(self, scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """The choice was made at the prompt's end."""
        return scores

    def priorities(self, scores: torch.Tensor, positions: torch.Tensor, moment: Moment) -> torch.Tensor:
        """At the prompt's end the less mass, the lower; later the older, the lower, and chosen tokens stay."""
        in_window = positions >= moment.prompt - self.window_tokens
        if moment.seen == moment.prompt:
            return scores.masked_fill(in_window, torch.inf)
        return positions.double().masked_fill(~in_window, torch.inf)
