"""Which budget to choose: what the measured text needs, as a line of configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from questkv.config import QuestConfig
from questkv.evaluate.recall_measure import sparse_layers
from questkv.evaluate.recall_rules import QUEST
from questkv.evaluate.task import Row


@dataclass(frozen=True)
class Suggestion:
    """Which budget keeps a share of the attention mass, on the text that was measured.

    Attributes:
        share: The share asked for, in (0, 1).
        length: Tokens of the prompt.
        layers: For every layer, the budget with which it keeps the share, the mean over its heads and steps. Of several
            samples the one that needs most counts.
        mean: The same for the mean over the layers that aren't dense.
        config: The configuration with that budget; one that reads everything where less isn't enough.
    """

    share: float
    length: int
    layers: Mapping[int, int]
    mean: int
    config: QuestConfig

    @property
    def sparse(self) -> list[int]:
        """Layers that the budget acts on."""
        return sparse_layers(list(self.layers), self.config)

    @property
    def every(self) -> int:
        """Budget with which each of these layers keeps the share on its own."""
        return max(self.layers[layer] for layer in self.sparse)

    @property
    def line(self) -> str:
        """The configuration as Python: the budget, and what differs from the defaults."""
        default = QuestConfig()
        parts = [f"token_budget={self.config.token_budget!r}"]
        for field in fields(QuestConfig):
            value = getattr(self.config, field.name)
            if field.name != "token_budget" and value != getattr(default, field.name):
                parts.append(f"{field.name}={value!r}")
        return f"QuestConfig({', '.join(parts)})"

    def as_json(self) -> dict[str, Any]:
        """The suggestion as JSON values."""
        return {
            "share": self.share,
            "length": self.length,
            "mean": self.mean,
            "every": self.every,
            "layers": {str(layer): budget for layer, budget in self.layers.items()},
            "config": self.config.to_dict(),
            "line": self.line,
        }


def suggest(rows: Sequence[Row], base: QuestConfig) -> Iterator[Suggestion]:
    """One suggestion for each length.

    Args:
        rows: Of `run_recall`.
        base: `Recall.base`.
    """
    needed = [row for row in rows if row["budget"] is None and row["rule"]["method"] == QUEST]
    for length in dict.fromkeys(row["length"] for row in needed):
        here = [row for row in needed if row["length"] == length]
        layers = {int(layer): max(row["layers"][layer] for row in here) for layer in here[0]["layers"]}
        mean = max(row["needed"] for row in here)
        whole = mean >= min(row["tokens"] for row in here)
        config = replace(base, token_budget=1.0 if whole else mean)
        yield Suggestion(here[0]["share"], length, layers, mean, config)
