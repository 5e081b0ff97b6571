"""`Scoring`: how pages are scored and chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from questkv.config import GROUP_RULES, QuestConfig
from questkv.kernels.checked import Bound

_CONFIG = QuestConfig()


@dataclass(frozen=True)
class Scoring(Bound):
    """How an operator scores pages and which of them it always chooses; by default what `QuestConfig` says.

    Attributes:
        optimism: >= 0, how much of a box's half width counts; 1 is the paper's upper bound (docs/method.md).
        group: ``mean`` or ``softmax_mean`` (one score per KV head), or ``per_head`` (one per query head).
        sink_pages: First pages that are always selected.
        recent_pages: Last sealed pages that are always selected.

    Raises:
        ValueError: A number is negative or not finite, or there is no rule of that name.
        TypeError: A count isn't an int.
    """

    optimism: float = _CONFIG.optimism
    group: str = _CONFIG.group
    sink_pages: int = _CONFIG.sink_pages
    recent_pages: int = _CONFIG.recent_pages

    def __post_init__(self) -> None:
        if not (isinstance(self.optimism, float | int) and math.isfinite(self.optimism) and self.optimism >= 0):
            raise ValueError(f"[Scoring] optimism: expected a finite number >= 0, got {self.optimism!r}")
        if self.group not in GROUP_RULES:
            raise ValueError(f"[Scoring] group: expected one of {list(GROUP_RULES)}, got {self.group!r}")
        for name in ("sink_pages", "recent_pages"):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise TypeError(f"[Scoring] {name}: expected an int >= 0, got {value!r}")
            if value < 0:
                raise ValueError(f"[Scoring] {name}: expected an int >= 0, got {value}")

    @classmethod
    def of(cls, config: QuestConfig) -> Scoring:
        """What a configuration says."""
        return cls(config.optimism, config.group, config.sink_pages, config.recent_pages)

    @property
    def forced_pages(self) -> int:
        """Pages that are always selected: a row may read at least so many, or all that it has."""
        return self.sink_pages + self.recent_pages


DEFAULT = Scoring()
