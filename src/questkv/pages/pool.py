"""The pool: physical pages, who holds them, and the segments they lie in."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from questkv import kernels
from questkv.errors import PoolFullError
from questkv.kernels import Pages, PageSegment
from questkv.kernels.gather import gather_tokens, runs_of
from questkv.pages.exclusive import exclusive
from questkv.pages.fetched import FetchedPages
from questkv.pages.geometry import PageGeometry
from questkv.pages.memory import available_bytes, give_back, is_out_of_memory

# A first segment this large keeps short prompts in one run of pages; later ones double what is there.
_FIRST_SEGMENT_PAGES = 64
# Free plain pages whose memory is kept where pages are closed: those that the next blocks of tokens pass through.
_KEPT_PAGES = 64


class Holder(Protocol):
    """Who holds pages of a pool; see `PagePool.enter`."""

    @property
    def pages(self) -> list[int]:
        """Every physical page that it holds, as often as it does."""


@dataclass(frozen=True)
class _Segment:
    """A run of physical pages of one kind: its storage in every layer."""

    pages: int
    closed: bool
    layers: tuple[PageSegment, ...]


class PagePool:
    """Physical pages for all layers of one geometry.

    A physical page has one id in every layer. The pool grows by whole segments, so nothing that is there moves, and
    memory is only reserved until a token is written. Pages are counted references: `allocate` gives a page to one
    holder, `share` adds one, `release` takes one away; a page without holders is free again.

    With spans, a span's box is numbered after its last page, so the last place of every span needs a page that may end
    one: every C-th (`PageGeometry.ends_span`). The others take what is left of these only when there is no other.

    Pages are plain, where tokens are written, or closed, where a page is moved when it is sealed: coded with
    ``kv_dtype="int8"``, in host memory with ``offload="host"``. A segment has one kind, the first is plain.

    The counts follow from what the pool's holders hold. Whoever changes both, a batch's sequences and the counts, puts
    the sequences back after an exception, wherever it came, and calls `recount`.

    Forks share a pool, and may be used in several threads, each in one: what changes the pool runs in one at a time.

    Args:
        geometry: The shape of a page.
        layers: Layers to start with, all on the device; `add_layer` adds more.
        max_tokens: Most tokens the pool may ever hold in pages of one kind, rounded down to whole pages (or spans);
            None leaves it to the memory.
    """

    def __init__(self, geometry: PageGeometry, *, layers: int = 0, max_tokens: int | None = None) -> None:
        self._unit = geometry.span_pages or 1  # segments are whole spans
        least = self._unit * geometry.page_size
        if max_tokens is not None and max_tokens < least:
            what = "span" if geometry.span_pages else "page"
            raise ValueError(f"[PagePool] max_tokens: expected at least one {what} ({least}), got {max_tokens}")
        self.geometry = geometry
        self.max_pages = None if max_tokens is None else max_tokens // least * self._unit
        self._segments: tuple[_Segment, ...] = ()
        self._fetched: tuple[FetchedPages | None, ...] = (None,) * layers
        self._views: dict[int, Pages] = {}
        self._known: dict[int, Holder] = {}  # by id
        self._holders: list[int] = []
        self._closed: list[bool] = []
        self._emptied: set[int] = set()  # free plain pages whose memory is still ours
        # Free pages: whether closed, whether they may end a span.
        self._free = _no_pages()

    @property
    def num_layers(self) -> int:
        """Layers that have storage."""
        return len(self._fetched)

    @property
    def num_pages(self) -> int:
        """Physical pages of all segments, free ones included."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Physical pages that nobody holds."""
        return sum(map(len, self._free.values()))

    @property
    def num_held(self) -> int:
        """Physical pages that somebody holds."""
        return self.num_pages - self.num_free

    @property
    def bytes_held(self) -> int:
        """Bytes of the held pages in all layers, boxes included."""
        return self.num_layers * sum(self._held(closed) * self._page_bytes(closed) for closed in (False, True))

    @property
    def host_bytes_held(self) -> int:
        """Bytes of those that lie in host memory."""
        return self._host_layers * self._held(True) * self.geometry.closed_kv_bytes

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the copies that the device holds of pages in host memory."""
        return sum(fetched.bytes for fetched in self._fetched if fetched is not None)

    @property
    def box_bytes_held(self) -> int:
        """Bytes of the held pages' boxes in all layers."""
        return self.num_held * self.num_layers * self.geometry.box_bytes

    @property
    def bytes_reserved(self) -> int:
        """Bytes of all segments: address space, of which the system backs what was ever written."""
        return self.num_layers * sum(self._pages_of(closed) * self._page_bytes(closed) for closed in (False, True))

    def is_closed(self, page_id: int) -> bool:
        """Whether a physical page is one that sealed pages move into: nothing is written there but by sealing."""
        return self._closed[page_id]

    @exclusive
    def fetched(self, layer: int) -> FetchedPages | None:
        """What the device holds of a layer whose closed pages lie in host memory; None for another."""
        fetched = self._fetched[layer]
        if fetched is not None:
            fetched.follow(self.layer(layer))
        return fetched

    def holders(self, page_id: int) -> int:
        """How many sequences hold a physical page."""
        return self._holders[page_id]

    def layer(self, layer: int) -> Pages:
        """The pages of one layer, as the operators take them."""
        view = self._views.get(layer)
        return self._new_view(layer) if view is None else view

    @exclusive
    def add_layer(self, *, host: bool = False) -> int:
        """Storage for one more layer in every segment; returns the layer's number.

        Args:
            host: Whether its closed pages' keys and values lie in host memory.

        Raises:
            PoolFullError: There is no memory for it; the pool is as it was.
        """
        segments = tuple(
            _Segment(
                segment.pages,
                segment.closed,
                (*segment.layers, self._allocate_segment(segment.pages, segment.closed, host)),
            )
            for segment in self._segments
        )
        fetched = (*self._fetched, FetchedPages(self.geometry) if host else None)
        self._segments, self._fetched = segments, fetched
        return len(fetched) - 1

    @exclusive
    def enter(self, holder: Holder) -> None:
        """Count what `holder` holds, now and after every `recount`, until it leaves."""
        self._known[id(holder)] = holder

    @exclusive
    def leave(self, holder: Holder) -> None:
        """Take away what a holder holds, for good."""
        try:
            if self._known.pop(id(holder), None) is not None:
                self.release(holder.pages)
        except BaseException:
            self._known.pop(id(holder), None)
            self.recount()
            raise

    @exclusive
    def recount(self) -> None:
        """Make the counts those of the pages that the holders hold: an exception may have left others.

        Pages that nobody wrote down anywhere are free then.
        """
        while True:
            known = list(self._known.values())
            closed = [segment.closed for segment in self._segments for _ in range(segment.pages)]
            holders = [0] * len(closed)
            for holder in known:
                for page_id in holder.pages:
                    holders[page_id] += 1
            free = _no_pages()  # ascending lists are heaps
            for page_id, count in enumerate(holders):
                if not count:
                    free[closed[page_id], self.geometry.ends_span(page_id)].append(page_id)
            emptied = {page_id for page_id in self._emptied if not holders[page_id]}
            if self.geometry.closes:
                emptied.update(
                    page_id
                    for page_id, before in enumerate(self._holders)
                    if before and not holders[page_id] and not closed[page_id]
                )
            # A batch that was garbage meanwhile has left, and taken its pages from the counts that are replaced here.
            if len(self._known) == len(known):
                break
        self._closed, self._holders, self._free, self._emptied, self._views = closed, holders, free, emptied, {}

    @exclusive
    def allocate(self, count: int, *, closed: bool = False, ends: Collection[int] = ()) -> list[int]:
        """Give `count` free pages of one kind to one holder, lowest first, growing the pool if need be.

        Args:
            count: How many.
            closed: Of which kind.
            ends: Places in the result whose pages end a span.

        Raises:
            PoolFullError: They don't fit; the pool is as it was, and the message says how many tokens fit.
        """
        assert not closed or self._segments, "a closed page comes from a plain one, so that is allocated first"
        missing = max(count - self._num_free(closed), (len(ends) - len(self._free[closed, True])) * self._unit)
        if missing > 0:
            self._grow(-(-missing // self._unit) * self._unit, closed)
        page_ids = []
        for place in range(count):
            # Where no other page is left, there are as many of these as places.
            end = place in ends or not self._free[closed, False]
            page_ids.append(heapq.heappop(self._free[closed, end]))
        for page_id in page_ids:
            self._holders[page_id] = 1
        self._emptied.difference_update(page_ids)
        return page_ids

    @exclusive
    def share(self, page_ids: Iterable[int]) -> None:
        """Add a holder to each page."""
        for page_id in page_ids:
            assert self._holders[page_id] > 0, f"page {page_id} is free"
            self._holders[page_id] += 1

    @exclusive
    def release(self, page_ids: Iterable[int]) -> None:
        """Take a holder from each page; one without holders is free."""
        for page_id in page_ids:
            assert self._holders[page_id] > 0, f"page {page_id} is free"
            self._holders[page_id] -= 1
            if not self._holders[page_id]:
                self._put_free(page_id)
                if self.geometry.closes and not self._closed[page_id]:
                    self._emptied.add(page_id)

    @exclusive
    def trim(self) -> None:
        """Give the memory of plain pages that tokens only passed through back to the system, but for a few.

        Where sealed pages move, a prompt that is read in one forward needs a plain page for every page of it, once.
        """
        if len(self._emptied) < 2 * _KEPT_PAGES or self.geometry.device.type != "cpu":
            return
        pages = torch.tensor(sorted(self._emptied)[_KEPT_PAGES:])
        self._emptied.difference_update(pages.tolist())
        for part, here in runs_of([segment.pages for segment in self._segments], pages):
            for layer in self._segments[part].layers:
                for tensor in (layer.keys, layer.values):
                    for head in tensor[:, here]:
                        give_back(head)

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of a page into a plain one in every layer, decoding a coded page.

        Boxes are not copied, since a copied page is written next.
        """
        assert not self._closed[target], "only sealing writes closed pages"
        for layer in range(self.num_layers):
            segment, to = self._locate(layer, target)
            keys, values = gather_tokens(self.layer(layer), torch.tensor([source], device=self.geometry.device))
            segment.keys[:, to], segment.values[:, to] = keys[:, 0].to(segment.keys), values[:, 0].to(segment.values)

    def seal(self, layer: int, page_ids: torch.Tensor, into: torch.Tensor | None, *, backend: str = "auto") -> None:
        """Seal full pages of one layer, and move what they hold into closed ones.

        Args:
            layer: The layer.
            page_ids: [n] int64 plain pages.
            into: [n] int64 closed pages; None leaves the pages where they are.
            backend: ``auto`` or a backend's name.
        """
        pages = self.layer(layer)
        if into is None or self.geometry.kv_dtype == "int8":
            kernels.seal(pages, page_ids, into, backend=backend)
        else:
            kernels.seal(pages, page_ids, backend=backend)
            heads = self.geometry.kv_heads
            kernels.transfer(pages, page_ids.expand(heads, -1), pages, into.expand(heads, -1), backend=backend)
        fetched = self.fetched(layer)
        if fetched is not None and into is not None:
            fetched.forget(into)

    @exclusive
    def _new_view(self, layer: int) -> Pages:
        view = self._views[layer] = Pages(tuple(segment.layers[layer] for segment in self._segments))
        return view

    @exclusive
    def _locate(self, layer: int, page_id: int) -> tuple[PageSegment, int]:
        for segment in self._segments:
            if page_id < segment.pages:
                return segment.layers[layer], page_id
            page_id -= segment.pages
        raise AssertionError("a physical page lies in no segment")

    def _pages_of(self, closed: bool) -> int:
        """Physical pages of one kind, free ones included."""
        return sum(segment.pages for segment in self._segments if segment.closed == closed)

    def _num_free(self, closed: bool) -> int:
        return len(self._free[closed, False]) + len(self._free[closed, True])

    def _put_free(self, page_id: int) -> None:
        heapq.heappush(self._free[self._closed[page_id], self.geometry.ends_span(page_id)], page_id)

    def _held(self, closed: bool) -> int:
        return self._pages_of(closed) - self._num_free(closed)

    @property
    def _host_layers(self) -> int:
        return sum(fetched is not None for fetched in self._fetched)

    def _page_bytes(self, closed: bool) -> int:
        return self.geometry.closed_page_bytes if closed else self.geometry.page_bytes

    def _grow(self, missing: int, closed: bool) -> None:
        """Add one segment that holds at least `missing` pages, twice what there is of the kind if it may."""
        room = missing if self.max_pages is None else self.max_pages - self._pages_of(closed)
        if room < missing:
            why = f"the pool is limited to {self._tokens(self.max_pages or 0)} tokens"
            raise PoolFullError(self._full(why, self._num_free(closed) + room, closed))
        self._check_memory(missing, closed)
        wanted = max(missing, self._pages_of(closed), _FIRST_SEGMENT_PAGES)
        wanted = -(-wanted // self._unit) * self._unit
        pages = wanted if self.max_pages is None else min(wanted, room)
        try:
            layers = [self._allocate_segment(pages, closed, fetched is not None) for fetched in self._fetched]
        except PoolFullError:
            if pages == missing:
                raise
            pages = missing
            layers = [self._allocate_segment(pages, closed, fetched is not None) for fetched in self._fetched]
        # What else the pool knows of its pages follows from this.
        self._segments = (*self._segments, _Segment(pages, closed, tuple(layers)))
        self._views = {}
        first = len(self._holders)
        self._holders.extend([0] * pages)
        self._closed.extend([closed] * pages)
        for page_id in range(first, first + pages):
            self._put_free(page_id)

    def _check_memory(self, pages: int, closed: bool) -> None:
        in_host = self._host_layers * self.geometry.closed_kv_bytes if closed else 0
        on_device = max(self.num_layers, 1) * self._page_bytes(closed) - in_host
        for device, page_bytes in ((self.geometry.device, on_device), (torch.device("cpu"), in_host)):
            available = available_bytes(device) if page_bytes else None
            if available is not None and pages * page_bytes > available:
                where = " in host memory" if device != self.geometry.device else ""
                why = f"{_mib(pages * page_bytes)} more are needed{where} and {_mib(available)} of memory are available"
                raise PoolFullError(self._full(why, self._num_free(closed) + available // page_bytes, closed))

    def _allocate_segment(self, pages: int, closed: bool, host: bool) -> PageSegment:
        try:
            return self.geometry.allocate(pages, closed=closed, host=host and closed)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"{_mib(pages * self._page_bytes(closed))} for one layer's pages could not be allocated"
            raise PoolFullError(self._full(why, self._num_free(closed), closed)) from error

    def _full(self, why: str, fit: int, closed: bool) -> str:
        kind = "sealed pages" if closed else "pages"
        return (
            f"[PagePool] tokens: expected no more than fit: {why}; the pool holds {self._tokens(self._held(closed))} "
            f"tokens in {kind} of {self.geometry.page_size}, and {self._tokens(fit)} more fit"
        )

    def _tokens(self, pages: int) -> int:
        return pages * self.geometry.page_size


def _no_pages() -> dict[tuple[bool, bool], list[int]]:
    """Lists of pages by kind: whether closed, whether they may end a span."""
    return {(closed, end): [] for closed in (False, True) for end in (False, True)}


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
