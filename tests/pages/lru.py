"""What one KV head has of its pages on the device, as a list: the page read longest ago makes room."""

from __future__ import annotations

from collections.abc import Collection


class Lru:
    """Places that hold (page, when it was read last), or None."""

    def __init__(self, slots: int) -> None:
        self.places: list[tuple[int, int] | None] = [None] * slots
        self.now = 0

    @property
    def pages(self) -> dict[int, int]:
        """The place of every page that is there."""
        return {place[0]: i for i, place in enumerate(self.places) if place is not None}

    def fetch(self, wanted: Collection[int]) -> tuple[int, int]:
        """Pages that were there, and that were copied."""
        self.now += 1
        pages, at = sorted(set(wanted)), self.pages
        there, missing = [page for page in pages if page in at], [page for page in pages if page not in at]
        for page in there:
            self.places[at[page]] = (page, self.now)
        for page in missing:
            oldest = min(range(len(self.places)), key=lambda i: -1 if self.places[i] is None else self.places[i][1])
            assert self.places[oldest] is None or self.places[oldest][0] not in pages
            self.places[oldest] = (page, self.now)
        return len(there), len(missing)

    def forget(self, pages: Collection[int]) -> None:
        self.places = [None if place is None or place[0] in pages else place for place in self.places]
