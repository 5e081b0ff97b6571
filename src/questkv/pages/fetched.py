"""Pages in host memory that the device holds a copy of: which, where, and whose place the next one takes."""

from __future__ import annotations

import torch

from questkv import kernels
from questkv.errors import PoolFullError
from questkv.kernels import Pages, PageSegment
from questkv.pages.exclusive import exclusive
from questkv.pages.geometry import PageGeometry
from questkv.pages.memory import is_out_of_memory


class FetchedPages:
    """Copies of one layer's pages in host memory, those that were read last.

    Every KV head has `slots` places of its own, since every head selects for itself. A page that is fetched takes the
    place of the one that was read longest ago, the lowest place among equals; a page that is there is not copied again.
    What is where is kept in tensors on the device, so that fetching waits for nothing.

    Args:
        geometry: The shape of a page.

    Attributes:
        pages: The layer's pages; `follow` says which.
        slots: Places of every KV head; none before `reserve`.
    """

    def __init__(self, geometry: PageGeometry) -> None:
        self.geometry = geometry
        self.pages: Pages | None = None
        self.slots = 0
        self._now = 0
        self._is_changing = False
        self._segment: PageSegment | None = None
        self._view: Pages | None = None
        # [Hkv, slots + 1] the page in every place, and the call that read it last; [Hkv, pages + 1] the place of every
        # page; -1 for none. The last place and the last page are where padding is written.
        self._page_of, self._used, self._slot_of = self._filled(0), self._filled(0), self._filled(0)

    @property
    def bytes(self) -> int:
        """Bytes of the copies, boxes included."""
        return 0 if self._segment is None else (self.slots + 1) * self.geometry.closed_page_bytes

    @property
    def segment(self) -> PageSegment:
        """The copies, [Hkv, slots + 1, ...]; the last page, never written, stands for those that are not there."""
        assert self._segment is not None, "reserve comes first"
        return self._segment

    @property
    def view(self) -> Pages:
        """The layer as attention reads it, with the page tables that `table` gives: plain pages, then the copies."""
        if self._view is None:
            assert self.pages is not None, "follow comes first"
            plain = (segment for segment in self.pages.segments if not segment.host)
            self._view = Pages((*plain, self.segment))
        return self._view

    @exclusive
    def follow(self, pages: Pages) -> None:
        """Take note of the layer's pages, which become more."""
        if pages is self.pages:
            return
        places, start = [], 0
        for segment in pages.segments:
            size = segment.keys.shape[1]
            places.append(torch.full((size,), -1) if segment.host else torch.arange(start, start + size))
            start += 0 if segment.host else size
        self._plain = torch.cat(places).to(self.geometry.device)
        if self.slots:
            slot_of = self._filled(pages.num_pages + 1)
            slot_of[:, : self._slot_of.shape[1]] = self._slot_of
            self._slot_of = slot_of
        self._view = None
        self.pages = pages  # last, so that an exception before it has this done again

    @exclusive
    def reserve(self, slots: int) -> None:
        """Have at least `slots` places; where there were fewer, nothing is there any more.

        Raises:
            PoolFullError: The device has no memory for them; no page is there then.
        """
        if slots <= self.slots:
            return
        # A budget that is a share of the context grows with every token.
        slots = max(slots, self.slots * 5 // 4)
        assert self.pages is not None, "follow comes first"
        self.slots, self._segment, self._view = 0, None, None
        try:
            self._segment = self.geometry.allocate(slots + 1, closed=True)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise PoolFullError(
                f"[questkv] offload_cache: expected room on {self.geometry.device} for {slots} pages of "
                f"{self.geometry.closed_page_bytes} bytes of each layer in host memory, got none; lower it or the "
                "budget"
            ) from error
        self._page_of, self._used = self._filled(slots + 1), self._filled(slots + 1)
        self._slot_of = self._filled(self.pages.num_pages + 1)
        self.slots = slots

    @exclusive
    def fetch(self, page_ids: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
        """Have copies of all these pages until the next call.

        Args:
            page_ids: [Hkv, n] int64 closed physical pages, for each KV head its own, in any order and as often as they
                come; -1 is padding.
            backend: ``auto`` or a backend's name, for the copies.

        Returns:
            [2] int64 on the device: pages, summed over KV heads, that were there, and that were copied.

        Raises:
            ValueError: More pages at a time than there are places.
        """
        if page_ids.shape[1] > self.slots:
            raise ValueError(
                f"[fetch] page_ids: expected at most {self.slots} pages at a time, the places on the device, got "
                f"{page_ids.shape[1]}"
            )
        if not page_ids.shape[1]:
            return page_ids.new_zeros(2)
        assert self.pages is not None
        self._begin_change()
        self._now += 1
        no_page, no_slot = self._slot_of.shape[1] - 1, self.slots
        wanted = page_ids.sort(dim=1).values
        distinct = first_of_each(wanted)
        slot = self._slot_of.gather(1, wanted.where(distinct, no_page))
        there, missing = distinct & (slot >= 0), distinct & (slot < 0)
        self._used.scatter_(1, slot.where(there, no_slot), self._now)
        # There are as many places as pages: those of this call are the latest, and come behind all that are taken.
        oldest = self._used[:, : self.slots].argsort(dim=1, stable=True)
        slot = oldest.gather(1, (missing.cumsum(dim=1) - 1).clamp(min=0)).where(missing, no_slot)
        gone = self._page_of.gather(1, slot)
        self._slot_of.scatter_(1, gone.where(gone >= 0, no_page), -1)
        self._slot_of.scatter_(1, wanted.where(missing, no_page), slot)
        self._slot_of[:, no_page] = -1
        copied = wanted.where(missing, -1)
        self._page_of.scatter_(1, slot, copied)
        self._used.scatter_(1, slot, self._now)
        kernels.transfer(self.pages, copied, self.view, slot + self.view.starts[-2], backend=backend)
        self._is_changing = False
        return torch.stack([there.sum(), missing.sum()])

    @exclusive
    def forget(self, page_ids: torch.Tensor) -> None:
        """Pages [n] int64 that hold something else now: their copies are void."""
        if not self.slots:
            return
        self._begin_change()
        slot = self._slot_of[:, page_ids]
        slot = slot.where(slot >= 0, self.slots)
        self._page_of.scatter_(1, slot, -1)
        self._used.scatter_(1, slot, -1)
        self._slot_of[:, page_ids] = -1
        self._is_changing = False

    def _begin_change(self) -> None:
        """After a change that an exception ended nobody knows what is where, so nothing is there."""
        if self._is_changing:
            self._slot_of.fill_(-1)
            self._page_of.fill_(-1)
            self._used.fill_(-1)
        self._is_changing = True

    @exclusive
    def table(self, page_table: torch.Tensor) -> torch.Tensor:
        """[R, Hkv, P] pages of `view` for a page table [R, P] of the pool; -1 stays -1.

        Pages that were not fetched lead to one that was never written: they may be named and not read.
        """
        slot, plain = self._slot_of[:, page_table], self._plain[page_table]
        places = torch.where(slot >= 0, slot, self.slots) + self.view.starts[-2]
        return torch.where(plain >= 0, plain, places).masked_fill(page_table < 0, -1).transpose(0, 1).contiguous()

    def _filled(self, width: int) -> torch.Tensor:
        """[Hkv, width] int64 of -1."""
        with torch.inference_mode(False):
            return torch.full((self.geometry.kv_heads, width), -1, dtype=torch.int64, device=self.geometry.device)


def first_of_each(ids: torch.Tensor) -> torch.Tensor:
    """[..., n] bool: where ids [..., n], ascending, name a page for the first time; a negative one is padding."""
    first = ids >= 0
    first[..., 1:] &= ids[..., 1:] != ids[..., :-1]
    return first
