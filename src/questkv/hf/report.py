"""What a cache has read and what it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerReport:
    """One paged layer's decode steps.

    Attributes:
        layer: The model's layer.
        pages_read: Pages read, summed over decode steps, sequences and KV heads, open pages included.
        pages_held: Pages that dense attention would have read in the same steps.
    """

    layer: int
    pages_read: int
    pages_held: int


@dataclass(frozen=True)
class CacheReport:
    """`QuestCache.report()`.

    Attributes:
        tokens: Tokens of every sequence.
        pages_read: Pages read while decoding, summed over layers (see `LayerReport`); prefill is not counted.
        pages_held: Pages that dense decoding would have read.
        bytes_held: Bytes of the pages that the sequences hold in all paged layers, boxes included.
        box_bytes: Bytes of the boxes among them.
        bytes_reserved: Bytes of the segments: address space, backed by memory once written.
        layers: One entry per paged layer.
    """

    tokens: tuple[int, ...]
    pages_read: int
    pages_held: int
    bytes_held: int
    box_bytes: int
    bytes_reserved: int
    layers: tuple[LayerReport, ...]

    @property
    def share_read(self) -> float:
        """Pages read over pages held: 1.0 for dense decoding, and before anything was decoded."""
        return self.pages_read / self.pages_held if self.pages_held else 1.0

    def __str__(self) -> str:
        return (
            f"{self.pages_read:,} of {self.pages_held:,} pages read ({self.share_read:.1%}), "
            f"{self.bytes_held / 2**20:.1f} MiB held, boxes {self.box_bytes / 2**20:.1f} MiB"
        )
