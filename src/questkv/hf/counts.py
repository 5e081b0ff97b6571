"""Counting the pages that decode steps read, without a look at a tensor in any of them."""

from __future__ import annotations

import torch

# Steps whose counts a layer keeps apart before it adds them up.
_MOST_KEPT = 64

# What `PageCounts` holds: pages read, pages held and fetches, by layer.
Counted = tuple[dict[int, list[torch.Tensor]], dict[int, int], dict[int, torch.Tensor]]


class PageCounts:
    """Pages that layers read and held, summed over decode steps, rows and KV heads."""

    def __init__(self) -> None:
        self._read: dict[int, list[torch.Tensor]] = {}
        self._held: dict[int, int] = {}
        self._fetches: dict[int, torch.Tensor] = {}

    def add(self, layer: int, read: torch.Tensor, held: int) -> None:
        """Add a step of a layer.

        Args:
            layer: The model's layer.
            read: [R] int64 pages that its rows read; kept, so it must not change.
            held: Pages that all of its rows held.
        """
        kept = self._read.setdefault(layer, [])
        kept.append(read)
        if len(kept) == _MOST_KEPT:
            self._read[layer] = [torch.cat(kept).sum(dim=0, keepdim=True)]
        self._held[layer] = self._held.get(layer, 0) + held

    def of(self, layer: int) -> tuple[int, int]:
        """Pages read and held by a layer."""
        return sum(int(read.sum()) for read in self._read.get(layer, ())), self._held.get(layer, 0)

    def add_fetches(self, layer: int, fetches: torch.Tensor) -> None:
        """Add a step's [2] pages in host memory: those that the device had a copy of, and those it copied."""
        self._fetches[layer] = self._fetches.get(layer, 0) + fetches

    @property
    def fetches(self) -> tuple[int, int]:
        """What `add_fetches` added, over all layers."""
        there, copied = (sum(int(fetches[which]) for fetches in self._fetches.values()) for which in (0, 1))
        return there, copied

    @property
    def counted(self) -> Counted:
        """Everything that was added, to be put back after an exception."""
        return {layer: list(read) for layer, read in self._read.items()}, dict(self._held), dict(self._fetches)

    @counted.setter
    def counted(self, counted: Counted) -> None:
        self._read, self._held, self._fetches = counted

    def clear(self) -> None:
        """Start from zero."""
        self._fetches.clear()
        self._read.clear()
        self._held.clear()
