"""TOVA: the token that the current query heeds least goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from questkv.policies.eviction import EvictionPolicy, Moment
from questkv.policies.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class TOVA(EvictionPolicy):
    """Drops the tokens with the lowest weight under the latest query, the mean over all query heads of the layer.

    Oren et al., *Transformers are Multi-State RNNs*, EMNLP 2024, https://arxiv.org/abs/2401.06104. All heads of a
    layer hold the same tokens, and none is protected.
    """

    name: ClassVar[str] = "tova"
    observes: ClassVar[bool] = True

    def first_scores(self, statistics: Statistics | None, shape: tuple[int, int]) -> torch.Tensor:
        """The weights of the prompt's last query."""
        assert statistics is not None
        return _one_list(statistics.last)

    def next_scores(self, scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """The weights of the latest query alone."""
        return _one_list(mass)

    def priorities(self, scores: torch.Tensor, positions: torch.Tensor, moment: Moment) -> torch.Tensor:
        """The lower the weight, the lower."""
        return scores


def _one_list(mass: torch.Tensor) -> torch.Tensor:
    """[Hkv, T] with the mean over the KV heads in every row: each KV head has as many query heads."""
    return mass.mean(dim=0, keepdim=True).expand_as(mass)
