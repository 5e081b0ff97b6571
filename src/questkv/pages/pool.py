"""The pool: physical pages, who holds them, and the segments they lie in."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from questkv.errors import PoolFullError
from questkv.kernels import Pages, PageSegment
from questkv.pages.geometry import PageGeometry
from questkv.pages.memory import available_bytes, is_out_of_memory

# A first segment this large keeps short prompts in one run of pages; later ones double what is there.
_FIRST_SEGMENT_PAGES = 64


class PagePool:
    """Physical pages for all layers of one geometry.

    A physical page has one id in every layer. The pool grows by whole segments, so nothing that is there moves, and
    memory is only reserved until a token is written. Pages are counted references: `allocate` gives a page to one
    holder, `share` adds one, `release` takes one away; a page without holders is free again.

    Args:
        geometry: The shape of a page.
        layers: Layers to start with; `add_layer` adds more.
        max_tokens: Most tokens the pool may ever hold, rounded down to whole pages; None leaves it to the memory.
    """

    def __init__(self, geometry: PageGeometry, *, layers: int = 0, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < geometry.page_size:
            raise ValueError(
                f"[PagePool] max_tokens: expected at least one page ({geometry.page_size}), got {max_tokens}"
            )
        self.geometry = geometry
        self.max_pages = None if max_tokens is None else max_tokens // geometry.page_size
        self._segment_pages: list[int] = []
        self._layers: list[list[PageSegment]] = [[] for _ in range(layers)]
        self._views: list[Pages | None] = [None] * layers
        self._holders: list[int] = []
        self._free: list[int] = []

    @property
    def num_layers(self) -> int:
        """Layers that have storage."""
        return len(self._layers)

    @property
    def num_pages(self) -> int:
        """Physical pages of all segments, free ones included."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Physical pages that nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Physical pages that somebody holds."""
        return self.num_pages - self.num_free

    @property
    def bytes_held(self) -> int:
        """Bytes of the held pages in all layers, boxes included."""
        return self.num_held * self.num_layers * self.geometry.page_bytes

    @property
    def box_bytes_held(self) -> int:
        """Bytes of the held pages' boxes in all layers."""
        return self.num_held * self.num_layers * self.geometry.box_bytes

    @property
    def bytes_reserved(self) -> int:
        """Bytes of all segments: address space, of which the system backs what was ever written."""
        return self.num_pages * self.num_layers * self.geometry.page_bytes

    def holders(self, page_id: int) -> int:
        """How many sequences hold a physical page."""
        return self._holders[page_id]

    def layer(self, layer: int) -> Pages:
        """The pages of one layer, as the operators take them."""
        view = self._views[layer]
        if view is None:
            view = self._views[layer] = Pages(tuple(self._layers[layer]))
        return view

    def add_layer(self) -> int:
        """Storage for one more layer in every segment; returns the layer's number.

        Raises:
            PoolFullError: There is no memory for it; the pool is as it was.
        """
        segments = [self._allocate_segment(pages) for pages in self._segment_pages]
        self._layers.append(segments)
        self._views.append(None)
        return len(self._layers) - 1

    def allocate(self, count: int) -> list[int]:
        """Give `count` free pages to one holder, lowest first, growing the pool if need be.

        Raises:
            PoolFullError: They don't fit; the pool is as it was, and the message says how many tokens fit.
        """
        if count > len(self._free):
            self._grow(count - len(self._free))
        page_ids = [heapq.heappop(self._free) for _ in range(count)]
        for page_id in page_ids:
            self._holders[page_id] = 1
        return page_ids

    def share(self, page_ids: Iterable[int]) -> None:
        """Add a holder to each page."""
        for page_id in page_ids:
            assert self._holders[page_id] > 0, f"page {page_id} is free"
            self._holders[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Take a holder from each page; one without holders is free."""
        for page_id in page_ids:
            assert self._holders[page_id] > 0, f"page {page_id} is free"
            self._holders[page_id] -= 1
            if not self._holders[page_id]:
                heapq.heappush(self._free, page_id)

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of a page in every layer; boxes are not, since a copied page is written next."""
        for layer in range(self.num_layers):
            (from_segment, at), (to_segment, to) = self._locate(layer, source), self._locate(layer, target)
            to_segment.keys[:, to] = from_segment.keys[:, at]
            to_segment.values[:, to] = from_segment.values[:, at]

    def _locate(self, layer: int, page_id: int) -> tuple[PageSegment, int]:
        for segment, pages in zip(self._layers[layer], self._segment_pages, strict=True):
            if page_id < pages:
                return segment, page_id
            page_id -= pages
        raise AssertionError("a physical page lies in no segment")

    def _grow(self, missing: int) -> None:
        """Add one segment that holds at least `missing` pages, twice what there is if it may."""
        room = missing if self.max_pages is None else self.max_pages - self.num_pages
        if room < missing:
            why = f"the pool is limited to {self._tokens(self.max_pages or 0)} tokens"
            raise PoolFullError(self._full(why, self.num_free + room))
        self._check_memory(missing)
        wanted = max(missing, self.num_pages, _FIRST_SEGMENT_PAGES)
        pages = wanted if self.max_pages is None else min(wanted, room)
        try:
            segments = [self._allocate_segment(pages) for _ in self._layers]
        except PoolFullError:
            if pages == missing:
                raise
            pages = missing
            segments = [self._allocate_segment(pages) for _ in self._layers]
        for layer, segment in enumerate(segments):
            self._layers[layer].append(segment)
            self._views[layer] = None
        self._segment_pages.append(pages)
        for page_id in range(len(self._holders), len(self._holders) + pages):
            heapq.heappush(self._free, page_id)
        self._holders.extend([0] * pages)

    def _check_memory(self, pages: int) -> None:
        page_bytes = max(self.num_layers, 1) * self.geometry.page_bytes
        available = available_bytes(self.geometry.device)
        if available is not None and pages * page_bytes > available:
            why = f"{_mib(pages * page_bytes)} more are needed and {_mib(available)} of memory are available"
            raise PoolFullError(self._full(why, self.num_free + available // page_bytes))

    def _allocate_segment(self, pages: int) -> PageSegment:
        try:
            return self.geometry.allocate(pages)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"{_mib(pages * self.geometry.page_bytes)} for one layer's pages could not be allocated"
            raise PoolFullError(self._full(why, self.num_free)) from error

    def _full(self, why: str, fit: int) -> str:
        return (
            f"[PagePool] tokens: expected no more than fit: {why}; the pool holds {self._tokens(self.num_held)} tokens "
            f"in pages of {self.geometry.page_size}, and {self._tokens(fit)} more fit"
        )

    def _tokens(self, pages: int) -> int:
        return pages * self.geometry.page_size


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
