"""StreamingLLM: the first tokens and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from questkv.errors import ConfigError
from questkv.policies.eviction import EvictionPolicy, Moment
from questkv.policies.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(EvictionPolicy):
    """Holds the first tokens (the attention sinks) and the most recent ones.

    Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, ICLR 2024, https://arxiv.org/abs/2309.17453.
    4 sinks as in the paper. Unlike there, tokens keep the positions they were rotated for, as under every method here.

    Attributes:
        sink_tokens: First tokens that are held.
    """

    name: ClassVar[str] = "streaming_llm"

    sink_tokens: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.sink_tokens, bool) or not isinstance(self.sink_tokens, int) or self.sink_tokens < 0:
            raise ConfigError(f"[{self.name}] sink_tokens: expected an int >= 0, got {self.sink_tokens!r}")
        super().__post_init__()

    @property
    def smallest_budget(self) -> int:
        """The sinks and the token itself."""
        return self.sink_tokens + 1

    def first_scores(self, statistics: Statistics | None, shape: tuple[int, int]) -> torch.Tensor:
        """None are needed."""
        return torch.zeros(shape)

    def next_scores(self, scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """None are needed."""
        return scores

    def priorities(self, scores: torch.Tensor, positions: torch.Tensor, moment: Moment) -> torch.Tensor:
        """The older, the lower; sinks stay."""
        return positions.double().masked_fill(positions < self.sink_tokens, torch.inf)
