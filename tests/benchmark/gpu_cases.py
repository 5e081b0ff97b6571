"""A machine without a GPU that stands for one, and cases that are small enough for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from questkv.benchmark.gpu.cases import Case

TINY = (
    Case("float32", 16, 2, 1, page_size=4, pages=16, segments=2),
    Case("bfloat16", 16, 2, 3, page_size=4, pages=16, rule="per_head", coded=True, segments=2),
    Case("float16", 16, 1, 4, page_size=4, pages=16, rule="softmax_mean", coded=True),
    Case("float16", 24, 1, 4, page_size=4, pages=16, box_dtype="model"),
)


class FakeMachine:
    """Graphs are calls; runs take the milliseconds that they are given, and a look at the clock a second."""

    def __init__(self, free_bytes: int = 2**20, milliseconds: Sequence[float] = (1.0,)) -> None:
        self.device = torch.device("cpu")
        self.cache_bytes = 1000
        self.captured = 0
        self.timed: list[int] = []
        self._free_bytes, self._seconds = free_bytes, itertools.count()
        self._milliseconds = itertools.cycle(milliseconds)

    def free_bytes(self) -> int:
        return self._free_bytes

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.captured += 1
        run()
        return run

    def time(self, runs: Sequence[Callable[[], Any]]) -> list[float]:
        self.timed.append(len(runs))
        return [next(self._milliseconds) for _ in runs]

    def synchronize(self) -> None:
        pass

    def now(self) -> float:
        return float(next(self._seconds))

    def describe(self) -> dict[str, Any]:
        return {"gpu": "none"}
