"""The shape of a page, equal for all layers that share a page table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from questkv.kernels import PageSegment
from questkv.pages.memory import prefer_huge_pages


@dataclass(frozen=True)
class PageGeometry:
    """What a page of one layer looks like; layers of equal geometry share one page table.

    Attributes:
        kv_heads: Hkv.
        head_dim: D, of keys and of values.
        page_size: S, tokens a page.
        dtype: float32, bfloat16 or float16.
        device: Where the pages lie.
        box_dtype: ``int8`` or ``model``.
        kv_dtype: ``model``, or ``int8``: sealed pages are coded in eight bits, in pages of their own.
    """

    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    box_dtype: str = "int8"
    kv_dtype: str = "model"

    def fits(self, keys: torch.Tensor) -> bool:
        """Whether keys [B, Hkv, n, D] are of these heads, this head dim, dtype and device."""
        shape = keys.shape
        return (
            shape[1] == self.kv_heads
            and shape[3] == self.head_dim
            and keys.dtype == self.dtype
            and keys.device == self.device
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of one plain page's keys and values in one layer."""
        return 2 * self.kv_heads * self.page_size * self.head_dim * self.dtype.itemsize

    @property
    def box_bytes(self) -> int:
        """Bytes of one page's boxes (and scales) in one layer."""
        if self.box_dtype == "int8":
            return self.kv_heads * (2 * self.head_dim + 4)
        return self.kv_heads * 2 * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one plain page in one layer, its boxes included."""
        return self.kv_bytes + self.box_bytes

    @property
    def coded_page_bytes(self) -> int:
        """Bytes of one coded page in one layer: codes, step and offset of every value, boxes."""
        return self.kv_heads * self.page_size * (2 * self.head_dim + 8) + self.box_bytes

    def allocate(self, num_pages: int, *, coded: bool = False) -> PageSegment:
        """Storage for `num_pages` pages of one layer; the memory is reserved, not touched."""
        # A tensor made in inference mode can't be written outside it, and a cache outlives the call that made it.
        with torch.inference_mode(False):
            return self._allocate(num_pages, coded)

    def _allocate(self, num_pages: int, coded: bool) -> PageSegment:
        int8 = self.box_dtype == "int8"
        dtype = torch.uint8 if coded else self.dtype
        tokens = (self.kv_heads, num_pages, self.page_size, self.head_dim)
        boxes = (self.kv_heads, num_pages, 2, self.head_dim)
        return PageSegment(
            keys=prefer_huge_pages(torch.empty(tokens, dtype=dtype, device=self.device)),
            values=prefer_huge_pages(torch.empty(tokens, dtype=dtype, device=self.device)),
            boxes=prefer_huge_pages(torch.empty(boxes, dtype=torch.int8 if int8 else self.dtype, device=self.device)),
            scales=torch.empty(tokens[:2], dtype=torch.float32, device=self.device) if int8 else None,
            value_scales=torch.empty((*tokens[:3], 2), dtype=torch.float32, device=self.device) if coded else None,
        )
