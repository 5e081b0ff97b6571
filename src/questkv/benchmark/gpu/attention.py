"""One decode step of one layer on a GPU: ours eager and in a graph, its parts, and others, timed in turn."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from questkv import kernels
from questkv.benchmark.attention import (
    DENSE,
    SPARSE,
    Attention,
    Candidate,
    Row,
    check,
    exact,
    is_memory,
    is_ours,
    token_mask,
)
from questkv.benchmark.gpu import peers
from questkv.benchmark.gpu.machine import Machine, Run
from questkv.benchmark.layers import Layer
from questkv.benchmark.shapes import Shape
from questkv.config import QuestConfig
from questkv.kernels.triton.attend import Lists, attention
from questkv.kernels.triton.select import choose

EAGER = "-eager"
# What is read in turn, in last-level caches: no step finds in one what it reads.
_CACHES = 3
_MOST_LAYERS = 128
# Steps of one graph: the launch of a graph is a small part of them.
_FEWEST_STEPS = 8
_FEWEST_TURNS = 3
_BUFFER_BYTES = 2**30


@dataclass(frozen=True)
class Timed:
    """Something to time: `steps` steps of a candidate in one run."""

    candidate: Candidate
    run: Run
    steps: int = 1


class GpuAttention(Attention):
    """The benchmark at one context on a GPU. A graph holds one step of every layer, as an engine captures a model.

    Args:
        shape: The layer's shape.
        config: Budget, page size, optimism, group and KV dtype.
        context: Tokens of every sequence, a multiple of the page size.
        machine: What it runs on.
        layers: Layers in turn (see `layers_that_fit`).
        with_flex: Whether to time flex_attention, whose compilation takes long.

    Attributes:
        notes: Others that were not timed, and why.
    """

    def __init__(
        self,
        shape: Shape,
        config: QuestConfig,
        context: int,
        machine: Machine,
        *,
        layers: int,
        with_flex: bool = False,
    ) -> None:
        super().__init__(shape, config, context, with_flex=with_flex, device=machine.device, layers=layers)
        self.machine = machine
        self.notes: list[str] = []
        self.model_rows, self.page_rows = self.rows(self.selected, plain=True), self.rows(self.selected)
        self.counts = torch.full_like(self.lengths, self.selected)
        steps = max(layers, _FEWEST_STEPS)
        self.turns = [(self.query(), self.layers[i % layers]) for i in range(steps)]

    def decode(self, query: torch.Tensor, layer: Layer, selected: int, *, plain: bool = False) -> torch.Tensor:
        """Our decode step, or our dense attention where it would read every page."""
        pages, rows = (layer.plain, self.model_rows) if plain else (layer.pages, self.page_rows)
        if selected > self.selected:
            return kernels.dense(query, pages, rows, self.softmax, backend=self.config.backend)
        return kernels.decode(query, pages, rows, self.softmax, self.scoring, backend=self.config.backend)

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        """The kernel as `decode` launches it; `kernels.select` would wait for the GPU."""
        chosen = torch.empty((*scores.shape[:2], self.selected), dtype=torch.int64, device=self.device)
        choose(scores, self.lengths, self.config.page_size, self.counts, self.scoring, chosen)
        return chosen

    def attend(self, query: torch.Tensor, layer: Layer, selection: torch.Tensor) -> torch.Tensor:
        """The kernels as `decode` launches them; `kernels.attend` would count the selection first."""
        if self.config.group == "per_head":
            return super().attend(query, layer, selection)
        return attention(query, layer.pages, self.page_rows, self.softmax, Lists(self.counts, selection))

    def checked(self) -> list[Candidate]:
        """Ours, their parts, and the others whose results are right; the rest are noted.

        Raises:
            DisagreementError: One of our results is wrong.
        """
        query, layer = self.turns[0]
        scores = self.estimate(query, layer)
        selection = self.select(scores)
        mask = token_mask(selection, self.context, self.config.page_size, query)
        everything = exact(query, layer.keys, layer.values, self.scale)
        dtype = self.shape.torch_dtype
        found = [
            replace(candidate, max_error=check(candidate.name, candidate.step(query, layer), expected, dtype, allowed))
            for candidate, expected, allowed in self._ours(query, layer, mask, everything)
        ]
        for candidate in self._peers():
            # Others may fail in any way: a package that doesn't fit the GPU is no fault of ours.
            try:
                error = check(candidate.name, candidate.step(query, layer), everything, dtype)
                found.append(replace(candidate, max_error=error))
            except Exception as failure:
                self._note(candidate.name, failure)
        attended = self.sparse_bytes - self.box_bytes
        return [
            *found,
            Candidate("estimate", self.estimate, self.box_bytes),
            Candidate("select", lambda q, x: self.select(scores), scores.numel() * 4),
            Candidate("attend", lambda q, x: self.attend(q, x, selection), attended),
        ]

    def _peers(self) -> Iterator[Candidate]:
        dense_bytes = self.shape.kv_bytes(self.context)
        copies = _copies(dense_bytes, self.machine.cache_bytes)
        for name, make in peers.available(self.layers, self.shape.heads, copies, with_flex=self.with_flex):
            try:
                yield Candidate(name, make(), dense_bytes)
            except Exception as failure:
                self._note(name, failure)

    def _note(self, name: str, failure: Exception) -> None:
        lines = str(failure).strip().splitlines() or [""]
        self.notes.append(f"{name}: not timed: {type(failure).__name__}: {lines[0][:160]}")

    def measure_until(self, seconds: float, until: float) -> list[Row]:
        """Time everything in turn for so many seconds of the GPU, three turns at least.

        Args:
            seconds: Of the graphs, and once more of the eager steps.
            until: When to stop, on the machine's clock.
        """
        candidates = self.checked()
        graphs = [*memory_runs(self.machine)]
        for candidate in candidates:
            try:
                run = self.machine.capture(self._all_steps(candidate))
            except RuntimeError as failure:
                if is_ours(candidate.name):
                    raise
                self._note(candidate.name, failure)
                continue
            graphs.append(Timed(candidate, run, len(self.turns)))
        eager = [
            Timed(replace(candidate, name=candidate.name + EAGER), self._all_steps(candidate), len(self.turns))
            for candidate in candidates
            if candidate.name in (SPARSE, DENSE)
        ]
        rows = [*self._turns(graphs, seconds, until), *self._turns(eager, seconds / 4, until)]
        return sorted(rows, key=lambda row: is_memory(row.name))

    def _all_steps(self, candidate: Candidate) -> Callable[[], list[Any]]:
        return lambda: [candidate.step(query, layer) for query, layer in self.turns]

    def _turns(self, timed: list[Timed], seconds: float, until: float) -> list[Row]:
        times: list[list[float]] = [[] for _ in timed]
        turns = 0
        while turns < _FEWEST_TURNS or (sum(map(sum, times)) < seconds * 1e3 and self.machine.now() < until):
            # The first one keeps the GPU busy while the host gets ahead of it.
            spent = self.machine.time([timed[0].run, *(one.run for one in timed)])[1:]
            for own, one in zip(times, spent, strict=True):
                own.append(one)
            turns += 1
        return [self._row_of(one, own) for one, own in zip(timed, times, strict=True)]

    def _row_of(self, timed: Timed, spent: list[float]) -> Row:
        candidate = timed.candidate
        median, least = statistics.median(spent) / timed.steps, min(spent) / timed.steps
        rate = candidate.read_bytes / median / 1e6
        return Row(candidate.name, self.context, self.budget, median, least, rate, candidate.max_error)


def memory_runs(machine: Machine) -> list[Timed]:
    """What the memory gives: a plain sum over a buffer larger than the cache, and a copy of it."""
    size = max(min(_BUFFER_BYTES, machine.free_bytes() // 8), _CACHES * machine.cache_bytes)
    buffer = torch.ones(size // 4, device=machine.device)
    copy = torch.empty_like(buffer)
    bytes_read = buffer.numel() * 4
    return [
        Timed(Candidate(name, lambda q, x: None, moved), machine.capture(run))
        for name, run, moved in (
            ("memory-read", buffer.sum, bytes_read),
            ("memory-copy", lambda: copy.copy_(buffer), 2 * bytes_read),
        )
    ]


def layers_that_fit(shape: Shape, config: QuestConfig, context: int, machine: Machine) -> int:
    """Layers in turn: as many as no cache holds what is read of them, if the memory holds them; 0 if not one fits."""
    pages = context // config.page_size
    boxes, dense_bytes = shape.box_bytes(config, pages), shape.kv_bytes(context)
    held, largest = dense_bytes + boxes, 2 * context * shape.head_dim * 8
    if config.kv_dtype == "int8":
        held += shape.coded_bytes(context) + boxes
        # Decoded for the check, by way of float64.
        largest += 24 * shape.batch * shape.kv_heads * context * shape.head_dim
    packages = sum(importlib.util.find_spec(package) is not None for package in peers.PACKAGES)
    beside = packages * _copies(dense_bytes, machine.cache_bytes) * dense_bytes + largest + 2 * _BUFFER_BYTES
    fit = int((0.9 * machine.free_bytes() - beside) // held)
    return max(min(-(-_CACHES * machine.cache_bytes // boxes), _MOST_LAYERS, fit), 0)


def _copies(dense_bytes: int, cache_bytes: int) -> int:
    """Layers that no cache holds, of what reads all of them."""
    return -(-_CACHES * cache_bytes // dense_bytes)
