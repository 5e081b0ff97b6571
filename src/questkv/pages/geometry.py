"""The shape of a page, equal for all layers that share a page table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from questkv.errors import UnsupportedError
from questkv.kernels import PageSegment
from questkv.pages.memory import prefer_huge_pages

# Tests set this: host memory and the device are then both the CPU's.
_host_without_gpu = False


@dataclass(frozen=True)
class PageGeometry:
    """What a page of one layer looks like; layers of equal geometry share one page table.

    Attributes:
        kv_heads: Hkv.
        head_dim: D, of keys.
        page_size: S, tokens a page.
        dtype: float32, bfloat16 or float16.
        device: Where the pages lie.
        box_dtype: ``int8`` or ``model``.
        kv_dtype: ``model``, or ``int8``: sealed pages are coded in eight bits, in pages of their own.
        offload: ``none``, or ``host``: sealed pages' keys and values lie in pinned host memory, in pages of their own.
        span_pages: C, pages a span that has a box too, 0 for none.
        value_dim: Dv, of values; 0: as the keys'.

    Raises:
        UnsupportedError: Offload ``host`` where there is no GPU to offload from.
    """

    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    box_dtype: str = "int8"
    kv_dtype: str = "model"
    offload: str = "none"
    span_pages: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        # Geometries are compared: equal pages must have one name for it.
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        if self.offload == "host" and self.device.type != "cuda" and not _host_without_gpu:
            raise UnsupportedError(
                f"[questkv] offload: expected a model on a GPU for 'host', got one on {self.device}; offload='none' "
                "keeps pages where the model is"
            )

    @property
    def closes(self) -> bool:
        """Whether a page that is sealed moves into a page of another kind: a closed one."""
        return self.kv_dtype == "int8" or self.offload == "host"

    def ends_span(self, page: int) -> bool:
        """Whether a span ends with a logical page; or whether it may end with a physical page, by its number."""
        return self.span_pages > 0 and page % self.span_pages == self.span_pages - 1

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether keys [B, Hkv, n, D] and values [B, Hkv, n, Dv] are of these heads, widths, dtype and device."""
        shape = keys.shape
        return (
            shape[1] == self.kv_heads
            and shape[3] == self.head_dim
            and values.shape[3] == self.value_dim
            and keys.dtype == self.dtype
            and keys.device == self.device
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of one plain page's keys and values in one layer."""
        return self.kv_heads * self.page_size * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def box_bytes(self) -> int:
        """Bytes of one page's boxes (and scales) in one layer, its share of its span's included (rounded up)."""
        if self.box_dtype == "int8":
            own = self.kv_heads * (2 * self.head_dim + 4)
        else:
            own = self.kv_heads * 2 * self.head_dim * self.dtype.itemsize
        return own if not self.span_pages else own + -(-own // self.span_pages)

    @property
    def page_bytes(self) -> int:
        """Bytes of one plain page in one layer, its boxes included."""
        return self.kv_bytes + self.box_bytes

    @property
    def closed_kv_bytes(self) -> int:
        """Bytes of one closed page's keys and values in one layer; of codes with step and offset of every value."""
        if self.kv_dtype == "int8":
            return self.kv_heads * self.page_size * (self.head_dim + self.value_dim + 8)
        return self.kv_bytes

    @property
    def closed_page_bytes(self) -> int:
        """Bytes of one closed page in one layer, its boxes included."""
        return self.closed_kv_bytes + self.box_bytes

    def allocate(self, num_pages: int, *, closed: bool = False, host: bool = False) -> PageSegment:
        """Storage for `num_pages` pages of one layer; the memory is reserved, not touched.

        Args:
            num_pages: N, whole spans.
            closed: Whether sealed pages move here, as codes with ``kv_dtype="int8"``.
            host: Whether keys and values lie in host memory, pinned if the device is a GPU.
        """
        # A tensor made in inference mode can't be written outside it, and a cache outlives the call that made it.
        with torch.inference_mode(False):
            return self._allocate(num_pages, closed and self.kv_dtype == "int8", host)

    def _allocate(self, num_pages: int, coded: bool, host: bool) -> PageSegment:
        int8 = self.box_dtype == "int8"
        dtype = torch.uint8 if coded else self.dtype
        kv = torch.device("cpu") if host else self.device
        pinned = kv != self.device
        tokens = (self.kv_heads, num_pages, self.page_size)
        rows = num_pages + (num_pages // self.span_pages if self.span_pages else 0)
        boxes = (self.kv_heads, rows, 2, self.head_dim)
        return PageSegment(
            keys=_empty((*tokens, self.head_dim), dtype, kv, pinned),
            values=_empty((*tokens, self.value_dim), dtype, kv, pinned),
            boxes=_empty(boxes, torch.int8 if int8 else self.dtype, self.device),
            scales=_empty(boxes[:2], torch.float32, self.device) if int8 else None,
            value_scales=_empty((*tokens, 2), torch.float32, kv, pinned) if coded else None,
            host=host,
        )


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
    return tensor if pinned else prefer_huge_pages(tensor)
