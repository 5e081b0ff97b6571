"""The pool: physical pages, who holds them, and the segments they lie in."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import torch

from questkv.errors import PoolFullError
from questkv.kernels import Pages, PageSegment
from questkv.kernels.gather import gather_tokens
from questkv.pages.geometry import PageGeometry
from questkv.pages.memory import available_bytes, is_out_of_memory

# A first segment this large keeps short prompts in one run of pages; later ones double what is there.
_FIRST_SEGMENT_PAGES = 64


class PagePool:
    """Physical pages for all layers of one geometry.

    A physical page has one id in every layer. The pool grows by whole segments, so nothing that is there moves, and
    memory is only reserved until a token is written. Pages are counted references: `allocate` gives a page to one
    holder, `share` adds one, `release` takes one away; a page without holders is free again.

    Pages are plain (in the model's type) or coded (in eight bits, only with ``kv_dtype="int8"``); a segment has one
    kind, the first is plain.

    Args:
        geometry: The shape of a page.
        layers: Layers to start with; `add_layer` adds more.
        max_tokens: Most tokens the pool may ever hold in pages of one kind, rounded down to whole pages; None leaves it
            to the memory.
    """

    def __init__(self, geometry: PageGeometry, *, layers: int = 0, max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < geometry.page_size:
            raise ValueError(
                f"[PagePool] max_tokens: expected at least one page ({geometry.page_size}), got {max_tokens}"
            )
        self.geometry = geometry
        self.max_pages = None if max_tokens is None else max_tokens // geometry.page_size
        self._segment_pages: list[int] = []
        self._segment_coded: list[bool] = []
        self._layers: list[list[PageSegment]] = [[] for _ in range(layers)]
        self._views: list[Pages | None] = [None] * layers
        self._holders: list[int] = []
        self._coded: list[bool] = []
        # Free pages of each kind, the coded ones under True.
        self._free: dict[bool, list[int]] = {False: [], True: []}

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
        return len(self._free[False]) + len(self._free[True])

    @property
    def num_held(self) -> int:
        """Physical pages that somebody holds."""
        return self.num_pages - self.num_free

    @property
    def bytes_held(self) -> int:
        """Bytes of the held pages in all layers, boxes included."""
        return self.num_layers * sum(self._held(coded) * self._page_bytes(coded) for coded in (False, True))

    @property
    def box_bytes_held(self) -> int:
        """Bytes of the held pages' boxes in all layers."""
        return self.num_held * self.num_layers * self.geometry.box_bytes

    @property
    def bytes_reserved(self) -> int:
        """Bytes of all segments: address space, of which the system backs what was ever written."""
        return self.num_layers * sum(self._pages_of(coded) * self._page_bytes(coded) for coded in (False, True))

    def is_coded(self, page_id: int) -> bool:
        """Whether a physical page is one in eight bits."""
        return self._coded[page_id]

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
        segments = [
            self._allocate_segment(*segment) for segment in zip(self._segment_pages, self._segment_coded, strict=True)
        ]
        self._layers.append(segments)
        self._views.append(None)
        return len(self._layers) - 1

    def allocate(self, count: int, *, coded: bool = False) -> list[int]:
        """Give `count` free pages of one kind to one holder, lowest first, growing the pool if need be.

        Raises:
            PoolFullError: They don't fit; the pool is as it was, and the message says how many tokens fit.
        """
        assert not coded or self._segment_pages, "a page is coded from a plain one, so that is allocated first"
        free = self._free[coded]
        if count > len(free):
            self._grow(count - len(free), coded)
        page_ids = [heapq.heappop(free) for _ in range(count)]
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
                heapq.heappush(self._free[self._coded[page_id]], page_id)

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of a page into a plain one in every layer, decoding a coded page.

        Boxes are not copied, since a copied page is written next.
        """
        assert not self._coded[target], "only seal writes coded pages"
        for layer in range(self.num_layers):
            segment, to = self._locate(layer, target)
            keys, values = gather_tokens(self.layer(layer), torch.tensor([source], device=self.geometry.device))
            segment.keys[:, to], segment.values[:, to] = keys[:, 0].to(segment.keys), values[:, 0].to(segment.values)

    def _locate(self, layer: int, page_id: int) -> tuple[PageSegment, int]:
        for segment, pages in zip(self._layers[layer], self._segment_pages, strict=True):
            if page_id < pages:
                return segment, page_id
            page_id -= pages
        raise AssertionError("a physical page lies in no segment")

    def _pages_of(self, coded: bool) -> int:
        """Physical pages of one kind, free ones included."""
        return sum(pages for pages, kind in zip(self._segment_pages, self._segment_coded, strict=True) if kind == coded)

    def _held(self, coded: bool) -> int:
        return self._pages_of(coded) - len(self._free[coded])

    def _page_bytes(self, coded: bool) -> int:
        return self.geometry.coded_page_bytes if coded else self.geometry.page_bytes

    def _grow(self, missing: int, coded: bool) -> None:
        """Add one segment that holds at least `missing` pages, twice what there is of the kind if it may."""
        room = missing if self.max_pages is None else self.max_pages - self._pages_of(coded)
        if room < missing:
            why = f"the pool is limited to {self._tokens(self.max_pages or 0)} tokens"
            raise PoolFullError(self._full(why, len(self._free[coded]) + room, coded))
        self._check_memory(missing, coded)
        wanted = max(missing, self._pages_of(coded), _FIRST_SEGMENT_PAGES)
        pages = wanted if self.max_pages is None else min(wanted, room)
        try:
            segments = [self._allocate_segment(pages, coded) for _ in self._layers]
        except PoolFullError:
            if pages == missing:
                raise
            pages = missing
            segments = [self._allocate_segment(pages, coded) for _ in self._layers]
        for layer, segment in enumerate(segments):
            self._layers[layer].append(segment)
            self._views[layer] = None
        self._segment_pages.append(pages)
        self._segment_coded.append(coded)
        for page_id in range(len(self._holders), len(self._holders) + pages):
            heapq.heappush(self._free[coded], page_id)
        self._holders.extend([0] * pages)
        self._coded.extend([coded] * pages)

    def _check_memory(self, pages: int, coded: bool) -> None:
        page_bytes = max(self.num_layers, 1) * self._page_bytes(coded)
        available = available_bytes(self.geometry.device)
        if available is not None and pages * page_bytes > available:
            why = f"{_mib(pages * page_bytes)} more are needed and {_mib(available)} of memory are available"
            raise PoolFullError(self._full(why, len(self._free[coded]) + available // page_bytes, coded))

    def _allocate_segment(self, pages: int, coded: bool) -> PageSegment:
        try:
            return self.geometry.allocate(pages, coded=coded)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"{_mib(pages * self._page_bytes(coded))} for one layer's pages could not be allocated"
            raise PoolFullError(self._full(why, len(self._free[coded]), coded)) from error

    def _full(self, why: str, fit: int, coded: bool) -> str:
        kind = "coded pages" if coded else "pages"
        return (
            f"[PagePool] tokens: expected no more than fit: {why}; the pool holds {self._tokens(self._held(coded))} "
            f"tokens in {kind} of {self.geometry.page_size}, and {self._tokens(fit)} more fit"
        )

    def _tokens(self, pages: int) -> int:
        return pages * self.geometry.page_size


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
