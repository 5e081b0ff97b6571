"""A layer's segments as the kernels find them: base pointers, and a table of where each segment lies from there."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from questkv.errors import UnsupportedError
from questkv.kernels.triton.language import constant, jit, tl
from questkv.kernels.triton.launch import check_page
from questkv.kernels.types import Pages, PageSegment

# Columns of the table. Offsets are in elements, from the base pointer of the tensor's kind.
FIELDS = constant(8)
START = constant(0)  # first physical page
SIZE = constant(1)  # N, physical pages
KEYS = constant(2)
VALUES = constant(3)
BOXES = constant(4)
SCALES = constant(5)
VALUE_SCALES = constant(6)
CODED = constant(7)  # 1 where pages are in eight bits

_VECTOR = 16  # bytes of the widest load


@dataclass(frozen=True, eq=False)
class Storage:
    """What a kernel is given of a layer.

    Attributes:
        table: [segments, 8] int64 on the layer's device.
        segment_of: [pages] int32, the table's row of every physical page.
        bases: Tensors whose address the table's offsets start from: keys, values, keys and values of coded pages,
            boxes, scales, value_scales. Where a layer has none of a kind, some other tensor that nothing reads.
        has_codes: Whether any segment is coded.
        int8_boxes: Whether boxes are in eight bits.
        unit: Elements that every row of D keys, values, and codes starts at a multiple of: 16 bytes, or 1.
        box_unit: The same for a row of D box codes.
    """

    table: torch.Tensor
    segment_of: torch.Tensor
    bases: tuple[torch.Tensor, ...]
    has_codes: bool
    int8_boxes: bool
    unit: int
    box_unit: int


_layers: WeakKeyDictionary[Pages, Storage] = WeakKeyDictionary()


def storage_of(pages: Pages) -> Storage:
    """The layer's table, made once for as long as the pages live (and so before a CUDA graph is captured)."""
    found = _layers.get(pages)
    if found is None:
        found = _layers[pages] = _storage(pages)
    return found


def _storage(pages: Pages) -> Storage:
    if pages.span_pages:
        raise UnsupportedError(
            f"[triton] boxes: expected boxes of pages alone with backend 'triton', got boxes of spans of "
            f"{pages.span_pages} pages too; span_pages=0 leaves them out"
        )
    check_page(pages.page_size, pages.head_dim)
    first = pages.segments[0]
    coded = next((segment for segment in pages.segments if segment.coded), None)
    bases = (
        first.keys,
        first.values,
        first.keys if coded is None else coded.keys,
        first.values if coded is None else coded.values,
        first.boxes,
        first.keys if first.scales is None else first.scales,
        first.keys if coded is None or coded.value_scales is None else coded.value_scales,
    )
    rows = [_row(segment, start, bases) for segment, start in zip(pages.segments, pages.starts, strict=False)]
    sizes = [segment.keys.shape[1] for segment in pages.segments]
    tokens = [tensor for segment in pages.segments for tensor in (segment.keys, segment.values)]
    return Storage(
        table=torch.tensor(rows, dtype=torch.int64).to(pages.device),
        segment_of=torch.repeat_interleave(torch.tensor(sizes)).to(pages.device, torch.int32),
        bases=bases,
        has_codes=coded is not None,
        int8_boxes=first.scales is not None,
        unit=min(map(_unit, tokens)),
        box_unit=min(_unit(segment.boxes) for segment in pages.segments),
    )


def _row(segment: PageSegment, start: int, bases: tuple[torch.Tensor, ...]) -> list[int]:
    keys, values, coded_keys, coded_values, boxes, scales, value_scales = bases
    return [
        start,
        segment.keys.shape[1],
        _offset(segment.keys, coded_keys if segment.coded else keys),
        _offset(segment.values, coded_values if segment.coded else values),
        _offset(segment.boxes, boxes),
        0 if segment.scales is None else _offset(segment.scales, scales),
        0 if segment.value_scales is None else _offset(segment.value_scales, value_scales),
        int(segment.coded),
    ]


def _offset(tensor: torch.Tensor, base: torch.Tensor) -> int:
    """Elements from the base's address to the tensor's: two allocations of one address space."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()


def _unit(tensor: torch.Tensor) -> int:
    row = tensor.shape[-1] * tensor.element_size()
    return _VECTOR // tensor.element_size() if not (tensor.data_ptr() % _VECTOR or row % _VECTOR) else 1


@jit
def row_of(page, p_segment_of, p_table, SEGMENTED: tl.constexpr):
    """Addresses of the table's rows of physical pages; one for all where there is one segment.

    Looked up, not searched for: a loop in a loop would keep the compiler from fetching the outer one's tiles ahead.
    """
    p_row = p_table
    if SEGMENTED:
        p_row = p_table + tl.load(p_segment_of + page) * FIELDS
    return p_row


@jit
def place_of(page, i_h, p_row):
    """(KV head, page) counted through the segment that the page lies in: h * N + page of the segment. Int64."""
    return i_h.to(tl.int64) * tl.load(p_row + SIZE) + (page - tl.load(p_row + START))
