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
        host_bytes: Bytes among `bytes_held` that lie in host memory; the others lie with the model.
        fetched_bytes: Bytes beside them of the copies that the GPU keeps of pages in host memory.
        pages_fetched: Pages in host memory that decode steps read and had to copy to the GPU, summed over KV heads.
        pages_there: Pages in host memory that decode steps read and the GPU had a copy of, summed over KV heads.
        layers: One entry per paged layer.
    """

    tokens: tuple[int, ...]
    pages_read: int
    pages_held: int
    bytes_held: int
    box_bytes: int
    bytes_reserved: int
    layers: tuple[LayerReport, ...]
    host_bytes: int = 0
    fetched_bytes: int = 0
    pages_fetched: int = 0
    pages_there: int = 0

    @property
    def share_read(self) -> float:
        """Pages read over pages held: 1.0 for dense decoding, and before anything was decoded."""
        return self.pages_read / self.pages_held if self.pages_held else 1.0

    @property
    def device_bytes(self) -> int:
        """Bytes on the model's device: held pages, boxes, and copies of pages in host memory."""
        return self.bytes_held - self.host_bytes + self.fetched_bytes

    @property
    def hit_rate(self) -> float:
        """Share of the pages in host memory that were read and needed no copy: 1.0 before any was read."""
        asked = self.pages_there + self.pages_fetched
        return self.pages_there / asked if asked else 1.0

    def __str__(self) -> str:
        text = (
            f"{self.pages_read:,} of {self.pages_held:,} pages read ({self.share_read:.1%}), "
            f"{self.bytes_held / 2**20:.1f} MiB held, boxes {self.box_bytes / 2**20:.1f} MiB"
        )
        if self.host_bytes:
            text += (
                f"; {self.host_bytes / 2**20:.1f} MiB in host memory, {self.device_bytes / 2**20:.1f} MiB on the GPU "
                f"({self.fetched_bytes / 2**20:.1f} MiB of it copies), {self.hit_rate:.1%} of pages needed no copy"
            )
        return text
