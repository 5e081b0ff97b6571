"""What is timed, the most telling first, and how long all of it may take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from questkv.benchmark.shapes import PRESETS, Shape
from questkv.config import QuestConfig

# The context that the paper compares at, and the order in which others tell most.
_CONTEXTS = (32768, 8192, 131072, 65536, 16384, 262144)


@dataclass(frozen=True)
class Point:
    """One layer's shape at one context."""

    preset: str
    shape: Shape
    context: int

    def __str__(self) -> str:
        return f"{self.preset}, {self.context:,} tokens, batch {self.shape.batch}"


@dataclass(frozen=True)
class Plan:
    """Everything that a run does.

    Attributes:
        presets: Names of shapes.
        contexts: Tokens.
        batches: Sequences.
        dtype: Of keys and values.
        config: Budget, page size, group, KV dtype.
        seconds: All of it may take so long.
        seed: Of the checks' inputs.
        timings: Whether to time after the checks.
        with_flex: Whether to time flex_attention at each preset's first point.
    """

    presets: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    dtype: str
    config: QuestConfig
    seconds: float
    seed: int
    timings: bool = True
    with_flex: bool = True

    @property
    def check_seconds(self) -> float:
        """What the checks may take of it."""
        return self.seconds / 2 if self.timings else self.seconds

    def points(self) -> list[Point]:
        """In the order in which they are timed: batch 1 first, and of each batch the contexts that tell most."""
        known = {context: i for i, context in enumerate(_CONTEXTS)}
        contexts = sorted(self.contexts, key=lambda context: known.get(context, len(known)))
        return [
            Point(preset, replace(PRESETS[preset], batch=batch, dtype=self.dtype), context)
            for batch in sorted(self.batches)
            for context in contexts
            for preset in self.presets
        ]
